"""Choosing what compiled code saves: lowtide's planner proposes, the schedule decides.

Problem: the planner allows repeated replays and assumes one kernel per operation; compiled code
runs an operation at most once in each half and fuses kernels. Invariant: choices are judged by
`Scheduler`, which follows these rules, never by the planner's own figures; if what torch would save
fits, that is the choice, so a limit that is met anyway changes nothing. Deterministic: work is
counted, not timed. Imports joint, schedule and the planner. Rejected: an integer program over the
FX graph; and torch's own way, a knapsack of independent items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lowtide.inductor.joint import OUTSIDE, Joint
from lowtide.inductor.schedule import Outcome, Scheduler
from lowtide.inductor.stepgraph import step_graph
from lowtide.planner import HOLD, Graph, Retention, minimum, solve
from lowtide.planner.graph import EXTERNAL

_ROUNDS = 5  # limits for which the planner is run
_RATIOS = (0.7, 0.45, 0.2)  # torch's own choices at these activation budgets are candidates too
_STEPS = 6  # rungs of a ladder
_PLAIN = "plain"
_WORK = 400_000  # operations that a search may schedule: a few seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """Storages to save, and the outcome."""

    saved: frozenset[int]
    outcome: Outcome
    method: str


class Search:
    """The choices for one graph.

    Args:
        joint: the graph.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.scheduler = Scheduler(joint)
        self.allowed = max(_WORK // (len(joint.ops) + 1), 60)
        self.savable = self.scheduler.savable()
        self._known: dict[frozenset[int], Choice] = {}
        self._errors: list[tuple[int, float, float]] = []
        """For each choice whose peaks were read: its saved bytes, and the ratios of its forward and
        backward peaks to the predicted ones."""
        self._plain: Choice | None = None
        self._graph: Graph | None = None
        self._least: Choice | None = None
        self._by_torch: list[Choice] = []

    def _try(self, saved: Iterable[int], method: str) -> Choice:
        outcome = self.scheduler.run(frozenset(saved) & self.savable)
        known = self._known.get(outcome.kept)
        if known is not None:
            return known
        if self._errors and method != _PLAIN:
            _, forward, backward = min(self._errors, key=lambda e: abs(e[0] - outcome.saved))
            outcome.forward = int(outcome.forward * forward)
            outcome.backward = int(outcome.backward * backward)
        return Choice(outcome.kept & self.savable, outcome, method)

    def learn(self, choice: Choice, forward: int, backward: int) -> Choice:
        """Note the true peaks of a choice. Similar choices are assumed to be mispredicted alike.

        The prediction for the plain choice is not corrected, since fractions refer to it.
        """
        guessed = self.scheduler.run(choice.saved)
        self._errors.append(
            (guessed.saved, forward / max(1, guessed.forward), backward / max(1, guessed.backward))
        )
        outcome = replace(guessed, forward=forward, backward=backward)
        known = self._known[outcome.kept] = Choice(choice.saved, outcome, choice.method)
        self._plain = self._plain and self._try(self._plain.saved, self._plain.method)
        self._by_torch = [self._try(c.saved, c.method) for c in self._by_torch]
        self._least = self._least and self._try(self._least.saved, self._least.method)
        return known

    def known(self) -> list[Choice]:
        """Choices whose peaks were learned."""
        return list(self._known.values())

    def is_known(self, choice: Choice) -> bool:
        return choice.outcome.kept in self._known

    @property
    def plain(self) -> Choice:
        """What torch alone saves."""
        if self._plain is None:
            self._plain = self._by_ratio(1.0)
        return self._plain

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            self._graph = step_graph(self.scheduler, self.plain.saved)
        return self._graph

    def within(self, forward: int, backward: int) -> Choice:
        """The fastest choice whose peaks are at most these; if there is none, the nearest."""

        def over(choice: Choice) -> int:
            return max(0, choice.outcome.forward - forward, choice.outcome.backward - backward)

        def cost(choice: Choice) -> tuple[float, ...]:
            return over(choice), choice.outcome.seconds

        if not over(self.plain):
            return self.plain
        candidates = [*self.by_torch(), *self.known()]
        best = min(candidates, key=cost)
        room = min(forward, backward)
        asked = room
        for _ in range(_ROUNDS):
            solution = solve(self.graph, max(asked, 1))
            found = self._try(_held(self.graph, solution.plan), "planner")
            best = min(best, found, key=cost)
            if over(found):
                asked -= max(over(found), room // 100)
            elif room - found.outcome.peak > room // 50:
                asked += (room - found.outcome.peak) // 2
            else:
                break
            if solution.status != "fits" or asked <= 0:
                break
        if over(best):
            best = min(best, self.least(), key=cost)
        return self._descended(best, cost)

    def smallest(self, room: int) -> Choice:
        """The choice that saves the fewest bytes, with peaks of at most `room` where possible."""
        return min(
            (self.nothing(), self.least(), self.plain, *self.known()),
            key=lambda c: (max(0, c.outcome.peak - room), c.outcome.saved, c.outcome.seconds),
        )

    def nothing(self) -> Choice:
        """Save nothing: recompute everything from the inputs."""
        return self._try((), "nothing")

    def ladder(self, room: int) -> list[Choice]:
        """Choices from few saved bytes to many, each faster than the one before."""
        found = [self.plain, self.nothing(), self.least(), *self.by_torch()]
        high, low = self.plain.outcome.peak, self.least().outcome.peak
        for step in range(1, _STEPS):
            asked = low + (high - low) * step // _STEPS
            solution = solve(self.graph, asked)
            found.append(self._try(_held(self.graph, solution.plan), "planner"))
        found.sort(key=lambda c: (c.outcome.saved, c.outcome.seconds))
        rungs: list[Choice] = []
        for choice in found:
            if choice.outcome.peak > room and rungs:
                continue
            if not rungs or choice.outcome.seconds < rungs[-1].outcome.seconds:
                rungs.append(choice)
        return rungs

    def by_torch(self) -> list[Choice]:
        """What torch itself saves at some activation budgets."""
        if not self._by_torch:
            self._by_torch = [self._by_ratio(ratio) for ratio in _RATIOS]
        return self._by_torch

    def _by_ratio(self, ratio: float) -> Choice:
        nodes = self.joint.traced.saved_by_torch(ratio)
        return self._try(
            {s for n in nodes for s in self.joint.storages_of(n)},
            _PLAIN if ratio == 1 else "as torch",
        )

    def names(self, choice: Choice) -> frozenset[str]:
        """A choice as the names of its nodes, which are the same when a graph is traced again."""
        return frozenset(node.name for node in self._saved_nodes(choice))

    def named(self, names: frozenset[str]) -> Choice | None:
        """The choice with these names; None if some are not in this graph."""
        storages = self.joint.storages
        found = [n for n in self.savable if storages[n].node.name in names]
        return self._try(found, "known") if len(found) == len(names) else None

    def _saved_nodes(self, choice: Choice) -> list[Any]:
        kept = choice.saved | (choice.outcome.kept & self.savable)
        return [self.joint.storages[number].node for number in kept]

    def nodes(self, choice: Choice) -> list[Any]:
        """The nodes to save, in the order of the trace, inputs included."""
        saved = set(self._saved_nodes(choice))
        for number, again in self.joint.passed_on.items():
            held = self.joint.storages[number]
            if held.maker == OUTSIDE or held.node in saved:
                saved.update(again)
        return [n for n in self.joint.traced.nodes if n in saved or self.joint.is_input(n)]

    def least(self) -> Choice:
        """The choice with the lowest peak that the search finds."""
        if self._least is None:
            starts = [self.plain, self.nothing(), *self.known()]
            low = minimum(self.graph)
            starts.append(self._try(_held(self.graph, low.plan), "planner"))
            for factor in (1.1, 1.3, 1.6):
                solution = solve(self.graph, int(low.peak * factor))
                starts.append(self._try(_held(self.graph, solution.plan), "planner"))
            starts.sort(key=lambda c: c.outcome.peak)
            self._least = min(map(self._lowered, starts[:3]), key=lambda c: c.outcome.peak)
        return self._least

    # ------------------------------------------------------------------ single moves

    def _moves(self, choice: Choice) -> Iterator[int]:
        """Storages to save, or no longer to save, the largest first."""
        nbytes = self.scheduler.nbytes
        touched = {s for i in choice.outcome.twice for s in self.scheduler.makes[i]}
        able = (touched | choice.saved) & self.savable - self.joint.bound
        yield from sorted(able, key=lambda s: (-nbytes[s], s))

    def _lowered(self, best: Choice) -> Choice:
        return self._descended(best, lambda choice: (choice.outcome.peak,), "least")

    def _descended(
        self, best: Choice, cost: Callable[[Choice], tuple[float, ...]], method: str = ""
    ) -> Choice:
        """Make single changes as long as one costs less. The method is that of the choice that is
        changed, unless one is given."""
        stop = self.scheduler.evaluations + self.allowed
        changed = True
        while changed and self.scheduler.evaluations < stop:
            changed = False
            for storage in list(self._moves(best)):
                found = self._try(best.saved ^ {storage}, method or best.method)
                if cost(found) < cost(best):
                    best, changed = found, True
                if self.scheduler.evaluations >= stop:
                    break
        return best


def _held(graph: Graph, plan: Retention) -> frozenset[int]:
    return frozenset(
        number
        for number, (value, choice) in enumerate(zip(graph.values, plan.retain, strict=True))
        if choice == HOLD and value.producer != EXTERNAL
    )
