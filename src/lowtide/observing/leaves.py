"""The leaves that a step reads: which gradients backward will allocate, and after which operation.

Problem: a leaf's gradient exists from the backward of its last reader (which backward reaches
first) to the end of the step, and is not the result of any operation. Invariant: leaves are known
by weak references and by identity; only gradients that do not exist yet are counted. Imports
`_compat` and sharded. Rejected: going through a model's parameters, which shows neither what a step
reads nor leaves that are not parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from lowtide import _compat
from lowtide.tape.sharded import is_freed

if TYPE_CHECKING:
    from lowtide.observing.seen import Seen
    from lowtide.running.where import Where
    from lowtide.tape.known import Entry


class Read(NamedTuple):
    """One operation that reads a leaf, or a part of it."""

    op: int
    nbytes: int
    """Bytes that it reads."""
    between: int = 0
    """Bytes of the largest gradient that is made on the way to the leaf's own."""
    way: _compat.Way | None = None
    """If it reads a view, how the leaf gets its gradient; None for the leaf itself, or unknown."""
    argument: int = -1
    """Which it is of the operation's arguments that require grad."""
    whole: bool = False
    """Whether it reads the leaf itself."""


class Leaves:
    """The leaves that a step reads and that get a gradient, or might.

    Attributes:
        gradients: leaf -> (last reader, bytes), for the gradients to be allocated.
        known: leaf -> (last reader, the leaf), for all leaves that may get one.
        reads: leaf -> the operations that read it, as far as they were watched.
        nodes: for each operation, the number of autograd's newest node when it ran.
        frozen: parameters that get none.
        where: the device whose bytes count; gradients on others count as none. None: all do.
        parts: for storages of which FSDP2 leaves this rank a part of the gradient, by their keys:
            how many parts there are.
    """

    def __init__(self) -> None:
        self.where: Where | None = None
        self.gradients: dict[int, tuple[int, int]] = {}
        self.known: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self.reads: dict[int, list[Read]] = {}
        self.nodes: list[int] = []
        self.frozen: dict[int, weakref.ref[torch.Tensor]] = {}
        self.parts: dict[int, int] = {}
        self._alone: list[weakref.ref[torch.Tensor]] = []  # read by what nobody watched
        self._sizes: dict[int, int] = {}  # of gradients: those of tables may be sparse
        self._dense: set[int] = set()  # leaves with a gradient that is as large as they are
        # Leaf -> the key of the storage in which it was read.
        self._read_in: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}

    def resume(self, seen: Seen, count: int) -> None:
        """Start with the leaves that the first `count` operations of another step have read."""
        for key, (reader, nbytes) in seen.parameters.items():
            if reader < count:
                self.gradients[key] = (reader, nbytes)
        self.known = {key: leaf for key, leaf in seen.leaves.items() if leaf[0] < count}
        self.frozen = dict(enumerate(seen.frozen))
        self.nodes = [-1] * count

    def unwatched(self, count: int, nbytes: int, leaves: list[torch.Tensor]) -> None:
        """So many operations have run, of which nobody watched those after the ones that are noted:
        they have read leaves of so many bytes, these among them."""
        self._alone = list(map(_weak, leaves))
        self.nodes += [-1] * (count - len(self.nodes))
        if nbytes:  # there from the backward of the last of them on
            self.gradients[_UNKNOWN] = (count - 1, nbytes)

    def least(self) -> dict[int, tuple[int, int]]:
        """`gradients`, with those alone of what nobody watched that are certain to be allocated."""
        found = {key: it for key, it in self.gradients.items() if key != _UNKNOWN}
        if _UNKNOWN in self.gradients:
            reader, _ = self.gradients[_UNKNOWN]
            read = [leaf for weak in self._alone if (leaf := weak()) is not None]
            fresh = [leaf for leaf in read if leaf.grad is None and leaf.requires_grad]
            sizes = [self._size(leaf) for leaf in fresh if id(leaf) not in self.known]
            found[_UNKNOWN] = reader, sum(sizes)
        return found

    def ran(self, tensors: list[torch.Tensor], sparse: int | None = None) -> None:
        """The next operation reads these tensors. `sparse`: bytes of the gradient that it gives to
        the first, if that is a table that gets a sparse one."""
        self.nodes.append(_compat.newest_node())
        wanted = 0
        for tensor in tensors:
            if tensor.requires_grad:
                self._read(tensor, len(self.nodes) - 1, wanted, sparse)
                wanted += 1
            else:
                self._no_leaf(tensor)
            sparse = None

    def _read(self, tensor: torch.Tensor, op: int, argument: int, sparse: int | None) -> None:
        leaf = _compat.leaf_of(tensor)
        if leaf is None:
            _, leaf = _compat.first_view(tensor)
        if leaf is None:
            return
        self._was_in(tensor, leaf)
        size = self._bytes(tensor)
        self._sized(leaf, None if leaf is not tensor else sparse)
        way = None if leaf is tensor else _compat.way_to_leaf(tensor)
        between = 0 if way is None else way.between * leaf.element_size()
        self.known[id(leaf)] = (op, _weak(leaf))
        read = Read(op, size, between, way, argument, leaf is tensor)
        self.reads.setdefault(id(leaf), []).append(read)
        if leaf.grad is None:
            self.gradients[id(leaf)] = (op, self._size(leaf))

    def collecting(self) -> Iterator[tuple[int, int, int, bool]]:
        """(leaf, last reader, bytes of its gradient, whether that exists already)."""
        for key, (reader, nbytes) in self.gradients.items():
            yield key, reader, nbytes, False
        for key, (reader, weak) in self.known.items():
            leaf = weak()
            if leaf is not None and key not in self.gradients:
                yield key, reader, self._sizes.get(key, self._bytes(leaf)), True

    def _no_leaf(self, tensor: torch.Tensor) -> None:
        """A tensor that gets no gradient: note its parameter, which may be unfrozen later."""
        parameter = _compat.parameter_of(tensor)
        if parameter is None:
            return
        self._was_in(tensor, parameter)
        if not parameter.requires_grad and id(parameter) not in self.frozen:
            self.frozen[id(parameter)] = _weak(parameter)

    def _was_in(self, tensor: torch.Tensor, leaf: torch.Tensor) -> None:
        storage = _compat.storage_of(tensor)
        if storage is not None:
            self._read_in[id(leaf)] = _compat.storage_id(storage), _weak(leaf)

    def emptied(self, table: Mapping[int, Entry]) -> tuple[int, int]:
        """How many leaves the program has taken out of memory since it read them, by `.data`, and
        the bytes of that memory, which is there for replays alone. `table`: the storages alive."""
        count, found = 0, {}
        for key, weak in self._read_in.values():
            leaf, entry = weak(), table.get(key)
            storage = None if entry is None else entry()
            if leaf is None or entry is None or storage is None or is_freed(entry):
                continue
            now = _compat.storage_of(leaf)
            if now is None or _compat.storage_id(now) == key:
                continue
            if leaf.numel() == 0 or leaf.device != storage.device:
                count += 1
                found[key] = entry.nbytes
        return count, sum(found.values())

    def _bytes(self, tensor: torch.Tensor) -> int:
        if self.where is not None and not self.where.has(tensor):
            return 0
        return tensor.numel() * tensor.element_size()

    def _sized(self, leaf: torch.Tensor, sparse: int | None) -> None:
        """Another read gives the leaf a gradient: one as large as the leaf, or a sparse one, whose
        rows go beside those that there are: together they may be larger than the leaf. A sparse
        gradient and a dense one add up to a dense one."""
        key = id(leaf)
        if sparse is None:
            self._dense.add(key)
        there = self._sizes.get(key, 0)
        self._sizes[key] = self._bytes(leaf) if key in self._dense else there + (sparse or 0)

    def _size(self, leaf: torch.Tensor) -> int:
        """Bytes of the leaf's gradient on this rank."""
        return self._sizes.get(id(leaf), self._bytes(leaf)) // self._parts_of(leaf)

    def _parts_of(self, leaf: torch.Tensor) -> int:
        storage = _compat.storage_of(leaf) if self.parts else None
        return 1 if storage is None else self.parts.get(_compat.storage_id(storage), 1)

    def left(self) -> int:
        """Bytes of these gradients that are there after backward: a hook of the backward, such as
        an optimizer's step, may have used one up."""
        left = 0
        for key, (_, nbytes) in self.gradients.items():
            _, weak = self.known.get(key, (0, None))
            leaf = None if weak is None else weak()
            used = leaf is not None and leaf.grad is None and _compat.followed_by_hooks(leaf)
            left += 0 if used else nbytes
        return left

    def to_come(self, model: torch.nn.Module) -> int:
        """Bytes of gradients to be allocated for parameters that no operation has read so far."""
        return sum(
            self._bytes(parameter)
            for parameter in model.parameters()
            if parameter.requires_grad
            and parameter.grad is None
            and not isinstance(parameter, UninitializedParameter)  # a lazy layer still to come
            and id(parameter) not in self.gradients
        )

    def look_again(self) -> None:
        """Update: since the forward, gradients may have been set to None, or allocated, and
        parameters unfrozen that were frozen while it read them. Of those, a later step's
        `requires_grad` says nothing when it begins, nor when its backward does; that one of its
        operations wants more gradients does."""
        self.frozen = {
            key: weak
            for key, weak in self.frozen.items()
            if (parameter := weak()) is None or not parameter.requires_grad
        }
        for key, (reader, weak) in self.known.items():
            leaf = weak()
            if leaf is None:
                continue
            if leaf.grad is None:
                nbytes = self._size(leaf)
                _, before = self.gradients.get(key, (reader, nbytes))
                self.gradients[key] = (reader, min(nbytes, before))
            else:
                self.gradients.pop(key, None)


_UNKNOWN = -1  # in place of the id of a leaf


def _weak(leaf: torch.Tensor) -> weakref.ref[torch.Tensor]:
    return weakref.ref(leaf)
