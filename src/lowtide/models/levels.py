"""Finding, in any model, which modules are layers, blocks, stages and encoders.

Problem: a checkpointing level such as "transformer layers" means nothing to a module tree, and a
table of model classes is out of date with the next model. Invariant: a module's level follows from
what it holds (how many weight matrices, which levels its parts have, which parts are repeated);
names only break ties, every choice carries its reason, and no model is run. Imports torch and
`_compat`. Rejected: levels by depth in the tree, which differ between two ways of writing one
network.

Levels are found from the leaves up. A *unit* is a module that is called; lists and dictionaries of
modules are not units, what they hold is.

1. layer: one weight matrix at most, with the norm, activation and dropout around it.
2. small block: two to eight weight matrices in layers (residual block, attention, MLP, dense
   layer), or such a block with nothing but a norm around it.
3. several small blocks, or a small block and layers (transformer layer, decoder block).
4. stage: a run of alike blocks, or several units of level 3.
5. encoder or decoder: a run of stages; or a run of blocks that is the only one of its kind or is
   named an encoder or decoder.

The model itself, or a part that holds all of it, is chosen only if it is a single layer: a region
around the whole step recomputes everything and lowers no peak.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils import parametrize

from lowtide import _compat

# With more weight matrices than this, a flat module is a run of layers (VGG's features), no block.
_MOST_IN_A_BLOCK = 8

# Names as tie-breakers.
_WHOLE = re.compile(r"encoder|decoder|backbone|trunk", re.IGNORECASE)
_RESIDUAL = re.compile(
    r"bottleneck|basicblock|res(idual)?_?net?_?(block|unit)|mbconv", re.IGNORECASE
)
_PARALLEL = re.compile(r"(^|[._])(experts?|heads?|branch(es)?|paths?|scales?)\b", re.IGNORECASE)
_NOT_A_WEIGHT = re.compile(r"pos|token|embed|bias|table|query|gamma|scale|mask", re.IGNORECASE)


@dataclass(eq=False)
class Unit:
    """One called module: what it holds, and the level concluded from that."""

    name: str
    module: nn.Module
    # The last part of the name relative to the parent unit; a list's name is part of it.
    local: str
    parts: list[Unit] = field(default_factory=list)
    weights: int = 0  # weight matrices in the whole subtree, each counted once
    has_parameters: bool = False
    is_layer: bool = False  # counts as one layer, whatever it holds
    level: int = 0
    reason: str = ""
    repeated: bool = False  # one of several alike siblings with numbered names
    run: int = 0  # how many of its parts form the run of alike blocks that makes it a stage
    nests: bool = False  # a layer that saves more than its input


def find_units(model: nn.Module) -> Unit:
    """The tree of units with their levels; the root is the model."""
    root = _build(model, "", "", set())
    if root.parts:
        _classify(root)
        for unit in _all_of_it(root):
            unit.level, unit.reason = 0, "the model itself"
        _promote(root)
    elif root.has_parameters:
        _classify(root)
    return root


def _all_of_it(root: Unit) -> Iterator[Unit]:
    """The model, and any part that holds all of it: the inside of a wrapper, or UNet's `model`."""
    yield root
    holding = [part for part in root.parts if part.has_parameters]
    if len(holding) == 1 and holding[0].parts and holding[0].weights == root.weights:
        yield from _all_of_it(holding[0])


def walk(unit: Unit) -> Iterator[Unit]:
    yield unit
    for part in unit.parts:
        yield from walk(part)


def _build(module: nn.Module, name: str, local: str, seen: set[int]) -> Unit:
    unit = Unit(name, module, local)
    unit.is_layer = _is_one_layer(module)
    for key, child in _called_children(module, ""):
        if id(child) in seen:
            continue  # a module with several names belongs where it comes first
        seen.add(id(child))
        part = _build(child, f"{name}.{key}" if name else key, key, seen)
        unit.parts.append(part)
    numbered = Counter(_alike(part) for part in unit.parts if any(map(str.isdigit, part.local)))
    for part in unit.parts:
        part.repeated = numbered[_alike(part)] > 1
    own = 0 if unit.is_layer else _own_matrices(module) + _scripted_matrices(module)
    unit.weights = 1 if unit.is_layer else own + sum(part.weights for part in unit.parts)
    unit.has_parameters = (
        own > 0
        or any(True for _ in module.parameters(recurse=False))
        or any(part.has_parameters for part in unit.parts)
    )
    if unit.is_layer:
        unit.parts = []
        unit.has_parameters = True
    return unit


