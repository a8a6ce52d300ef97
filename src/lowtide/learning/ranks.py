"""The ranks of a process group, which a budget makes plan and refuse alike.

Problem: each rank measures different times, so each would make its own plan, and a limit that only
one rank refuses leaves the others waiting in their next collective. Invariant: ranks communicate
only where a budget is entered, which every rank does equally often; nothing is sent in a forward or
a backward, and what was agreed on is the same value on each rank. Imports torch.distributed, the
planner, externals and errors. Rejected: agreeing in the middle of a step, where other ranks may be
inside one of the model's own collectives: a deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from lowtide.errors import BudgetError, UsageError
from lowtide.observing.externals import External, externals_of, with_externals
from lowtide.planner import Event, Graph
from lowtide.planner.graph import UNKNOWN

T = TypeVar("T")

Step = tuple[Any, ...]
"""What tells one step from another, in the same way on each rank."""


@dataclass(frozen=True)
class Known:
    """What a rank knows of a step, or what all ranks take to be known of it."""

    graph: Graph
    measured: bool
    lessons: int
    before: int
    """As in `lowtide.observing.seen.Seen`."""


def ranks_of(group: Any) -> Ranks | None:
    """The ranks of what a budget was given as `group`. None, or False: each decides for itself."""
    return None if group is None or group is False else Ranks(group)


class Ranks:
    """The ranks of one process group. Every method is a collective of that group."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "a budget was given a group, but torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() before, or leave group= out."
            )
        self.group = dist.group.WORLD if group is True else group
        try:
            self.rank = dist.get_rank(self.group)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"a budget was given group={group!r}, which is no process group. Pass what "
                "torch.distributed.new_group returned, True for the default group, or leave "
                "group= out."
            ) from error
        if self.rank < 0:
            raise UsageError("this process is not a member of the group that its budget was given.")
        self.size = dist.get_world_size(self.group)
        accelerator = torch.accelerator.current_accelerator()
        on_cpu = accelerator is None or "gloo" in str(dist.get_backend(self.group))
        self._device = torch.device("cpu") if on_cpu else accelerator

    def any(self, here: bool) -> bool:
        """Whether it is true on some rank. One number is sent."""
        import torch.distributed as dist

        flag = torch.tensor([int(here)], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, in the order of ranks."""
        import torch.distributed as dist

        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def of_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, the only one that calls it."""
        made = make() if self.rank == 0 else None
        return self.gather(made)[0]  # type: ignore[return-value]

    def refuse_together(self, refusal: BudgetError | None) -> None:
        """If any rank refuses, raise the `BudgetError` of the one that needs most on every rank."""
        found = self.gather(None if refusal is None else (str(refusal), refusal.limit,
                                                          refusal.minimum))  # fmt: skip
        worst = max(
            ((entry[2], -rank) for rank, entry in enumerate(found) if entry is not None),
            default=None,
        )
        if worst is None:
            return
        minimum, rank = worst[0], -worst[1]
        entry = found[rank]
        assert entry is not None
        count = sum(entry is not None for entry in found)
        raise BudgetError(
            f"{count} of {self.size} ranks cannot keep their limit, so all of them stop here. "
            f"Rank {rank} needs most: {entry[0]}",
            limit=entry[1],
            minimum=minimum,
        )

    def common(
        self, limit: int | float, wanted: Iterable[Step], known: Mapping[Step, Known]
    ) -> dict[Step, Known]:
        """What all ranks know together of each step that some rank wants a plan for and that every
        rank knows, if the limit is the same on all of them; in the same order on each rank.

        Args:
            limit: what this rank plans for.
            wanted: the steps that this rank wants to plan.
            known: what this rank knows of steps.
        """
        found = self.gather((limit, tuple(wanted)))
        steps = tuple(dict.fromkeys(step for _, wants in found for step in wants))
        if not steps or any(other != limit for other, _ in found):
            return {}
        each = self.gather([known.get(step) for step in steps])
        return {
            step: together([one for one in all_of_it if one is not None])
            for step, *all_of_it in zip(steps, *each, strict=True)
            if None not in all_of_it
        }


def together(known: Sequence[Known]) -> Known:
    """What holds on every rank."""
    return Known(
        merged([one.graph for one in known]),
        all(one.measured for one in known),
        min(one.lessons for one in known),
        max(one.before for one in known),
    )


def merged(graphs: Sequence[Graph]) -> Graph:
    """Graphs of one structure as one graph: mean times, and the largest memory of any rank.

    A plan that fits it fits on each rank.
    """
    graphs = _with_all_externals(graphs)
    first = graphs[0]
    values = tuple(
        replace(
            nodes[0],
            pinned=all(node.pinned for node in nodes),
            named=min(node.named for node in nodes),
            cut=max(node.cut for node in nodes),
        )
        for nodes in zip(*(graph.values for graph in graphs), strict=True)
    )
    ops = tuple(
        replace(
            nodes[0],
            seconds=sum(node.seconds for node in nodes) / len(nodes),
            workspace=max(node.workspace for node in nodes),
            other=max(node.other for node in nodes),
            peak_other=max(node.peak_other for node in nodes),
        )
        for nodes in zip(*(graph.ops for graph in graphs), strict=True)
    )
    events = tuple(
        replace(
            nodes[0],
            other=max(node.other for node in nodes),
            peak_other=max(node.peak_other for node in nodes),
            after=max(node.after for node in nodes),
            more=_later_of(nodes),
        )
        for nodes in zip(*(graph.events for graph in graphs), strict=True)
    )
    turn = max(graph.turn for graph in graphs)
    return replace(first, values=values, ops=ops, events=events, turn=turn)


def _later_of(events: Sequence[Event]) -> int:
    """`Event.more`, for the rank whose node is over last."""
    more = [event.more for event in events]
    return UNKNOWN if UNKNOWN in more else max(more)


def _with_all_externals(graphs: Sequence[Graph]) -> list[Graph]:
    """Externals that only the record has are no part of the structure: what one rank has, all do.

    A rank that was not watched knows of none, and on one the program may have what it has let go of
    on another.
    """
    without, each = zip(*map(externals_of, graphs), strict=True)
    known: dict[tuple[int, ...], External] = {}
    for found in each:
        seen: Counter[tuple[int, ...]] = Counter()
        for one in found:
            seen[one.readers] += 1
            key = (seen[one.readers], *one.readers)
            other = known.setdefault(key, one)
            known[key] = replace(
                one,
                nbytes=max(one.nbytes, other.nbytes),
                named=min(one.named, other.named),
                release=max(one.release, other.release),
            )
    return [with_externals(graph, list(known.values())) for graph in without]
