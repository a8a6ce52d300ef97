"""Where everything in a step comes from: a ledger written during a dry run.

Problem: a graph says how many bytes there are, not what they belong to. "Why is my memory not going
down?" is answered by names: this module, this operator, this line. Invariant: numbers and names
only, never a tensor that the step would have freed; every storage of a dry run is entered once,
when it is made, and closed once, when it is freed (see `ledger`). Imports ledger, memory, tape,
`_compat`. Rejected: inspecting autograd's graph afterwards, which does not know the modules, nor
what was freed before the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.dryrun.ledger import Block, Ledger, Output, Saved, Site, Step
from lowtide.dryrun.lines import line_of_caller
from lowtide.dryrun.memory import FakeMemory
from lowtide.kernels.costs import CostModel
from lowtide.observing.rebuild import found_externals, recorded
from lowtide.tape.values import Handle, Value, flatten

if TYPE_CHECKING:
    from lowtide.dryrun.found import Found
    from lowtide.observing.observer import Observer

_LAST_NODE = 1 << 62  # AccumulateGrad nodes have the largest sequence number, above this


class Witness:
    """Writes a ledger while a step is traced, from a call of `begins` to one of `ends`."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.ledger: Ledger | None = None
        self._clear()

    def _clear(self) -> None:
        self._memory: _Counted | None = None
        self._sites: list[Site] = []
        self._nodes: list[int] = []  # sequence numbers of autograd nodes; `_places`: their sites
        self._places: list[Site] = []
        self._saved: dict[int, Saved] = {}
        self._foreign: dict[int, Saved] = {}
        self._outputs: list[Output] = []
        self._named: dict[int, tuple[str, str]] = {}
        self._standing: dict[str, int] = {}
        self._leaves: list[tuple[str, torch.Tensor]] = []
        self._grad_mode: list[tuple[bool, bool]] = []
        self._backward = False
        self._own_backward = False
        self._in_regions = False

    # ------------------------------------------------------------------ called by the dry run

    def counts(self, costs: CostModel, mode: Any) -> FakeMemory:
        """The memory counter for a dry run."""
        self._clear()
        self._memory = _Counted(costs, mode, self)
        return self._memory

    def starts_over(self) -> None:
        """The dry run failed, and a real step is recorded instead."""
        self._clear()

    def begins(self, found: Found, seen_as: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The step begins. `seen_as` gives the tensor that it will see in place of a found one."""
        parameters: dict[str, torch.Tensor] = {}
        counts = {"parameter": 0, "buffer": 0, "input": 0, "gradient": 0}
        names = found.names()
        for module in found.modules():
            prefix = names.get(id(module), "")
            for kind, tensors in zip(
                ("parameter", "buffer"), _compat.parameters_and_buffers(module), strict=True
            ):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        label = ".".join(filter(None, (prefix, name)))
                        counts[kind] += self._stands(kind, label, seen_as(tensor))
                        parameters.setdefault(label, tensor)
        for place, tensor in enumerate(found.tensors):
            counts["input"] += self._stands("input", f"input {place}", seen_as(tensor))
            parameters.setdefault(f"input {place}", tensor)
        seen: set[int] = set()
        for name, tensor in parameters.items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if tensor.grad is not None:
                counts["gradient"] += tensor.grad.numel() * tensor.grad.element_size()
            if tensor.is_leaf and tensor.requires_grad:
                self._leaves.append((name, seen_as(tensor)))
        self._standing = counts
        self._frozen = [
            (name, t.requires_grad) for name, t in parameters.items()
            if isinstance(t, torch.nn.Parameter)
        ]  # fmt: skip

    def _stands(self, kind: str, name: str, seen: torch.Tensor) -> int:
        storage = _compat.storage_of(seen)
        if storage is None or _compat.storage_id(storage) in self._named:
            return 0
        self._named[_compat.storage_id(storage)] = (kind, name)
        return storage.nbytes()

    def operation(self, name: str, made: list[Value]) -> None:
        """An operation was recorded; `made` are the values it made."""
        memory = self._memory
        self._in_regions |= any(value.region.parent is not None for value in made)
        self._sites.append(
            Site(name, self._module(), memory.line if memory is not None else line_of_caller())
        )
        if memory is not None:
            self._grad_mode.append((torch.is_grad_enabled(), memory.reads_grad))
            fresh, memory.fresh = memory.fresh, []
            # Match from the end: the first blocks may be from calls that were not recorded.
            for value in reversed(made):
                for place in reversed(range(len(fresh))):
                    if fresh[place].nbytes == value.nbytes:
                        fresh[place].values.append(value.number)
                        del fresh[place]
                        break

    def saved(self, value: Value, handle: Handle) -> None:
        """Autograd saves a value, or another view of it."""
        held = value.held
        storage = None if held is None else _compat.storage_of(held)
        block = None
        if storage is not None and self._memory is not None:
            block = self._memory.entry(_compat.storage_id(storage))
            if block is not None:
                block.saved = True
                if value.number not in block.values:
                    block.values.append(value.number)
        if self._backward:
            return  # a forward after the first backward: some saved values were released by then
        shape, dtype = tuple(handle.ref.size), _dtype(handle.ref.dtype)
        place = -1 if block is None else block.place
        if value.number >= 0:
            if value.number not in self._saved:
                made = -1 if value.op is None else value.op.sequence
                site = self._sites[made] if 0 <= made < len(self._sites) else None
                site = site or (block.site if block is not None else Site())
                self._saved[value.number] = Saved(
                    value.number, value.nbytes, shape, dtype, "activation", "", site, place
                )
            return
        key = id(value) if storage is None else _compat.storage_id(storage)
        if key in self._foreign:
            return
        known = self._named.get(key)
        if known is None and block is None and self._memory is not None:
            known = "input", "constant"  # not made in this step, so it existed before
        if known is not None:
            kind, name = known
            self._foreign[key] = Saved(-1, value.nbytes, shape, dtype, kind, name, Site(), -1)
        else:
            site = Site() if block is None else block.site
            self._foreign[key] = Saved(-1, value.nbytes, shape, dtype, "unseen", "", site, place)

    def returned(self, results: list[torch.Tensor], recorder: Any) -> None:
        """Describe what the step returned; no tensor is kept."""
        self._own_backward = self._backward
        for tensor in results:
            entry = recorder.entry_of(tensor)
            value = None if entry is None else recorder.value_in(entry)
            place = -1 if value is None or value.op is None else value.op.sequence
            site = self._sites[place] if place >= 0 else Site()
            self._outputs.append(
                Output(
                    tuple(tensor.shape),
                    _dtype(tensor.dtype),
                    tensor.requires_grad,
                    site,
                    self._why(tensor, place),
                )
            )

    def _why(self, tensor: torch.Tensor, place: int) -> str:
        if tensor.requires_grad:
            if tensor.grad_fn is None:
                return "it is a leaf with requires_grad"
            leaves = {id(leaf) for leaf in _compat.leaves_behind([tensor])}
            names = [name for name, leaf in self._leaves if id(leaf) in leaves]
            what = f"{len(leaves)} leaves that require grad"
            if len(leaves) == 1:
                what = "one leaf that requires grad"
            if names:
                what += f", {names[0]} among them" if len(leaves) > 1 else f", {names[0]}"
            return f"it was computed, with grad enabled, from {what}"
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return f"its dtype is {_dtype(tensor.dtype)}, and only floating point carries gradients"
        enabled, reads = (
            self._grad_mode[place] if 0 <= place < len(self._grad_mode) else (True, False)
        )
        if not enabled:
            return "it was made with grad disabled (no_grad or inference_mode)"
        if reads:
            return "it was cut off after it was made (detach, .data or a no_grad block)"
        frozen = sum(not on for _, on in self._frozen)
        told = "nothing that it was computed from requires grad"
        if not self._frozen:
            return f"{told}; the step was found to have no parameters"
        if not frozen:
            return f"{told}: it was detached before, or made from none of the parameters"
        return f"{told} ({frozen} of {len(self._frozen)} parameters are frozen)"

    def backward_begins(self) -> None:
        self._backward = True

    def collected(self, leaves: list[torch.Tensor]) -> None:
        """Note the gradients of leaves that `Found` did not find, before they are taken back."""
        self._collect((f"leaf {place}", leaf) for place, leaf in enumerate(leaves))

    def _collect(self, leaves: Any) -> None:
        if self._memory is None:
            return
        for name, leaf in leaves:
            storage = None if leaf.grad is None else _compat.storage_of(leaf.grad)
            block = None if storage is None else self._memory.entry(_compat.storage_id(storage))
            if block is not None:
                block.gradient, block.name = True, name

    def ends(self, observer: Observer) -> None:
        """The step is over: write the ledger and drop all references to tensors."""
        self._collect(self._leaves)
        memory = self._memory
        names = {id(leaf): name for name, leaf in self._leaves}
        externals = dict(enumerate(found_externals(observer), recorded(observer)))
        if memory is not None:
            memory.number({number: one.place for number, one in externals.items()})
        before, marks = 0, []
        for log in observer.ops:
            marks.append((log.begin or before, log.mark))
            before = log.mark
        self.ledger = Ledger(
            tuple(self._sites),
            (*self._saved.values(), *self._foreign.values()),
            self._standing,
            (len(self._frozen), sum(on for _, on in self._frozen)),
            tuple(self._outputs),
            () if memory is None else tuple(memory.blocks),
            () if memory is None else tuple(memory.steps),
            tuple(observer.requests),
            frozenset(
                n for n in observer.held_from_forward() if n >= 0 and n not in observer.pinned
            ).union(externals),
            tuple(
                (nbytes, reader, names.get(key, ""))
                for key, (reader, nbytes) in observer.leaves.gradients.items()
            ),
            tuple(marks),
            self._own_backward,
            self._in_regions,
        )
        if memory is not None:
            memory.closed()
        self._clear()

    # ------------------------------------------------------------------ the current site

    def _module(self) -> str:
        return self.inside[-1] if self.inside else ""

    def site(self, name: str) -> Site:
        """The site of the current call; in backward, that of the forward call it belongs to."""
        if not self._backward:
            site = Site(name, self._module(), line_of_caller())
            node = _compat.newest_node()
            if not self._nodes or self._nodes[-1] < node:
                self._nodes.append(node)
                self._places.append(site)
            return site
        running = _compat.node_in_backward()
        # A write through a view adds another node after that of its operator.
        found = -1 if running is None else bisect_right(self._nodes, running) - 1
        if found < 0 or running is None or running > _LAST_NODE:
            return Site(name)
        return Site(name, self._places[found].module, self._places[found].line)


class _Counted(FakeMemory):
    """Counts as `FakeMemory`, and records every storage and call."""

    def __init__(self, costs: CostModel, mode: Any, witness: Witness) -> None:
        super().__init__(costs, mode)
        self._witness = witness
        self.blocks: list[Block] = []
        self.steps: list[Step] = [Step(Site(), 0, 0, 0)]
        self.fresh: list[Block] = []  # made since the last recorded operation
        self.line = ""
        self.reads_grad = False
        self._open: dict[int, Block] = {}
        self._noted_blocks: list[Block | None] = []
        self._site = Site()
        usual = self._forget

        def forget(block: Any) -> None:
            entry = self._open.pop(block.key, None)
            if entry is not None:
                entry.died = len(self.steps)
            usual(block)

        self._forget = forget

    def entry(self, key: int) -> Block | None:
        """The block of a live storage."""
        return self._open.get(key)

    def note(self, storage: torch.UntypedStorage) -> int:
        self._noted_blocks.append(self.entry(_compat.storage_id(storage)))
        return super().note(storage)

    def number(self, places: dict[int, int]) -> None:
        """Say which of the storages that were noted are which values, by their places."""
        for number, place in places.items():
            block = self._noted_blocks[place] if place >= 0 else None
            if block is not None:
                block.values.append(number)

    def closed(self) -> None:
        """The step is over: what is freed from now on is not part of it."""
        self._open.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if fakes.asks_for_device(func):
            return args[0].fake_device
        self._site = self._witness.site(_compat.schema_of(func).name)
        self.line = self._site.line
        self.reads_grad = any(
            isinstance(t, torch.Tensor) and t.requires_grad for a in args for t in flatten(a)
        )
        before, self.peak = self.peak, 0
        result = super().__torch_dispatch__(func, types, args, kwargs)
        here, self.peak = max(self.peak, self.level), max(before, self.peak)
        self.steps.append(Step(self._site, len(self._levels) - 1, self.level, here))
        return result

    def _count(self, args: Any, kwargs: Any, result: Any) -> int:
        known = len(self._known)
        made = super()._count(args, kwargs, result)
        if len(self._known) > known:
            for tensor in flatten(result):
                storage = _compat.storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
                if storage is None or _compat.storage_id(storage) in self._open:
                    continue
                if _compat.storage_id(storage) in self._known:
                    block = Block(
                        len(self.blocks),
                        storage.nbytes(),
                        self._site,
                        tuple(tensor.shape),
                        _dtype(tensor.dtype),
                        len(self.steps),
                    )
                    self._open[_compat.storage_id(storage)] = block
                    self.blocks.append(block)
                    self.fresh.append(block)
        return made

    def mark(self) -> int:
        index = super().mark()
        # The level between two operators: since the last one, memory can only have been freed.
        self.steps.append(Step(Site(), index, self.level, self.level))
        return index


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
