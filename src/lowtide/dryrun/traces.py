"""What a dry run would leave behind: real tensors that it wrote, and fake ones that the step kept.

Problem: torch runs some operators for real although all tensors are to be fake (`counter += 1` of a
tensor that is no argument), and a step may keep what it made (a mask in a cache), which has no
content and would turn the training that follows into one on fake tensors. Invariant: what was
written is put back with its version; a cache of `functools` that kept a fake tensor is emptied; of
anything else that keeps one, the user is told. Imports `_compat` and operators. Rejected: refusing
such steps, many of which are harmless; faking every tensor that exists.
"""

from __future__ import annotations

import functools
import gc
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.errors import DryRunWarning, users_frame
from lowtide.tape.operators import FACTS, facts_of
from lowtide.tape.values import tensors_at, tensors_in

_CACHE: Any = type(functools.lru_cache(lambda: None))
# Autograd's thread of a device lets go of a graph a moment after its backward has returned.
_WAITS = 0.01, 0.1, 0.4
_DEPTH = 4  # containers around a tensor that are looked through for a cache


class Undone:
    """Keeps the content of real tensors that a dry run is about to write, to put it back."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def calls(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator is about to be called."""
        facts = FACTS.get(id(func)) or facts_of(func)
        if not facts.writes:
            return
        # With a fake argument it runs on shapes only, but the version moves all the same.
        runs = not any(map(fakes.is_fake, tensors_in(args, kwargs)))
        for place in facts.writes:
            for tensor in tensors_at(place, args, kwargs):
                if not fakes.is_fake(tensor):
                    self._keep(tensor, runs)

    def _keep(self, tensor: torch.Tensor, content: bool) -> None:
        storage = _compat.storage_of(tensor)
        if storage is None or tensor.is_inference():
            return
        self._versions.append((tensor, _compat.version_of(tensor)))
        key = _compat.storage_id(storage)
        if content and key not in self._contents:
            with _compat.disable_dispatch():
                self._contents[key] = tensor, storage.clone()

    def put_back(self) -> None:
        """To be called when no mode of the dry run is open any more."""
        for tensor, before in self._contents.values():
            tensor.untyped_storage().copy_(before)
        for tensor, version in reversed(self._versions):
            _compat.put_version(tensor, version)
        self._contents.clear()
        self._versions.clear()


@contextmanager
def nothing_kept(mode: Any) -> Iterator[None]:
    """Warn if the step keeps fake tensors, which would make fakes of what is computed from them."""
    try:
        yield
    except BaseException:
        _forget_fakes(mode)
        raise  # not said of what is kept: the error's own traceback keeps some
    kept = _kept(mode) if _forget_fakes(mode) else None
    if kept is None:
        return
    warnings.warn(
        f"the dry run of the step is over, but the program still keeps {kept}. They are fake "
        "tensors: shapes without content, and whatever is computed from one is fake too. Remove "
        "them before training, or keep what the step makes in attributes of its modules, which are "
        "put back.",
        DryRunWarning,
        stacklevel=users_frame(),
    )


class _Living(list[Any]):
    """Fake tensors that are alive, or what holds them; a class of its own, as a list refers to what
    is in it too."""


def _forget_fakes(mode: Any) -> bool:
    """Empty the caches that keep fake tensors of this mode; returns whether any were alive."""
    if not _living(mode):
        return False
    gc.collect()  # what is only in cycles is not kept
    for cache in _caches(_living(mode)):
        cache.cache_clear()
    return True


def _kept(mode: Any) -> str | None:
    """What still keeps fake tensors of this mode, in words."""
    for seconds in _WAITS:
        if not _living(mode):
            return None
        time.sleep(seconds)
        gc.collect()
    kept = _living(mode)
    if not kept:
        return None
    shape = tuple(kept[0].shape)
    return f"{len(kept)} of its tensors, one of shape {shape} in {_where(kept[0])}"


def _where(kept: torch.Tensor) -> str:
    """What keeps a tensor, for people who have to find it."""
    for holder in _holders(kept):
        if isinstance(holder, dict):
            owner = next(
                (o for o in _holders(holder) if getattr(o, "__dict__", None) is holder), None
            )
            keys = [key for key, value in holder.items() if value is kept]
            name = f" under {keys[0]!r}" if keys else ""
            return f"a {type(holder if owner is None else owner).__name__}{name}"
        return f"a {type(holder).__name__}"
    return "a closure, a variable or a graph"


def _living(mode: Any) -> _Living:
    kind: Any = fakes.fake_type()
    objects: list[Any] = gc.get_objects()
    return _Living(o for o in objects if type(o) is kind and o.fake_mode is mode)


def _holders(*kept: Any) -> _Living:
    """The containers, caches and objects that refer to one of these; not the stack. Every call
    walks over all objects of the process, however many it is asked about."""
    passing = types.FrameType, types.GeneratorType, types.CellType, _Living
    found = gc.get_referrers(*kept)
    # Python 3.13 counts the arguments of this very call as a holder.
    return _Living(o for o in found if o is not kept and not isinstance(o, passing))


def _caches(kept: _Living) -> list[Any]:
    """The caches of `functools.lru_cache` that keep one of these, also inside containers."""
    found: dict[int, Any] = {}
    for _ in range(_DEPTH + 1):
        if not kept:
            break
        holders = _holders(*kept)
        found.update((id(holder), holder) for holder in holders if isinstance(holder, _CACHE))
        kept = _Living(holder for holder in holders if isinstance(holder, dict | list | tuple))
    return list(found.values())
