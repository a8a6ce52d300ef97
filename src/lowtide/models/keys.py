"""Weights saved through a wrapper, for a module without one.

Problem: wrapper modules (MONAI's, fairscale's, torch's) put a part of their own into every key
below them, and lowtide's modules keep theirs. Invariant: a key is renamed only if it can mean one
of the module's own; where it may mean two, it stays, and a strict load says so. Imports nothing.
Rejected: the known key that is found first when one part is left out; with a child called "module"
that may be another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_WRAPPER_PARTS = frozenset({"module", "_checkpoint_wrapped_module"})


def without_wrapper_keys(
    state_dict: dict[str, Any], prefix: str, known_keys: Callable[[], Mapping[str, object]]
) -> None:
    """Rename, in place, keys into which a wrapper has put "module." or the like.

    A key is renamed only if it is not one of the module's own keys, and becomes one when parts that
    wrappers put in are left out. For plain weights, the module's keys are not asked for: that runs
    its `state_dict` hooks. The module may have parts of these names itself, so
    both are compared without any.
    """
    wrapped = [
        key for key in state_dict if key.startswith(prefix) and _has_part(key[len(prefix) :])
    ]
    if not wrapped:
        return
    known = known_keys()
    plain: dict[str, str | None] = {}
    for name in known:
        bare = _without_wrappers(name)
        plain[bare] = None if bare in plain else name
    for key in wrapped:
        own = key[len(prefix) :]
        meant = plain.get(_without_wrappers(own))
        if own in known or meant is None or len(own) <= len(meant):
            continue
        if prefix + meant not in state_dict:
            state_dict[prefix + meant] = state_dict.pop(key)


def _has_part(key: str) -> bool:
    return not _WRAPPER_PARTS.isdisjoint(key.split("."))


def _without_wrappers(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPER_PARTS)
