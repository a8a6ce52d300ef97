"""The peaks of generated code, from its own lines.

Problem: predictions of Inductor's memory may be wrong by a few percent, and a limit is a promise.
Once a choice has been lowered, and before it runs, the code itself says which buffers it allocates
and when it frees them. Invariant: what a line allocates counts from that line until the last name
for it is deleted; the workspace of calls outside generated kernels comes from `workspace`, as
everywhere. For code that is not understood there is no peak (None), and the prediction is used.
Imports joint. Rejected: measuring the first step, which may exceed its limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowtide._compat.lowered import Line, Lowered
from lowtide.inductor.joint import OUTSIDE, Joint


def peaks(joint: Joint, halves: list[Lowered]) -> tuple[int, int] | None:
    """Peak bytes of a forward and of its backward, above what was in memory before each call."""
    if len(halves) != 2 or any(half.lines is None for half in halves):
        return None
    by_name = {node.name: node for node in joint.traced.nodes}

    def storages(names: Iterable[str]) -> dict[str, int]:
        found = {}
        for name in names:
            for number in joint.storages_of(by_name[name]) if name in by_name else ():
                found[name] = number
        return found

    workspace = {op.node.name: op.workspace for op in joint.ops if op.workspace}
    forward, backward = halves
    lasting = {
        s for s in joint.returned if joint.results_last and joint.storages[s].maker != OUTSIDE
    }
    inputs = storages(backward.inputs)
    tangents = set(joint.tangents)
    there = {
        s for s in inputs.values() if joint.storages[s].maker != OUTSIDE or s in tangents
    } | lasting
    # Autograd holds the gradients that it passes to compiled code until that returns.
    stays = lasting | tangents
    nbytes = {s: joint.storages[s].nbytes for s in there}
    one = Walk({}, {}, workspace).through(forward.lines or ())
    two = Walk(inputs, {s: n for s, n in nbytes.items() if s not in stays}, workspace)
    last = two.through(backward.lines or ())
    if one is None or last is None:
        return None
    return one, sum(nbytes.values()) + last


class Walk:
    """Tracks buffers through the names that code gives them.

    Args:
        inputs: storage of each input.
        going: bytes of the inputs' storages that are freed after their last use.
        workspace: workspace bytes of the calls made from certain nodes.
    """

    def __init__(
        self, inputs: dict[str, int], going: dict[int, int], workspace: dict[str, int]
    ) -> None:
        self.workspace = workspace
        self.bytes: dict[int, int] = dict(going)
        self.names: dict[int, int] = {}  # how many names each buffer has
        self.of: dict[str, list[int]] = {}
        self.new = 1 + max(inputs.values(), default=0)
        for name, storage in inputs.items():
            self._name(name, [storage])

    def _name(self, name: str, buffers: list[int]) -> None:
        self.of[name] = buffers
        for buffer in buffers:
            self.names[buffer] = self.names.get(buffer, 0) + 1

    def _take(self, nbytes: int) -> int:
        self.new += 1
        self.bytes[self.new] = nbytes
        return self.new

    def through(self, lines: tuple[Line, ...]) -> int | None:
        """The highest level, relative to that at the start; None if a name is unknown."""
        pieces: dict[str, list[Line]] = {}
        for line in lines:
            if line.kind == "piece":
                pieces.setdefault(line.of, []).append(line)
        level = peak = 0
        for line in lines:
            if line.kind == "take":
                self._name(line.name, [self._take(line.nbytes)])
                level += line.nbytes
            elif line.kind == "several":
                mine = [self._take(piece.nbytes) for piece in pieces.get(line.name, ())]
                self._name(line.name, mine)
                for piece, buffer in zip(pieces.get(line.name, ()), mine, strict=True):
                    self.of[piece.name] = [buffer]
                level += sum(self.bytes[buffer] for buffer in mine)
            elif line.kind == "piece":
                if line.name not in self.of:
                    return None
                self._name(line.name, self.of[line.name])
            elif line.kind == "same":
                self._name(line.name, self.of.get(line.of, []))
            elif line.kind == "free":
                level -= self._free(line.name)
            beside = next((self.workspace[n] for n in line.nodes if n in self.workspace), 0)
            peak = max(peak, level + beside)
        return peak

    def _free(self, name: str) -> int:
        gone = 0
        for buffer in self.of.pop(name, []):
            self.names[buffer] -= 1
            if not self.names[buffer]:
                gone += self.bytes.get(buffer, 0)
        return gone
