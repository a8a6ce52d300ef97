"""What a tensor consists of: a storage, a version counter, and in some subclasses other tensors.

Problem: the tape tells values apart by storage and version; torch shows the number of a version
counter but not which counter it is, and a storage only by its address. Invariant: as in
`lowtide._compat`, of which this is a part; a counter that is moved to identify it is put back.
Imports dispatch. Rejected: identity by `data_ptr`, which is the same for all storages without
memory.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import MemberDescriptorType

import torch

from lowtide._compat.dispatch import disable_dispatch

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Address of the StorageImpl: what two aliases have in common.

`UntypedStorage._cdata` is the only identity that torch gives a storage. Not a Python function: the
recorder reads it several times per operation.
"""

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def storage_key(tensor: torch.Tensor) -> int:
    """`storage_id` of a tensor's storage.

    Raises NotImplementedError or RuntimeError for tensors without storage (sparse, oneDNN).
    """
    return storage_id(tensor.untyped_storage())


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None if it has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_holders(storage: torch.UntypedStorage) -> int:
    """How many owners a storage has, its Python wrapper included; 0 if torch cannot tell."""
    return 0 if _use_count is None else _use_count(storage_id(storage))


_ENGINES_ALONE = 4  # owners of a tensor, as a mode below counts them, that only autograd has


def only_the_engine_has(tensor: torch.Tensor) -> bool:
    """Whether an argument of an operator that a dispatch mode sees in a backward, the only owner of
    its storage, has no owner but autograd's buffer of gradients.

    `Tensor._use_count` is private, and the number of owners that are only there because of the call
    is torch's: another number counts as no.
    """
    count = getattr(tensor, "_use_count", None)
    return (
        count is not None
        and count() == _ENGINES_ALONE
        and storage_holders(tensor.untyped_storage()) == 2
    )


# The autograd version counter. `Tensor._version` is documented but has no public name; it raises
# RuntimeError for inference tensors. The bare getter, because it is read for every argument.
version_of: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]


