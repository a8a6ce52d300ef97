"""A layer around a forward that goes along into deep copies of its module.

Problem: a layer is in the module's own `__dict__` and no copy has it (rule 11). But a block that is
wrapped for good is often only what the blocks of a model are copied from, as by
`nn.TransformerEncoder(block, 6)`: there, plain copies would save no memory, and nothing would say
so. Invariant: a deep copy has the layer if and only if the module has it when it is copied; pickles
and shallow copies stay plain. Imports entries and override. Rejected: the same for every layer; a
handle's `remove()` and a budget would have to know copies that their user has made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.models.entries import InstanceEntry
from lowtide.models.override import has_override


class GoesAlong(InstanceEntry):
    """`__deepcopy__` of a module with a layer of this kind, which `put_on` puts on the copy too."""

    attribute = "__deepcopy__"

    def __init__(self, module: nn.Module, kind: str, put_on: Callable[[nn.Module], object]) -> None:
        super().__init__(module)
        self._kind = kind
        self._put_on = put_on

    def __call__(self, memo: dict[int, Any]) -> Any:
        module = self.module()
        self.uninstall()  # so that the module is copied as it would be without this
        try:
            copied = copy.deepcopy(module, memo)
        finally:
            if has_override(module, self._kind):
                self.install()
        # A class may copy in a way of its own, such as not at all.
        if has_override(module, self._kind) and not has_override(copied, self._kind):
            self._put_on(copied)
        return copied

    # Where a class copies or pickles its `__dict__` by hand: None there is as no entry at all.
    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None
