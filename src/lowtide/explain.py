"""`lowtide.explain`: what is in memory at the peak, why, and what would help, in sentences.

Problem: tables serve those who know what they look for; others need sentences. Invariant: every
sentence is made from figures that are in the data beside it, and says only what was simulated or
counted for this very step. Imports advice, record, study, limits. Rejected: advice that holds for
"most models".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lowtide.analysis.advice import Change, Holder, Kept, changes, holders, reasons
from lowtide.analysis.record import record
from lowtide.analysis.study import Study, study
from lowtide.analysis.timeline import Timeline
from lowtide.dryrun.found import OUTSIDE
from lowtide.dryrun.ledger import Output
from lowtide.errors import BudgetError, UsageError
from lowtide.limits import format_bytes, meant_by_place, parse_limit
from lowtide.plans import Plan
from lowtide.saved import LEFT_OUT, standing_text
from lowtide.texttable import count_of

_MOST = 5
_MUCH = 0.3  # share of a peak from which on gradients are worth a sentence
_KINDS = {
    "kept": "activations kept for backward",
    "recomputed": "recomputed activations",
    "gradient": "gradients of parameters and inputs",
    "temporary": "temporaries",
    "workspace": "workspace of a kernel",
}


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a step uses memory for. Prints as sentences.

    Attributes:
        study: the step, as the dry run saw it.
        plan: the plan for the limit; None if no limit was given or none can be kept.
        refused: why no plan keeps the limit, if none does.
    """

    study: Study
    plan: Plan | None
    refused: BudgetError | None = None

    @property
    def plain(self) -> Timeline:
        """The step with nothing recomputed."""
        return self.study.plain_timeline

    @cached_property
    def planned(self) -> Timeline | None:
        """The step under the plan; None without a plan."""
        return None if self.plan is None else self.study.timeline(self.plan)

    @property
    def biggest(self) -> tuple[Holder, ...]:
        """The five largest items at the peak: the planned one, if there is a plan."""
        return holders(self.planned or self.plain)[:_MOST]

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """The largest tensors that the plan keeps, and why each is not recomputed."""
        return reasons(self.study, self.plan) if self.plan is not None else ()

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the step returned, and why each output does or does not require grad."""
        return self.study.ledger.outputs

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What would lower the plain peak: first what halves it, the cheapest first; if nothing
        does, what comes nearest first."""
        return changes(self.study)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The explanation in words: what `print` shows, line by line."""
        return tuple(_say(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation, with both timelines, what autograd holds and the sentences, as
        JSON types: sizes in bytes, times in seconds."""
        return record(self)

    def __str__(self) -> str:
        return format_explanation(self)

    def __repr__(self) -> str:
        planned = "" if self.plan is None else f", planned peak {format_bytes(self.plan.peak)}"
        return f"<Explanation of {self.study.name}: peak {format_bytes(self.plain.peak)}{planned}>"

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import explanation_html

        return explanation_html(self)


