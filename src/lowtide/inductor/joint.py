"""A joint graph of forward and backward as operations and storages, in flat lists.

Problem: torch hands its partitioner thousands of FX nodes, many of them views, tuples and symbols;
choosing what to save needs bytes, times and dependencies. Invariant: a storage is counted once,
however many nodes see it, and its bytes come from the traced shapes (for a symbolic size, its value
while compiling; for one that is found in data, the largest). What must not run twice is not
`again`: collectives, custom operators, writes, calls of whole graphs, what finds sizes in data, and
what reads an input that the forward overwrites. Imports `_compat`, nodes, costs, scratchpad,
workspace. Rejected: one value per node, as in torch's own knapsack, which counts a storage once for
each of its views.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import partitioner, symbolic
from lowtide.inductor.nodes import (
    by_element,
    device_of,
    draws,
    elements_of,
    fusible,
    in_channels_last,
    is_view,
    key_of,
    nbytes_of,
    numel_of,
    returns_new,
    taken_in,
    values_of,
    writes,
)
from lowtide.kernels.costs import CostModel, DeviceModel
from lowtide.kernels.scratchpad import scratchpad
from lowtide.kernels.workspace import kernel_workspace
from lowtide.tape.values import flatten

OUTSIDE = -1
"""The maker of a storage that the graph does not make: a parameter, a buffer, an input."""

_AGAIN = ("aten", "prims", "inductor_prims", "prim")
# Nanoseconds on one core that computing an element costs in a fused kernel, besides moving its
# memory: for these slow functions (a random number is one), and for anything else.
_SLOW = frozenset(
    ("exp", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh", "erf", "gelu", "gelu_backward",
     "sigmoid", "silu", "pow", "softplus", "inductor_random")
)  # fmt: skip
_NS_SLOW, _NS_PLAIN = 0.8, 0.08
# On a CPU, Inductor writes results of these to memory if they are read more than once.
_REUSED = frozenset(("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"))
# Bytes of a random state on the CPU. An accelerator's takes none of its memory: torch keeps it in a
# generator or, as 16 bytes, on the CPU (`functionalize_rng_ops`).
_STATE = 5056


@dataclass(slots=True)
class Op:
    """One operation that is not a view.

    Attributes:
        node: its FX node.
        reads, makes: storages.
        seconds: of its kernel; if fused, of its share of one, without moving memory.
        workspace: bytes that the kernel allocates while it runs.
        fused: Inductor generates its code and may fuse it with its neighbours.
        inlined: it does so elementwise, and may compute it where it is read.
        slow: has a function that Inductor does not compute twice on a CPU.
        elements: elements that a fused operation iterates over.
        taken_in: a product that is merged with the sum that reads it (addmm).
        again: may run a second time, in the backward.
        late: depends on an incoming gradient.
        state: bytes of the random state that the device saves for it if it runs twice.
        inner: the graphs that it calls, of which one runs at a time.
    """

    node: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    workspace: int
    fused: bool
    inlined: bool
    slow: bool
    elements: int
    taken_in: bool
    again: bool
    late: bool
    state: int
    inner: tuple[Joint, ...] = ()


@dataclass(slots=True)
class Storage:
    """Memory of one or more nodes.

    Attributes:
        nbytes: its size.
        maker: index of the operation that makes it, or `OUTSIDE`.
        node: the first node that returns it as a tensor; to save it, this node is saved.
    """

    nbytes: int
    maker: int
    node: Any


class Joint:
    """The facts of one joint graph.

    Attributes:
        ops: operations, in the order of the trace.
        storages: what they read and make.
        returned: storages that the forward returns to its caller.
        gradients: storages that the backward makes and returns.
        parameter_gradients: those of them that are gradients of parameters, which stay.
        tangents: storages of the incoming gradients.
        first_late: index of the first operation that is traced once an incoming gradient is read;
            -1: none is.
        passed_on: nodes that get a storage back from a call of graphs that it was given to. Only
            that call can make them, so they are saved with it.
        required: storages that a checkpoint's policy inside, or torch itself, says must be saved.
        bound: all that have to be saved if the backward reads them.
        results_last: whether the caller holds `returned` while this graph's backward runs.
        bandwidth: bytes per second that fused kernels move.
        on_cpu: whether all of it is on the CPU.
    """

    def __init__(
        self,
        traced: partitioner.JointGraph | partitioner.Subgraph,
        *,
        fuse: bool,
        results_last: bool = True,
    ) -> None:
        self.traced: Any = traced
        self.fuse = fuse
        self.results_last = results_last
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self._by_key: dict[int, int] = {}
        self._seen: dict[Any, tuple[int, ...]] = {}
        self._parts: dict[Any, list[tuple[int, ...]]] = {}  # by result of a call of graphs
        self.passed_on: dict[int, list[Any]] = {}
        self._late = traced.tangent_dependent()
        self.tangents: list[int] = []
        device = device_of(traced.nodes)
        self.on_cpu = device.type == "cpu"
        self._costs = CostModel(device)
        self.model: DeviceModel = self._costs.model
        self.bandwidth = self.model.bandwidth
        # What reads these must not run again: it would read the new content.
        self._overwritten = traced.overwritten()
        self._changed: set[int] = set()
        converted = traced.converted_inputs() if fuse else frozenset()
        self._channels_last = fuse and traced.prefers_channels_last()
        self.first_late = -1
        for node in traced.nodes:
            if self.first_late < 0 and node in self._late and node.op != "placeholder":
                self.first_late = len(self.ops)
            self._enter(node)
            if node in converted:
                self._convert(node)
        forward, backward = traced.results()
        self.returned = self._of(forward)
        self.gradients = self._made(backward)
        self.parameter_gradients = self._made(
            [backward[place] for place in traced.static if place < len(backward)]
        )
        self.required = self._made([n for n in traced.nodes if partitioner.must_be_saved(n)])
        once = (op for op in self.ops if not op.again and not op.late)
        self.bound = self.required.union(made for op in once for made in op.makes)
        self.bound |= {s for s in self.passed_on if self.storages[s].maker != OUTSIDE}

    def is_input(self, node: Any) -> bool:
        """Whether a node is an input tensor of the forward, which costs nothing to hold."""
        return node.op == "placeholder" and node not in self._late and bool(self._seen.get(node))

    def storages_of(self, node: Any) -> tuple[int, ...]:
        """The storages of a node's result."""
        return self._seen.get(node, ())

    def _of(self, results: list[Any]) -> frozenset[int]:
        return frozenset(s for node in results for s in self._seen.get(node, ()))

    def _made(self, results: list[Any]) -> frozenset[int]:
        return frozenset(s for s in self._of(results) if self.storages[s].maker != OUTSIDE)

    # ------------------------------------------------------------------ entering the nodes

    def _enter(self, node: Any) -> None:
        value = node.meta.get("val")
        if node.op == "output":
            return
        if node.op in ("placeholder", "get_attr"):
            self._seen[node] = self._stored(node, value, OUTSIDE)
            if node in self._overwritten:
                self._changed.update(self._seen[node])
            if node in self._late:
                self.tangents.extend(self._seen[node])
            return
        inputs = node.all_input_nodes
        reads = tuple(dict.fromkeys(s for n in inputs for s in self._seen.get(n, ())))
        if node.target is operator.getitem:
            source, parts = self._seen.get(node.args[0], ()), self._parts.get(node.args[0])
            found = self._picked(node, source, value) if parts is None else self._part(node, parts)
            self._seen[node] = found
            return
        subgraphs = partitioner.subgraphs_of(self.traced.module, node)
        if subgraphs or (returns_new(node, _AGAIN) and self._seem_known(value)):
            self._call(node, reads, value, tuple(Joint(s, fuse=self.fuse) for s in subgraphs))
            return
        known = self._aliased(value)
        if known is None and is_view(node):  # a view that a pass of Inductor's inserted
            known = reads[:1]
        if known is not None and not writes(node):
            self._seen[node] = known
            return
        if not isinstance(value, torch.Tensor | tuple | list) and not reads:
            self._seen[node] = ()  # arithmetic on symbols
            return
        index = len(self.ops)
        makes = () if writes(node) else self._stored(node, value, index)
        self._seen[node] = reads[:1] if writes(node) else makes
        self.ops.append(self._operation(node, reads, makes))

    def _convert(self, node: Any) -> None:
        """Replace an input by the copy that Inductor makes of it, which is what gets saved."""
        (source,) = self._seen[node]
        made, index = len(self.storages), len(self.ops)
        self.storages.append(Storage(self.storages[source].nbytes, index, None))
        copy = Op(node, (source,), (made,), 0.0, 0, fused=True, inlined=False, slow=False,
                  elements=numel_of(node.meta["val"]), taken_in=False, again=False, late=False,
                  state=0)  # fmt: skip
        self.ops.append(copy)
        self._seen[node] = (made,)

    def _stored(self, node: Any, value: Any, maker: int) -> tuple[int, ...]:
        """New storages for what a node returns."""
        found = []
        for tensor in flatten(value):
            if not isinstance(tensor, torch.Tensor):
                continue
            key = key_of(tensor)
            number = self._by_key.get(key) if key is not None else None
            if number is None:
                number = len(self.storages)
                plain = node if isinstance(value, torch.Tensor) else None
                self.storages.append(Storage(nbytes_of(tensor), maker, plain))
                if key is not None:
                    self._by_key[key] = number
            found.append(number)
        return tuple(found)

    def _call(
        self, node: Any, reads: tuple[int, ...], value: Any, inner: tuple[Joint, ...]
    ) -> None:
        """Enter a call of whole graphs, or of a custom operator, whose results are new.

        What torch has traced as its results may be those of another call of the same graphs, or an
        argument that stands for them, and says nothing of storages: which results of a graph are
        arguments follows from the graph itself.
        """
        operands = partitioner.call_of_one(node)
        places: dict[int, tuple[int, ...]] = {}  # by storage of the graph that is called
        returned: list[Any] = []
        if operands is not None:
            returned = inner[0].traced.results()[0]
            inputs = [n for n in inner[0].traced.nodes if n.op == "placeholder"]
            for given, taken in zip(operands, inputs, strict=False):
                places |= dict.fromkeys(inner[0].storages_of(taken), self._seen.get(given, ()))
        index = len(self.ops)
        makes: list[int] = []
        parts: list[tuple[int, ...]] = []
        for place, item in enumerate(value if isinstance(value, tuple | list) else [value]):
            below = inner[0].storages_of(returned[place]) if place < len(returned) else ()
            known = places.get(below[0], ()) if below else ()
            if not known and isinstance(item, torch.Tensor):
                known = (len(self.storages),)
                places |= dict.fromkeys(below, known)
                makes.extend(known)
                plain = node if isinstance(value, torch.Tensor) else None
                self.storages.append(Storage(nbytes_of(item), index, plain))
            parts.append(known)
        self._parts[node] = parts
        self._seen[node] = tuple(dict.fromkeys(s for part in parts for s in part))
        op = self._operation(node, reads, tuple(makes))
        if inner:
            op.inner, op.seconds = inner, max(sum(o.seconds for o in each.ops) for each in inner)
        self.ops.append(op)

    def _seem_known(self, value: Any) -> bool:
        """Whether traced results share their storages with one another or with other tensors."""
        keys = [key_of(tensor) for tensor in flatten(value) if isinstance(tensor, torch.Tensor)]
        return len(set(keys)) < len(keys) or any(key in self._by_key for key in keys)

    def _part(self, node: Any, parts: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The storage of one of several results of a call of graphs."""
        found: tuple[int, ...] = parts[node.args[1]]
        for number in found:
            if self.storages[number].node is None:
                self.storages[number].node = node
            else:
                self.passed_on.setdefault(number, []).append(node)
        return found

    def _picked(self, node: Any, source: tuple[int, ...], value: Any) -> tuple[int, ...]:
        """The storage of one of several results (`getitem`)."""
        place = node.args[1]
        key = key_of(value) if isinstance(value, torch.Tensor) else None
        number = self._by_key.get(key) if key is not None else None
        if number is None and len(source) > place:
            number = source[place]
        if number is None:
            return ()
        if self.storages[number].node is None and isinstance(value, torch.Tensor):
            self.storages[number].node = node
        return (number,)

    def _aliased(self, value: Any) -> tuple[int, ...] | None:
        """The storages of a result that is only views; None if some of it is new."""
        tensors = [t for t in flatten(value) if isinstance(t, torch.Tensor)]
        keys = [key_of(tensor) for tensor in tensors]
        numbers = [self._by_key.get(key) if key is not None else None for key in keys]
        found = tuple(n for n in numbers if n is not None)
        return found if tensors and len(found) == len(tensors) else None

    def _operation(self, node: Any, reads: tuple[int, ...], makes: tuple[int, ...]) -> Op:
        fused = self.fuse and fusible(node) and not any(map(taken_in, node.all_input_nodes))
        again = (
            partitioner.is_overload(node.target)
            and node.target.namespace in _AGAIN
            and not _compat.schema_of(node.target).is_mutable
            and not (draws(node) and self.fuse and node.target.namespace != "aten")
            and self._changed.isdisjoint(reads)
            and not symbolic.sizes_from_data(node)
        )
        args, kwargs = values_of((node.args, node.kwargs))
        result = node.meta.get("val")
        made = sum(self.storages[number].nbytes for number in makes)
        seconds, workspace = self.model.launch, 0
        inlined, elements = fused and isinstance(result, torch.Tensor), 0
        if partitioner.is_overload(node.target):
            if fused:
                elements = elements_of(node, result)
                inlined = inlined and by_element(node)
                seconds = self._computing(node, elements)
            else:
                result = values_of(result)
                seconds = self._costs.seconds(node.target, args, kwargs, result)
                name = _compat.schema_of(node.target).name
                if self._channels_last and name.startswith("aten::convolution"):
                    args = [in_channels_last(arg) for arg in args]
                tensors = [t for a in args for t in flatten(a) if isinstance(t, torch.Tensor)]
                workspace = int(kernel_workspace(name, tensors, args, made))
                if self.on_cpu and "convolution" in name:  # of which no step is measured
                    workspace += scratchpad(name, args)
        late, state = node in self._late, _STATE if draws(node) and self.on_cpu else 0
        slow = inlined and node.target.overloadpacket.__name__ in _REUSED
        return Op(
            node, reads, makes, seconds, workspace, fused, inlined, slow, elements,
            self.fuse and taken_in(node), again, late, state,
        )  # fmt: skip

    def _computing(self, node: Any, elements: int) -> float:
        """Seconds in a fused kernel, besides moving memory."""
        name = node.target.overloadpacket.__name__
        each = _NS_SLOW if name in _SLOW else _NS_PLAIN
        cores = max(1.0, self.model.flops / 9e10)
        return elements * each * 1e-9 / cores
