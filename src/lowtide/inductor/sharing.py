"""What each of several graphs of a step saves, so that all together stay under one limit.

Problem: bytes that one graph saves are there while the others run, so the choices of a step depend
on each other. Invariant: every choice tried is judged by the peak of all calls in their order
(`ledger.peak_of`). Imports ledger and search. Rejected: a limit for each graph, which would have
to be known before the step is.
"""

from __future__ import annotations

from typing import Any

from lowtide.inductor.ledger import peak_of
from lowtide.inductor.search import Choice


def share(calls: list[Any], limit: int, ladders: dict[Any, list[Choice]]) -> dict[Any, Choice]:
    """A choice for each graph: from the fewest bytes up, the most time for a byte first."""
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
    """A faster choice than one of a ladder, in the room that the others leave."""
    place, chosen = calls.index(graph), choices[graph]
    before = sum(choices[g].outcome.saved for g in calls[:place])
    after = sum(choices[g].outcome.gradients for g in dict.fromkeys(calls[place + 1 :]))
    found = graph.search.within(limit - before, limit - before - after)
    trial = {**choices, graph: found}
    fits = peak_of([(g, trial[g].outcome) for g in calls]) <= limit
    return found if fits and found.outcome.seconds < chosen.outcome.seconds else chosen
