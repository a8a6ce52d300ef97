"""One graph of Dynamo's under a `CompileBudget`: split, compiled, read, and compiled again.

Problem: what generated code takes is known once it is there, and another choice is other code.
Invariant: what runs was chosen for what its own code is known to take, where that can be read; a
graph is compiled a bounded number of times; and the limit that a refusal names is kept, since what
it names was found on a way that does not depend on the limit. Imports the package's other modules.
Rejected: to run a step and measure it, which has exceeded the limit by then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide._compat import partitioner
from lowtide._compat.lowered import Lowered, watching_lowering
from lowtide.errors import BudgetError, CompiledWarning
from lowtide.inductor.generated import peaks
from lowtide.inductor.joint import Joint, draws
from lowtide.inductor.report import GraphReport
from lowtide.inductor.search import Choice, Search

if TYPE_CHECKING:
    from lowtide.inductor.backend import CompileBudget

_UNREAD = 0.04
"""Of the limit, what the model of Inductor's memory may be wrong by where its code is not read."""
_READ = 0.002  # where it is: what kernels outside of it take beside
_ROUNDS = 5  # times that a graph is compiled at most, to find out what a choice takes
_GAIN = 0.01  # of the time or the peak of a graph: for less it is not compiled again


class CompiledGraph:
    """One graph of Dynamo's, what was chosen for it, and the code that was made of it."""

    def __init__(self, budget: CompileBudget, graph: Any, mode: Any, options: Any) -> None:
        self.budget = budget
        self.traced = graph
        self.mode = mode
        self.options = options
        self.more_follows = partitioner.broken_off(graph)
        self.context = partitioner.tracing_context()
        self.search: Search = None  # type: ignore[assignment]  # until it has been split
        self.choice: Choice | None = None
        self.wanted: frozenset[str] | None = None
        self.code: Callable[..., Any] | None = None
        self.refused: BudgetError | None = None
        self.known: dict[frozenset[str], tuple[int, int]] = {}
        """Of what was compiled, by the names of what it saves, the peaks of its two halves."""
        self.made: frozenset[str] | None = None
        """What the code saves that was read last."""
        self.dynamic = False
        self.planned_for: int | None = None
        """Bytes of the inputs that a graph of symbolic sizes was planned for, or warned of."""
        self.margin = _READ if budget.compiler == "inductor" else 0.0

    def __call__(self, *args: Any) -> Any:
        budget = self.budget
        if budget._ledger.begin():
            budget._settle()
        if self.refused is not None:
            raise _again(self.refused)
        if self.choice is not None and not self._fits():
            self.change_to(budget._choose(self))
        if self.code is None:
            with partitioner.tracing_again(self.context):
                self.compile(args)
            if self.refused is not None:
                raise _again(self.refused)
        assert self.code is not None
        if self.dynamic:
            self._warn_of_larger(args)
        results = self.code(*args)
        if self.choice is not None:
            budget._ledger.enter(self, self.choice.outcome, results)
        return results

    def _warn_of_larger(self, args: tuple[Any, ...]) -> None:
        """The limit is not kept for inputs larger than those that were planned for."""
        nbytes = sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
        if self.planned_for is None:
            self.planned_for = nbytes
        elif nbytes > self.planned_for:
            known, self.planned_for = self.planned_for, nbytes  # said once for each larger size
            warnings.warn(
                f"compiled code of symbolic sizes, planned for inputs and parameters of {known} "
                f"bytes, is called with {nbytes}: what it takes grows with them, and the limit is "
                "not kept for it. Give torch.compile dynamic=False, and each size is planned for.",
                CompiledWarning,
                stacklevel=2,
            )

    def _fits(self) -> bool:
        assert self.choice is not None
        budget = self.budget
        need = budget._ledger.peak_with(self, self.choice.outcome)
        return need <= budget._limit_with(self)

    def change_to(self, choice: Choice) -> None:
        """Save something else from the next call on."""
        if self.choice is None or choice.saved != self.choice.saved:
            self.choice = choice
            self.wanted = self.search.names(choice)
            self.code = None

    def compile(self, examples: Any) -> None:
        """Make the code, more than once where what it takes is not what was chosen for."""
        self.dynamic |= any(isinstance(example, torch.SymInt) for example in examples)
        try:
            self._compile_and_correct(examples)
        except BudgetError as error:
            # Dynamo would wrap it in an error of its own; raised by the code, it comes through.
            self.refused = self._compile_lowest(examples, error)
            if self.refused is not None:
                self.code = None

    def _compile_and_correct(self, examples: Any) -> None:
        for _ in range(_ROUNDS):
            lowered = self._compile(examples)
            if self.choice is None or self.budget.compiler != "inductor":
                return
            if not self._corrected(lowered):
                return
        self._settle_for_known(examples)

    def _compile_lowest(self, examples: Any, error: BudgetError) -> BudgetError | None:
        """What takes the least, before a limit is refused: what to refuse it with, or None.

        The search begins anew. What was learned on the way here depends on the limit; this does
        not, so that the limit which a refusal names is kept when it is asked for.
        """
        if self.budget.compiler != "inductor" or self.margin == _UNREAD:
            return error
        search = self.search = Search(self.search.joint)
        goal = search.least().outcome.peak
        for _ in range(_ROUNDS):
            choice = search.within(goal, goal)
            lowest = min((known.outcome.peak for known in search.known()), default=None)
            if lowest is not None and choice.outcome.peak > (1 - _GAIN) * lowest:
                break
            self.choice, self.wanted = choice, search.names(choice)
            if self.wanted not in self.known and self._read(self._compile(examples)) is None:
                self.margin = _UNREAD
                return error
            search.learn(choice, *self.known[self.wanted])
        try:
            self._settle_for_known(examples)
        except BudgetError as named:
            return named
        return None

    def _read(self, lowered: list[Lowered]) -> tuple[int, int] | None:
        """The peaks of the code that was just made, where it can be read."""
        assert self.choice is not None
        self.made = self.search.names(self.choice)
        found = peaks(self.search.joint, lowered)
        if found is not None:
            self.known[self.made] = found
        return found

    def _compile(self, examples: Any) -> list[Lowered]:
        with partitioner.uncached_partitions():
            if self.budget.compiler == "aot_eager":
                self.code = partitioner.compile_with_aot_eager(self.traced, examples, self._split)
                return []
            options = {**(self.options or {})}
            options["custom_partitioner_fn"] = partitioner.as_hook(self._split)
            with watching_lowering() as lowered:
                self.code = partitioner.compile_with_inductor(
                    self.traced, examples, options, self.mode
                )
            return lowered

    def _corrected(self, lowered: list[Lowered]) -> bool:
        """Whether, now that it is known what the code takes, something else is to be saved."""
        assert self.choice is not None
        budget = self.budget
        read = self._read(lowered)
        if read is not None:
            self.choice = self.search.learn(self.choice, *read)
        elif self.margin == _UNREAD:
            return False
        else:
            self.margin = _UNREAD
        limit = budget._limit_with(self)
        if self.margin == _UNREAD:
            limit = budget._allowed(limit, [self])
        better = budget._choose_again(self)
        if better.saved == self.choice.saved:
            return False
        fits = budget._ledger.peak_with(self, self.choice.outcome) <= limit
        if fits and better.outcome.seconds > (1 - _GAIN) * self.choice.outcome.seconds:
            return False
        self.choice, self.wanted = better, self.search.names(better)
        return True

    def _settle_for_known(self, examples: Any) -> None:
        """Take the fastest of the choices whose code was read and that fit."""
        budget = self.budget
        limit = budget._limit_with(self)
        known = self.search.known()
        fits = [c for c in known if budget._ledger.peak_with(self, c.outcome) <= limit]
        if not fits:
            least = min(known, key=lambda c: c.outcome.peak)
            raise budget._refusal(self, least, limit)
        self.choice = min(fits, key=lambda c: c.outcome.seconds)
        self.wanted = self.search.names(self.choice)
        if self.code is None or self.wanted != self.made:
            self._compile(examples)

    def _split(
        self,
        module: Any,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        """The partitioner: called by AOTAutograd with a joint graph."""
        traced = partitioner.JointGraph(module, num_fwd_outputs, static_lifetime_input_indices)
        if not traced.has_backward:
            return traced.split_without_backward()
        joint = Joint(
            traced,
            fuse=self.budget.compiler == "inductor",
            results_last=not self.more_follows,  # read by the graph after a break, and gone with it
        )
        search = Search(joint)
        wanted = None if self.wanted is None else search.named(self.wanted)
        if wanted is None:
            self.search = search
            if self.budget.compiler == "inductor" and not joint.on_cpu:
                self.margin = _UNREAD  # kernels outside of its code were measured on CPUs only
            if self not in self.budget._graphs:
                self.budget._graphs.append(self)
            wanted = self.choice = self.budget._choose(self)
        for node in traced.nodes:
            partitioner.untagged(node)
        for index in wanted.outcome.twice:
            if draws(joint.ops[index].node):
                partitioner.recomputed_draw(joint.ops[index].node)
        return traced.split(search.nodes(wanted))

    def report(self) -> GraphReport:
        assert self.choice is not None
        mine, plain = self.choice.outcome, self.search.plain.outcome
        return GraphReport(
            operations=sum(not op.late for op in self.search.joint.ops),
            recomputed=len(mine.twice),
            saved_bytes=mine.saved,
            plain_saved_bytes=plain.saved,
            peak=mine.peak,
            plain_peak=plain.peak,
            seconds=mine.seconds / plain.seconds if plain.seconds else 1.0,
        )


def _again(error: BudgetError) -> BudgetError:
    """The same error without the traceback of where it was raised before."""
    return BudgetError(str(error), limit=error.limit, minimum=error.minimum)
