"""Entries of a module's `__dict__` that shadow its methods, and keep themselves out of copies.

Problem: what shadows a method of one module must not go along where that is copied or pickled.
Invariant (rule 11): a copy is a plain module, however it was made, at the latest when it is called.
Imports torch. Rejected: a strong reference to the module, a cycle that keeps a deleted model in
memory until the garbage collector runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

Call = Callable[..., Any]

ABSENT: Any = object()


class InstanceEntry:
    """A callable that shadows the method `attribute` of one module.

    Copies of the module are plain. `_PlainState` removes the entry from the usual state. If a class
    copies its `__dict__` by other means, `__reduce__` and `__deepcopy__` give the copy's own bound
    method. A copy of the `__dict__` itself becomes plain when it is called, loads, or is given to
    lowtide.
    """

    attribute = ""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.shadowed = module.__dict__.get(self.attribute, ABSENT)

    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                f"this `{self.attribute}` belongs to a module that was deleted; keep the module "
                "itself while its methods are in use"
            )
        return module

    def came_along(self, module: nn.Module) -> bool:
        """Whether it is in a copy of the `__dict__` of another module."""
        return module is not self._module() and module.__dict__.get(self.attribute) is self

    def plain(self) -> Call:
        """What the module would call without lowtide."""
        if self.shadowed is not ABSENT:
            return self.shadowed  # type: ignore[no-any-return]
        module = self.module()
        return getattr(type(module), self.attribute).__get__(module)  # type: ignore[no-any-return]

    def install(self) -> None:
        self.module().__dict__[self.attribute] = self

    def uninstall(self) -> None:
        """Put back what was there, unless somebody has replaced the entry since."""
        module = self._module()
        if module is None or module.__dict__.get(self.attribute) is not self:
            return
        if self.shadowed is ABSENT:
            del module.__dict__[self.attribute]
        else:
            module.__dict__[self.attribute] = self.shadowed

    def __reduce__(self) -> tuple[Any, ...]:
        # Nothing of lowtide is in the pickle, so it loads where lowtide is not installed.
        return (getattr, (self.module(), self.attribute))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self.module()
        copied = memo.get(id(module))
        if copied is None:
            import copy

            # The method alone is copied: copy its module, as for a bound method. The memo entry
            # ends the recursion if the copy of that module comes here again.
            memo[id(self)] = self.plain()
            copied = copy.deepcopy(module, memo)
            found = getattr(copied, self.attribute)
            if isinstance(found, InstanceEntry):  # it went along (`copied.GoesAlong`)
                return found.bound_to(copied)
        return getattr(copied, self.attribute)

    def bound_to(self, copied: nn.Module) -> Any:
        """What a copy of the method alone is, where this is the entry of that copied module."""
        return self


def without_entries(state: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in state.items():
        if not isinstance(value, InstanceEntry):
            plain[name] = value
        elif value.shadowed is not ABSENT:
            plain[name] = value.shadowed
    return plain


def make_plain(copied: nn.Module) -> None:
    """Take the entries of another module out of a copy that somebody has made of its `__dict__`."""
    plain = without_entries(copied.__dict__)
    for name in [name for name in copied.__dict__ if name not in plain]:
        del copied.__dict__[name]
    copied.__dict__.update(plain)
