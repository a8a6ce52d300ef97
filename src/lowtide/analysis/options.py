"""Usual ways of checkpointing, on the graph of a step: per block, levels, square root of n, policy.

Problem: users think of checkpointing in these terms, so plans have to be shown next to them.
Invariant: each option is simulated on the same graph that plans are made for, as lowtide's own
regions would run it, so that points in one picture differ only in what is recomputed. Imports
levels, planner, policies. Rejected: running every option, which takes a machine that holds the
largest of them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lowtide.dryrun.run import Dry
from lowtide.levels import find_levels
from lowtide.planner import HOLD, NEVER, Simulator, keep_all
from lowtide.policies import KeepProducts, OperationInfo, Policy

if TYPE_CHECKING:
    from lowtide.dryrun.found import Found

_CANDIDATES = 8
Region = tuple[str, ...]
"""Names of modules that are recomputed together as one region."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way of checkpointing, simulated.

    Attributes:
        name: "per block", "level 3", ...
        how: the line of code that does it.
        regions: how many regions it makes.
        peak: predicted, in bytes. What a policy keeps is counted until nothing that is made of it
            is needed; the engine frees it as soon as that is there, so the step may take less.
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


@dataclass(frozen=True, slots=True)
class Blocks:
    """Repeated modules, of one class or in one list, that are usually wrapped one by one."""

    names: tuple[str, ...]
    how: str
    """The argument for `lowtide.checkpoint_modules`: a class or a pattern."""

    def recipes(self) -> tuple[Recipe, ...]:
        """Each block a region; the same with products kept; about the square root of n groups."""
        singles = tuple((name,) for name in self.names)
        code = f"lowtide.checkpoint_modules(model, {self.how})"
        keep = "policy=lowtide.policies.KeepProducts()"
        kept = f"lowtide.checkpoint_modules(model, {self.how}, {keep})"
        made = [
            Recipe("per block", code, singles),
            Recipe("per block, products kept", kept, singles, KeepProducts()),
        ]
        size = math.ceil(math.sqrt(len(singles)))
        if size > 1:
            groups = tuple(self.names[at : at + size] for at in range(0, len(self.names), size))
            code = f"lowtide.checkpoint_sequential(blocks, {len(groups)}, x)"
            made.append(Recipe("square root of n", code, groups))
        return tuple(made)


@dataclass(frozen=True, slots=True)
class Recipes:
    """The options that the modules of a step offer: blocks to choose from, and levels."""

    blocks: tuple[Blocks, ...]
    levels: tuple[Recipe, ...]


def recipes(found: Found, held: Mapping[str, int]) -> Recipes:
    """The options that the modules of a step offer.

    Args:
        found: its modules.
        held: bytes of saved tensors, by the module that made them.
    """
    names = found.names()
    levels = []
    for level in range(1, 6):
        regions = _at_level(found, names, level)
        if regions:
            code = f"lowtide.checkpoint_levels(model, {level})"
            levels.append(Recipe(f"level {level}", code, regions))
    return Recipes(_blocks(found, names, held), tuple(levels))


def _at_level(found: Found, names: dict[int, str], level: int) -> tuple[Region, ...]:
    regions: list[Region] = []
    for root in found.roots.values():
        prefix = names.get(id(root), "")
        chosen = find_levels(root).regions(level)
        regions += [(".".join(filter(None, (prefix, choice.name))),) for choice in chosen]
    return tuple(region for region in regions if region[0])


def _blocks(found: Found, names: dict[int, str], held: Mapping[str, int]) -> tuple[Blocks, ...]:
    """Repeated modules, those with the most saved bytes first."""
    inside: dict[str, int] = defaultdict(int)
    for name, nbytes in held.items():
        for around in _ancestors(name):
            inside[around] += nbytes
    groups: dict[str, list[nn.Module]] = defaultdict(list)
    for module in found.modules():
        children = list(module.children())
        if isinstance(module, nn.Sequential | nn.ModuleList):
            # Blocks without a class of their own: each Sequential in a Sequential or ModuleList.
            place = names.get(id(module), "")
            pattern = repr(f"{place}.*" if place else "*")
            groups[pattern] += [child for child in children if isinstance(child, nn.Sequential)]
        elif children and not isinstance(module, nn.ModuleDict):
            groups[type(module).__name__].append(module)
    weighed = []
    for how, members in groups.items():
        below = {id(m) for block in members for m in block.modules() if m is not block}
        blocks = tuple(names[id(m)] for m in members if id(m) not in below)
        if len(blocks) > 1:
            weighed.append((sum(inside[name] for name in blocks), Blocks(blocks, how)))
    weighed.sort(key=lambda pair: -pair[0])
    return tuple(blocks for _, blocks in weighed[:_CANDIDATES])


def simulate_options(step: Dry, offered: Recipes) -> tuple[Option, ...]:
    """Peak and overhead of each option; those that change nothing are left out.

    Of the kinds of blocks that could be wrapped, the one with the lowest peak is used.
    """
    simulator = Simulator(step.graph)
    plain = keep_all(step.graph).retain

    def run(recipe: Recipe) -> Option | None:
        retain = retention(step, recipe)
        if tuple(retain) == plain:
            return None
        result = simulator.run(retain)
        overhead = result.seconds / step.seconds if step.seconds > 0 else 0.0
        return Option(recipe.name, recipe.how, len(recipe.regions), result.peak, overhead)

    tried = [(run(blocks.recipes()[0]), blocks) for blocks in offered.blocks]
    possible = [(option, blocks) for option, blocks in tried if option is not None]
    wanted = offered.levels
    if possible:
        _, best = min(possible, key=lambda pair: (pair[0].peak, pair[0].overhead))
        wanted = (*best.recipes(), *wanted)
    return tuple(option for option in map(run, wanted) if option is not None)


def retention(step: Dry, recipe: Recipe) -> list[int]:
    """What checkpointing these regions keeps and drops, as a `Retention`'s list.

    A value that is read inside one region only is dropped. It is retained by the replay that
    backward requests from inside the innermost region around its readers, as nested regions do.
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
            if any(of_op[reader] for reader in graph.consumers[value]):
                retain[value] = HOLD  # an input of a region, whether autograd saves it or not
            continue
        op = graph.ops[node.producer]
        if recipe.policy is not None and recipe.policy(OperationInfo(op.name, None, node.nbytes)):
            if graph.consumers[value]:
                retain[value] = HOLD  # even if autograd does not save it: a replay reads it
            continue
        saved = graph.release[value] >= 0
        retain[value] = asked.get(around[-1], 0) if saved else NEVER
    return retain


def _first_asked(step: Dry, of_op: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """For each region, the first event that something inside it requests."""
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
    """Which regions a module is in, outermost first."""

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
