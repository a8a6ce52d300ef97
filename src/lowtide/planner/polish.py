"""Random changes to the best plan of a search, if the caller has a simulator that is fast enough.

Problem: at tight limits the plans that exchanges lead to cost up to a tenth more than others that
are several changes away. Invariant: the result is one more candidate: it is simulated here, and
taken if it fits and is cheaper. Only decisions that the other searches may take are tried.
Deterministic: work is counted, in list items that the simulations walk through.

Imports: `lowtide.planner.repair`, `lowtide.planner.retention`, `lowtide.planner.search`.

Rejected: the same in Python. Plans would then not depend on whether there is a compiler, but in the
same time Python tries about two hundred changes, and fifty thousand are needed.
"""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

from lowtide.planner.repair import Candidate, Problem, trace_of
from lowtide.planner.retention import HOLD
from lowtide.planner.search import Search
from lowtide.planner.simulate import Lists

WORK = 160_000_000
"""List items that one search may walk through before it lays out parts of the step anew, for which
it walks through six tenths more: about half a second, and then a third."""
FEWEST, MOST = 10, 3000
"""Changes per value that is decided on: fewer find nothing, more find nothing better."""

Choice = tuple[int, int, bool, bool]
"""A value; the last event from which it may be retained (-1: none); whether it may be held; whether
it may be dropped before its release (`NEVER`)."""


class Polish(Protocol):
    """Changes a plan at random; see `anneal.h`."""

    def __call__(
        self,
        graph: Lists,
        choices: list[Choice],
        retain: list[int],
        limit: int,
        work: int,
        enough: float,
        seconds: float,
        /,
    ) -> list[int]:
        """The cheapest plan found within the limit. The search ends when it has walked through
        `work` items, has a plan of at most `enough` seconds, or has run for `seconds`."""
        ...


def polish(search: Search, with_: Polish, start: Candidate, settled: frozenset[int]) -> None:
    """Anneal a plan that fits and offer the result, unless the graph is too large to gain from it.

    What it holds of the `settled` values it goes on holding.
    """
    problem = search.problem
    choices = [choice for choice in choices_of(problem) if choice[0] not in settled]
    size = len(problem.fixed) + len(problem.sim.cost) + len(problem.sim.event_value) + 1
    work = min(WORK, MOST * len(choices) * size)
    if not choices or work < FEWEST * len(choices) * size:
        return
    retain = with_(
        problem.sim.lists(),
        choices,
        start.retain,
        search.limit,
        work,
        search.enough(),
        max(search.deadline - perf_counter(), 0.0),
    )
    search.offer(_tidy(problem, retain), "annealing")


def choices_of(problem: Problem) -> list[Choice]:
    """The open decisions: those of `reference.choices`, for values that have bytes."""
    sim, graph = problem.sim, problem.sim.graph
    found = []
    for value, fixed in enumerate(problem.fixed):
        release, latest = sim.release[value], graph.latest[value]
        latest = latest if latest >= 0 else release
        holds = value not in problem.gone
        if fixed or not sim.nbytes[value] or (release < 0 and not holds):
            continue
        if release >= 0 or graph.consumers[value]:
            found.append((value, latest, holds, graph.needed[value] < release))
    return found


def _tidy(problem: Problem, retain: list[int]) -> Candidate:
    """Drop what is held but never needed: random changes that cost nothing are left behind."""
    result = problem.run(retain)
    alive = trace_of(result).alive
    tidy = [
        problem.dropped(value)
        if choice == HOLD and alive[value] < 0 and not problem.fixed[value]
        else choice
        for value, choice in enumerate(retain)
    ]
    return Candidate(tidy, problem.run(tidy))
