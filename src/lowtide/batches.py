"""What a batch gives to a step: its arguments, by place or by name, and its first half.

Problem: data comes as a tensor, as a tuple or as a dictionary, and steps are called with all three,
and with what libraries make of them. Invariant: the command line and Python read a batch alike, and
half a batch is of the same types. Imports torch. Rejected: one form only,
which would have every program convert what its loader and its tokenizer return.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The positional and the keyword arguments that a batch stands for; None if it is neither a
    tensor, a tuple or list, nor a dictionary."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    if hasattr(batch, "items"):  # also what tokenizers and collators return
        return (), dict(batch.items())
    return None


def tensors_of(item: Any) -> list[Tensor]:
    """The tensors in any nesting of lists, tuples, mappings and dataclasses (model outputs and what
    tokenizers return included)."""
    if isinstance(item, Tensor):
        return [item]
    return [tensor for part in _parts(item) for tensor in tensors_of(part)]


def _parts(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple):
        return list(item)
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, part.name) for part in fields(item)]
    return []


def changed(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting, of the same types, with `change` of each tensor in it."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(changed(part, change) for part in item))
    if type(item) in (list, tuple):
        return type(item)(changed(part, change) for part in item)
    record = is_dataclass(item) and not isinstance(item, type)
    if not record and not isinstance(item, MutableMapping):
        return item
    new: Any = copy.copy(item)  # an output of transformers is both
    for name in [part.name for part in fields(item)] if record else ():
        object.__setattr__(new, name, changed(getattr(item, name), change))  # it may be frozen
    for key in list(item) if isinstance(item, MutableMapping) else ():
        new[key] = changed(item[key], change)
    return new
