"""What a batch gives to a step: its arguments, by place or by name, and its first half.

Problem: data comes as a tensor, as a tuple or as a dictionary, and steps are called with all three,
and with what libraries make of them. Invariant: the command line and Python read a batch alike, and
half a batch is of the same types. Imports torch. Rejected: one form only,
which would have every program convert what its loader and its tokenizer return.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
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
        return [getattr(item, name) for name in _fields(item)]
    return []


def _fields(record: Any) -> list[str]:
    """The fields of a dataclass that have a value: none of `init=False` needs one."""
    return [part.name for part in fields(record) if hasattr(record, part.name)]


def changed(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting, of the same types, with `change` of each tensor in it. What may not be
    copied so, as a mapping that keeps its items in another, is returned as it is."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(changed(part, change) for part in item))
    if type(item) in (list, tuple):
        return type(item)(changed(part, change) for part in item)
    record = is_dataclass(item) and not isinstance(item, type)
    mapping = isinstance(item, dict | UserDict)  # of any other, a copy may share the items
    if not record and not mapping:
        return item
    new: Any = copy.copy(item)  # an output of transformers is both
    for name in _fields(item) if record else ():
        object.__setattr__(new, name, changed(getattr(item, name), change))  # it may be frozen
    for key in list(item) if mapping else ():
        part = item[key]
        new[key] = changed(part, change)
        attributes = getattr(new, "__dict__", {})
        if attributes.get(key) is part:  # of a dictionary that is its own `__dict__`
            attributes[key] = new[key]
    return new