def _called_children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if key == "parametrizations" or type(child).__name__ in _NEVER_CALLED:
            continue
        if _compat.is_script(child):
            continue  # it cannot be a region; its matrices count as its owner's
        if _compat.is_never_called(child):
            yield from _called_children(child, f"{name}.")
        else:
            yield name, child


# Held for their weights only: nn.MultiheadAttention reads out_proj.weight and calls a function.
_NEVER_CALLED = {"NonDynamicallyQuantizableLinear"}


def _is_one_layer(module: nn.Module) -> bool:
    """Whether it is a single layer to its users, although it may hold several matrices."""
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase, nn.Bilinear)):
        return True
    # An adapter (LoRA and its kin) around the layer that it adapts.
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def _scripted_matrices(module: nn.Module) -> int:
    """Weight matrices in the parts of `module` that are TorchScript."""
    scripted = filter(_compat.is_script, module.children())
    return sum(_own_matrices(inside) for part in scripted for inside in part.modules())


def _own_matrices(module: nn.Module) -> int:
    """Weight matrices that `module` holds itself: not norms, biases, embeddings or positions."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 0
    leaf = all(name == "parametrizations" for name, _ in module.named_children())
    own, _ = _compat.parameters_and_buffers(module)
    count = _parametrized_matrices(module)
    for name, parameter in module.named_parameters(recurse=False):
        if _is_norm(module):
            continue
        if name.endswith("_g") and f"{name[:-2]}_v" in own:
            continue  # the lengths that `nn.utils.weight_norm` splits off
        # A lazy layer has no shapes before its first forward; its bias is told by its name.
        lazy = nn.parameter.is_lazy(parameter)
        if bool(_NOT_A_WEIGHT.search(name)) if lazy else parameter.dim() < 2:
            continue
        # A parameter whose first size is 1 is added to a batch, not multiplied with it.
        if not (leaf or lazy) and (parameter.shape[0] == 1 or _NOT_A_WEIGHT.search(name)):
            continue
        count += 1
    if isinstance(module, nn.MultiheadAttention):
        count = max(count, 1) + 1  # the output projection, which is never called as a module
    return min(count, 1) if leaf and "weight" in own else count


def _parametrized_matrices(module: nn.Module) -> int:
    """Matrices that are computed from other parameters, as under `spectral_norm`."""
    computed = getattr(module, "parametrizations", None)
    if not (isinstance(computed, nn.ModuleDict) and parametrize.is_parametrized(module)):
        return 0
    originals = (part.parameters(recurse=False) for part in computed.values())
    return sum(any(p.dim() >= 2 for p in parts) for parts in originals)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_lookup(unit: Unit) -> bool:
    return isinstance(unit.module, (nn.Embedding, nn.EmbeddingBag))


def _classify(unit: Unit) -> None:
    for part in unit.parts:
        _classify(part)
    _level_siblings(unit.parts)
    if not unit.has_parameters or _is_lookup(unit):
        unit.level = 0
        return
    if unit.weights <= 1:
        unit.level, unit.reason = 1, _layer_reason(unit)
        unit.nests = _saves_inside(unit)
        return
    inner = [part for part in unit.parts if _counts(part)]
    highest = max((part.level for part in inner), default=1)
    run = _longest_run(unit, highest) if highest >= 2 else []
    if highest <= 1:
        _classify_flat(unit)
    elif not unit.repeated and _holds_a_whole(inner):
        unit.level = 0  # a model: a whole encoder and what goes with it
    elif len(inner) == 1 and unit.weights == inner[0].weights:
        unit.level = highest
        unit.reason = f"holds one {_kind(inner[0])} and no other weights"
        unit.run = inner[0].run
    elif run and not _PARALLEL.search(run[0].local):
        unit.run = len(run)
        unit.level = 5 if highest >= 4 else 4
        unit.reason = f"a run of {len(run)} alike {_kind(run[0], plural=True)}"
    elif run:
        unit.level, unit.reason = highest, f"{len(run)} parallel {_kind(run[0], plural=True)}"
    else:
        _classify_mixed(unit, inner, highest)


def _counts(part: Unit) -> bool:
    """Whether a part decides its parent's level; an anonymous Sequential of layers does not."""
    return part.level >= 2 and not (type(part.module) is nn.Sequential and _flat(part))


def _flat(unit: Unit) -> bool:
    return unit.level == 2 and not any(_counts(part) for part in unit.parts)


def _holds_a_whole(inner: list[Unit]) -> bool:
    """Whether a part is what `_promote` will make a whole encoder or decoder."""
    runs = [part for part in inner if part.level == 4 and part.run and not part.repeated]
    kinds = {type(part.module) for part in runs}
    return len(kinds) == len(runs) > 0 or any(_called_whole(part) for part in runs)


