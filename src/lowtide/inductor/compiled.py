"""One of Dynamo's graphs under a `CompileBudget`: split, compiled, read, and compiled again.

Problem: the memory of generated code is known only once it has been generated, and another choice
gives other code. Invariant: the code that runs was chosen by the peak read from that very code,
where it can be read; a graph is compiled a bounded number of times; and the limit that a refusal
names can be kept, since the search that found it does not depend on the requested limit. Imports
the package's other modules. Rejected: running a step to measure it, which may exceed the limit.
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
from lowtide.inductor.joint import Joint
from lowtide.inductor.nodes import draws, has_unknown_sizes
from lowtide.inductor.report import GraphReport
from lowtide.inductor.search import Choice, Search
from lowtide.inductor.sizes import Sizes, expect, largest, nbytes_of, sizes_of

if TYPE_CHECKING:
    from lowtide.inductor.backend import CompileBudget

_UNREAD = 0.04
"""If the code cannot be read: the share of the limit left free for errors of the model."""
_READ = 0.002  # if it can: the share left free for workspace of kernels outside that code
_ROUNDS = 5  # a graph is compiled at most this often to find out what its choices take
_UNKNOWN_SIZES = (
    "sizes in the compiled code are found in its data, and nothing is known of how large they can "
    "be: the limit is not kept for them. Leave that code out of what is compiled, or give a bound: "
    "torch._check(size <= bound)."
)
_SIZES = 16  # a graph is planned at most this often for larger inputs than before
_GAIN = 0.01  # a graph is not compiled again to gain less than this share of its time or peak


class CompiledGraph:
    """One of Dynamo's graphs, what was chosen for it, and the code generated from that."""

    def __init__(self, budget: CompileBudget, graph: Any, mode: Any, options: Any) -> None:
        self.budget = budget
        self.traced = graph
        self.mode = mode
        self.options = options
        self.more_follows = partitioner.broken_off(graph)
        self.context = partitioner.tracing_context()
        self.is_part = partitioner.split_for_ddp(self.context)
        self.results_last = self.is_part or not self.more_follows
        """Whether the caller holds the results during the backward. Else the next graph reads them,
        and frees them. Which of DDP's parts is the last, whose results stay, is not known."""
        self.traced_with: list[Any] = []
        self.search: Search = None  # type: ignore[assignment]  # set by the first split
        self.choice: Choice | None = None
        self.wanted: frozenset[str] | None = None
        self.code: Callable[..., Any] | None = None
        self.codes: dict[frozenset[str], Callable[..., Any]] = {}
        """All code that was generated, by what it saves (names): steps that take turns, such as
        those of two tasks, change between the same choices again and again."""
        self.refused: BudgetError | None = None
        self.known: dict[frozenset[str], tuple[int, int]] = {}
        """The peaks of the forward and backward of each compiled choice, by what it saves (names).
        """
        self.function = partitioner.function_being_compiled()
        self.dynamic = False
        self.sizes: Sizes = ()
        self.planned_for = 0
        """Bytes of inputs and parameters of these sizes, or of those that were last warned about.
        """
        self.times = 0  # that it was planned again for larger ones
        self.too_large: tuple[int, BudgetError] | None = None
        self.margin = _READ if budget.compiler == "inductor" else 0.0
        self.unread = False
        """Whether the generated code cannot be read, so that predictions have the last word."""

    def __call__(self, *args: Any) -> Any:
        if self.is_part and partitioner.are_fake(args):
            return self._for_next(args)
        budget = self.budget
        if budget._ledger.begin():
            budget._settle()
        if self.refused is not None:
            raise self.refused.again()
        if self.dynamic and self.choice is not None:
            self._plan_for(args)
        if self.choice is not None and not self._fits():
            self.change_to(budget._choose(self))
        if self.code is None:
            self._compile_again()
            if self.refused is not None:
                raise self.refused.again()
        assert self.code is not None
        results = self.code(*args)
        if self.choice is not None:
            budget._ledger.enter(self, self.choice.outcome, results)
        return results

    def _for_next(self, args: tuple[Any, ...]) -> Any:
        """What a call returns, for the compilation of DDP's next part. It is no call of a step: it
        is not accounted for, and the first real one raises a refusal."""
        assert self.code is not None
        self.codes = {self.search.names(self.choice): self.code} if self.choice else {}
        return self.code(*args)

    def _plan_for(self, args: tuple[Any, ...]) -> None:
        """If inputs are larger than those planned for, plan and compile for them, or refuse."""
        nbytes = sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
        if nbytes <= self.planned_for:
            return
        if self.too_large is not None and nbytes >= self.too_large[0]:
            raise self.too_large[1].again()
        if self.times == _SIZES:
            self._warn_of_larger(nbytes)
            return
        before = dict(vars(self))
        self.times += 1
        self._begin_for(sizes_of(args))
        self.budget._settled = []
        self._compile_again()
        if self.refused is not None:  # what fits may still be called
            error = self.refused
            vars(self).update(before)
            self.too_large = nbytes, error
            self._expect(self.sizes)
            raise error.again()

    def _begin_for(self, sizes: Sizes) -> None:
        """Forget what was chosen and compiled, and plan for these sizes from now on."""
        self.choice = self.wanted = self.code = self.refused = None
        self.codes, self.known = {}, {}
        self._expect(sizes)

    def _expect(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.planned_for = nbytes_of(self.traced_with, sizes)
        expect(self.traced_with, sizes)

    def _compile_again(self) -> None:
        with partitioner.tracing_again(self.context):
            self.compile(self.traced_with)

    def _warn_of_larger(self, nbytes: int) -> None:
        known, self.planned_for = self.planned_for, nbytes  # warn once per larger size
        warnings.warn(
            f"compiled code of symbolic sizes, planned for inputs and parameters of {known} bytes, "
            f"is called with {nbytes}: what it takes grows with them, and the limit is not kept "
            f"for it. It has been compiled for {_SIZES} larger calls before. Call it with the "
            "largest inputs first, or give torch.compile dynamic=False, and each size is planned "
            "for.",
            CompiledWarning,
            stacklevel=3,
        )

    def _fits(self) -> bool:
        assert self.choice is not None
        budget = self.budget
        need = budget._ledger.peak_with(self, self.choice.outcome)
        return need <= budget._limit_with(self)

    def change_to(self, choice: Choice) -> None:
        """Take another choice; the code for it is generated at the next call."""
        if self.choice is None or choice.saved != self.choice.saved:
            self.choice = choice
            self.wanted = self.search.names(choice)
            self.code = self.codes.get(self.wanted)

    def compile(self, examples: Any) -> None:
        """Generate the code, again if its memory is not what the choice was made for."""
        self.traced_with = self.traced_with or partitioner.traced_inputs(self.traced, examples)
        self.dynamic |= any(isinstance(example, torch.SymInt) for example in examples)
        known = self.budget._sizes.setdefault(self.function, set())
        if self.sizes:
            self._compile_or_refuse(examples)
        else:
            mine = sizes_of(self.traced_with)
            self._expect(largest(known if self.dynamic else (), self.traced_with))
            self._compile_or_refuse(examples)
            if self.refused is not None and self.sizes != mine:  # smaller ones may fit
                self._begin_for(mine)
                self._compile_or_refuse(examples)
        if self.refused is None:
            known.add(self.sizes)

    def _compile_or_refuse(self, examples: Any) -> None:
        try:
            self._compile_and_correct(examples)
        except BudgetError as error:
            # Raised here, Dynamo would wrap it in an error of its own; `__call__` raises it as is.
            self.refused = self._compile_lowest(examples, error)
            if self.refused is not None:
                self.code = None
                if self.is_part:  # Dynamo goes on with what its code returns all the same
                    self.choice = self.search.plain
                    self.wanted = self.search.names(self.choice)
                    self._compile(examples)

    def _compile_and_correct(self, examples: Any) -> None:
        for _ in range(_ROUNDS):
            lowered = self._compile(examples)
            if self.choice is None or self.budget.compiler != "inductor":
                return
            if not self._corrected(lowered):
                return
        self._settle_for_known(examples)

    def _compile_lowest(self, examples: Any, error: BudgetError) -> BudgetError | None:
        """Before refusing, compile for the lowest peak; the error to raise, or None if that fits.

        The search starts afresh: what was learned so far depends on the limit, and this must not,
        so that the limit which a refusal names can be kept when it is then requested.
        """
        if self.budget.compiler != "inductor" or self.unread or self.margin == _UNREAD:
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
                self.unread, self.margin = True, _UNREAD
                limit = self.budget._limit_with(self)
                return self.budget._refusal(self, search.least(), limit)  # with another margin
            search.learn(choice, *self.known[self.wanted])
        try:
            self._settle_for_known(examples)
        except BudgetError as named:
            return named
        return None

    def _read(self, lowered: list[Lowered]) -> tuple[int, int] | None:
        """The peaks of the code that was just generated; None if it cannot be read."""
        assert self.choice is not None
        found = peaks(self.search.joint, lowered)
        if found is not None:
            self.known[self.search.names(self.choice)] = found
        return found

    def _compile(self, examples: Any) -> list[Lowered]:
        lowered = self._generate(examples)
        if self.choice is not None:
            assert self.code is not None
            self.codes[self.search.names(self.choice)] = self.code
        return lowered

    def _generate(self, examples: Any) -> list[Lowered]:
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
        """Whether another choice is better, now that the memory of the code is known; takes it."""
        assert self.choice is not None
        budget = self.budget
        read = self._read(lowered)
        if read is not None:
            self.choice = self.search.learn(self.choice, *read)
        elif self.unread:
            return False
        else:
            self.unread, self.margin = True, _UNREAD
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
        """Take the fastest choice that fits, of those whose code was read."""
        budget = self.budget
        limit = budget._limit_with(self)
        known = self.search.known()
        fits = [c for c in known if budget._ledger.peak_with(self, c.outcome) <= limit]
        if not fits:
            least = min(known, key=lambda c: c.outcome.peak)
            raise budget._refusal(self, least, limit)
        self.choice = min(fits, key=lambda c: c.outcome.seconds)
        self.wanted = self.search.names(self.choice)
        self.code = self.codes.get(self.wanted)
        if self.code is None:
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
        """The partitioner, called by AOTAutograd with a joint graph, and before that with those of
        regions that this graph calls, which torch splits."""
        if partitioner.is_called_by_another(inputs):
            static = static_lifetime_input_indices
            return partitioner.split_by_torch(module, num_fwd_outputs, static)
        traced = partitioner.JointGraph(module, num_fwd_outputs, static_lifetime_input_indices)
        if not traced.has_backward:
            return traced.split_without_backward()
        joint = Joint(
            traced,
            fuse=self.budget.compiler == "inductor",
            results_last=self.results_last,
        )
        search = Search(joint)
        wanted = None if self.wanted is None else search.named(self.wanted)
        if wanted is None:
            self.search = search
            if self.wanted is None and any(map(has_unknown_sizes, traced.nodes)):
                warnings.warn(_UNKNOWN_SIZES, CompiledWarning, stacklevel=2)
            if self.budget.compiler == "inductor" and not joint.on_cpu:
                self.margin = _UNREAD  # workspace of kernels was measured on CPUs only
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
            time_ratio=mine.seconds / plain.seconds if plain.seconds else 1.0,
        )
