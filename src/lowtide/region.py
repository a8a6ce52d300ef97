"""What a checkpointed region is: a recording in which a policy says what to keep, and nothing else.

Problem: a region has to decide about each value as a budget does, in microseconds and with no step
before it to learn from. Invariant: whatever its policy keeps is held until the last handle on it is
gone, and the insides of a region are recomputed for what the region itself is asked for, not for
regions beside it (rule 9). The compiled replay has the rules of `RegionDecisions` in C++
(`compiled/replay.h`). Imports step, tape and policies. Rejected: a policy as the decisions' class,
which users would have to write against the tape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.policies import OperationInfo, keeps, means_keep
from lowtide.step import Nested, Recording, current_recorder
from lowtide.tape.tape import Decisions

if TYPE_CHECKING:
    from lowtide.tape.regions import Region
    from lowtide.tape.values import Handle, Operation, Value


class RegionDecisions(Decisions):
    """Decisions of a recording opened by a region: its policy, and nothing else. It holds no limit,
    and everything that it holds is needed."""

    __slots__ = ()
    asks = False

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        policy = region.policy
        if policy is None:
            return
        if isinstance(policy, Selective):
            keep = policy.select(op.facts.func, args, kwargs)
            for value in made:
                value.keep = keep
            return
        for value in made:
            value.keep = keeps(policy, OperationInfo(op.facts.name, op.facts.func, value.nbytes))

    def retained(self, value: Value, request: Handle) -> bool:
        """What the request's region, or one around it, needs; not the insides of others (rule 9).

        The inputs of an inner region are needed by the region around it, although nothing saved
        them there.
        """
        scope = value.scope
        if scope is None or not scope.contains(request.region):
            return False
        return scope is not value.region or value.pending()

    def replayed(self, operations: list[Operation], seconds: float) -> None:
        """What a policy keeps is needed to make other values. Once one of these is made and held,
        it needs its operation no more, which would hold what is kept until the last handle on it
        is gone: beside what a plain step holds, as a ReLU saves its result and not its input."""
        based: set[Value] = set()
        for op in operations:
            if not any(value in based or _kept(value) for value in op.values()):
                continue
            for value in op.made():
                if value.held is None:
                    based.add(value)
                elif value.op is op:
                    value.settle()


_DECISIONS = RegionDecisions()


def _kept(value: Value) -> bool:
    """Whether it was made in the region and is held for good."""
    return value.op is None and value.number >= 0


class Selective:
    """torch's selective-checkpoint policy function, asked once per operator call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def select(self, func: Any, args: Any, kwargs: Any) -> bool:
        from torch.utils.checkpoint import SelectiveCheckpointContext

        context = SelectiveCheckpointContext(is_recompute=False)
        return means_keep(self.function(context, func, *args, **kwargs))


def region(policy: Any = None) -> Recording | Nested:
    """A context manager that makes what runs inside it one region."""
    recorder = current_recorder()
    if recorder is not None:
        return Nested(recorder, policy)
    return Recording(_DECISIONS, policy)
