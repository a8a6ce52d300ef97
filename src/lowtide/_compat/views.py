"""How autograd treats views: as what their nodes were made, and how gradients pass through them.

Problem: the gradient of a view may be copied, joined with those of its neighbours or made as large
as the whole on its way to the base, and only the names of the nodes on the way tell. Invariant: as
in `lowtide._compat`, of which this is a part; a graph is read, never changed, and no node is made
that torch would not have made by then. Imports torch. Rejected: hooks on every tensor, which change
what users see and when memory is freed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

_VIEWS = re.compile(
    "(View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Unsqueeze|Squeeze|Expand|Alias|Select|Slice"
    "|AsStrided|Diagonal|Unfold|Movedim)Backward[0-9]+"
)
_PASSING = re.compile(
    "(View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Unsqueeze|Squeeze|Alias|Movedim)Backward[0-9]+"
)
_SPLITS = re.compile("(Split|SplitWithSizes|Unbind)Backward[0-9]+")

_is_current: Callable[[torch.Tensor], bool] | None = None


def ask_whether_current(is_current: Callable[[torch.Tensor], bool]) -> None:
    """Let the compiled core, once it is loaded, tell whether a view's node is up to date."""
    global _is_current
    _is_current = is_current


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd treats a tensor as a view, which then refers to its base.

    `Tensor._is_view` has no public name.
    """
    return bool(tensor._is_view())


def base_is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of one that is contiguous."""
    return tensor._base is not None and tensor._base.is_contiguous()


def _node_of(tensor: torch.Tensor) -> Any:
    """Autograd's node for a tensor; None if it has none, or may not be asked for it.

    If the base of a view was written since, torch makes the view's node anew to answer. It would do
    so later, when an operation with a gradient reads the view: made now, the node has its turn in
    backward at another time. For views of another dtype, and of complex tensors, torch calls the
    function that made the view, which gives no node below autograd: the gradient would be lost.
    """
    if not torch.is_grad_enabled():
        return None
    base = tensor._base
    if base is None:
        return tensor.grad_fn
    if _is_current is not None:
        return tensor.grad_fn if _is_current(tensor) else None
    # Python cannot see which version the node is for. Parameters are written between steps.
    if base.dtype != tensor.dtype or tensor.is_complex():
        return None
    try:
        return tensor.grad_fn if not tensor._version or _is_a_leafs(base) else None
    except RuntimeError:  # such as a view of several, which torch refuses to make anew
        return None


def _is_a_leafs(base: torch.Tensor) -> bool:
    """Whether it is a leaf, or what autograd saved of one, or of a view of all of it."""
    if base._base is not None or base.is_leaf:
        return base._base is None
    node = base.grad_fn
    while node is not None and _PASSING.fullmatch(node.name()):
        node = node.next_functions[0][0]
    return hasattr(node, "variable")


def made_anew(tensor: torch.Tensor) -> int | None:
    """The number of the node that torch has made for a view whose base was written since, or of any
    other `as_strided` on the way to the base; 0 if it may have one, but it cannot be told.

    The gradient of such a node is made as large as the base, from zeros. The names of autograd's
    nodes are private to torch.
    """
    if not tensor._is_view():
        return None
    node = _node_of(tensor)
    if node is None:
        return 0
    while node is not None and _VIEWS.fullmatch(node.name()):
        if node.name().startswith("AsStrided"):
            return int(node._sequence_nr())
        node = node.next_functions[0][0]
    return None


def gradient_of_part(tensor: torch.Tensor) -> str:
    """How autograd makes the gradient of a value of which `tensor` is a part.

    "joined": all at once, from the gradients of the pieces of a `split`, and zeros for pieces that
    have none; "stacked": the same for an `unbind`, whose zeros take no memory; "padded": for this
    part alone, from zeros; "own": not at all, as autograd does not know that it is a part.

    The names of autograd's nodes are private to torch; an unknown one counts as "padded".
    """
    if tensor._base is None:
        return "own"
    node = _node_of(tensor)
    while node is not None and not _SPLITS.fullmatch(node.name()):
        node = node.next_functions[0][0] if _VIEWS.fullmatch(node.name()) else None
    if node is None:
        return "padded"
    return "stacked" if node.name().startswith("Unbind") else "joined"


def arrives_at(tensor: torch.Tensor) -> int | None:
    """The number of the node that gets the gradient of a value of which `tensor` is a part, made as
    large as the whole; None if that cannot be told. What arrives at one node is added up there.

    The names of autograd's nodes are private to torch.
    """
    node, maker = _node_of(tensor), None
    while node is not None and _VIEWS.fullmatch(node.name()):
        maker = node if not _PASSING.fullmatch(node.name()) else maker
        node = node.next_functions[0][0]
    found = None if maker is None else maker.next_functions[0][0]
    return None if found is None else int(found._sequence_nr())


def made_by(tensor: torch.Tensor) -> int | None:
    """The number of the node that made what `tensor` is, or views as a whole; None for a leaf, and
    if that cannot be told."""
    node = _node_of(tensor)
    while node is not None and _PASSING.fullmatch(node.name()):
        node = node.next_functions[0][0]
    return None if node is None or hasattr(node, "variable") else int(node._sequence_nr())


