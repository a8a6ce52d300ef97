"""Watching a step so that the next one can be planned.

Problem: a planner needs sizes, times, which operation reads what, in which order backward requests
values, and the memory that is not the tape's: gradients, temporaries, kernel workspace. Invariant:
an observer stores numbers and weak references, never a tensor; the graph it makes holds for the
plan that ran and, as what that plan held is subtracted, for every other. What was measured
(`MemoryEvents`) wins over what was modelled from sizes. `graphs` makes a graph of what is here.
Imports tape, the planner's graph, cutoff, logs and memory's timeline. Rejected: asking users to run
a profiling step.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide.backward.functions import ends, outside, runs_again, some_run_again
from lowtide.backward.operation import Call, describe
from lowtide.backward.reads import look_at_reads, summed, writes_through
from lowtide.backward.sparse import sparse_gradient, sparse_temporaries
from lowtide.kernels.workspace import backward_temporaries, remembered_workspace
from lowtide.memory.marks import Marks
from lowtide.memory.timeline import Timeline
from lowtide.observing.cutoff import CutOff
from lowtide.observing.externals import Externals
from lowtide.observing.lives import weak_to
from lowtide.observing.logs import Alone, OpLog, unwatched, what_ran
from lowtide.observing.reached import Numbers
from lowtide.observing.requests import Request
from lowtide.observing.seen import Seen
from lowtide.planner.graph import Graph
from lowtide.tape.values import Handle, Operation, Ref, Value, tensors_in

if TYPE_CHECKING:
    from lowtide.running.prepared import Signature
    from lowtide.running.where import Where
    from lowtide.tape.recorder import Recorder


class Observer(CutOff):
    """Collects one step. Fed by the decisions of a budget."""

    def __init__(self, memory: Marks | None, earlier: tuple[OpLog, ...] = ()) -> None:
        super().__init__(memory)
        self._where: Where | None = None
        self.earlier = earlier  # operations of the step before, whose times are used as well
        self.place = self.before = 0  # as in `Seen`
        self.reached: set[int] = set()  # held when backward began; some may be dropped there
        self.pinned: set[int] = set()
        self._kept: set[int] = set()  # made by what is never replayed
        self.elsewhere = 0  # bytes of the forward that the program has in backward, not the tape
        self.carries_grad: set[int] = set()
        self.calls: list[tuple[int, str]] = []  # as in `Seen`
        self.externals = Externals()
        self._hidden: dict[int, int] = {}  # value made without grad -> operation
        self.base: Graph | None = None  # of another step, with the same first operations
        self.common = 0  # how many those are
        self.ran: list[int] | None = None  # the plan that was followed in backward
        self.timeline: Timeline | None = None
        self.later = False  # a backward has run, and this is another one of the same step
        self.passed = False  # backward does not ask for all that is saved, see `graph_before`
        self.estimated = range(0)  # operations that nobody watched
        self.sparing = False  # guesses (custom Functions, FSDP2, a loss outside) are the least
        self.spans: list[Numbers] | None = None  # of the nodes that the running backward reaches
        self.to_come: list[tuple[int, Numbers]] = []  # requests as last modelled, see `Expected`
        self.retains = False  # backward releases nothing that was saved: it may run again
        self.behind = 0  # bytes that backward may take in the graphs of earlier steps
        self.withheld = 0  # bytes that those of this context would hold more under a larger limit
        self._missed = False  # whether the last request was for a value not in memory
        self._begin: int | None = None
        self._draws: int | None = None  # mark before a random state was read for an operation
        self._anew: set[tuple[int, int]] = set()  # (value, node), see `_made_anew`
        self.over: int | None = None  # mark after what was dropped when the forward was over
        self.fell: tuple[int, int] | None = None  # as `OpLog.fell`, after the last operation
        self.began: int | None = None  # mark after what was dropped when backward began
        self._replay_from: int | None = None  # mark where a replay inside the forward began
        self._replays: list[tuple[int, int]] = []  # those since the last operation
        self._end = 0
        self._gradients = 0  # bytes of those that the backward which ended there has left
        self._forward = 0  # operations before backward began
        self._calls: dict[Call, Call] = {}  # equal ones as one object, as layers repeat

    def only(self, where: Where) -> None:
        """Count only the bytes of one device, not those of all."""
        self._where = where
        self.leaves.where = where

    @staticmethod
    def resumed(
        seen: Seen,
        base: Graph,
        ran: Sequence[Signature],
        values: Iterable[Value],
        handles: Iterable[Handle],
        recorder: Recorder | None,
    ) -> Observer:
        """An observer for a step that was not watched so far: it `ran` the first operations of
        `seen`, on no more bytes."""
        observer, count = Observer(None, seen.ops), len(ran)
        observer.ops = [
            log
            if (log.sizes, log.wanted) == (sizes, wanted)
            else replace(log, sizes=sizes, wanted=wanted)
            for log, (_, sizes, _, wanted) in zip(seen.ops, ran, strict=False)
        ]
        observer.carries_grad = set(seen.carries_grad)
        observer.base, observer.common = base, count
        observer.names.resume(base, count, {} if recorder is None else recorder.table)
        observer.leaves.resume(seen, count)
        observer.externals.resume(base, count)
        made = 1 + max([-1, *(number for log in observer.ops for number in log.outputs)])
        observer.cut = {value for value in base.cut if value < made}
        observer._values = list(map(weak_to, values))
        for handle in handles:
            observer.had(handle.value, handle)
        return observer

    def went_alone(
        self,
        ran: Iterable[Alone],
        leaves: int,
        read: list[torch.Tensor],
        values: Iterable[Value],
        handles: Iterable[Handle],
        recorder: Recorder | None,
    ) -> None:
        """Go on after operations that nobody watched, whose leaves have so many bytes; `read`: the
        leaves that are known."""
        first = len(self.ops)
        self.ops.extend(map(unwatched, ran))
        count = len(self.ops)
        self.estimated = range(first, count)
        for log in self.ops[self.common :]:
            self.carries_grad.update(log.receivers)
        self.names.resume(None, 0, {} if recorder is None else recorder.table)
        self.leaves.unwatched(count, leaves, read)
        self.externals.pass_over(count)
        self._values = list(map(weak_to, values))
        for handle in handles:
            self.had(handle.value, handle)

    def attach(self, recorder: Recorder, calls: list[tuple[int, str]] | None = None) -> None:
        """Take the recorder of the forward to watch, once it is open, and the list that gets its
        calls that are not recorded."""
        self.calls = self.calls if calls is None else calls
        recorder.draws, recorder.drawn = self.draws, self.anew
        self.names.table = recorder.table

    def runs_again(self) -> bool:
        """Whether a custom Function of the step is taken to run its forward again in backward."""
        return runs_again(self.ops)

    def some_run_again(self) -> bool:
        """Whether a custom Function of a step whose forward is over is taken to run that again;
        what a teacher ran without grad is none."""
        return some_run_again(self)

    def ran_without_grad(self) -> set[int]:
        """The operations of a forward that is over that ran without grad in no custom Function, and
        made what others have read."""
        return outside(self, ends(self))

    def seen(self) -> Seen:
        return Seen(
            tuple(self.ops),
            frozenset(self.carries_grad),
            dict(self.leaves.gradients),
            dict(self.leaves.known),
            self._forward,
            self._saved,
            tuple(self.leaves.frozen.values()),
            self.place,
            self.before,
            self.retains,
            tuple(self.calls),
            self.behind,
            self.withheld,
        )

    # ------------------------------------------------------------------ forward

    def operation(
        self,
        op: Operation,
        made: list[Value],
        args: Any,
        kwargs: Any,
        live: int,
        signature: Signature,
    ) -> None:
        begin, self._begin = self._begin, None
        unseen, self._draws = self._draws, None
        mark = self.memory.mark() if self.memory is not None else 0
        self.making.ran()
        tensors = tensors_in(args, kwargs)
        sparse = sparse_gradient(op.facts.name, args)
        self.leaves.ran(tensors, sparse)
        self.externals.ran([ref.value for ref in op.refs], self._counts, self.memory)
        log = what_ran(op, made, signature, live, begin, mark)
        log.fell, self.fell = self.fell, None
        log.inside = tuple(self._replays)
        log.unseen = begin if unseen is None else unseen
        self._replays.clear()
        self._look_at_backward(log, op, args, kwargs, tensors)
        # Values written in place without grad count as hidden only if they were made without grad.
        over = [-1 if ref.value is None else ref.value.number for ref, _ in op.writes]
        if log.hidden is not None and all(number in self._hidden for number in over):
            self._hidden.update(dict.fromkeys(log.outputs, len(self.ops)))
        written = [t for t in tensors if _compat.storage_of(t) is not None] if op.writes else []
        for ref, _ in op.writes:
            if ref.value is not None and ref.value.number >= 0:
                self.overwritten(ref.value.number, ref.value.nbytes)
        self.names.ran(len(self.ops), made, map(_compat.storage_key, written))
        self.names.reduces(log.name, args, made)
        if log.kept:
            self._kept.update(log.outputs)
        self._needs(log.inputs)
        self.ops.append(log)
        self._values.extend(map(weak_to, made))

    def _look_at_backward(
        self, log: OpLog, op: Operation, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> None:
        """Note what the operation takes besides its results, and what its backward will take."""
        wanted = [t for t in tensors if t.requires_grad]
        if not tensors or self._counts(tensors[0]):
            device = tensors[0].device.type if tensors else "cpu"
            call = describe(op.facts, args, kwargs, device)
            log.kind = None if call is None else self._calls.setdefault(call, call)
            self._look_at_memory(log, op, args, kwargs, wanted)
        elif self._where is not None:
            self._where.computes_on(tensors[0].device)
        if not torch.is_grad_enabled():
            leaves = [id(leaf) for leaf in map(_compat.leaf_of, wanted) if leaf is not None]
            log.hidden = (_compat.newest_node(), *leaves)
        elif wanted:
            self._look_for_functions(op.refs, tensors)
        else:
            log.temporaries = log.left = 0  # it has no backward, which would save its results
            log.saved = ()
        if wanted and torch.is_grad_enabled() and op.facts.writes == (0,):
            writes_through(log, tensors[0])
        if wanted:
            log.node = torch.is_grad_enabled()
            self.carries_grad.update(log.inputs)
            if len(op.refs) == len(tensors):  # running statistics are not among the refs
                dims = summed(log.name, args)
                look_at_reads(log, op.refs, tensors, op.facts.chunks, dims, self._made_anew)
            log.call, log.lent = log.kind, log.kind is None

    def _look_at_memory(
        self, log: OpLog, op: Operation, args: Any, kwargs: Any, wanted: list[torch.Tensor]
    ) -> None:
        made, call = sum(log.sizes), log.kind
        grads = sum(t.numel() * t.element_size() for t in wanted if self._counts(t))
        func = op.facts.func
        log.workspace, log.pad = remembered_workspace(call, log.name, func, args, kwargs, made)
        sparse = sparse_gradient(log.name, args)
        if sparse is not None and self._counts(args[0]):
            log.temporaries = sparse_temporaries(log.name, sparse)
        else:
            log.temporaries = backward_temporaries(log.name, grads, made, log.workspace)
        log.left = log.temporaries

    def _made_anew(self, value: Value, tensor: torch.Tensor) -> bool:
        """Whether `value` was written through a view, and is now read through one for the first
        time since."""
        maker = value.op.sequence if value.op is not None else -1
        if not 0 <= maker < len(self.ops) or self.ops[maker].through is None:
            return False
        node = _compat.made_anew(tensor)
        if node is None or (value.number, node) in self._anew:
            return False
        self._anew.add((value.number, node))
        return True

    def _counts(self, tensor: torch.Tensor) -> bool:
        return self._where is None or self._where.has(tensor)

    def _look_for_functions(self, refs: list[Ref], tensors: list[torch.Tensor]) -> None:
        """What was made without grad but has a graph is the result of a custom Function."""
        if len(refs) != len(tensors):
            return
        for ref, tensor in zip(refs, tensors, strict=True):
            value = ref.value
            if value is None or value.number < 0 or not tensor.requires_grad:
                continue
            maker = self._hidden.get(value.number)
            if maker is not None and _compat.leaf_of(tensor) is None:
                self.ops[maker].function = True

    def anew(self) -> None:
        """The memory of the next operation begins here.

        A random state was read for it, which is not the step's memory; or values were dropped,
        which the peak between two operations would count as the second one's workspace.
        """
        if self.memory is not None:
            self._begin = self.memory.mark()

    def changes_plan(self, dropped: Iterable[tuple[int, int]]) -> None:
        """The step has changed to another plan, which does not hold these values of such a size."""
        nbytes = sum(nbytes for number, nbytes in dropped if number not in self._named)
        if self.memory is not None and nbytes:
            self.fell = self.memory.mark(), nbytes

    def draws(self) -> None:
        """A random state is about to be read for the next operation."""
        if self.memory is not None:
            self._draws = self.memory.mark()

    def replays_inside(self) -> None:
        """A value is replayed for a backward inside the forward: not the next operation's work."""
        if self.memory is not None:
            self._replay_from = self.memory.mark()

    def replayed_inside(self) -> None:
        begin, self._replay_from = self._replay_from, None
        if self.memory is not None and begin is not None:
            self._begin = self.memory.mark()
            self._replays.append((begin, self._begin))

    # ------------------------------------------------------------------ backward

    def begin_backward(self, anchored: Container[int] = ()) -> None:
        """Note what is held, and what is in memory whatever a plan says: because the program has it
        too, or because the tape cannot drop it.

        Args:
            anchored: numbers of values that are held because the plan says so.
        """
        self._forward = len(self.ops)
        self.over = self._begin
        self.leaves.look_again()
        self.retains = _compat.in_backward() and _compat.backward_retains_graph()
        self._saved = tuple(sorted(Counter(self.handles).elements()))
        ours = set()
        named, self._named = self._named, {}
        for number, weak in named.items():
            storage = weak()
            if storage is not None:
                self.evicted[number] = len(self.ops)
                self.pinned.add(number)
                ours.add(_compat.storage_id(storage))
        for value in self.alive():
            if value.held is None:
                continue
            number = value.number
            self._lives(value, -1)
            storage = value.held.untyped_storage()
            ours.add(_compat.storage_id(storage))
            planned = number in anchored or number in self._kept or number in self.cut
            if (value.op is None and not planned) or _compat.storage_holders(storage) > 2:
                self.pinned.add(number)
        self.externals.begin_backward()
        made = self.names.over(ours)
        only_recorded = self.externals.are_ours(made)
        self.elsewhere = sum(n for key, n in made.items() if key not in only_recorded)
        self.reached = set(self.held) - self.pinned

    def has_begun(self) -> None:
        """What no plan needs any more was dropped, before backward has asked for anything."""
        self.began = self.memory.mark() if self.memory is not None else None
        self.externals.has_begun()

    def begins_again(self) -> None:
        """Another backward of the step begins."""
        self.later = True

    def request(self, value: Value, operation: int) -> None:
        if value.number >= 0:
            mark = self.memory.mark() if self.memory is not None else 0
            node = None if torch.is_grad_enabled() else _compat.node_in_backward()
            asks = None if node is None else (_compat.backward_number(), node)
            self.requests.append(Request(value.number, operation, mark, mark, asks))
            self._missed = value.held is None
            self._asked_on = threading.get_ident()
            self.externals.asked(len(self.requests))

    def answered(self, value: Value, given: torch.Tensor) -> None:
        """The last request was answered with a tensor."""
        if self._missed and self.requests and self.memory is not None:
            self.requests[-1] = self.requests[-1]._replace(answer=self.memory.mark())
            if value.held is None:
                self.gives(given.untyped_storage())

    def stop_measuring(self) -> None:
        """Something else begins before this step is over: the two could not be told apart."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.stop(lambda timeline: None)

    def mark_end(self) -> None:
        """A backward is over; what follows the last such mark does not belong to the step."""
        self.backwards.add(len(self.requests))
        if self.memory is not None:
            self._end = self.memory.mark()
            self._gradients = self.leaves.left()
            self.memory.over()

    def finish(self, then: Callable[[Observer], None]) -> None:
        """The step is over; `then` is called once its measurement is available."""
        self._values.clear()
        self.externals.close()
        self._refs.clear()  # what dies from now on does not belong to this step's backward
        memory, self.memory = self.memory, None
        if memory is None:
            then(self)
            return

        def arrived(timeline: Timeline | None) -> None:
            # operations may follow a backward that ran inside the context
            end = max([self._end, *(log.mark + 1 for log in self.ops[-1:])])
            self.timeline = None if timeline is None else timeline.until(end)
            then(self)

        memory.stop(arrived)

    def left(self) -> int:
        """Bytes that the step was measured to leave in memory, besides gradients and what its
        forward made; 0 if what autograd has saved may be among them."""
        if self.timeline is None or self.retains or self.lasting():
            return 0
        return max(0, self.timeline.final - self._gradients - self.elsewhere)