def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    limit: int | float | str | None = None,
    on: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explain why a training step takes the memory that it takes, and what would lower it.

    A dry run, like `lowtide.plan`: nothing is computed. ``fn`` is called twice, the second time
    with half the batch, if its arguments show what the batch is. Peaks are bytes above what was in
    memory before the step.

    Args:
        fn: the step, as for `lowtide.plan`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        limit: a limit whose plan is explained too: what it keeps, and why. A limit that cannot be
            kept is explained, not raised.
        on: the device whose times to model, as for `lowtide.plan`.

    Returns:
        The figures and the sentences made from them. It prints as the sentences.

    Raises:
        UsageError: ``fn`` cannot be called; the limit cannot be read; no rates are known of the
            device that `on` names; or called inside a budget or region, or with grad disabled.

    Examples:
        >>> import torch
        >>> layers = [torch.nn.Linear(64, 64) if i % 2 else torch.nn.Tanh() for i in range(12)]
        >>> told = explain(torch.nn.Sequential(*layers), torch.ones(512, 64))
        >>> told.plain.peak == sum(item.nbytes for item in told.plain.items)
        True
        >>> print(told.sentences[0])
        The step peaks at 1.0 MiB above what was in memory before it, in ...
    """
    wanted = None if limit is None else parse_limit(limit)
    with meant_by_place("lowtide.explain", limit, args):
        subject = study(fn, args, kwargs, on=on)
    return explain_study(subject, wanted)


def explain_study(subject: Study, limit: int | float | None) -> Explanation:
    """Explain a step that was studied already."""
    if limit is None:
        return Explanation(subject, None)
    try:
        return Explanation(subject, subject.plan(limit))
    except BudgetError as error:
        return Explanation(subject, None, error)


# ---------------------------------------------------------------------------- words


def _place(module: str, line: str) -> str:
    where = (module or OUTSIDE).strip("()")
    return f"{where}, {line}" if line else where


def _say(told: Explanation) -> list[str]:
    plain = told.plain
    said = [f"The step {_peak(plain)}."]
    if told.study.step.source == "recorded":
        said.append(
            "It could not run on fake tensors, so one real step was recorded: temporaries are "
            "known as a sum, not storage by storage."
        )
    if told.study.ledger.in_regions:
        said.append(
            f"{LEFT_OUT}, as under a budget. lowtide.measure tells what the step takes with them."
        )
    said.append(_parts(plain))
    standing = standing_text(told.study.ledger.standing)
    said.append(f"In memory before the step, and not counted in its peak: {standing}.")
    if plain.peak:
        said += _advice(told)
    if told.refused is not None:
        said.append(
            f"The limit of {format_bytes(told.refused.limit)} cannot be kept. The smallest that "
            f"would suffice is {format_bytes(told.refused.minimum)}."
        )
    if told.planned is not None and told.plan is not None:
        said += _under(told.plan, told.planned)
    if told.biggest:
        said.append(f"The largest {count_of(len(told.biggest), 'item')} at that peak:")
    for place, holder in enumerate(told.biggest, 1):
        said.append(f"  {place}. {_holder(holder)}")
    if told.kept and told.plan is not None and told.plan.overhead > 0:
        said.append("Why the largest tensors are kept and not recomputed:")
        for kept in told.kept[:3]:
            said.append(
                f"  {format_bytes(kept.nbytes)} of {kept.operator} "
                f"({_place(kept.module, kept.line)}): {kept.why}."
            )
    for place, output in enumerate(told.outputs[:4]):
        does = "requires" if output.requires_grad else "does not require"
        said.append(f"Output {place} ({output.dtype}{list(output.shape)}) {does} grad: "
                    f"{output.reason}.")  # fmt: skip
    if told.study.ledger.own_backward:
        said.append(
            "The step runs backward itself: what it does from its first backward to its last is "
            "counted, but not planned. Return the loss and leave backward to lowtide."
        )
    elif not any(output.requires_grad for output in told.outputs):
        said.append("Nothing that the step returns requires grad: it has no backward to plan for.")
    return said


def _under(plan: Plan, planned: Timeline) -> list[str]:
    limit = format_bytes(plan.limit)
    if plan.overhead == 0:
        return [f"A limit of {limit} is kept without recomputing anything."]
    least = "" if plan.lower_bound is None else f" (at least {plan.lower_bound:.1%})"
    return [
        f"Under a limit of {limit} it {_peak(planned)}, for {plan.overhead:.1%} more time{least}.",
        _parts(planned),
    ]


def _peak(line: Timeline) -> str:
    if not line.moments:
        return "has no operation that needs memory"
    moment = line.moments[line.at]
    when = {"forward": "the forward", "replay": "backward, while recomputing", "backward": (
        "backward"
    )}[moment.phase]  # fmt: skip
    return (
        f"peaks at {format_bytes(line.peak)} above what was in memory before it, in {when}, at "
        f"{moment.site.operator} ({_place(moment.site.module, moment.site.line)})"
    )


def _parts(line: Timeline) -> str:
    parts = [
        f"{format_bytes(nbytes)} of {_KINDS[kind]} ({nbytes / line.peak:.0%})"
        for kind, nbytes in line.by_kind().items()
        if nbytes
    ]
    return f"In memory at the peak: {', '.join(parts)}." if parts else "The peak is zero."


def _holder(holder: Holder) -> str:
    what = {
        "kept": "kept",
        "recomputed": "recomputed",
        "gradient": "gradient",
        "temporary": "temporary",
        "workspace": "kernel workspace",
    }[holder.kind]
    times = "" if holder.count == 1 else f" in {holder.count} storages"
    return (
        f"{format_bytes(holder.nbytes)}{times}, {what}: {holder.operator or 'not broken down'} "
        f"({_place(holder.module, holder.line)})."
    )


def _advice(told: Explanation) -> list[str]:
    plain = told.plain.peak
    found = told.changes
    if not found:
        said = "Nothing that was tried lowers the peak: it does not consist of activations."
        return [said, *_gradients(told.plain)]
    first, *others = found
    halves = first.peak <= plain // 2
    lead = "To halve the memory" if halves else "Half the memory is out of reach here. The nearest"
    said = f"{lead}: {_change(first, plain)}."
    also = [f"Also: {_change(change, plain)}." for change in others[:4]]
    return [said, *([] if halves else _gradients(told.plain)), *also]


def _gradients(line: Timeline) -> list[str]:
    """What to do about gradients, if they are much of a peak that nothing halves."""
    nbytes = line.by_kind().get("gradient", 0)
    if not nbytes or nbytes < line.peak * _MUCH:
        return []
    return [
        f"{nbytes / line.peak:.0%} of the peak are gradients of parameters and inputs, which no "
        "recomputation lowers. An optimizer that steps as soon as each gradient is ready (in a "
        "post-accumulate-grad hook) frees them one by one; frozen parameters have none."
    ]


def _change(change: Change, plain: int) -> str:
    price = "less work per step" if change.overhead is None else f"{change.overhead:.1%} more time"
    return (
        f"{change.what} ({change.how}) would peak at {format_bytes(change.peak)}, "
        f"{change.peak / plain:.0%} of the plain peak, for {price}"
    )


def format_explanation(told: Explanation) -> str:
    """Return the sentences of an explanation as text, one per line.

    Args:
        told: from `explain`.

    Raises:
        UsageError: ``told`` is something else, such as the step itself.
    """
    if not isinstance(told, Explanation):
        raise UsageError(
            "format_explanation and print_explanation take what lowtide.explain returns; got "
            f"{type(told).__name__}. Write lowtide.explain(step, ...) around the step."
        )
    return "\n".join(told.sentences)


def print_explanation(told: Explanation) -> None:
    """Print the sentences of an explanation, as `format_explanation` returns them."""
    print(format_explanation(told))  # noqa: T201
