"""What a budget tells its user: the report of a step, and the refusals.

Problem: a user must see at a glance whether the limit held and what it cost. Invariant: reports
are data that print well; figures come from the plan and from measurements, and a figure that was
not measured is None, never a guess, and is not printed. Imports planner, limits, errors, page.
Rejected: logging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.errors import BudgetError
from lowtide.limits import exact_bytes, format_bytes, format_limit
from lowtide.planner import Graph, Simulation, Simulator, plain_peak
from lowtide.texttable import count_of

_DRIFT = 0.006  # share of a measured peak that a refusal adds, as steps differ a little
_MISJUDGED = 0.02  # the same of a modelled peak
_FEW = 100  # bytes: whoever gives so few has meant a fraction, or a percentage


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What a budget knows after a step. Sizes are in bytes, times in seconds; None: not known.

    Attributes:
        limit: the limit.
        planned_peak: the peak that the plan predicts for the step that it was made for. A smaller
            step that follows the plan takes less.
        measured_peak: the peak of the last measured step (on the CPU not every step is measured).
        plain_peak: the peak of the same step with nothing recomputed; of the larger step, if the
            plan was made for one.
        kept_bytes: bytes of activations that the plan keeps; None for a step without a plan.
        recomputed_bytes: bytes of activations that autograd saves and the plan recomputes; None
            for a step without a plan.
        recorded_operations: operations of the last forward.
        replayed_operations: operations replayed in its backward, each run counted.
        replay_seconds: how long these replays took.
        steps: forwards run under the budget.
        planned: whether the last step followed a plan; if not, values were dropped as needed
            while it ran.
        measured_alike: whether the measured step ran the same operations as the last one, on the
            same shapes. If not, ``measured_peak`` belongs to another step than the other figures.
        left_plan_at: the operation of the forward, counted from 0, at which the last step turned
            out to be neither the planned step nor another known one; None: it did not.
        measured_steps: how many steps were measured so far.
        highest_peak: the highest peak of all measured steps.
        device_room: the room that the device was found to have, below the limit: it ran out of
            memory inside a step, and later steps are planned for this. None: it did not run out.
        fraction: the fraction of a plain peak that the budget was given; None: it was given bytes.
        idle_steps: forwards that were not recorded, as their plan keeps everything and takes less
            than half of the limit (rule 13). "The last step" is the last one that was recorded.
        recorder: ``"compiled"`` or ``"python"``, the recorder in use, see `lowtide.engine`; None
            before the first step.
        obstacle: why the last step that should have been measured was not, such as "a torch
            profiler is active"; None: nothing was in the way.
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
    fraction: float | None = None
    idle_steps: int = 0
    recorder: str | None = None
    obstacle: str | None = None

    def __str__(self) -> str:
        return "\n".join(f"{label:<{_WIDTH}}  {text}" for label, text in _rows(self))

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import text_html

        return text_html(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON types, by the names of the attributes: sizes in bytes, times
        in seconds, None for what is not known."""
        return asdict(self)


_WIDTH = len("activations recomputed")


def _rows(report: BudgetReport) -> list[tuple[str, str]]:
    """The figures that are known, and why the others are not."""
    rows = [("limit", _limit(report))]
    if report.planned_peak is not None:
        rows.append(("planned peak", format_bytes(report.planned_peak)))
    if report.measured_peak is not None:
        another = "" if report.measured_alike else " (of another step)"
        rows.append(("measured peak", format_bytes(report.measured_peak) + another))
    if report.measured_steps:
        of_steps = f"of {count_of(report.measured_steps, 'step')} measured"
        rows.append(("highest peak", f"{format_bytes(report.highest_peak)} {of_steps}"))
    if report.plain_peak is not None:
        rows.append(("plain peak", format_bytes(report.plain_peak)))
    if report.kept_bytes is not None:
        rows.append(("activations kept", format_bytes(report.kept_bytes)))
    if report.recomputed_bytes is not None:
        rows.append(("activations recomputed", format_bytes(report.recomputed_bytes)))
    if report.recorded_operations:
        replayed = f"{report.replayed_operations} of {report.recorded_operations}"
        taken = f"in {report.replay_seconds * 1e3:.1f} ms"
        rows.append(("operations replayed", f"{replayed} {taken}"))
    rows.append(("steps", _steps(report)))
    if report.recorder == "python":  # many times slower where operations are small
        rows.append(("recorder", "in Python (lowtide.engine.reason() says why)"))
    why = _why_unknown(report)
    return [*rows, ("not known", why)] if why else rows


