"""Everything that pictures of a step are made from, found in one dry run.

Problem: the text, the command line, the page and the trace describe the same step and must agree.
Invariant: they all read one `Study`; it holds numbers and names, no module and no tensor, and one
dry run is enough for all of them. Imports batches, dryrun, witness, options. Rejected: a dry run
for each verb.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lowtide.analysis.options import Option, Recipes, recipes, simulate_options
from lowtide.analysis.timeline import Timeline, timeline
from lowtide.batches import changed, tensors_of
from lowtide.dryrun.found import Found
from lowtide.dryrun.ledger import Ledger
from lowtide.dryrun.run import Dry, dry_run
from lowtide.dryrun.witness import Witness
from lowtide.errors import BudgetError, LowtideError
from lowtide.frontier import Curve, curve_of
from lowtide.limits import format_bytes
from lowtide.plans import Plan, plan_step
from lowtide.saved import SavedTensors, from_ledger

SHARES = (0.75, 0.5)
"""Limits that are always tried, as shares of the plain peak."""
_ROOM = 1.025


@dataclass(frozen=True)
class Halved:
    """The same step with half the batch: sizes before and after, and its plain peak in bytes."""

    size: int
    half: int
    peak: int


@dataclass(frozen=True, repr=False)
class Study:
    """A step that was traced, with the origin of everything in it."""

    name: str
    step: Dry
    ledger: Ledger
    recipes: Recipes
    halved: Halved | None

    def __repr__(self) -> str:
        return f"<Study of {self.name}: peak {format_bytes(self.plain.peak)}>"

    @cached_property
    def plain(self) -> Plan:
        """The step with nothing recomputed."""
        return plan_step(self.step, None)

    @cached_property
    def plain_timeline(self) -> Timeline:
        return self.timeline(self.plain)

    @cached_property
    def saved(self) -> SavedTensors:
        return from_ledger(self.ledger, self.step.source)

    @cached_property
    def options(self) -> tuple[Option, ...]:
        return simulate_options(self.step, self.recipes)

    @cached_property
    def curve(self) -> Curve:
        """Plans from the plain step to the lowest peak, without those that another plan beats in
        both time and memory."""
        mine = []
        for share in SHARES:
            with contextlib.suppress(BudgetError):
                mine.append(self.plan(share))
        limits = {plan.limit for plan in mine}
        found = [plan for plan in curve_of(self.step) if plan.limit not in limits]
        best: list[Plan] = []
        for plan in sorted((*found, *mine), key=lambda plan: (-plan.peak, -plan.overhead)):
            while best and best[-1].overhead >= plan.overhead and best[-1].peak >= plan.peak:
                best.pop()
            best.append(plan)
        return Curve(tuple(best))

    @property
    def standing(self) -> int:
        """Bytes in memory before the step: parameters, buffers, gradients, inputs."""
        return sum(self.ledger.standing.values())

    @cached_property
    def smallest(self) -> int:
        """The smallest limit to advise, 2.5 % above the smallest that can be kept: a real step that
        takes slightly more than predicted would leave a plan that has no room for it."""
        return int(self.plain.minimum_peak * _ROOM)

    def plan(self, limit: int | float | None) -> Plan:
        """A plan for this step. Raises `BudgetError` if the limit cannot be kept."""
        if limit not in self._plans:
            self._plans[limit] = plan_step(self.step, limit)
        return self._plans[limit]

    @cached_property
    def _plans(self) -> dict[int | float | None, Plan]:
        return {}

    def timeline(self, plan: Plan) -> Timeline:
        return timeline(replace(self.step, graph=plan.graph), self.ledger, plan.retention)


def study(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    on: str | None = None,
    name: str = "",
    halve: bool = True,
) -> Study:
    """Trace a step, and once more with half the batch if its arguments show what the batch is.

    Raises:
        UsageError: `fn` cannot be called; called inside a budget or with grad disabled.
    """
    kwargs = kwargs or {}
    witness = Witness()
    step = dry_run(fn, args, kwargs, on, witness)
    assert witness.ledger is not None
    found = Found(fn, args, kwargs)
    by_module = from_ledger(witness.ledger, step.source).by("module")
    held = {group.keys[0]: group.nbytes for group in by_module}
    smaller = None
    if halve and step.source == "fake":
        smaller = _halved(fn, args, kwargs, on)
    return Study(
        name or getattr(fn, "__name__", type(fn).__name__),
        step,
        witness.ledger,
        recipes(found, held),
        smaller,
    )


def _halved(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], on: str | None
) -> Halved | None:
    """What half the batch takes; None unless all arguments share a first size above one."""
    sizes = _first_sizes((args, kwargs))
    if len(sizes) != 1 or min(sizes) < 2:
        return None
    size = sizes.pop()
    half = size // 2

    def cut(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()[:half] if tensor.dim() else tensor.detach()
        return leaf.requires_grad_(tensor.requires_grad)

    try:
        half_args, half_kwargs = changed(args, cut), changed(kwargs, cut)
    except Exception:  # a mapping or a record of the program's may refuse others, each in its way
        return None
    if _first_sizes((half_args, half_kwargs)) != {half}:  # some of it is in what cannot be copied
        return None
    # A step may accept only the batch size it was written for: then there is no such figure.
    try:
        step = dry_run(fn, half_args, half_kwargs, on, real=False)
    except LowtideError:
        return None
    return Halved(size, half, plan_step(step, None).peak)


def _first_sizes(arguments: Any) -> set[int]:
    return {tensor.shape[0] for tensor in tensors_of(arguments) if tensor.dim()}
