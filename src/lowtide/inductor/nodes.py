"""Facts of single nodes of a joint graph, and of the tensors that were traced there.

Problem: bytes, storages and what Inductor does with an operator have to be read off FX nodes, whose
values may be symbols. Invariant: nothing here knows more of the graph than a node and its readers.
Imports `_compat` and the tape's `flatten`. Rejected: asking Inductor, which knows only once it has
lowered.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import partitioner, symbolic
from lowtide.tape.values import flatten

# Never inlined elementwise into their readers.
_WHOLE = frozenset(("cat", "cumsum", "cumprod", "logcumsumexp", "inductor_random"))


def device_of(nodes: list[Any]) -> torch.device:
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


def key_of(tensor: torch.Tensor) -> int | None:
    try:
        return _compat.storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def in_channels_last(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return value
    return value.to(memory_format=torch.channels_last)


def numel_of(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= symbolic.size_hint(size)
    return count


def elements_of(node: Any, result: Any) -> int:
    """Elements that a fused operation iterates over: of its result, or of what it reduces."""
    counted = [*flatten(result), *(n.meta.get("val") for n in node.all_input_nodes)]
    return max((numel_of(t) for t in counted if isinstance(t, torch.Tensor)), default=0)


def taken_in(node: Any) -> bool:
    """Whether Inductor merges a product and the sum that reads it into one operation (addmm)."""
    if node.target is not torch.ops.aten.mm.default or len(node.users) != 1:
        return False
    (user,) = node.users
    return (
        user.target is torch.ops.aten.add.Tensor
        and len(user.all_input_nodes) == 2
        and all(n.meta["val"].shape == user.meta["val"].shape for n in user.all_input_nodes)
    )


def by_element(node: Any) -> bool:
    """Whether Inductor can compute an element of the result by itself, where it is read."""
    target = node.target
    return torch.Tag.reduction not in target.tags and target.overloadpacket.__name__ not in _WHOLE


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the storage that sizes and strides reach."""
    reach = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size = symbolic.size_hint(size)
        if size == 0:
            return 0
        reach += (size - 1) * symbolic.size_hint(stride)
    return reach * tensor.element_size()


def has_unknown_sizes(node: Any) -> bool:
    """Whether it returns tensors whose sizes are found in data, of which nothing is known."""
    tensors = [t for t in flatten(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    return not all(symbolic.is_bounded(size) for t in tensors for size in t.shape)


def writes(node: Any) -> bool:
    target = node.target
    return partitioner.is_overload(target) and bool(_compat.schema_of(target).is_mutable)


def is_view(node: Any) -> bool:
    target = node.target
    return partitioner.is_overload(target) and bool(target.is_view)


def returns_new(node: Any, trusted: tuple[str, ...]) -> bool:
    """Whether an operator says that its results are new, though it may have been traced as if they
    were an argument (`register_fake(lambda x: x)`). Those of `trusted` namespaces are not."""
    target = node.target
    if not partitioner.is_overload(target) or target.namespace in trusted:
        return partitioner.calls_mutating_operator(node)
    return not any(result.alias_info for result in _compat.schema_of(target).returns)


def draws(node: Any) -> bool:
    """Whether an operation draws random numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def fusible(node: Any) -> bool:
    target = node.target
    packet = target.overloadpacket if partitioner.is_overload(target) else target
    return packet in partitioner.fusible_operators() or (
        getattr(target, "namespace", "") in ("prims", "inductor_prims") and not draws(node)
    )


def values_of(tree: Any) -> Any:
    """The arguments of a node: traced tensors in place of nodes, integers in place of symbols."""
    if isinstance(tree, torch.fx.Node):
        return values_of(tree.meta.get("val"))
    if isinstance(tree, torch.SymInt):
        return symbolic.size_hint(tree)
    if isinstance(tree, torch.Tensor):
        return symbolic.with_hinted_sizes(tree)
    if isinstance(tree, dict):
        return {key: values_of(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(values_of(item) for item in tree)
    return tree