def _limit(report: BudgetReport) -> str:
    text = format_limit(report.limit, report.fraction)
    if report.fraction is not None and report.limit is not None:
        # Of the largest step's peak, which need not be the one below.
        whole = format_bytes(round(report.limit / report.fraction))
        text += f" ({report.fraction:g} of a plain peak of {whole})"
    if report.device_room is not None:
        text += f" (the device had room for {format_bytes(report.device_room)})"
    return text


def _steps(report: BudgetReport) -> str:
    if not report.steps:
        return "none yet"
    idle = f" ({report.idle_steps} not recorded)" if report.idle_steps else ""
    if not _finished(report):
        return f"{report.steps}{idle}, none finished yet"
    followed = "planned" if report.planned else "unplanned"
    if report.left_plan_at is not None:
        followed += f": it left its plan at operation {report.left_plan_at}"
    return f"{report.steps}{idle}, the last one {followed}"


def _finished(report: BudgetReport) -> bool:
    """Whether a step has ended, of which there are figures."""
    return bool(report.planned or report.recorded_operations or report.measured_steps)


def _why_unknown(report: BudgetReport) -> str:
    """Which figures are missing, and why; empty if none is."""
    if not report.steps:
        return (
            "the rest, as no step has run (without grad, or in a fitted model's eval mode, none is)"
        )
    if not _finished(report):
        return "the rest, as no step's backward has run yet"
    why = []
    if not report.planned:
        why.append("what a plan keeps and takes, as the last step had none")
    if not report.measured_steps:
        because = "" if report.obstacle is None else f": {report.obstacle}"
        why.append(f"measured peaks, as no step has been measured yet{because}")
    if report.plain_peak is None:
        why.append("the plain peak, as no step has shown it yet")
    if not report.recorded_operations:
        why.append("what was replayed, as no operation was recorded")
    return "; ".join(why)


LOGGED = ("limit", "planned_peak", "measured_peak", "highest_peak")


def logged(report: BudgetReport) -> dict[str, int]:
    """The figures of a report that a training log shows, in bytes, without the unknown ones."""
    figures = {f"lowtide/{name}": getattr(report, name) for name in LOGGED}
    return {name: nbytes for name, nbytes in figures.items() if nbytes is not None}


def too_small(
    name: str, live: int, need: int, limit: int, count: int, least: int, named: int, before: int
) -> BudgetError:
    """The refusal at an operation of an unplanned forward, where nothing is left to drop. All but
    `live` and `need` include what earlier steps have left, `before`."""
    making = f", and it allocates another {format_bytes(need)}" if need else ""
    return BudgetError(
        f"{_does_not_fit(limit, before)} At operation {count} of the forward ({name}), "
        f"{format_bytes(live)} are allocated of which nothing more can be dropped{making}. What "
        f"has run so far needs at least {format_bytes(least)} with its backward; the rest of the "
        f"step is not known yet. A limit that gets past this operation is "
        f"{exact_bytes(named)}; what comes after it may need more. "
        "lowtide.plan(step, batch).minimum_peak is the smallest for the whole step, found without "
        "running it. Use a smaller batch or a larger limit.",
        limit=limit,
        minimum=named,
    )


