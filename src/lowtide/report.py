"""What a budget tells: a report of a step, and the refusals.

Problem: a user must see at a glance whether the limit held and what it cost. Invariant: reports
are data that print well; figures come from the plan and from measurements, and one that was not
measured is None, never a guess. Imports planner, limits, errors. Rejected: logging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import BudgetError
from lowtide.limits import format_bytes
from lowtide.planner import Graph, Simulator, plain_peak
from lowtide.texttable import count_of

_DRIFT = 0.006  # of a measured peak, that a refusal adds for what differs from step to step
_MISJUDGED = 0.02  # of a modelled one


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """A budget after a step. Sizes in bytes, times in seconds; None: not known.

    Attributes:
        limit: the limit.
        planned_peak: what the plan in force predicts, for the step that it was made for: one that
            is followed by a smaller step takes less.
        measured_peak: of the last step that was measured (on the CPU not every step is).
        plain_peak: what the same step would take with nothing recomputed, or the larger one by
            whose plan it went.
        kept_bytes: activations that the plan keeps; None for a step without one.
        recomputed_bytes: activations that autograd saves and the plan recomputes; the same.
        recorded_operations: operations of the last forward.
        replayed_operations: of them, run again in its backward (each time counted).
        replay_seconds: how long that took.
        steps: forwards run under the budget.
        planned: whether the last step followed a plan, not online eviction.
        measured_alike: whether what was measured ran the operations of the last step, on the same
            shapes. If not, ``measured_peak`` is another step's and the other figures are not.
        left_plan_at: the operation of the forward, counted from 0, at which the last step turned
            out not to be the planned one, nor another that is known; None: it did not.
        measured_steps: how many steps were measured so far.
        highest_peak: the highest peak of all of them.
        device_room: what the device was found to have for a step, less than the limit: it ran out
            of memory inside of one, and steps are planned for this. None: it never did.
    """

    limit: int | None
    planned_peak: int | None
    measured_peak: int | None
    plain_peak: int | None
    kept_bytes: int | None
    recomputed_bytes: int | None
    recorded_operations: int
    replayed_operations: int
    replay_seconds: float
    steps: int
    planned: bool
    measured_alike: bool = False
    left_plan_at: int | None = None
    measured_steps: int = 0
    highest_peak: int | None = None
    device_room: int | None = None

    def __str__(self) -> str:
        another = self.measured_peak is not None and not self.measured_alike
        followed = "planned" if self.planned else "unplanned"
        if self.left_plan_at is not None:
            followed += f": it left its plan at operation {self.left_plan_at}"
        limit = format_bytes(self.limit)
        if self.device_room is not None:
            limit += f" (the device had room for {format_bytes(self.device_room)})"
        rows = [
            ("limit", limit),
            ("planned peak", format_bytes(self.planned_peak)),
            (
                "measured peak",
                format_bytes(self.measured_peak) + (" (of another step)" if another else ""),
            ),
            (
                "highest peak",
                f"{format_bytes(self.highest_peak)} of {count_of(self.measured_steps, 'step')} "
                "measured",
            ),
            ("plain peak", format_bytes(self.plain_peak)),
            ("activations kept", format_bytes(self.kept_bytes)),
            ("activations recomputed", format_bytes(self.recomputed_bytes)),
            (
                "operations replayed",
                f"{self.replayed_operations} of {self.recorded_operations} in "
                f"{self.replay_seconds * 1e3:.1f} ms",
            ),
            ("steps", f"{self.steps}, the last one {followed}"),
        ]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


LOGGED = ("limit", "planned_peak", "measured_peak", "highest_peak")


def logged(report: BudgetReport) -> dict[str, int]:
    """The figures of a report that a training log takes: bytes, those that are known."""
    figures = {f"lowtide/{name}": getattr(report, name) for name in LOGGED}
    return {name: nbytes for name, nbytes in figures.items() if nbytes is not None}


def too_small(
    name: str, live: int, need: int, limit: int, count: int, least: int, named: int, before: int
) -> BudgetError:
    """Nothing is left to drop at an operation of a forward that is not planned yet. All but `live`
    and `need` count what earlier steps have left, `before`."""
    making = f", and it allocates {format_bytes(need)}" if need else ""
    return BudgetError(
        f"the step does not fit in {format_bytes(limit)}{_left(before)}: at operation {count} of "
        f"the forward ({name}), {format_bytes(live)} are allocated of which nothing more can be "
        f"dropped{making}. What has run so far needs at least {format_bytes(least)} with its "
        "backward; the rest of the step is not known yet. A limit that gets past it, with room "
        f"for the rest, is {named} bytes ({format_bytes(named)}). Use a smaller batch or a larger "
        "limit.",
        limit=limit,
        minimum=named,
    )


def _left(before: int) -> str:
    """What there is to say of the steps before this one."""
    if not before:
        return ""
    return (
        f", of which earlier steps of the same context have left {format_bytes(before)} in memory"
    )


def refusal(
    graph: Graph,
    limit: int,
    retain: Sequence[int],
    *,
    measured: bool,
    predicted: int | None = None,
    before: int = 0,
    modules: Sequence[str] = (),
    named: int | None = None,
) -> BudgetError:
    """A known step whose smallest reachable peak, that of this plan, is above the limit.

    `predicted`: the peak that a dry run told of the plan that was followed. `before`: bytes that
    earlier steps of the same context have left; they count for the limit. `modules`: the name of
    the one that each operation ran in, where that is known. `named`: the smallest limit, where the
    caller knows what it will take.
    """
    result, plain = Simulator(graph).run(retain), plain_peak(graph)
    minimum = int(result.peak * (1 + (_DRIFT if measured else _MISJUDGED)))
    if measured:  # a limit that the plain step keeps is kept by doing nothing
        minimum = min(minimum, max(plain, result.peak))
    minimum = minimum + before if named is None else named
    known = ""
    if graph.events and result.peak >= plain:
        known = " What stands there has to, whatever is recomputed."
    if graph.events and not measured:
        known += " The memory of its backward is computed from sizes so far."
    if not graph.events:
        known = (
            " No backward asks for anything of this step, so there is nothing to recompute: does "
            "what it returns require grad?"
        )
    if predicted is not None:
        known += (
            f" The plan that was followed had been predicted, from sizes, to take "
            f"{format_bytes(predicted)}; now the step has been measured."
        )
    return BudgetError(
        f"the step does not fit in {format_bytes(limit)}{_left(before)}; plain it takes "
        f"{format_bytes(plain)}. The smallest limit known to do is {minimum} bytes "
        f"({format_bytes(minimum)}): at its peak stands {_stands(graph, result.peak_at, modules)}, "
        f"with {format_bytes(result.held_bytes_at_peak)} of activations and "
        f"{format_bytes(result.peak - result.held_bytes_at_peak)} of gradients, temporaries and "
        f"kernel workspace{_names(graph, result.peak_at)}.{known} Use a smaller batch or a larger "
        "limit.",
        limit=limit,
        minimum=minimum,
    )


def unrecorded(limit: int, peak: int, before: int) -> BudgetError:
    """A step that was measured above its limit, and of which nothing is recorded that was saved for
    its backward. Both count what earlier steps have left, `before`."""
    why = (
        "and nothing that it saves for its backward is recorded, so that nothing can be "
        "recomputed. Tensors of a class of their own that does not say what they consist of "
        "(`__tensor_flatten__`, `__tensor_unflatten__`) are kept whole, and so is everything where "
        "a dispatch mode of the program's own stands around a step that is recorded in Python "
        "(lowtide.engine.reason() says why it is)."
    )
    if before:
        why = (
            "and its backward asks for nothing that it saved itself, so that nothing of it can be "
            "recomputed."
        )
    return BudgetError(
        f"the step does not fit in {format_bytes(limit)}{_left(before)}: it took "
        f"{format_bytes(peak)}, {why} Use a smaller batch, or a limit of at least {peak} bytes "
        f"({format_bytes(peak)}).",
        limit=limit,
        minimum=peak,
    )


def _stands(graph: Graph, peak_at: tuple[str, int], modules: Sequence[str]) -> str:
    """What runs at a peak, in words."""
    phase, index = peak_at
    if phase == "forward" and index == len(graph.ops):
        return "what the loss takes outside of the budget, between its forward and backward"
    if phase != "forward":
        index = graph.values[graph.events[index].value].producer
    module = f" in {modules[index]}" if modules and modules[index] else ""
    if phase == "forward":
        return f"operation {index} ({graph.ops[index].name}) of the forward{module}"
    return f"the backward that reads the output of {graph.ops[index].name}{module}"


def _names(graph: Graph, peak_at: tuple[str, int]) -> str:
    """What the program itself has in memory at a peak in the forward, in words."""
    phase, index = peak_at
    nbytes = _named(graph, index) if phase == "forward" and index < len(graph.ops) else 0
    if not nbytes:
        return ""
    return (
        f", of which your program itself has {format_bytes(nbytes)} in memory that backward asks "
        "for: dropping that frees nothing before the names on it have gone"
    )


def _named(graph: Graph, index: int) -> int:
    """Bytes of saved values that only the program still needs at an operation of the forward."""
    return sum(
        node.nbytes
        for node, last, release in zip(graph.values, graph.last_use, graph.release, strict=True)
        if last < index <= node.named and release >= 0 and not node.pinned
    )
