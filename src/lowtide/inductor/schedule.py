"""What compiled code takes when certain storages are saved: its peaks and its time.

Problem: a choice must be judged by the memory of the resulting code, not by the bytes it saves:
what is recomputed also lives in the backward, from where torch computes it to its last use.
Invariant: the rules are those of torch's split. An operation runs at most once in each half; one of
the forward runs in the backward right before the first operation that needs it. With Inductor, a
value that only its own fused kernel reads takes no memory. Imports joint and kernels. Rejected:
summing the saved bytes, as `activation_memory_budget` does: where much is recomputed at once, the
peak rises again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide._compat import partitioner
from lowtide.inductor.joint import OUTSIDE, Joint, Op
from lowtide.inductor.kernels import Facts, Half
from lowtide.inductor.nodes import nbytes_of, numel_of


@dataclass(slots=True)
class Outcome:
    """The memory and time of a choice.

    Attributes:
        forward, backward: peak bytes above what was in memory before, including what is saved.
        saved: bytes held between the two, including the results returned to the caller.
        gradients: bytes of the parameter gradients that the backward leaves.
        seconds: modelled time of both.
        kept: numbers of the storages that are saved and read.
        twice: operations that run in both halves.
        order: operations of the backward, in order.
        profile: bytes at each operation of the backward.
    """

    forward: int
    backward: int
    saved: int
    gradients: int
    seconds: float
    kept: frozenset[int]
    twice: list[int]
    order: list[int] = field(default_factory=list)
    profile: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


class Scheduler:
    """Tries choices on one joint graph."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        for op in joint.ops:
            if op.inner:
                op.workspace = _beside_results(op, sum(joint.storages[s].nbytes for s in op.makes))
        self.reads = [op.reads for op in joint.ops]
        self.makes = [op.makes for op in joint.ops]
        self.nbytes = [s.nbytes for s in joint.storages]
        self.maker = [s.maker for s in joint.storages]
        self.seconds = [op.seconds for op in joint.ops]
        self.workspace = [op.workspace for op in joint.ops]
        self.fused = [op.fused for op in joint.ops]
        self.facts = Facts(
            self.reads, self.makes, self.fused, [op.inlined for op in joint.ops],
            [op.slow for op in joint.ops], [op.elements for op in joint.ops], self.nbytes,
            frozenset(i for i, op in enumerate(joint.ops) if op.taken_in),
        )  # fmt: skip
        self.late = [index for index, op in enumerate(joint.ops) if op.late]
        self.is_late = [op.late for op in joint.ops]
        self.evaluations = 0

    def _early(self, storage: int) -> bool:
        maker = self.maker[storage]
        return maker != OUTSIDE and not self.is_late[maker]

    def savable(self) -> frozenset[int]:
        """What may be saved: storages made by the forward that a node returns as a tensor."""
        return frozenset(
            number
            for number, storage in enumerate(self.joint.storages)
            if self._early(number) and storage.node is not None
        )

    def inside_forward(self) -> frozenset[int]:
        """Storages that a forward which saves nothing never writes to memory."""
        if not self.joint.fuse:
            return frozenset()
        early = [index for index, op in enumerate(self.joint.ops) if not op.late]
        half = Half(self.facts, early, self.joint.returned, ())
        return frozenset(s for i in early for s in self.makes[i] if s not in half.written)

    def run(self, saved: Iterable[int]) -> Outcome:
        """Peaks and seconds if `saved` is kept."""
        self.evaluations += 1
        there = set(saved) | self.joint.bound
        order, kept = self._backward_order(there)
        forward_order = self._forward_order(kept)
        returned = {s for s in self.joint.returned if self.maker[s] != OUTSIDE}
        given = set(self.joint.tangents)
        held = kept | returned
        between = sum(self.nbytes[s] for s in held)
        forward, _, one = self._walk(forward_order, set(), held)
        gradients = set(self.joint.gradients)
        lasting = returned if self.joint.results_last else set()
        start = kept | lasting | given
        # Autograd holds the gradients that it passes to compiled code until that returns.
        stays = gradients | lasting | given
        backward, profile, two = self._walk(order, start, stays)
        base = sum(self.nbytes[s] for s in start)
        profile = [base + level for level in profile]
        runs = set(forward_order)
        twice = [index for index in order if not self.is_late[index] and index in runs]
        states = sum(self.joint.ops[index].state for index in twice)
        return Outcome(
            forward=forward + states,
            backward=max(base + backward, base) + states,
            saved=between + states,
            gradients=sum(self.nbytes[s] for s in self.joint.parameter_gradients - kept),
            seconds=one + two,
            kept=frozenset(kept),
            twice=twice,
            order=order,
            profile=profile,
        )

    def alone(self) -> int:
        """Peak bytes of all operations, in the order of the trace, with what they return."""
        stays = {s for s in self.joint.returned if self.maker[s] != OUTSIDE}
        return self._walk(list(range(len(self.reads))), set(), stays)[0]

    # ------------------------------------------------------------------ the two orders

    def _backward_order(self, there: set[int]) -> tuple[list[int], set[int]]:
        """Operations of the backward in order, and which of `there` they read.

        From the first that depends on an incoming gradient, all keep the order of the trace; what
        was traced before that runs right before the first of them that needs it.
        """
        maker, reads = self.maker, self.reads
        kept: set[int] = set()
        needed = bytearray(len(reads))
        stack = list(self.joint.gradients)
        for index in self.late:
            needed[index] = 1
            stack.extend(reads[index])
        while stack:
            storage = stack.pop()
            if storage in there:
                kept.add(storage)
                continue
            made = maker[storage]
            if made != OUTSIDE and not needed[made]:
                needed[made] = 1
                stack.extend(reads[made])

        order: list[int] = []
        done = bytearray(len(reads))

        def bring(wanted: Iterable[int]) -> None:
            """Append the operations that these storages still need, in the order of the trace."""
            stack = list(wanted)
            found = []
            while stack:
                storage = stack.pop()
                made = maker[storage]
                if storage in there or made == OUTSIDE or done[made]:
                    continue
                done[made] = 1
                found.append(made)
                stack.extend(reads[made])
            found.sort()
            order.extend(found)

        for index in range(max(0, self.joint.first_late), len(reads)):
            if needed[index] and not done[index]:
                bring(reads[index])
                done[index] = 1
                order.append(index)
        bring(self.joint.gradients)
        return order, kept

    def _forward_order(self, kept: set[int]) -> list[int]:
        maker, reads = self.maker, self.reads
        done = bytearray(len(reads))
        stack = [*kept, *self.joint.returned]
        for index, op in enumerate(self.joint.ops):
            if not op.makes and not op.late:  # a write: it runs once, in the forward
                done[index] = 1
                stack.extend(reads[index])
        while stack:
            made = maker[stack.pop()]
            if made != OUTSIDE and not done[made] and not self.is_late[made]:
                done[made] = 1
                stack.extend(reads[made])
        return [index for index in range(len(reads)) if done[index]]

    # ------------------------------------------------------------------ the memory of one order

    def _walk(
        self, order: list[int], start: set[int], stays: set[int]
    ) -> tuple[int, list[int], float]:
        """Peak and profile relative to the start, and seconds.

        Args:
            order: operations.
            start: storages that are in memory at the start, and are freed after their last use.
            stays: storages that are still needed at the end.
        """
        seconds = sum(self.seconds[index] for index in order)
        if not self.joint.fuse:
            levels = self._levels([[i] for i in order], self.reads, None, start, stays)
            return max(levels, default=0), levels, seconds
        half = Half(self.facts, order, stays, start)
        levels = self._levels(half.kernels, half.reads, half.written, start, stays)
        at = {i: level for kernel, level in zip(half.kernels, levels, strict=True) for i in kernel}
        profile = []
        level = 0
        for index in reversed(order):  # an inlined operation has the level of its reader
            level = at.get(index, level)
            profile.append(level)
        profile.reverse()
        seconds += self._moved(half) / self.joint.bandwidth
        return max(levels, default=0), profile, seconds

    def _levels(
        self,
        kernels: list[list[int]],
        reads: Any,
        written: set[int] | None,
        start: set[int],
        stays: set[int],
    ) -> list[int]:
        """Bytes in memory while each kernel runs, relative to the start."""
        nbytes, makes = self.nbytes, self.makes
        last: dict[int, int] = {}
        for place, kernel in enumerate(kernels):
            for index in kernel:
                last.update(dict.fromkeys(reads[index], place))
                last.update(dict.fromkeys(makes[index], place))
        ends: dict[int, list[int]] = {}
        for storage, place in last.items():
            if storage not in stays:
                ends.setdefault(place, []).append(storage)
        level = 0
        levels = []
        there = set(start)
        for place, kernel in enumerate(kernels):
            made = [
                s
                for index in kernel
                for s in makes[index]
                if (written is None or s in written) and s not in there
            ]
            going = [s for s in ends.get(place, ()) if s in there]
            new = sum(nbytes[s] for s in made)
            top = level + new + max(self.workspace[index] for index in kernel)
            levels.append(top - self._overwritten(kernel, reads, made, going))
            there.update(made)
            level += new - sum(nbytes[s] for s in ends.get(place, ()) if s in there)
        return levels

    def _overwritten(self, kernel: list[int], reads: Any, made: list[int], going: list[int]) -> int:
        """Bytes that a fused kernel writes in place, over storages that it is the last to read.

        It does not write over what several of its operations read.
        """
        if not going or not self.fused[kernel[0]]:
            return 0
        nbytes = self.nbytes
        by: dict[int, int] = {}  # the operation that reads each; -1: several do
        for index in kernel:
            for storage in reads[index]:
                by[storage] = -1 if storage in by else index
        free = [s for s in going if s in by]
        total = 0
        wanted = set(made)
        for index in kernel:
            for storage in self.makes[index]:
                if storage not in wanted:
                    continue
                found = next(
                    (s for s in free if by[s] == index and nbytes[s] == nbytes[storage]), None
                )
                if found is not None:
                    free.remove(found)
                    total += nbytes[found]
        return total

    def _moved(self, half: Half) -> int:
        """Bytes that fused kernels read and write."""
        total = 0
        for kernel in half.kernels:
            if not self.fused[kernel[0]]:
                continue
            own = {s for index in kernel for s in self.makes[index]}
            touched = {s for index in kernel for s in half.reads[index]} - own
            touched |= own & half.written
            total += sum(self.nbytes[s] for s in touched)
        return total


def _beside_results(op: Op, made: int) -> int:
    """Bytes that a call of whole graphs has at once, besides its results."""
    most = max(Scheduler(joint).alone() for joint in op.inner)
    handed_on = partitioner.handed_on_by(op.node)
    if handed_on is None:
        return max(0, most - made) + (made if partitioner.keeps_iterations(op.node) else 0)
    # Of what is stacked, all is there from the first iteration on, and so are its places, what the
    # first has returned of it and, in each iteration, what the one before has.
    returned = [
        node.meta.get("val") for node in op.inner[0].traced.results()[0] if node is not None
    ]
    stacked = [val for val in returned[handed_on:] if isinstance(val, torch.Tensor)]
    places = torch.long.itemsize * sum(map(numel_of, stacked))
    return most + 2 * sum(map(nbytes_of, stacked)) + places
