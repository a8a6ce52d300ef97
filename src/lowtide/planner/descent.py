"""Local search in which every move is simulated.

Problem: near the lowest reachable peak, and wherever replays overlap, the estimates of `repair`
mislead: only a simulation tells whether holding an anchor or retaining a value later helps.

Invariant: the objective is the excess over the limit, summed over the whole step. Where several
moments share the peak no single move lowers the maximum, but a move can lower the sum. Moves are
tried in a fixed order and accepted when they improve, so equal input gives equal output.

Imports: `lowtide.planner.repair`, `lowtide.planner.simulate`.

Rejected: annealing, which `polish` uses to make a plan that fits cheaper. The lowest peak decides
whether a limit is refused, and that must not depend on whether there is a compiled simulator.
"""

from __future__ import annotations

from lowtide.planner.repair import Candidate, Problem, live_at_peak, trace_of
from lowtide.planner.retention import HOLD
from lowtide.planner.simulate import Simulation, Trace

FOLLOWING = 2
"""How many moves `pairs` tries after each."""


def excess(result: Simulation, limit: int) -> int:
    """Bytes over the limit, summed over operations and events."""
    if not result.complete:
        return 1 << 100
    trace = trace_of(result)
    return sum(x - limit for x in trace.forward if x > limit) + sum(
        x - limit for x in trace.backward if x > limit
    )


def descend(problem: Problem, candidate: Candidate, limit: int, evaluations: int) -> Candidate:
    """Take single moves that lower the excess, until the plan fits or no move helps."""
    sim = problem.sim
    stop = sim.evaluations + evaluations
    best, score = candidate, excess(candidate.result, limit)
    tabu: set[tuple[int, int]] = set()
    while score and sim.evaluations < stop:
        improved = False
        for value, choice in _moves(problem, best):
            if (value, choice) in tabu:
                continue
            retain = best.retain.copy()
            retain[value] = choice
            result = problem.run(retain)
            found = excess(result, limit)
            if found < score:
                best, score, improved = Candidate(retain, result), found, True
                tabu.clear()
                break
            tabu.add((value, choice))
            if sim.evaluations >= stop:
                break
        if not improved:
            break
    return best


def pairs(problem: Problem, candidate: Candidate, limit: int, evaluations: int) -> Candidate:
    """One step of a descent that no single move can go on with: the first move after which a few
    more lower the excess, although it does not by itself."""
    sim = problem.sim
    stop = sim.evaluations + evaluations
    score = excess(candidate.result, limit)
    for value, choice in _moves(problem, candidate):
        if sim.evaluations >= stop:
            break
        retain = candidate.retain.copy()
        retain[value] = choice
        result = problem.run(retain)
        if result.complete:
            found = descend(problem, Candidate(retain, result), limit, FOLLOWING)
            if excess(found.result, limit) < score:
                return found
    return candidate


def _moves(problem: Problem, candidate: Candidate) -> list[tuple[int, int]]:
    """Moves at the peak: drop held values, retain others later, hold what replays recompute."""
    sim, trace = problem.sim, trace_of(candidate.result)
    phase, index = candidate.result.peak_at
    event = -1 if phase == "forward" else index
    moves: list[tuple[int, int]] = []
    for value in live_at_peak(problem, candidate.result):
        if not sim.nbytes[value]:
            continue
        choice = problem.less_of(value, trace, event)
        if choice is not None:
            moves.append((value, choice))
        if trace.start[value] == -1 and problem.sim.graph.first_event[value] > event >= 0:
            moves.append((value, event + 1))  # drop it, and retain it only after the peak
    moves.sort(key=lambda move: (-sim.nbytes[move[0]], move))
    if event >= 0:
        anchors = [
            value
            for op, times in enumerate(trace.replays)
            if times
            for value in sim.outputs[op]
            if trace.start[value] != -1
            and not problem.fixed[value]
            and trace.alive[value] >= 0
            and value not in problem.gone
        ]
        anchors.sort(key=lambda value: (sim.nbytes[value], -value))
        moves += [(value, HOLD) for value in anchors]
        moves += _earlier(problem, trace, event)
    return moves


def _earlier(problem: Problem, trace: Trace, event: int) -> list[tuple[int, int]]:
    """Values replayed at the peak that an earlier replay made too: retain them from that one on.

    For a value that cannot be held from the forward on (`Problem.gone`), this is the only way to
    serve as an anchor.
    """
    missed: dict[int, list[int]] = {}
    for value, at in trace.missed:
        missed.setdefault(value, []).append(at)
    found = []
    for value, events in missed.items():
        before = [at for at in events if at < event]
        if before and event in events:
            found += [(value, at) for at in dict.fromkeys((before[-1], before[0]))]
    return sorted(found, key=lambda move: (problem.sim.nbytes[move[0]], -move[0], -move[1]))
