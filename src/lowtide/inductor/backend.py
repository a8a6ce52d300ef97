"""`lowtide.CompileBudget`: torch.compile with a memory limit in bytes.

Problem: torch has a ratio for each graph (`activation_memory_budget`), which says nothing about
what a step takes. Invariant: the limit covers everything that compiled code allocates in one step,
over all graphs that this object has compiled; each call is checked against what earlier calls still
hold, and a graph that does not fit is planned and compiled again or refused, never run unchecked.
If a graph fits as torch would split it, it is split that way. A choice is made by the prediction of
a model and confirmed by the code generated for it, before that runs. Imports the package's other
modules and limits. Rejected: wrapping the model, which would put a prefix before the names of its
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import torch

from lowtide import _compat
from lowtide.errors import BudgetError, UnsupportedError, UsageError
from lowtide.inductor.compiled import CompiledGraph
from lowtide.inductor.ledger import Ledger, peak_of
from lowtide.inductor.report import CompileReport
from lowtide.inductor.search import Choice
from lowtide.inductor.sharing import between_rungs, share
from lowtide.inductor.sizes import Sizes
from lowtide.limits import exact_bytes, format_bytes, parse_limit

_COMPILERS = ("inductor", "aot_eager")
_SMALL = 1 << 10  # bytes, for scalars and rounding
_FAR = 1.5  # a prediction of more than this many times the limit is refused without compiling


class CompileBudget:
    """A backend for `torch.compile` that keeps compiled training steps inside a limit.

    ``torch.compile(loss, backend=lowtide.CompileBudget("2 GiB"))``, where ``loss`` calls the model.
    What to save between forward and backward and what to recompute is decided for each operation by
    lowtide's planner; the code is Inductor's. Pass one object to several `torch.compile` calls, and
    they share the limit.

    Args:
        limit: bytes (``int``), text (``"2 GiB"``, ``"50%"``), or a float in (0, 1]: a fraction of
            the peak of the same step as torch alone would compile it. It counts what compiled code
            allocates above what was in memory before: saved activations, temporaries, gradients
            and results; not parameters, inputs, or anything outside compiled code.
        several_calls: set this if a step calls compiled code more than once, for example if blocks
            are compiled one by one. The first step then saves as little as it can; from the second
            on all calls are planned together. (Graph breaks are noticed without it.)
        compiler: ``"inductor"``, or ``"aot_eager"``, which runs the same split without generating
            code, for debugging.

    Raises:
        UsageError: the limit cannot be read, or the compiler is neither of the two.
        UnsupportedError: torch is older than 2.13.
        BudgetError: when a graph is compiled or called: the limit cannot be kept. The error names
            the smallest limit that can.
    """

    __name__ = "lowtide"  # for Dynamo's messages

    def __init__(
        self,
        limit: int | float | str,
        *more: Never,
        several_calls: bool = False,
        compiler: str = "inductor",
    ) -> None:
        if more:
            raise UsageError(
                "a CompileBudget takes its limit alone, and torch.compile takes the object: write "
                'torch.compile(loss, backend=lowtide.CompileBudget("6 GiB")), not the class.'
            )
        if compiler not in _COMPILERS:
            raise UsageError(
                f"CompileBudget compiles with {' or '.join(map(repr, _COMPILERS))}; "
                f"got {compiler!r}."
            )
        if not _compat.torch_has((2, 13)):
            raise UnsupportedError(
                "CompileBudget needs torch 2.13 or later, whose partitioner tells what it knows of "
                f"a graph; this is {torch.__version__}. Put lowtide.budget "
                "around the step without torch.compile, or set "
                "torch._functorch.config.activation_memory_budget."
            )
        self.limit = parse_limit(limit)
        self.several_calls = several_calls
        self.compiler = compiler
        self._graphs: list[CompiledGraph] = []
        self._ledger = Ledger()
        self._settled: list[CompiledGraph] = []
        self._sizes: dict[int | None, set[Sizes]] = {}  # that were planned for, of each function

    def __call__(
        self, graph: Any, examples: Any, *, mode: str | None = None, options: Any = None
    ) -> Callable[..., Any]:
        """Called by Dynamo with each graph that it has traced."""
        made = CompiledGraph(self, graph, mode, options)
        made.compile(examples)
        return made

    def __enter__(self) -> None:
        raise UsageError(
            "a CompileBudget is not entered: write torch.compile(loss, backend=lowtide."
            "CompileBudget(...)). For a step that is not compiled: `with lowtide.budget(limit):`."
        )

    def __exit__(self, *exc: object) -> None:
        """Never called, but asked for before `__enter__` is."""

    def __reduce__(self) -> Any:
        """A copy, pickled or not, is a budget of the same limit that has compiled nothing yet, as
        is what `torch.compile` returned if it is copied."""
        return _again, (self.limit, self.several_calls, self.compiler)

    def __repr__(self) -> str:
        share = isinstance(self.limit, float)
        shown = f"{self.limit!r} of the plain peak" if share else exact_bytes(int(self.limit))
        return f"<lowtide.CompileBudget of {shown}>"

    def report(self) -> CompileReport:
        """What has been planned so far; prints as text."""
        calls = list(self._ledger.step or self._ledger.last_step or self._graphs)
        known = [(g, g.choice.outcome) for g in calls if g.choice is not None]
        fraction = self.limit if isinstance(self.limit, float) else None
        return CompileReport(
            limit=self._limit_of(calls) if known or fraction is None else None,
            planned_peak=peak_of(known) if known else None,
            plain_peak=self._plain_peak(calls) if known else None,
            graphs=tuple(g.report() for g in self._graphs if g.choice is not None),
            fraction=fraction,
        )

    # ------------------------------------------------------------------ the limit

    def _plain_peak(self, graphs: list[CompiledGraph]) -> int:
        return peak_of([(g, g.search.plain.outcome) for g in graphs if g.search is not None])

    def _limit_of(self, graphs: list[CompiledGraph]) -> int:
        """The limit in bytes for a step of these calls."""
        if isinstance(self.limit, int):
            return self.limit
        return int(self.limit * self._plain_peak(graphs))

    def _allowed(self, limit: int, graphs: list[CompiledGraph]) -> int:
        """The limit for a prediction: less a margin for its error."""
        return int(limit * (1 - max(graph.margin for graph in graphs))) - _SMALL

    def _limit_with(self, graph: CompiledGraph) -> int:
        """The limit for the open calls and one more. A fraction is of the largest step known."""
        calls = [*(call.graph for call in self._ledger.open), graph]
        return max(self._limit_of(calls), self._limit_of(self._ledger.last_step))

    def _choose(self, graph: CompiledGraph) -> Choice:
        """What a graph saves, given what the open calls hold.

        If more of the step is to come, how much is unknown, so it saves as little as possible. A
        choice that only a prediction puts over the limit is compiled, to learn its true peak,
        unless the code is known not to tell it.
        """
        search, ledger = graph.search, self._ledger
        limit = self._limit_with(graph)
        unknown = self.several_calls or graph.more_follows
        if ledger.peak_with(graph, search.plain.outcome) <= limit and not unknown:
            return search.plain
        room = self._allowed(limit, [graph]) - ledger.held
        if unknown or graph in ledger.step:
            choice = search.smallest(room)
        else:
            choice = search.within(room, room)
        need = ledger.peak_with(graph, choice.outcome)
        if need > limit and not (unknown and isinstance(self.limit, float)):
            choice = min((choice, search.least()), key=lambda c: c.outcome.peak)
            need = ledger.peak_with(graph, choice.outcome)
            guessed = self.compiler == "inductor" and not graph.unread
            guessed = guessed and not search.is_known(choice)
            if need > limit and not (guessed and need <= _FAR * limit):
                raise self._refusal(graph, choice, limit)
        return choice

    def _refusal(self, graph: CompiledGraph, choice: Choice, limit: int) -> BudgetError:
        need = self._ledger.peak_with(graph, choice.outcome)
        least = int(need / (1 - graph.margin)) + _SMALL
        held = self._ledger.held
        others = (
            f" {format_bytes(held)} are held by {len(self._ledger.open)} calls of compiled graphs "
            "before it in the same step."
            if held
            else ""
        )
        # In the first run of a step it is unknown what follows the calls so far.
        more = bool(self._ledger.open) or self.several_calls or graph.more_follows
        so_far = " for the graphs so far" if more and graph not in self._ledger.last_step else ""
        return BudgetError(
            f"the compiled step does not fit in {format_bytes(limit)}: it would run out of memory. "
            f"Graph {self._graphs.index(graph)} takes at least "
            f"{format_bytes(choice.outcome.peak)} for its forward and backward, of which "
            f"{format_bytes(choice.outcome.gradients)} are gradients.{_required(graph, choice)}"
            f"{others} The smallest limit "
            f"that would do{so_far} is {exact_bytes(least)}. "
            f"Use a smaller batch or a larger limit.{self._way_out()}",
            limit=limit,
            minimum=least,
        )

    def _way_out(self) -> str:
        """What would help a step that calls compiled code more than once."""
        if self.several_calls:
            return ""
        if isinstance(self.limit, float):
            return (
                " A fraction is one of the graphs that are known so far: where a step calls "
                "compiled code more than once, give several_calls=True or a limit in bytes."
            )
        if all(call.graph.more_follows for call in self._ledger.open):
            return ""
        return (
            " The calls before it were not known to be followed by another: with "
            "several_calls=True, each leaves as much room as it can in the first step."
        )

    # ------------------------------------------------------------------ from step to step

    def _settle(self) -> None:
        """Choose for all graphs of the last step together, now that its calls are known. One that
        had left room for others may be alone, as if the backward is called in compiled code."""
        calls = self._ledger.last_step
        waited = self.several_calls or any(graph.more_follows for graph in calls)
        if not calls or calls == self._settled or (len(calls) < 2 and not waited):
            return
        self._settled = calls
        for graph, choice in self._together(calls).items():
            graph.change_to(choice)

    def _together(self, calls: list[CompiledGraph]) -> dict[CompiledGraph, Choice]:
        """A choice for each graph of a step all of whose calls are known."""
        limit = self._limit_of(calls)
        graphs = list(dict.fromkeys(calls))
        if self._plain_peak(calls) <= limit:
            return {graph: graph.search.plain for graph in graphs}
        allowed = self._allowed(limit, graphs)
        choices = share(calls, allowed, {g: g.search.ladder(allowed) for g in graphs})
        for graph in graphs:
            if calls.count(graph) == 1:
                choices[graph] = between_rungs(graph, calls, allowed, choices)
        return choices

    def _choose_again(self, graph: CompiledGraph) -> Choice:
        """Choose for this graph again, now that more is known about the memory of its code."""
        if graph in self._settled:
            return self._together(self._settled)[graph]
        return self._choose(graph)


def _required(graph: CompiledGraph, choice: Choice) -> str:
    """What a refusal says of the values that a choice cannot leave to be recomputed."""
    joint = graph.search.joint
    nbytes = sum(joint.storages[s].nbytes for s in joint.required & choice.outcome.kept)
    if 10 * nbytes < choice.outcome.peak:
        return ""
    return (
        f" {format_bytes(nbytes)} must be saved, as the policy of a checkpoint inside it says "
        "(MUST_SAVE), or torch does."
    )


def _again(limit: int | float, several_calls: bool, compiler: str) -> CompileBudget:
    return CompileBudget(limit, several_calls=several_calls, compiler=compiler)
