"""What people do today, on the graph of a step: per block, levels, square root of n, a policy.

Problem: "what should I checkpoint?" is asked in those words, so the answer has to stand next to
them. Invariant: each option is simulated on the very graph that plans are made for, as lowtide's
own regions would run it, so that points on one picture differ by what is recomputed and nothing
else. Imports levels, planner, policies. Rejected: running every option, which takes a machine that
holds the largest of them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lowtide.dryrun import Dry
from lowtide.levels import find_levels
from lowtide.planner import HOLD, NEVER, Simulator, keep_all
from lowtide.policies import KeepProducts, OperationInfo, Policy

if TYPE_CHECKING:
    from lowtide.standins import Found

Region = tuple[str, ...]
"""Names of modules that are recomputed together, one after the other."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way of checkpointing, simulated.

    Attributes:
        name: "per block", "level 3", ...
        how: the line of code that does it.
        regions: how many regions it makes.
        peak: predicted, in bytes.
        overhead: replayed time as a share of the plain step's.
    """

    name: str
    how: str
    regions: int
    peak: int
    overhead: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """An option before it is simulated: names only, no module."""

    name: str
    how: str
    regions: tuple[Region, ...]
    policy: Policy | None = None


def recipes(found: Found) -> tuple[Recipe, ...]:
    """The options that the modules of a step offer."""
    made: list[Recipe] = []
    names = found.names()
    blocks, kind = _blocks(found, names)
    if blocks:
        singles = tuple((name,) for name in blocks)
        code = f"lowtide.checkpoint_modules(model, {kind})"
        made.append(Recipe("per block", code, singles))
        made.append(
            Recipe(
                "per block, products kept",
                f"lowtide.checkpoint_modules(model, {kind}, policy=KeepProducts())",
                singles,
                KeepProducts(),
            )
        )
        size = math.ceil(math.sqrt(len(blocks)))
        if size > 1:
            groups = tuple(tuple(blocks[k : k + size]) for k in range(0, len(blocks), size))
            made.append(
                Recipe(
                    "square root of n",
                    f"lowtide.checkpoint_sequential(blocks, {len(groups)}, x)",
                    groups,
                )
            )
    for level in range(1, 6):
        regions = _at_level(found, names, level)
        if regions:
            code = f"lowtide.checkpoint_levels(model, {level})"
            made.append(Recipe(f"level {level}", code, regions))
    return tuple(made)


def _at_level(found: Found, names: dict[int, str], level: int) -> tuple[Region, ...]:
    regions: list[Region] = []
    for root in found.roots.values():
        prefix = names.get(id(root), "")
        try:
            chosen = find_levels(root).regions(level)
        except ValueError:  # nothing in it has parameters
            continue
        regions += [(".".join(filter(None, (prefix, choice.name))),) for choice in chosen]
    return tuple(region for region in regions if region[0])


def _blocks(found: Found, names: dict[int, str]) -> tuple[list[str], str]:
    """The repeated modules that hold most parameters, and the name of their class."""
    groups: dict[type, list[nn.Module]] = defaultdict(list)
    for module in found.modules():
        if next(module.children(), None) is not None and not isinstance(
            module, nn.Sequential | nn.ModuleList | nn.ModuleDict
        ):
            groups[type(module)].append(module)
    plain: dict[str, list[nn.Module]] = defaultdict(list)
    for module in found.modules():  # blocks that are a Sequential in a Sequential or a list
        if isinstance(module, nn.Sequential | nn.ModuleList):
            for child in module.children():
                if isinstance(child, nn.Sequential):
                    plain[names.get(id(module), "")].append(child)
    best: tuple[float, int, list[str], str] = (0.0, 0, [], "")
    candidates = [(members, kind.__name__) for kind, members in groups.items()]
    candidates += [
        (members, repr(f"{prefix}.*" if prefix else "*")) for prefix, members in plain.items()
    ]
    for members, kind in candidates:
        inside = {id(m) for block in members for m in block.modules() if m is not block}
        outer = [m for m in members if id(m) not in inside]
        if len(outer) < 2:
            continue
        weight = float(sum(p.numel() for m in outer for p in m.parameters()))
        best = max(best, (weight, len(outer), [names[id(m)] for m in outer], kind))
    return best[2], best[3]


def simulate_options(step: Dry, found: Iterable[Recipe]) -> tuple[Option, ...]:
    """Peak and overhead of each; those that change nothing are left out."""
    simulator = Simulator(step.graph)
    plain = keep_all(step.graph).retain
    options = []
    for recipe in found:
        retain = retention(step, recipe)
        if tuple(retain) == plain:
            continue
        result = simulator.run(retain)
        overhead = result.seconds / step.seconds if step.seconds > 0 else 0.0
        options.append(Option(recipe.name, recipe.how, len(recipe.regions), result.peak, overhead))
    return tuple(options)


def retention(step: Dry, recipe: Recipe) -> list[int]:
    """What checkpointing these regions holds and lets go, as the planner writes it.

    What is read inside one region only is let go. It is kept again by a replay that backward asks
    for from inside the innermost region around its readers, as nested regions do.
    """
    graph = step.graph
    regions = _Regions(recipe.regions)
    of_op = [regions.around(module) for module in step.modules]
    retain = list(keep_all(graph).retain)
    asked = _first_asked(step, of_op)
    for value, node in enumerate(graph.values):
        if node.producer < 0 or node.pinned or value in graph.must_hold:
            continue
        around = of_op[node.producer]
        for reader in graph.consumers[value]:
            around = _common(around, of_op[reader])
        if not around:
            continue
        op = graph.ops[node.producer]
        if recipe.policy is not None and recipe.policy(OperationInfo(op.name, None, node.nbytes)):
            continue
        saved = graph.release[value] >= 0
        retain[value] = asked.get(around[-1], 0) if saved else NEVER
    return retain


def _first_asked(step: Dry, of_op: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Of each region, the first event that something inside it asks for."""
    graph = step.graph
    first: dict[int, int] = {}
    for index, event in enumerate(graph.events):
        readers = graph.consumers[event.value]
        asks = of_op[readers[-1] if readers else graph.values[event.value].producer]
        for region in asks:
            first.setdefault(region, index)
    return first


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]


class _Regions:
    """Which regions a module lies in, from the outside in."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._of = {name: index for index, region in enumerate(regions) for name in region}
        self._known: dict[str, tuple[int, ...]] = {}

    def around(self, module: str) -> tuple[int, ...]:
        found = self._known.get(module)
        if found is None:
            found = tuple(
                dict.fromkeys(self._of[name] for name in _ancestors(module) if name in self._of)
            )
            self._known[module] = found
        return found


def _ancestors(module: str) -> Iterator[str]:
    for match in re.finditer(r"\.", module):
        yield module[: match.start()]
    yield module


__all__ = ["HOLD", "Option", "Recipe", "recipes", "simulate_options"]
