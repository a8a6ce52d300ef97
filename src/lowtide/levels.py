"""Checkpointing by level: the size of the pieces that are recomputed, for any model.

Problem: few users know the module names of the net they train, but most know whether they want
single layers or whole stages recomputed. Invariant: the choice can be read before and after
(`find_levels`, `handle.describe()`), and a higher level never keeps more activations than a lower
one. Imports modules, training_level, `models.levels`, texttable, errors. Rejected: only the modules
of exactly one level: a whole stage or encoder is then recomputed at once in backward, and the peak
is hardly lower.

Level L switches on all modules found at levels 1 to L, nested. While an outer region is replayed,
its inner regions free their insides again, so another level never raises the peak. Each level
around an operation replays it once more, at about a third of a plain step each. Left out are single
layers in a larger region that save only their input, such as a Linear: they would add a replay and
free nothing. A convolution with its norm saves twice as much. In a large block of such layers (a
stack at full resolution) the replay of the whole block is then the peak.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from lowtide.errors import UsageError
from lowtide.models.levels import Unit, find_units
from lowtide.modules import CheckpointedModules, check_model, switch_on
from lowtide.policies import PolicyLike, check_policy
from lowtide.texttable import count_of
from lowtide.training_level import LEVELS, check_level

_TITLES = {
    1: "single layers",
    2: "small blocks",
    3: "transformer layers, decoder blocks",
    4: "stages",
    5: "whole encoders and decoders",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One module and the level that was found for it."""

    name: str
    type_name: str
    level: int
    reason: str
    # The names of the chosen modules of higher levels around it.
    inside: tuple[str, ...] = ()
    # For a single layer: whether it saves more than its input, so that it is a region inside
    # larger ones too.
    nests: bool = False


@dataclass(frozen=True, slots=True)
class Levels:
    """The checkpointing level of each module of a model, in the model's order. Prints as text.

    Attributes:
        model_type: the name of the model's class.
        choices: one entry for each module that has a level: ``name``, ``type_name``, ``level``,
            ``reason``, the names of the modules that it is ``inside``, and for a single layer
            whether it ``nests``: is a region inside larger ones too.
    """

    model_type: str
    choices: tuple[Choice, ...]

    def at(self, level: int) -> tuple[Choice, ...]:
        """The modules of exactly `level`."""
        return tuple(choice for choice in self.choices if choice.level == level)

    def names(self, level: int) -> tuple[str, ...]:
        """The names of the modules of exactly `level`."""
        return tuple(choice.name for choice in self.at(level))

    def regions(self, level: int, *, nested: bool = True) -> tuple[Choice, ...]:
        """The modules that `checkpoint_levels(model, level)` switches on."""
        known = {c.name: c for c in self.choices if c.level <= level}
        chosen = []
        for choice in known.values():
            around = [known[name] for name in choice.inside if name in known]
            alone = choice.level == 1 and not choice.nests
            if any(outer.level >= 2 for outer in around) and (alone or not nested):
                continue
            chosen.append(choice)
        return tuple(chosen)

    def describe(self) -> str:
        """Describe every level, its modules and why each is there, as text."""
        return "\n".join(
            [f"{self.model_type}, by level:"] + [_level_text(n, self.at(n)) for n in LEVELS if n]
        )

    def __str__(self) -> str:
        return self.describe()


def find_levels(model: nn.Module) -> Levels:
    """Find the checkpointing level of each module of `model`, without running the model.

    1 single layers, 2 small blocks, 3 transformer layers and decoder blocks, 4 stages, 5 whole
    encoders and decoders. `lowtide.models.levels` says how a level is found. `print` the result.

    Args:
        model: any module.

    Raises:
        UsageError: ``model`` is not a module.
    """
    check_model(model, "find_levels")
    choices: list[Choice] = []
    _collect(find_units(model), (), choices)
    return Levels(type(model).__name__, tuple(choices))


def checkpoint_levels(
    model: nn.Module,
    level: int,
    *,
    nested: bool = True,
    policy: PolicyLike | None = None,
    in_eval: bool = False,
) -> CheckpointedModules:
    """Checkpoint the modules of `model` up to `level`; lowtide finds them.

    Args:
        model: any module; it stays the object it is.
        level: 0 nothing, 1 single layers, 2 small blocks, 3 transformer layers and decoder blocks,
            4 stages, 5 whole encoders and decoders. No level recomputes less or keeps more than the
            one before it.
        nested: whether regions are nested. False takes only the largest ones, so that each
            operation is recomputed at most once.
        policy: what to keep inside the regions, as for `lowtide.checkpoint`.
        in_eval: also while a module is in eval mode, as for `lowtide.checkpoint_modules`.

    Returns:
        A handle, whose `describe()` says what was chosen and why, and whose `remove()` switches it
        off again.

    Raises:
        UsageError: ``model`` is not a module, ``level`` is not an int from 0 to 5, ``nested`` is
            not a bool, no module is found, or a module cannot be checkpointed (see
            `checkpoint_modules`).
    """
    check_model(model, "checkpoint_levels")
    level = check_level(level, "level")
    check_policy(policy, "checkpoint_levels")
    if not isinstance(nested, bool):
        raise UsageError(f"checkpoint_levels: nested is True or False, not {nested!r}.")
    if level == 0:
        return CheckpointedModules(
            (), (), f"{type(model).__name__}: level 0, nothing is checkpointed"
        )
    levels = find_levels(model)
    regions = levels.regions(level, nested=nested)
    if not regions:
        raise UsageError(
            f"checkpoint_levels: found no module to checkpoint at level {level} or below in this "
            f"{type(model).__name__}"
            + (
                f"; it has modules at level {_present(levels)}"
                if levels.choices
                else ": it has no layer with parameters"
            )
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = [(region.name, modules[region.name]) for region in regions]
    text = "\n".join(
        [f"{levels.model_type}, level {level}: {count_of(len(regions), 'module')} checkpointed"]
        + [_level_text(n, tuple(r for r in regions if r.level == n)) for n in range(1, level + 1)]
    )
    return switch_on(
        model,
        chosen,
        policy=policy,
        in_eval=in_eval,
        caller="checkpoint_levels",
        description=text,
    )


def _present(levels: Levels) -> str:
    return ", ".join(str(n) for n in LEVELS if levels.at(n))


def _collect(unit: Unit, around: tuple[Choice, ...], choices: list[Choice]) -> None:
    # Only the outermost module of a level counts: a block inside a block frees little more.
    if unit.level and all(outer.level > unit.level for outer in around):
        inside = tuple(outer.name for outer in around)
        type_name = type(unit.module).__name__
        choice = Choice(unit.name, type_name, unit.level, unit.reason, inside, unit.nests)
        choices.append(choice)
        around = (*around, choice)
    for part in unit.parts:
        _collect(part, around, choices)


def _level_text(level: int, choices: tuple[Choice, ...]) -> str:
    head = f"  {level} {_TITLES[level]}: {len(choices) or 'none'}"
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for choice in choices:
        stem = re.sub(r"\d+", "#", choice.name)
        groups[stem, choice.type_name, choice.reason].append(choice.name)
    lines = [
        f"    {_span(names)}  {type_name}  ({reason})"
        for (_, type_name, reason), names in groups.items()
    ]
    return "\n".join([head, *lines])


def _span(names: list[str]) -> str:
    if len(names) == 1:
        return names[0] or "(the model itself)"
    return f"{names[0]} to {names[-1]} ({len(names)})"
