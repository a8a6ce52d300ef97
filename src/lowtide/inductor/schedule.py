"""What compiled code takes when certain storages are saved: its peaks and its time.

Problem: a choice is judged by the memory of the code that comes out of it, not by the bytes it
saves: what is made again lives in the backward too, from where torch puts it to its last use.
Invariant: the rules are those of torch's split. An operation runs at most once in each half; in the
backward it runs right before the first operation that needs it. With Inductor, a value that only
its own fused kernel reads takes no memory. Imports joint. Rejected: summing the saved bytes, as
`activation_memory_budget` does: the peak rises again where much is made again at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lowtide.inductor.joint import OUTSIDE, Joint


@dataclass(slots=True)
class Outcome:
    """What a choice comes to.

    Attributes:
        forward, backward: peak bytes above what was there before, what is saved included.
        saved: bytes that are held between the two, results that the caller gets included.
        gradients: bytes that the backward leaves behind, of parameters.
        seconds: modelled, of both.
        kept: the storages that are saved and read, by number.
        twice: operations that run in both.
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
        self.reads = [op.reads for op in joint.ops]
        self.makes = [op.makes for op in joint.ops]
        self.nbytes = [s.nbytes for s in joint.storages]
        self.maker = [s.maker for s in joint.storages]
        self.seconds = [op.seconds for op in joint.ops]
        self.workspace = [op.workspace for op in joint.ops]
        self.fused = [op.fused for op in joint.ops]
        self.late = self._late_order()
        self.is_late = [op.late for op in joint.ops]
        self.evaluations = 0

    def _late_order(self) -> list[int]:
        """Operations of the backward. Inductor reorders its own for a low peak.

        Of two products after one another, the one that makes less goes first: the gradient of a
        weight lets an activation go before that of an input takes its place.
        """
        ops, nbytes = self.joint.ops, self.nbytes
        late = [index for index, op in enumerate(ops) if op.late]
        if not self.joint.fuse:
            return late
        size = {index: sum(nbytes[s] for s in ops[index].makes) for index in late}
        for place in range(len(late) - 1):
            one, two = late[place : place + 2]
            apart = not (ops[one].fused or ops[two].fused)
            if apart and size[two] < size[one] and set(ops[one].makes).isdisjoint(ops[two].reads):
                late[place : place + 2] = [two, one]
        return late

    def _early(self, storage: int) -> bool:
        maker = self.maker[storage]
        return maker != OUTSIDE and not self.is_late[maker]

    def savable(self) -> frozenset[int]:
        """What may be saved: made by the forward, and a tensor of its own."""
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
        return frozenset(self._fuse(early, set(self.joint.returned), set())[0])

    def run(self, saved: Iterable[int]) -> Outcome:
        """Peaks and seconds where `saved` is kept."""
        self.evaluations += 1
        there = set(saved) | self.joint.bound
        order, kept = self._backward_order(there)
        forward_order = self._forward_order(kept)
        returned = {s for s in self.joint.returned if self.maker[s] != OUTSIDE}
        given = set(self.joint.tangents)
        held = kept | returned
        between = sum(self.nbytes[s] for s in held)
        forward, _, one = self._walk(forward_order, set(), held, set())
        gradients = set(self.joint.gradients)
        lasting = returned if self.joint.results_last else set()
        start = kept | lasting | given
        backward, profile, two = self._walk(order, start, gradients | lasting, start)
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

    # ------------------------------------------------------------------ the two orders

    def _backward_order(self, there: set[int]) -> tuple[list[int], set[int]]:
        """Operations of the backward in order, and what of `there` they read."""
        maker, reads = self.maker, self.reads
        order: list[int] = []
        done = bytearray(len(reads))
        kept: set[int] = set()

        def bring(wanted: Iterable[int]) -> None:
            """The operations that are missing for these storages, in the order of the trace."""
            stack = list(wanted)
            found = []
            while stack:
                storage = stack.pop()
                if storage in there:
                    kept.add(storage)
                    continue
                made = maker[storage]
                if made == OUTSIDE or done[made]:
                    continue
                done[made] = 1
                found.append(made)
                stack.extend(reads[made])
            found.sort()
            order.extend(found)

        for index in self.late:
            if not done[index]:
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

    # ------------------------------------------------------------------ walking one of them

    def _walk(
        self, order: list[int], start: set[int], stays: set[int], freed: set[int]
    ) -> tuple[int, list[int], float]:
        """Peak and profile above the start, and seconds.

        Args:
            order: operations.
            start: storages that are there and counted at the start.
            stays: what lives on at the end.
            freed: what of the start goes after its last use.
        """
        if self.joint.fuse:
            inside, seconds = self._fuse(order, stays, start)
        else:
            inside, seconds = set(), sum(self.seconds[index] for index in order)
        last = self._last_uses(order, inside)
        ends: dict[int, list[int]] = {}
        for storage, at in last.items():
            if storage not in stays and storage not in inside:
                ends.setdefault(at, []).append(storage)
        nbytes, makes = self.nbytes, self.makes
        level = peak = 0
        made_here: set[int] = set()
        profile = []
        for place, index in enumerate(order):
            new = 0
            for storage in makes[index]:
                if storage not in inside and storage not in start:
                    new += nbytes[storage]
                    made_here.add(storage)
            going = sum(nbytes[s] for s in ends.get(place, ()) if s in made_here or s in freed)
            top = level + new + self.workspace[index]
            if self.fused[index]:  # a fused kernel writes over what it is the last to read
                top -= min(new, going)
            level += new - going
            if top > peak:
                peak = top
            profile.append(top)
        return peak, profile, seconds

    def _last_uses(self, order: list[int], inside: set[int]) -> dict[int, int]:
        """Of each storage, the place of its last reader; what is inside a kernel passes its on."""
        last: dict[int, int] = {}
        for place in range(len(order) - 1, -1, -1):
            index = order[place]
            when = place
            for storage in self.makes[index]:
                if storage in inside:
                    when = max(when, last.get(storage, place))
                else:
                    last.setdefault(storage, place)
            for storage in self.reads[index]:
                if last.get(storage, -1) < when:
                    last[storage] = when
        return last

    def _fuse(self, order: list[int], stays: set[int], start: set[int]) -> tuple[set[int], float]:
        """Storages that never leave their fused kernel, and the seconds of all kernels.

        Operations of one rank, with no kernel of a library between them, are one fused kernel.
        """
        rank_of: dict[int, int] = {}
        fused, reads, makes, nbytes = self.fused, self.reads, self.makes, self.nbytes
        readers: dict[int, set[int]] = {}
        by_library: set[int] = set()
        outside_kernel: dict[int, bool] = {}
        for index in order:
            mine = fused[index]
            rank = 0
            for storage in reads[index]:
                below = rank_of.get(storage)
                if below is not None:
                    step = 0 if mine and not outside_kernel[storage] else 1
                    if below + step > rank:
                        rank = below + step
            for storage in makes[index]:
                rank_of[storage] = rank
                outside_kernel[storage] = not mine
            for storage in reads[index]:
                if mine:
                    readers.setdefault(storage, set()).add(rank)
                else:
                    by_library.add(storage)
        inside: set[int] = set()
        moved = 0.0
        for storage, rank in rank_of.items():
            own = not outside_kernel[storage]
            ranks = readers.get(storage, set())
            if own and storage not in stays and storage not in by_library and ranks <= {rank}:
                inside.add(storage)
                continue
            moved += nbytes[storage] * (own + len(ranks - {rank} if own else ranks))
        for storage, ranks in readers.items():
            if storage not in rank_of:
                moved += nbytes[storage] * len(ranks)
        seconds = sum(self.seconds[index] for index in order)
        return inside, seconds + moved / self.joint.bandwidth
