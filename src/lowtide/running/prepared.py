"""A plan in the form in which a running step follows it.

Problem: a planned step must know at each operation, at no cost, whether it is still the planned one
and what to do with what was made. Invariant: immutable; made once when a plan is made, and read by
the decisions of every step that follows it, in Python or compiled. Imports planner, logs, seen,
the records of a tape, workspace. Rejected: consulting the graph while the step runs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowtide import _compat, engine
from lowtide.kernels.unfolding import runs_itself
from lowtide.kernels.workspace import unfolds
from lowtide.observing.logs import KEPT, OpLog
from lowtide.observing.seen import Seen
from lowtide.planner import NEVER, Graph, Retention, Simulator, plain_peak
from lowtide.tape.values import Operation, Value, tensors_in

ANCHOR = -2  # a choice: hold it although autograd does not save it

# What an operation looks like to a plan: its name, the bytes of each value it makes, the numbers of
# the values it reads (-1 for externals), and the bytes of the gradients that its backward makes for
# its arguments: of an expanded one at its expanded size, of a slice at that of the whole. Two steps
# with equal signatures have the same graph.
Signature = tuple[str, tuple[int, ...], tuple[int, ...], int]


def signature_of(op: Operation, made: list[Value], args: Any, kwargs: Any) -> Signature:
    """The signature of an operation that has just run."""
    kept = bool(made) and made[0].op is None
    return (
        _named(op.facts.name, kept),
        tuple([value.nbytes for value in made]),
        tuple([-1 if ref.value is None else ref.value.number for ref in op.refs]),
        sum(map(_compat.wanted_bytes, tensors_in(args, kwargs))),
    )


def signatures_of(ops: Iterable[OpLog]) -> tuple[Signature, ...]:
    return tuple((_named(log.name, log.kept), log.sizes, log.reads, log.wanted) for log in ops)


def _named(name: str, kept: bool) -> str:
    """An operation that is replayed and one that is not take different plans."""
    return name + KEPT if kept else name


def covers(planned: Signature, seen: Signature) -> bool:
    """Whether it is the same operation on the same values, and neither it nor its backward makes
    more bytes than planned."""
    return (
        planned[0] == seen[0]
        and planned[2] == seen[2]
        and planned[3] >= seen[3]
        and len(planned[1]) == len(seen[1])
        and all(map(operator.ge, planned[1], seen[1]))
    )


def outgrown_by(planned: Iterable[Signature], seen: Iterable[Signature]) -> float:
    """For the same operations on other sizes: the largest ratio of the bytes that one makes, or of
    the gradients that it wants, to what was planned. 1.0 if none is larger."""
    ratio = 1.0
    for (_, most, _, wants), (_, made, _, wanted) in zip(planned, seen, strict=True):
        for bound, nbytes in zip((*most, wants), (*made, wanted), strict=True):
            if nbytes > bound:
                ratio = max(ratio, nbytes / bound if bound else math.inf)
    return ratio


def plain_seconds(graph: Graph) -> float:
    """About how long a step takes with nothing recomputed: three times as long as its forward."""
    return 3 * sum(op.seconds for op in graph.ops)


@dataclass(frozen=True)
class Prepared:
    """A plan with what is needed to follow it operation by operation."""

    plan: Retention
    graph: Graph
    signatures: tuple[Signature, ...]
    needs: tuple[int, ...]
    """Bytes that each operation allocates, workspace included."""
    choices: tuple[int, ...]
    """The plan's decision for each value; `ANCHOR` if it is held and autograd does not save it."""
    peak: int
    """Predicted peak, in bytes."""
    seen: Seen
    """The step it was made from; a step that differs only later has its first part in common."""
    measured: bool
    """Whether its memory was measured, or modelled from sizes."""
    lessons: int
    """How many measured steps, one after the other, it was made from."""
    grown: bool
    """Whether it is for a larger step than the measured one, see `Learned.larger`."""
    apart: bool = False
    """Whether that is for all steps that vary each in its own way, see `Learned.bounded`."""
    tried: bool = False
    """Whether a step that followed it was measured, and kept its limit."""
    of_plain: int | None = None
    """The plain peak, if the graph is not that of the plain step, see `Learned.in_part`."""

    def same_forward(self, other: Prepared) -> bool:
        """Whether it is for the same operations, at the same place among a context's steps."""
        return self.seen.place == other.seen.place and (
            self.signatures is other.signatures
            # Steps that begin alike are compared for long before they differ.
            or (self.digest == other.digest and self.signatures == other.signatures)
        )

    @functools.cached_property
    def digest(self) -> int:
        """A hash of the operations."""
        return hash(self.signatures)

    def asked_at(self, number: int) -> int | None:
        """The first request for a value in the backward of the plan, by its place among all."""
        places = (i for i, event in enumerate(self.graph.events) if event.value == number)
        return next(places, None)

    def passed_over(self, place: int) -> frozenset[int]:
        """The values that neither this request nor a later one, nor a replay for one, needs."""
        return frozenset([value for value, last in enumerate(self._lives) if last < place])

    @functools.cached_property
    def _lives(self) -> list[int]:
        return Simulator(self.graph).lifetimes(self.plan.retain)

    def bytes(self) -> tuple[int, int]:
        """Bytes of activations that the plan keeps, and that it recomputes."""
        kept = recomputed = 0
        for value, (node, choice) in enumerate(
            zip(self.graph.values, self.plan.retain, strict=True)
        ):
            if node.owned:
                continue
            if choice < 0:
                kept += node.nbytes
            elif self.graph.release[value] >= 0:
                recomputed += node.nbytes
        return kept, recomputed

    @functools.cached_property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed."""
        return self.bytes()[1] == 0

    @functools.cached_property
    def plain_peak(self) -> int:
        """What the same step takes with nothing recomputed, in bytes."""
        return plain_peak(self.graph) if self.of_plain is None else self.of_plain

    @functools.cached_property
    def unrecorded_peak(self) -> int:
        """What the step takes without a recording, in bytes. A recording that keeps everything may
        take less, as it drops what autograd saves for graphs that no backward goes through."""
        return max(self.peak, self.plain_peak)

    def backward_before(self, index: int) -> int:
        """What the backward of the operations before this one takes at most, in bytes, beside what
        they hold and the gradients of leaves that are there. Where that is not known (calls that
        are not recorded, custom Functions), it is all that the step takes."""
        others = self.seen.gradients_of_others()
        unknown = others is None or any(at <= index for at, _ in self.seen.calls)
        if unknown or any(log.hidden and log.wanted for log in self.seen.ops[:index]):
            return self.unrecorded_peak
        return min(self.unrecorded_peak, (others or 0) + max(self._backward[:index], default=0))

    @functools.cached_property
    def _backward(self) -> list[int]:
        """For each operation, the bytes of gradients of activations while its backward runs, and of
        what that takes itself."""
        return self.seen.in_backward([node.nbytes for node in self.graph.values])

    @functools.cached_property
    def seconds(self) -> float:
        """About how long the step takes, with nothing recomputed."""
        return plain_seconds(self.graph)

    @functools.cached_property
    def allocates(self) -> int:
        """Bytes that all its operations allocate together: the size of the step."""
        return sum(self.needs)

    @functools.cached_property
    def itself(self) -> dict[int, bool | None]:
        """For each convolution of the forward, whether torch runs it with its own kernel, see
        `unfolding`; None: not known. A smaller one may run otherwise and take more memory."""
        return {
            index: None if log.kind is None else runs_itself(log.kind.args, log.kind.device)
            for index, log in enumerate(self.seen.ops)
            if unfolds(log.name)
        }

    @functools.cached_property
    def script(self) -> Any:
        """This plan as the compiled recorder reads it; made at first use."""
        columns = zip(*self.signatures, strict=True) if self.signatures else ((),) * 4
        return engine.core().Script(*columns, self.needs, self.choices, tuple(self.itself))

    def __getstate__(self) -> dict[str, Any]:
        return {key: item for key, item in vars(self).items() if key != "script"}

    @staticmethod
    def of(
        plan: Retention,
        graph: Graph,
        peak: int,
        seen: Seen,
        measured: bool,
        lessons: int = 0,
        *,
        grown: bool = False,
        apart: bool = False,
    ) -> Prepared:
        signatures = signatures_of(seen.ops)
        choices = list(plan.retain[: graph.recorded])
        anchors = _anchors(plan, graph)
        for value, choice in enumerate(choices):
            if choice < 0 and graph.release[value] < 0:
                choices[value] = ANCHOR if value in anchors else NEVER
        needs = tuple(
            sum(log.sizes) + op.workspace for log, op in zip(seen.ops, graph.ops, strict=True)
        )
        return Prepared(
            plan, graph, signatures, needs, tuple(choices), peak, seen, measured, lessons, grown,
            apart,
        )  # fmt: skip


def _anchors(plan: Retention, graph: Graph) -> frozenset[int]:
    """The held values that a replay may read. That the program has one too, for which a simulation
    counts it as in memory, does not tell the tape where it is."""
    retain = plan.retain
    needed = Simulator(graph).lifetimes(retain)
    dropped = {value for value, last in enumerate(needed) if last >= 0 and retain[value] >= 0}
    replayed = [op for op in graph.ops if not dropped.isdisjoint(op.outputs)]
    read = {value for op in replayed for value in op.inputs}
    return frozenset(value for value in read if retain[value] < 0)
