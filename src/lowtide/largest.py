"""`lowtide.largest_batch`: how many samples a step can have under a limit, plain and with lowtide.

Problem: "how large a batch fits, and is it worth it" is what memory is asked for, and finding out
by running out of it takes an evening. Invariant: each size in the answer has a plan that keeps the
limit, and the next larger one was found to have none; nothing is run, of whatever size. Imports
batches, dryrun, planner, plans. Rejected: doubling and bisecting alone, which takes twice as many
dry runs: memory is nearly a straight line in the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from lowtide.batches import arguments_of
from lowtide.dryrun.provenance import UnansweredError
from lowtide.dryrun.putback import RandomStates
from lowtide.dryrun.run import Dry, check_step, dry_run, tell_of_no_loss
from lowtide.errors import BudgetError, LowtideError, UsageError
from lowtide.limits import exact_bytes, format_bytes, parse_limit, whole_number
from lowtide.planner import Graph, Solution, minimum, plain_peak
from lowtide.plans import Plan, from_solution, plan_step
from lowtide.texttable import count_of, table

_BETWEEN = 3
"""Sizes shown between the largest plain one and the largest."""
_FARTHEST = 8
"""How many times as large as one that fits the next size to try may be."""
_MOST = 2**31 - 1
"""No size above this is tried."""
_GROWS = 64
"""A batch of so many units of samples that is no more than one of one unit never becomes more.
Fewer may be the same: batches are padded, and the peak may be of a part that has no samples."""


@dataclass(frozen=True)
class BatchSize:
    """One number of samples, and what a step with it costs under the limit.

    Attributes:
        size: how many samples.
        plain_peak: predicted peak with nothing recomputed, in bytes.
        peak: predicted peak under the limit, in bytes.
        overhead: time spent on replays, as a share of the plain step's: 0.1 is 10 % more.
        samples_per_second: predicted, replays included.
    """

    size: int
    plain_peak: int
    peak: int
    overhead: float
    samples_per_second: float


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that a limit allows. Prints as a table.

    Attributes:
        limit: in bytes.
        size: samples in the largest batch for which a plan keeps the limit.
        plain_size: samples in the largest batch whose plain step keeps it; 0 if none does.
        plan: the plan for `size`, which `lowtide.budget` can run.
        sizes: some sizes from `plain_size` to `size` that have a plan, the smallest first.
        more: whether larger batches were not looked for, because of `at_most`.
    """

    limit: int
    size: int
    plain_size: int
    plan: Plan
    sizes: tuple[BatchSize, ...]
    more: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the answer and the table as JSON types: sizes in bytes."""
        names = ("limit", "size", "plain_size", "more")
        return {
            **{name: getattr(self, name) for name in names},
            "device": self.plan.step.device,
            "sizes": [asdict(each) for each in self.sizes],
        }

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import text_html

        return text_html(str(self))

    def __str__(self) -> str:
        plain = f"{self.plain_size} without recomputation" if self.plain_size else "none without it"
        more = "; more were not asked for" if self.more else ""
        head = [
            f"limit    {format_bytes(self.limit)}",
            f"largest  {count_of(self.size, 'sample')}, {plain}{more}",
            f"times    modelled, {self.plan.step.device}",
            "",
        ]
        cells = [
            [
                str(each.size),
                format_bytes(each.plain_peak),
                format_bytes(each.peak),
                f"{each.overhead:.1%}",
                f"{each.samples_per_second:.4g}",
            ]
            for each in self.sizes
        ]
        titles = ("samples", "plain peak", "peak", "overhead", "samples/s")
        return "\n".join([*head, *table(titles, cells, right=5)])


def largest_batch(
    fn: Callable[..., Any],
    batch: Callable[[int], Any],
    /,
    limit: int | str,
    *,
    multiple_of: int = 1,
    at_most: int | None = None,
    on: str | None = None,
) -> LargestBatch:
    """Find the largest batch that a limit allows, plain and with recomputation, and its price.

    Dry runs, like that of `lowtide.plan`, of about a dozen sizes: nothing is computed, and only the
    batches themselves are allocated. Sizes are searched for as if a larger batch took at least as
    much memory as a smaller one.

    Args:
        fn: the step, as for `lowtide.plan`.
        batch: called with a number of samples; returns a batch of that many: a tensor, a tuple or
            list of positional arguments for `fn`, or a dictionary of keyword arguments. What it
            draws is drawn again afterwards: random states are put back.
        limit: what the step may take: bytes, or text with a unit. It counts what `lowtide.budget`
            counts: neither parameters nor optimizer states nor the batch.
        multiple_of: only look at multiples of this, for instance 8.
        at_most: look at no larger batches. Default: no bound.
        on: the device whose times to model, as for `lowtide.plan`.

    Returns:
        The largest size, its plan, and some sizes between it and the largest plain one.

    Raises:
        BudgetError: not even the smallest batch has a plan that keeps the limit. The error names
            the smallest limit that can be kept.
        UsageError: ``fn`` or ``batch`` cannot be called; the limit cannot be read or is a fraction
            of the plain peak, which grows with the batch; the step takes no more memory with more
            samples; it cannot be run on fake tensors; or called inside a budget or region, or with
            grad disabled.

    Examples:
        >>> import torch
        >>> layers = [torch.nn.Linear(64, 64) if i % 2 else torch.nn.Tanh() for i in range(12)]
        >>> model = torch.nn.Sequential(*layers)
        >>> found = largest_batch(model, lambda size: torch.ones(size, 64), "1 MiB")
        >>> found.size > 1.5 * found.plain_size > 0
        True
    """
    check_step(fn)
    if not callable(batch):
        raise UsageError(
            "batch is a function of the number of samples, for instance "
            f"lambda size: torch.randn(size, 3, 224, 224); got {type(batch).__name__}."
        )

    def run(size: int) -> Dry:
        args, kwargs = _arguments(batch(size))
        return dry_run(fn, args, kwargs, on, real=False)

    nbytes, states = limit_in_bytes(limit), RandomStates()
    try:
        return search(run, nbytes, multiple_of, at_most)
    finally:
        states.restore()


def limit_in_bytes(limit: object) -> int:
    """Read a limit that is no fraction."""
    nbytes = parse_limit(limit)
    if isinstance(nbytes, float):
        raise UsageError(
            "the limit for a largest batch is bytes, or text such as '6 GiB': a fraction of the "
            f"plain peak ({nbytes:g}) grows with the batch."
        )
    return nbytes


def _arguments(made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = arguments_of(made)
    if found is not None:
        return found
    raise UsageError(
        "batch returns a tensor, a tuple of arguments or a dictionary of keyword arguments; got "
        f"{type(made).__name__}. A batch of another type is an argument: return (batch,)."
    )


# ---------------------------------------------------------------------------- the search


def search(
    run: Callable[[int], Dry], limit: int, multiple_of: int = 1, at_most: int | None = None
) -> LargestBatch:
    """The answer for steps that `run` makes, one for each number of samples."""
    unit = _positive(multiple_of, "multiple_of")
    most = (_MOST if at_most is None else _positive(at_most, "at_most")) // unit
    if not most:
        bound = (
            f"{_MOST}, the most that are looked at," if at_most is None else f"at_most ({at_most})"
        )
        raise UsageError(f"{bound} is less than multiple_of ({unit}).")
    sizes = _Sizes(run, unit)
    plain = last_within(sizes.plain, limit, most)
    last = last_within(sizes.least, limit, most, plain)
    if not last:
        _refuse(sizes.step(1), limit, unit)
    shown = {plain + (last - plain) * place // (_BETWEEN + 1) for place in range(_BETWEEN + 2)}
    found = {
        count: sizes.plan(count, limit, prove=count == last) for count in sorted(shown) if count
    }
    plans = {count: plan for count, plan in found.items() if plan is not None}
    return LargestBatch(
        limit,
        last * unit,
        plain * unit,
        plans[last],
        tuple(_priced(count * unit, plan) for count, plan in plans.items()),
        last == most,
    )


class _Sizes:
    """What is known of steps with so many units of samples."""

    def __init__(self, run: Callable[[int], Dry], unit: int) -> None:
        self._run, self._unit = run, unit
        self._steps: dict[int, Dry] = {}
        self._least: dict[int, Solution] = {}

    def step(self, count: int) -> Dry:
        found = self._steps.get(count)
        if found is None:
            try:
                found = self._run(count * self._unit)
            except Exception as error:
                self._tell_the_size(error, count)
                raise
            if not self._steps:
                tell_of_no_loss(found)
            self._steps[count] = found
            self._check_growth(count, found.graph)
        return found

    def _tell_the_size(self, error: Exception, count: int) -> None:
        """Note with an error how large the batch was, where that may be what it is about."""
        cause = error.__cause__ if isinstance(error, LowtideError) else error
        if cause is None or isinstance(cause, UnansweredError):
            return
        size = count_of(count * self._unit, "sample")
        if self._steps:
            most = max(self._steps) * self._unit
            error.add_note(
                f"That was a batch of {size}; one of {most} did not fail. If there cannot be so "
                f"many, set a bound: at_most={most}, say."
            )
        elif self._runs(2 * count):
            error.add_note(
                f"That was a batch of {size}, the smallest; one of {2 * count * self._unit} does "
                f"not fail. With multiple_of={2 * count * self._unit}, say, none is so small."
            )

    def _runs(self, count: int) -> bool:
        try:
            self._run(count * self._unit)
        except Exception:
            return False
        return True

    def _check_growth(self, count: int, graph: Graph) -> None:
        first = self.step(1).graph
        peak = plain_peak(graph)
        if count >= _GROWS and peak <= plain_peak(first) and _made(graph) <= _made(first):
            raise UsageError(
                f"the step takes no more memory with a batch of {count * self._unit} than with one "
                f"of {self._unit} ({exact_bytes(peak)}). The batch has to have as many samples as "
                "its function is asked for, and the step has to use it."
            )

    def plain(self, count: int) -> int:
        """The peak with nothing recomputed."""
        return plain_peak(self.step(count).graph)

    def least(self, count: int) -> int:
        """The smallest peak that can be reached."""
        return self._lowest(count).peak

    def _lowest(self, count: int) -> Solution:
        if count not in self._least:
            self._least[count] = minimum(self.step(count).graph)
        return self._least[count]

    def plan(self, count: int, limit: int, *, prove: bool) -> Plan | None:
        """The plan for a limit; None if there is none, as memory does not always grow."""
        try:
            return plan_step(self.step(count), limit, prove=prove)
        except BudgetError:  # a search for a plan may also have run out of time
            lowest = self._lowest(count)
            return from_solution(self.step(count), limit, lowest) if lowest.peak <= limit else None


def _made(graph: Graph) -> int:
    """Bytes of all that the step's forward makes or reads."""
    return sum(value.nbytes for value in graph.values)


