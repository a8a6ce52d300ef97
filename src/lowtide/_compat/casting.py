"""What autocast does inside an operation: it casts the operators that the kernel calls.

Problem: an operation is recorded below autocast, with arguments that are cast already. If its
kernel calls other operators (`_safe_softmax`, `_trilinear`, `logsumexp`), autocast casts those as
well, unless the operation itself is in autocast's lists: then autocast is off until it returns. A
replay has to cast alike. Invariant: as in `lowtide._compat`, of which this is a part; autocast is
left as it was found, and caches no cast of a replay. Imports torch. Rejected: a list of such
kernels, which differs for each kind of device; `torch.autocast` around a replay, which leaves keys
above the dispatcher's guards switched on.
"""

from __future__ import annotations

import functools

import torch
from torch import _C

Casting = tuple[tuple[str, torch.dtype], ...]

# Public functions say whether autocast was switched on, but not whether it is off inside one of its
# own operators. Unnecessary when they do.
_excluded = _C._dispatch_tls_is_dispatch_key_excluded
_exclude = _C._dispatch_tls_set_dispatch_key_excluded
_any_enabled = _C._is_any_autocast_enabled  # read at each operation; public functions need a device


@functools.cache
def _keys() -> tuple[tuple[str, _C.DispatchKey], ...]:
    """Each kind of device that can cast, with its key."""
    found = []
    for name, key in _C.DispatchKey.__members__.items():
        kind = name.removeprefix("Autocast")
        if kind in (name, "Functionality"):
            continue
        kind = _C._get_privateuse1_backend_name() if kind == "PrivateUse1" else kind.lower()
        found.append((kind, key))
    return tuple(found)


def casting_now() -> Casting | None:
    """The kinds of device for which operators called from here are cast, with the dtype of each."""
    found = None
    if not _any_enabled():
        return None
    for kind, key in _keys():
        if not _excluded(key) and torch.is_autocast_enabled(kind):
            found = (*(found or ()), (kind, torch.get_autocast_dtype(kind)))
    return found


class cast_as:
    """Cast as when an operation was recorded; entered below autocast."""

    __slots__ = ("_before", "_cached", "_casting")

    def __init__(self, casting: Casting) -> None:
        self._casting = casting

    def __enter__(self) -> None:
        self._cached = torch.is_autocast_cache_enabled()
        self._before = [
            (kind, key, _excluded(key), torch.is_autocast_enabled(kind),
             torch.get_autocast_dtype(kind))
            for kind, key in _keys() if any(kind == recorded for recorded, _ in self._casting)
        ]  # fmt: skip
        torch.set_autocast_cache_enabled(False)
        for kind, dtype in self._casting:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)

    def __exit__(self, *exc: object) -> None:
        for kind, key, excluded, enabled, dtype in self._before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
            _exclude(key, excluded)
        torch.set_autocast_cache_enabled(self._cached)