def put_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version counter, after its content was put back to what it was then.

    Unnecessary when torch can undo a write together with its version.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def detached_alias(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` that shares the version counter, also when called below autograd.

    Inside a dispatch mode the key that makes views share their counter is switched off: an alias
    made there would never show that its storage was written.
    """
    with counting_writes():
        return tensor.detach()


def counting_writes() -> AbstractContextManager[None]:
    """Let views that are made below autograd share the version counter of what they are part of."""
    guard: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


def _moved_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_inference() or other.is_inference():
        return False
    before, mine = other._version, one._version
    if before != mine:
        return False
    set_version = torch._C._autograd._unsafe_set_version_counter
    set_version((other,), (before + 1,))
    shared = one._version != mine
    set_version((other,), (before,))
    return shared


_compare: list[Callable[[torch.Tensor, torch.Tensor], bool]] = [_moved_together]


def compare_counters_with(compare: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Use the compiled core's function in place of Python's, which has to move a counter to see."""
    _compare[0] = compare


def shares_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a version counter: a write through one moves that of the other."""
    return _compare[0](one, other)


@functools.cache
def _without_memory(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def with_counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the version counter of another one, and no memory.

    A handle may die inside a transform of `torch.func`, which would wrap the alias and refuse to
    write `.data`: `_DisableFuncTorch` is torch's own guard for code that is not to be transformed.
    """
    with disable_dispatch(), torch._C._DisableFuncTorch():
        alias = detached_alias(tensor)
        alias.data = _without_memory(tensor.dtype, tensor.device)
    return alias


class Counter:
    """A tensor's version counter, without its memory.

    torch shows a counter's number and not which counter it is: `.data` has one of its own, `detach`
    and views share theirs. Goes when `.data` does.
    """

    __slots__ = ("_alias", "_key", "_then")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias, self._key = with_counter_of(tensor), storage_key(tensor)
        self._then = version_of(self._alias)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a write through `tensor` moves this counter."""
        return shares_counter(self._alias, tensor)

    def moved_over(self, held: torch.Tensor) -> bool:
        """Whether it has moved since, and `held` is in the same memory: then so has its content."""
        return version_of(self._alias) != self._then and storage_key(held) == self._key


# A subclass that does not override dispatch carries this marker in place of a method.
_DISABLED_DISPATCH = torch._C._disabled_torch_dispatch_impl


class _DryRun(threading.local):
    """Whether this thread records a step of fake tensors, which then count as plain ones.

    Attributes:
        outputs: what is to live until the backward of the step is over.
    """

    on = False

    def __init__(self) -> None:
        self.outputs: list[object] = []


dry_run = _DryRun()


def has_own_dispatch(cls: type) -> bool:
    """Whether `cls` is a tensor subclass that intercepts operators (DTensor, FakeTensor)."""
    own = getattr(cls, "__torch_dispatch__", _DISABLED_DISPATCH) is not _DISABLED_DISPATCH
    return own and not (dry_run.on and cls.__name__ == "FakeTensor")


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass consists of, found as `torch.compile` finds them."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    parts = (getattr(tensor, name) for name in flatten()[0])
    return [part for part in parts if isinstance(part, torch.Tensor)]  # a mesh is another part


_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def sparse_members(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one consists of; none for any other layout.

    Aliases, without a gradient. `_indices` and `_values` have no public names that also serve a
    tensor which is not coalesced.
    """
    layout = tensor.layout
    with torch.no_grad():
        if layout == torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if layout in _COMPRESSED_ROWS:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if layout in _COMPRESSED_COLUMNS:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def nested_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of all rows of a nested tensor of strided layout, as an alias."""
    with torch.no_grad():
        return tensor.values()


def is_wrapper(cls: type) -> bool:
    """Whether tensors of this class can be taken apart and put together again.

    The protocol is that of `torch.compile`. It is documented, but torch's own check is not public,
    and needs a tensor.
    """
    both = hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")
    return both and has_own_dispatch(cls)


def taken_apart(tensor: torch.Tensor) -> tuple[list[str], object]:
    """Names of the attributes that are a wrapper's parts, and its context."""
    flatten: Callable[[], tuple[list[str], object]] = tensor.__tensor_flatten__  # type: ignore[attr-defined]
    return flatten()


def hollow(tensor: torch.Tensor) -> torch.Tensor | None:
    """An alias of a wrapper that has its version counter and nothing else, or None.

    A write to a wrapper moves only the wrapper's counter. The attributes are removed from the alias
    itself, not set: a setter of the class may reach what the alias shares with the wrapper.
    """
    alias = detached_alias(tensor)
    attributes = getattr(alias, "__dict__", {})
    if type(alias) is not type(tensor) or attributes is getattr(tensor, "__dict__", None):
        return None  # the wrapper itself, or something else
    attributes.clear()
    for cls in type(alias).__mro__:
        if issubclass(torch.Tensor, cls):
            break
        for slot in vars(cls).values():
            if isinstance(slot, MemberDescriptorType):
                slot.__set__(alias, None)
    return alias


def put_together(
    cls: type, parts: dict[str, object], context: object, size: object, stride: object
) -> torch.Tensor:
    """Make a wrapper from its parts: the reverse of `taken_apart`."""
    made: torch.Tensor = cls.__tensor_unflatten__(parts, context, size, stride)  # type: ignore[attr-defined]
    return made


def awaited(tensor: torch.Tensor) -> torch.Tensor | None:
    """Wait for the collective that fills a tensor and return the result; None for other tensors.

    A DTensor's `redistribute` makes such tensors. Unnecessary when `AsyncCollectiveTensor` waits
    when it is taken apart; now its part may still have the content and version from before the end
    of the collective.
    """
    functional = sys.modules.get("torch.distributed._functional_collectives")
    waits: type = getattr(functional, "AsyncCollectiveTensor", type(None))
    if not isinstance(tensor, waits):
        return None
    filled: torch.Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
    return filled