def last_within(peak: Callable[[int], int], limit: int, most: int, known: int = 0) -> int:
    """The largest count from 1 to `most` whose peak is within the limit, 0 if there is none, where
    the peak grows with the count.

    `known` is within it. The peak is taken to be nearly a straight line: that through two known
    counts says what to try next. Where that is again on the same side of the limit, what is tried
    lies ever farther beyond it, up to the middle of what is open.
    """
    before, below, above = (0, 0), (0, 0), (0, 0)
    count, side, beyond = max(known, 1), 0, 0
    while True:
        now = (count, peak(count))
        last, side = side, 1 if now[1] <= limit else -1
        if side > 0:
            before, below = below, now
        else:
            above = now
        end = above[0] or min(below[0] * _FARTHEST, most) + 1
        if below[0] + 1 >= end:
            return below[0]
        left, right = (below, above) if above[0] else (before, below)
        rise = right[1] - left[1]
        where = left[0] + (limit - left[1]) * (right[0] - left[0]) // rise if rise > 0 else end
        beyond = 2 * beyond + 1 if above[0] and side == last else 0
        if beyond:
            middle = (below[0] + end) // 2
            where = min(where + beyond, middle) if side > 0 else max(where - beyond, middle)
        count = min(max(where, below[0] + 1), end - 1)


def _priced(size: int, plan: Plan) -> BatchSize:
    seconds = plan.step.seconds * (1 + plan.overhead)
    return BatchSize(
        size, plan.plain_peak, plan.peak, plan.overhead, size / seconds if seconds > 0 else 0.0
    )


def _refuse(step: Dry, limit: int, unit: int) -> NoReturn:
    """Raise that no batch fits."""
    try:
        plan_step(step, limit)
    except BudgetError as error:
        error.add_note(f"No batch fits: this is of {count_of(unit, 'sample')}, the smallest.")
        raise
    raise AssertionError("a limit above the smallest peak is never refused")


def _positive(value: object, name: str) -> int:
    count = whole_number(value)
    if count is None or count < 1:
        raise UsageError(f"{name} is a number of samples, at least 1; got {value!r}.")
    return count
