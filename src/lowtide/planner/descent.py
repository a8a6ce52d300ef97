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
        for move in _moves(problem, best):
            if move in tabu:
                continue
            moved = _moved(problem, best, move)
            found = excess(moved.result, limit)
            if found < score:
                best, score, improved = moved, found, True
                tabu.clear()
                break
            tabu.add(move)
            if sim.evaluations >= stop:
                break
        if not improved:
            break
    return best


def pairs(problem: Problem, candidate: Candidate, limit: int, evaluations: int) -> Candidate:
    """One step of a descent that no single move can go on with: two moves or a few more that lower
    the excess, although the first does not by itself. First what a short descent from each move
    finds; if there is work left, all pairs."""
    sim = problem.sim
    stop = sim.evaluations + evaluations
    score = excess(candidate.result, limit)
    for move in _moves(problem, candidate):
        if sim.evaluations >= stop:
            return candidate
        first = _moved(problem, candidate, move)
        if first.result.complete:
            found = descend(problem, first, limit, FOLLOWING)
            if excess(found.result, limit) < score:
                return found
    moves = _moves(problem, candidate, thorough=True)
    share = max((stop - sim.evaluations) // (len(moves) + 1), FOLLOWING)
    for move in moves:
        if sim.evaluations >= stop:
            break
        first = _moved(problem, candidate, move)
        if first.result.complete:
            found = _second(problem, first, limit, share)
            if excess(found.result, limit) < score:
                return found
    return candidate


def _second(problem: Problem, first: Candidate, limit: int, evaluations: int) -> Candidate:
    """The second move that lowers the excess most, and a descent from there."""
    best, lowest = first, excess(first.result, limit)
    for move in _moves(problem, first, thorough=True)[: evaluations // 2]:
        found = _moved(problem, first, move)
        over = excess(found.result, limit)
        if over < lowest:
            best, lowest = found, over
    return best if best is first else descend(problem, best, limit, evaluations // 2)


def _moved(problem: Problem, candidate: Candidate, move: tuple[int, int]) -> Candidate:
    retain = candidate.retain.copy()
    retain[move[0]] = move[1]
    return Candidate(retain, problem.run(retain))


def _moves(
    problem: Problem, candidate: Candidate, *, thorough: bool = False
) -> list[tuple[int, int]]:
    """Moves at the peak: drop held values, retain others later, hold what replays recompute.

    `thorough`: hold it also if the peak is in the forward, where something may be held only because
    it is replayed from it.
    """
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
        if trace.start[value] == -1 and event >= 0 and problem.later(value, event):
            moves.append((value, event + 1))  # drop it, and retain it only after the peak
    moves.sort(key=lambda move: (-sim.nbytes[move[0]], move))
    if event >= 0 or thorough:
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
    found = []
    for value, events in trace.missed_at().items():
        before = [at for at in events if at < event]
        if before and event in events:
            found += [(value, at) for at in dict.fromkeys((before[-1], before[0]))]
    return sorted(found, key=lambda move: (problem.sim.nbytes[move[0]], -move[0], -move[1]))
