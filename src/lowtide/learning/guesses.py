"""Whether a step that would be refused may be refused for a guess alone.

Problem: what the backward of a custom Function takes is guessed before it has run, and what FSDP2
does in it; so is what operations take that ran unwatched (`lowtide.running.alone`), and how large
the gradients are that a loss outside gives (a sum gives one number); and convolutions may do
without the scratchpads that are counted for them. A guess that is too high would refuse the step
whenever it comes, and it would never be measured. Invariant: a step is refused before it was
measured only if it does not fit even where these take the least they may; then the refusal says
which of them it was, but for scratchpads, which are small. Imports planner, observer, logs,
graphs and margins. Rejected: one guess in between, which makes too little room for a Function that
runs all of its forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.memory import margins
from lowtide.observing.graphs import graph_before
from lowtide.observing.logs import OpLog
from lowtide.observing.observer import Observer
from lowtide.planner import Graph
from lowtide.planner.resume import forward_over, with_margin


def sparingly(observer: Observer, graph: Callable[[], Graph]) -> Graph:
    """What `graph` makes of the step where all that was guessed of it takes the least that it may:
    its Functions, and what nobody has watched."""
    ops, leaves = observer.ops, observer.leaves
    gradients = leaves.gradients
    observer.sparing = True
    observer.ops, leaves.gradients = list(ops), leaves.least()
    for at in observer.estimated:
        observer.ops[at] = replace(ops[at], workspace=0, temporaries=0, left=0, receivers=())
    observer.ops = [_unpadded(log) if log.pad else log for log in observer.ops]
    try:
        return graph()
    finally:
        observer.sparing = False
        observer.ops, leaves.gradients = ops, gradients


def _unpadded(log: OpLog) -> OpLog:
    workspace, temporaries = max(0, log.workspace - log.pad), max(0, log.temporaries - log.pad)
    return replace(log, workspace=workspace, temporaries=temporaries, pad=0)


def sparing_graph(observer: Observer, first: int) -> Graph | None:
    """The graph before a backward that begins at `first`, as in `sparingly`; None: nothing was
    guessed that makes a difference.

    What reads parameters without grad need not be a Function: a teacher's forward, or a moving
    average, has no backward, and so nothing was guessed for it.
    """
    guessed = observer.runs_again() or observer.turnover or observer.estimated
    guessed = guessed or any(log.pad for log in observer.ops)
    if not guessed and not observer.names.outside:
        return None
    sparing = sparingly(observer, lambda: graph_before(observer, first))
    return None if sparing.events == graph_before(observer, first).events else sparing


def what_was_guessed(observer: Observer) -> list[str]:
    """The parts of the step that were guessed, in the words of a refusal."""
    reasons = (
        (observer.estimated, "its first operations ran unwatched, below the limit"),
        (
            observer.some_run_again(),
            "a custom autograd Function in it reads parameters and is taken to run its forward "
            "again",
        ),
        (observer.turnover, "FSDP2 gathers parameters and is taken to hold some several times"),
        (
            observer.names.outside,
            "a loss outside is taken to give gradients as large as what it was given",
        ),
    )
    return [reason for applies, reason in reasons if applies]


def least_peak(graph: Graph, held: set[int], limit: int) -> int:
    """The peak of what is left of this step under the limit, or the smallest above it."""
    found = with_margin(forward_over(graph, held), held, limit, margins.MODELLED, search=True)
    return found.result.peak
