"""What a budget reports of its last step.

Problem: a user must see at a glance whether the limit held and what it cost. Invariant: reports
are data that print well; figures come from the plan and from measurements, and a figure that was
not measured is None, never a guess, and is not printed. Imports limits, texttable and page.
Rejected: logging.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide.limits import format_bytes, format_limit
from lowtide.texttable import count_of


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