def _called_whole(unit: Unit) -> bool:
    return bool(_WHOLE.search(unit.local) or _WHOLE.search(type(unit.module).__name__))


def _classify_flat(unit: Unit) -> None:
    if unit.weights <= _MOST_IN_A_BLOCK:
        unit.level, unit.reason = 2, f"{unit.weights} weighted layers"
    else:
        unit.level, unit.reason = 4, f"a run of {unit.weights} weighted layers"
        unit.run = unit.weights


def _classify_mixed(unit: Unit, inner: list[Unit], highest: int) -> None:
    """A unit that holds blocks, but no run of alike blocks."""
    top = [part for part in inner if part.level == highest]
    kinds = _kind(top[0], plural=len(top) > 1)
    number = "one" if len(top) == 1 else str(len(top))
    text = f"{number} {kinds}" + (" and layers" if len(top) == 1 else "")
    if highest == 2:
        named = type(unit.module).__name__
        # A block and layers: a transformer layer or decoder block if it is one of several alike
        # (BertLayer), else a block with its projection or router (BertAttention, a MoE).
        larger = len(top) > 1 or (unit.repeated and not _RESIDUAL.search(named))
        unit.level = 3 if larger else 2
    elif highest == 3:
        unit.level = 4
    elif highest == 4:
        unit.level = 5 if len(top) > 1 else 4
    else:
        unit.level = 0  # a whole encoder and more is a model
    unit.reason = text


def _level_siblings(parts: list[Unit]) -> None:
    """Give alike siblings one level, the highest of theirs."""
    groups: dict[tuple[type, str], list[Unit]] = defaultdict(list)
    for part in parts:
        groups[_alike(part)].append(part)
    for alike in groups.values():
        highest = max(part.level for part in alike)
        for part in alike:
            if _counts(part) and part.level < highest:
                part.level = highest
                part.reason = f"{part.reason}; alike siblings are {_KINDS[highest][1]}"


def _alike(part: Unit) -> tuple[type, str]:
    """What alike siblings share: the class, and the name apart from its numbers."""
    return type(part.module), re.sub(r"\d+", "#", part.local)


def _longest_run(unit: Unit, highest: int) -> list[Unit]:
    groups: dict[tuple[type, str], list[Unit]] = defaultdict(list)
    for part in unit.parts:
        if part.level == highest and _counts(part) and "#" in _alike(part)[1]:
            groups[_alike(part)].append(part)
    longest = max(groups.values(), key=len, default=[])
    return longest if len(longest) > 1 else []


def _promote(root: Unit) -> None:
    """Raise a run of blocks to level 5 if it is a whole encoder: by its name, or because no other
    stage is of its kind."""
    stages = [unit for unit in walk(root) if unit.level == 4 and unit.run and not unit.repeated]
    kinds = Counter(type(unit.module) for unit in stages)
    inside = {id(inner) for unit in stages for part in unit.parts for inner in walk(part)}
    for unit in stages:
        if id(unit) in inside:
            continue
        if _called_whole(unit):
            unit.level, unit.reason = 5, f"{unit.reason}, by its name a whole encoder or decoder"
        elif kinds[type(unit.module)] == 1:
            unit.level, unit.reason = 5, f"{unit.reason}, the only one of its kind"


_KINDS = {
    1: ("layer", "layers"),
    2: ("small block", "small blocks"),
    3: ("larger block", "larger blocks"),
    4: ("stage", "stages"),
    5: ("encoder or decoder", "encoders or decoders"),
}


# These save nothing, or their result, which the next layer saves as its input.
_SAVES_NO_MORE = (nn.Identity, nn.Flatten, nn.Unflatten, nn.ReLU, nn.Sigmoid, nn.Tanh)


def _saves_inside(unit: Unit) -> bool:
    """Whether a layer saves more than its input: a convolution with its norm, a recurrent cell."""
    if unit.is_layer:
        return isinstance(unit.module, nn.RNNCellBase)
    leaves = [inner.module for inner in walk(unit) if not inner.parts]
    return sum(not isinstance(m, _SAVES_NO_MORE) and not _is_dropout(m) for m in leaves) > 1


def _is_dropout(module: nn.Module) -> bool:
    return "dropout" in type(module).__name__.lower()


def _kind(unit: Unit, *, plural: bool = False) -> str:
    return _KINDS[max(unit.level, 1)][int(plural)]


def _layer_reason(unit: Unit) -> str:
    if not unit.weights:
        return "a norm or another layer without a weight matrix"
    return "one weighted layer and what follows it" if unit.parts else "a weighted layer"