def _does_not_fit(limit: int, before: int) -> str:
    """How a refusal begins. The last words are those that accelerate knows a batch by that is too
    large, see `accelerate.find_executable_batch_size`."""
    left = (
        ", of which earlier steps in the same context, or parameters that FSDP2 gathered before "
        f"the forward, occupy {format_bytes(before)}"
    )
    text = f"the step does not fit in {format_bytes(limit)}{left if before else ''}"
    meant = ' An int is a number of bytes: the plain peak is 1.0, a share of it 0.8 or "80%".'
    return f"{text}: it would run out of memory.{meant if limit <= _FEW else ''}"


def refusal(
    graph: Graph,
    limit: int,
    retain: Sequence[int],
    *,
    measured: bool,
    predicted: int | None = None,
    before: int = 0,
    more: int = 0,
    modules: Sequence[str] = (),
    named: int | None = None,
    again: bool = False,
    plain: int | None = None,
    least: int | None = None,
    guessed: Sequence[str] = (),
    unwatched: bool = False,
) -> BudgetError:
    """The refusal of a known step whose smallest reachable peak, this plan's, is above the limit.

    `predicted`: the peak that a dry run predicted for the plan that was followed. `before`: bytes
    that earlier steps of the same context have left; they count towards the limit. `more`: bytes
    that they would leave besides under a larger one, as a retained graph then holds more.
    `modules`: the name of the module that each operation ran in, if known. `named`: the smallest
    limit, if the caller knows which one it accepts. `again`: the step was not planned, and now is:
    it fits when it comes again. `plain`: the plain peak, if `graph` is only what is left of the
    step. `least`: the peak, if what was `guessed` takes less than `graph` says. `unwatched`: its
    first operations were not watched.
    """
    result = Simulator(graph).run(retain)
    plain = plain_peak(graph) if plain is None else plain
    minimum = int(result.peak * (1 + (_DRIFT if measured else _MISJUDGED)))
    minimum = minimum + before + more if named is None else named
    may = None if least is None else int(least * (1 + _MISJUDGED)) + before
    known = _remarks(
        graph,
        more=more,
        lowest=result.peak >= plain,
        measured=measured,
        guess=_guess(guessed, may, "run" if unwatched else "run and measured")
        if may is not None and guessed and may < minimum
        else None,
        predicted=predicted,
    )
    way_out = _AGAIN if again else "Use a smaller batch or a larger limit."
    way_out += "" if modules else _WHERE
    return BudgetError(
        f"{_does_not_fit(limit, before)} Its plain peak is {format_bytes(plain)}. "
        f"The smallest limit known to suffice is "
        f"{exact_bytes(minimum)}: its peak is {_stands(graph, result.peak_at, modules)}, "
        f"with {_consists_of(graph, result)}{_names(graph, result.peak_at)}.{known} {way_out}",
        limit=limit,
        minimum=minimum,
    )


_WHERE = " lowtide.explain(step, batch) tells by module and line what is in memory then."
_AGAIN = (
    "A first step decides what to drop before it has seen the rest. This budget has planned the "
    "step now, from its first operation on: run it again with the same budget object, and it fits, "
    "if its backward takes what was computed. Or use a smaller batch or a larger limit."
)


def _remarks(
    graph: Graph,
    *,
    more: int,
    lowest: bool,
    measured: bool,
    guess: str | None,
    predicted: int | None,
) -> str:
    """What a refusal says about its figures; a step without a backward has no others to explain."""
    said = []
    if not graph.events:
        said.append(
            "No backward asks for anything from this step, so there is nothing to recompute: does "
            "what it returns require grad?"
        )
    else:
        if more:
            said.append(
                f"That has room for another {format_bytes(more)} that the retained graphs of "
                "earlier steps in the same context may then hold."
            )
        if lowest:
            said.append("No recomputation lowers this peak.")
        if not measured:
            said.append("The memory of its backward is not measured yet, but computed from sizes.")
        if guess is not None:
            said.append(guess)
    if predicted is not None:
        said.append(
            "The plan that was followed was predicted, from sizes, to take "
            f"{format_bytes(predicted)}; now the step has been measured."
        )
    return "".join(f" {sentence}" for sentence in said)


