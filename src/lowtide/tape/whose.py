"""Which parameter or buffer a tensor is, in words.

Problem: an error about a tensor that was changed has its shape, which dozens of a model's tensors
have. Invariant: it is looked for when an error is raised, at no other time, and nothing is kept.
Imports `_compat`. Rejected: noting names when a budget or region begins, as most have no model to
ask.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn

from lowtide import _compat


def name_of(tensor: torch.Tensor) -> str | None:
    """The name that `named_parameters` or `named_buffers` gives it, with the model's class; None:
    it is not a module's."""
    key = _key_of(tensor)
    if key is None:
        return None
    # `type`, as `isinstance` asks an object, and a proxy may do anything then.
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    above: dict[int, tuple[nn.Module, str]] = {}
    for module in modules:
        with suppress(Exception):  # one that is half made, or that another thread changes
            above.update({id(c): (module, n) for n, c in nn.Module.named_children(module)})
    for module in modules:
        for kind, name, own in _tensors_of(module):
            if _key_of(own) == key:
                model, path = _from_the_top(module, above)
                return f"the {kind} {'.'.join([*path, name])} of {type(model).__name__}"
    return None


def _key_of(tensor: torch.Tensor) -> int | None:
    try:
        storage = _compat.storage_of(tensor)
    except Exception:  # a lazy parameter, or a subclass of others: another error is to be told
        return None
    return None if storage is None else _compat.storage_id(storage)


def _from_the_top(
    module: nn.Module, above: dict[int, tuple[nn.Module, str]]
) -> tuple[nn.Module, list[str]]:
    """The model that a module is in, and its name there, part by part."""
    path: list[str] = []
    passed = {id(module)}
    while (found := above.get(id(module))) is not None and id(found[0]) not in passed:
        module = found[0]
        passed.add(id(module))
        path.insert(0, found[1])
    return module, path


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    with suppress(Exception):
        for name, parameter in nn.Module.named_parameters(module, recurse=False):
            yield "parameter", name, parameter
        for name, buffer in nn.Module.named_buffers(module, recurse=False):
            yield "buffer", name, buffer