class Way(NamedTuple):
    """How the gradient of a view reaches its leaf."""

    node: int
    """The number of the node that makes a gradient as large as the leaf; if none does, of the last
    node on the way. Nodes run in the order of their numbers, which may be long after the backward
    of what reads the view."""
    part: tuple[int, int]
    """The node that made the view, and which of its results the view is."""
    makes: bool
    """Whether a node makes such a gradient; if not, the view covers all of the leaf."""
    by: int | None
    """The number of the node that passes that gradient on, as a view of it; None if the leaf gets
    it directly."""
    between: int
    """Elements of the largest gradient on the way that is neither the view's nor the leaf's."""
    joins: bool
    """Whether the node joins the gradients of the pieces of a `split`, with zeros for pieces that
    have none."""


def way_to_leaf(tensor: torch.Tensor) -> Way | None:
    """How the gradient of a view of a leaf reaches it; None if that cannot be told.

    The names of autograd's nodes and what they save are private to torch: of an unknown node it is
    assumed that it makes the gradient whole, with nothing in between.
    """
    node = _node_of(tensor)
    if node is None or not node.next_functions:
        return None
    part = int(node._sequence_nr()), tensor.output_nr
    makers, by = [], None
    while node is not None and node.next_functions:  # the leaf's own node has none
        last = node
        if not _PASSING.fullmatch(node.name()):
            makers.append(node)
            by = None
        elif by is None:
            by = int(node._sequence_nr())
        node = node.next_functions[0][0]
    between = [math.prod(getattr(n, "_saved_self_sym_sizes", (0,))) for n in makers[:-1]]
    made = makers[-1] if makers else last
    joins = made.name().startswith("Split")
    number = int(made._sequence_nr())
    return Way(number, part, bool(makers), by, max(between, default=0), joins)


def first_view(tensor: torch.Tensor) -> tuple[int | None, torch.Tensor | None]:
    """The first of the views, each of which covers all of the one before, through which `tensor`
    is read: its node's number, and the leaf that it is a view of.

    None for what it is not, or what cannot be told. The gradients of all that is read through one
    view are added up at its node. A view that autograd has saved and unpacked has no `_base`.
    """
    node, found = _node_of(tensor), None
    while node is not None and _PASSING.fullmatch(node.name()):
        found, node = node, node.next_functions[0][0]
    if found is None:
        return None, None
    leaf = getattr(node, "variable", None)
    return int(found._sequence_nr()), leaf if isinstance(leaf, torch.Tensor) else None


def gradient_through_views(tensor: torch.Tensor, expanded: Collection[int]) -> tuple[bool, bool]:
    """How the gradient of a tensor that is read through views of the whole reaches their base, if
    it is contiguous as it is read, but for the dimensions along which it is `expanded`: whether a
    view copies it on the way, because it cannot be divided or joined as it lies in memory, and
    whether it arrives contiguous.

    The views are known by the names of autograd's nodes and by what these have saved, both of which
    are private to torch; it has no other record of them. A node that is not known ends the search:
    nothing is then copied on the way, and the gradient arrives as it is read.
    """
    node, copied, base = _node_of(tensor), False, tensor._base
    sizes = [1 if dim in expanded else size for dim, size in enumerate(tensor.shape)]
    gradient = torch.empty(sizes, device="meta").expand(tensor.shape)
    while node is not None and (_PASSING.fullmatch(node.name()) or _keeps_size(node, gradient)):
        before, gradient = gradient, _before_view(node, gradient)
        copied |= not torch._C._is_alias_of(before, gradient)  # type: ignore[attr-defined]
        node = node.next_functions[0][0]
    if base is None or gradient.shape != base.shape:
        return False, False
    return copied, gradient.is_contiguous()


def _keeps_size(node: Any, gradient: torch.Tensor) -> bool:
    """Whether it is an `expand` to the size that there was, as every `matmul` has."""
    expands = node.name().startswith("Expand")
    return expands and tuple(node._saved_self_sym_sizes) == tuple(gradient.shape)


def _before_view(node: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of what a view was made of, given its own: a view of that, or a copy."""
    name = node.name()
    if name.startswith("Permute"):
        dims = [_signed(dim) % gradient.dim() for dim in node._saved_dims]
        return gradient.permute([dims.index(place) for place in range(len(dims))])
    if name.startswith("Transpose"):
        return gradient.transpose(_signed(node._saved_dim0), _signed(node._saved_dim1))
    if name.startswith("TBackward"):
        return gradient.t()
    if name.startswith("Unsqueeze"):
        return gradient.squeeze(_signed(node._saved_dim))
    if hasattr(node, "_saved_self_sym_sizes"):
        return gradient.reshape(node._saved_self_sym_sizes)
    return gradient


def _signed(number: int) -> int:
    """A dimension that a node has saved, which counts from the end as an unsigned number."""
    return number - (1 << 64) if number >> 63 else number