def _guess(guessed: Sequence[str], may: int, then: str) -> str:
    """That part of the smallest limit is a guess, and that `may` bytes may do."""
    return (
        f"Part of that is a guess: {'; '.join(guessed)}. If it takes the least that it may, "
        f"{exact_bytes(may)} may do: under such a limit the step is {then}."
    )


def unrecorded(limit: int, peak: int, before: int) -> BudgetError:
    """The refusal of a step that was measured above its limit, and of whose saved tensors none is
    recorded. Both figures include what earlier steps have left, `before`."""
    why = (
        "and nothing that it saves for its backward is recorded, so nothing can be recomputed: a "
        "backward that needs only parameters and inputs leaves nothing to drop. Nor is anything "
        "recorded that torch.utils.checkpoint runs again in backward: leave it out, or use "
        "lowtide.checkpoint in its place. "
        "Tensors of a subclass that does not say what they consist of "
        "(`__tensor_flatten__`, `__tensor_unflatten__`) are kept whole. So is everything if a "
        "dispatch mode of your own is around a step that the Python recorder records "
        "(lowtide.engine.reason() says why it does)."
    )
    if before:
        why = (
            "and its backward asks for nothing that it saved itself, so nothing of it can be "
            "recomputed."
        )
    return BudgetError(
        f"{_does_not_fit(limit, before)} It took {format_bytes(peak)}, {why} Use a smaller batch, "
        f"or a limit of at least {exact_bytes(peak)}.",
        limit=limit,
        minimum=peak,
    )


def _stands(graph: Graph, peak_at: tuple[str, int], modules: Sequence[str]) -> str:
    """Where a peak is, in words."""
    phase, index = peak_at
    if phase == "forward" and index == len(graph.ops):
        if not graph.events:
            return "after its forward"
        return "in the loss, outside the budget, between its forward and backward"
    if phase != "forward":
        index = graph.values[graph.events[index].value].producer
    module = f" in {modules[index]}" if modules and modules[index] else ""
    if phase == "forward":
        return f"at operation {index} ({graph.ops[index].name}) of the forward{module}"
    return f"in the backward that reads the output of {graph.ops[index].name}{module}"


def _consists_of(graph: Graph, result: Simulation) -> str:
    """What is in memory at a peak, in words. What was there before is told from what runs at that
    moment takes, which may be the workspace of a single kernel."""
    phase, index = result.peak_at
    rest = result.peak - result.held_bytes_at_peak
    activations = f"{format_bytes(result.held_bytes_at_peak)} of activations"
    if phase == "forward":
        others = "results, temporaries and kernel workspace"
        return f"{activations} and {format_bytes(rest)} of {others}"
    before = min(graph.events[index].other, rest)
    takes = (
        "a replay for it takes (results, temporaries, kernel workspace)"
        if phase == "replay"
        else "it takes itself (new gradients, temporaries, kernel workspace)"
    )
    return (
        f"{activations}, {format_bytes(before)} of gradients and other memory from before, and "
        f"{format_bytes(rest - before)} that {takes}"
    )


def _names(graph: Graph, peak_at: tuple[str, int]) -> str:
    """What the program itself keeps in memory at a peak in the forward, in words."""
    phase, index = peak_at
    nbytes = _named(graph, index) if phase == "forward" and index < len(graph.ops) else 0
    if not nbytes:
        return ""
    return (
        f". Your program itself has references to {format_bytes(nbytes)} that backward asks for: "
        "dropping these frees nothing until the references are gone"
    )


def _named(graph: Graph, index: int) -> int:
    """Bytes of saved values that only the program still holds at an operation of the forward."""
    return sum(
        node.nbytes
        for node, last, release in zip(graph.values, graph.last_use, graph.release, strict=True)
        if last < index <= node.named and release >= 0 and not node.pinned
    )
