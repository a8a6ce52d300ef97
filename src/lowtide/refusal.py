"""The errors of steps that do not fit, in words.

Problem: a refusal ends a training, and whoever reads it has to know what to change. Invariant: the
text says what happened, with the figures, and names the smallest limit known to suffice, or says
that it is an estimate; what is a guess is called one. Imports planner, limits, errors. Rejected: a
text at each place that refuses, which would word and round the same figures in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import BudgetError
from lowtide.limits import exact_bytes, format_bytes
from lowtide.planner import Graph, Simulation, Simulator, plain_peak

_DRIFT = 0.006  # share of a measured peak that a refusal adds, as steps differ a little
_MISJUDGED = 0.02  # the same of a modelled peak
_FEW = 100  # bytes: whoever gives so few has meant a fraction, or a percentage


def too_small(
    name: str,
    *,
    limit: int,
    live: int,
    need: int,
    count: int,
    least: int,
    named: int,
    before: int,
) -> BudgetError:
    """The refusal at an operation of an unplanned forward, where nothing is left to drop.

    Args:
        name: the operation's.
        limit: in bytes, what earlier steps have left included.
        live: bytes that the step has in memory.
        need: bytes that the operation is about to allocate.
        count: operations before it.
        least: what has run so far takes at least so much with its backward, `before` included.
        named: the limit to name, `before` included.
        before: bytes that earlier steps of the same context have left.
    """
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

    Args:
        graph: the step, or what is left of it.
        limit: in bytes; what earlier steps have left counts towards it.
        retain: the plan with the smallest peak.
        measured: whether the memory of the step was measured, or computed from sizes.
        predicted: the peak that a dry run predicted for the plan that was followed.
        before: bytes that earlier steps of the same context have left.
        more: bytes that they would leave besides under a larger limit, as a retained graph then
            holds more.
        modules: the name of the module that each operation ran in, if known.
        named: the smallest limit, if the caller knows which one it accepts.
        again: the step was not planned, and now is: it fits when it comes again.
        plain: the plain peak, if `graph` is only what is left of the step.
        least: the peak, if what was guessed takes less than `graph` says.
        guessed: what was, in words.
        unwatched: its first operations were not watched.
    """
    result = Simulator(graph).run(retain)
    plain = plain_peak(graph) if plain is None else plain
    if named is None:
        misjudged = _DRIFT if measured else _MISJUDGED
        named = int(result.peak * (1 + misjudged)) + before + more
    guess = None
    if least is not None and guessed:
        may = int(least * (1 + _MISJUDGED)) + before
        if may < named:
            guess = _guess(guessed, may, "run" if unwatched else "run and measured")
    known = _remarks(
        graph,
        more=more,
        lowest=result.peak >= plain,
        measured=measured,
        guess=guess,
        predicted=predicted,
    )
    way_out = _AGAIN if again else "Use a smaller batch or a larger limit."
    way_out += "" if modules else _WHERE
    return BudgetError(
        f"{_does_not_fit(limit, before)} Its plain peak is {format_bytes(plain)}. "
        f"The smallest limit known to suffice is "
        f"{exact_bytes(named)}: its peak is {_stands(graph, result.peak_at, modules)}, "
        f"with {_consists_of(graph, result)}{_names(graph, result.peak_at)}.{known} {way_out}",
        limit=limit,
        minimum=named,
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
