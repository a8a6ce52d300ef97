"""What each of a step's graphs saves, so that all of them together stay within one limit.

Problem: what one graph saves stays in memory while the others run, so the choices of a step depend
on each other. Invariant: every choice tried is judged by the peak of all calls in order
(`ledger.peak_of`). Imports ledger and search. Rejected: a limit for each graph, which would have
to be set before the step is known.
"""

from __future__ import annotations

from typing import Any

from lowtide.inductor.ledger import peak_of
from lowtide.inductor.search import Choice


def share(calls: list[Any], limit: int, ladders: dict[Any, list[Choice]]) -> dict[Any, Choice]:
    """A choice for each graph: start from the fewest saved bytes, then repeatedly take the choice
    that gains the most time per additional byte."""
    chosen = {graph: ladder[0] for graph, ladder in ladders.items()}
    count = {graph: calls.count(graph) for graph in ladders}

    def fits(graph: Any, choice: Choice) -> bool:
        trial = {**chosen, graph: choice}
        return peak_of([(g, trial[g].outcome) for g in calls]) <= limit

    while True:
        steps: list[tuple[float, int, Any, Choice]] = []
        for graph, ladder in ladders.items():
            now = chosen[graph].outcome
            for choice in ladder:
                gain = (now.seconds - choice.outcome.seconds) * count[graph]
                more = max(1, (choice.outcome.saved - now.saved) * count[graph])
                if gain > 0 and fits(graph, choice):
                    steps.append((gain / more, len(steps), graph, choice))
        if not steps:
            return chosen
        _, _, graph, choice = max(steps)
        chosen[graph] = choice


def between_rungs(graph: Any, calls: list[Any], limit: int, choices: dict[Any, Choice]) -> Choice:
    """A choice for one graph that fits the room left by the others, if one is faster than its
    choice from the ladder."""
    place, chosen = calls.index(graph), choices[graph]
    before = sum(choices[g].outcome.saved for g in calls[:place])
    after = sum(choices[g].outcome.gradients for g in dict.fromkeys(calls[place + 1 :]))
    found = graph.search.within(limit - before, limit - before - after)
    trial = {**choices, graph: found}
    fits = peak_of([(g, trial[g].outcome) for g in calls]) <= limit
    return found if fits and found.outcome.seconds < chosen.outcome.seconds else chosen
