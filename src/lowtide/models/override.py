"""Putting a call around one module's forward, without changing what the module is.

Problem: a region has to start where a module's forward starts. A wrapper module changes every name
below it, another class changes `type(module)`, and a hook cannot enclose the call. Invariant
(rule 11): type, names, `state_dict`, pickles and copies stay those of the plain module. Only a few
entries of the instance's `__dict__` change, and each of them removes itself from every copy.
Imports _compat, errors, entries and reached. Rejected: a wrapper module; a subclass; hooks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.models.entries import ABSENT, Call, InstanceEntry, make_plain, without_entries
from lowtide.models.reached import leads_to

_OVERRIDE = "__lowtide_override__"  # on a function taken from an override: that override


class _PlainState(InstanceEntry):
    """`__getstate__` of a module that has entries: its state without them."""

    attribute = "__getstate__"

    def __call__(self) -> Any:
        state = self.plain()()
        if isinstance(state, tuple) and state and isinstance(state[0], dict):
            return (without_entries(state[0]), *state[1:])
        return without_entries(state) if isinstance(state, dict) else state


class _Replica(InstanceEntry):
    """`_replicate_for_data_parallel`, which copies `__dict__` and so our entries with it."""

    attribute = "_replicate_for_data_parallel"

    def __call__(self) -> nn.Module:
        module = self.module()
        replica: nn.Module = self.plain()()
        make_plain(replica)
        current = find_override(module)
        if current is not None:
            for layer in current.layers:
                override_forward(replica, layer.for_replica, kind=layer.kind)
        return replica


class _ForwardOverride(InstanceEntry):
    """The `forward` of a module with one or more layers around it, the last one outermost.

    One object for any number of layers, so that they can be removed in any order.
    """

    attribute = "forward"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.layers: list[Restore] = []
        self.companions: list[InstanceEntry] = [_PlainState(module), _Replica(module)]
        self._call: Call = _plain_forward(self._module, self.shadowed)

    def plain(self) -> Call:
        if self.shadowed is not ABSENT:
            return self.shadowed  # type: ignore[no-any-return]
        return _compat.forward_of_class(self.module())

    def rebuild(self) -> None:
        call: Call = _plain_forward(self._module, self.shadowed)
        for layer in self.layers:
            call = layer.make_call(call)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            called = _compat.calling_module()
            if called is not None and self.came_along(called):
                make_plain(called)
                return called.forward(*args, **kwargs)
        return self._call(*args, **kwargs)

    def came_along(self, module: nn.Module) -> bool:
        """Whether this belongs to another module, of whose `__dict__` this one has a copy: it would
        run with that one's parameters. Not if somebody has assigned that one's forward alone."""
        return any(one.came_along(module) for one in self.companions)

    def bound_to(self, copied: nn.Module) -> Call:
        return types.MethodType(self.__func__, copied)  # which keeps the copy

    # `inspect.signature(module.forward)` and code that unwraps a forward must see the plain one.
    @property
    def __wrapped__(self) -> Call:
        return self.plain()

    @property
    def __name__(self) -> str:
        return "forward"

    # As of the plain forward: `inspect` finds the source of methods and functions only, and
    # torch.jit.script compiles what it finds. Dynamo must see what this is, to trace its call.
    @property
    def __class__(self) -> Any:
        return _ForwardOverride if _compat.is_tracing() else types.MethodType

    @__class__.setter
    def __class__(self, cls: Any) -> None:
        raise TypeError("the forward of a module stays what it is")

    @property
    def __self__(self) -> nn.Module:
        return self.module()

    @property
    def __func__(self) -> Call:
        # Accelerate wraps this in autocast and binds it again; the layers must stay around it.
        override = self

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is override._module():
                return override(*args, **kwargs)
            return _compat.forward_of_class(module)(*args, **kwargs)

        plain = getattr(self.plain(), "__func__", None) or _unbound(self.module())
        functools.update_wrapper(forward, plain)
        # Accelerate follows `__wrapped__` to the end, which must be this and not the plain forward.
        del forward.__dict__["__wrapped__"]
        with contextlib.suppress(ValueError):  # an operator of torch's has none
            forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        forward.__dict__[_OVERRIDE] = self
        return forward

    def __getattr__(self, name: str) -> Any:
        # What others read of a function (its code, its globals, marks that a decorator has left) is
        # that of the plain forward. Not while it is being made: there is no module then.
        if "_module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.plain(), name)

    @property
    def __signature__(self) -> Any:
        return inspect.signature(self.plain())

    def __repr__(self) -> str:
        module = self._module()
        owner = "a deleted module" if module is None else type(module).__name__
        return f"<forward of {owner}, {', '.join(layer.kind for layer in self.layers) or 'plain'}>"


def _plain_forward(reference: weakref.ref[nn.Module], shadowed: Any) -> Call:
    if shadowed is not ABSENT:
        return shadowed  # type: ignore[no-any-return]

    at_first = reference()
    takes_module = None if at_first is None else _takes_module(at_first)
    partly = None if at_first is None else _given_partly(at_first)

    def forward(*args: Any, **kwargs: Any) -> Any:
        module = reference()
        if module is None:
            raise ReferenceError(
                "this `forward` belongs to a module that was deleted; keep the module itself "
                "while its methods are in use"
            )
        # Looked up at each call, so that a class swapped in later (by FSDP2) uses its own forward.
        if takes_module:
            return type(module).forward(module, *args, **kwargs)
        if takes_module is False:
            return type(module).forward(*args, **kwargs)
        if partly is not None and torch.compiler.is_compiling():
            return partly.func(module, *partly.args, *args, **{**partly.keywords, **kwargs})
        return _compat.forward_of_class(module)(*args, **kwargs)

    return forward


def _takes_module(module: nn.Module) -> bool | None:
    """Whether what the class gives for its forward is to be called with the module, as a method is.

    Not a static method, or what is no descriptor (an operator of torch's, a callable). None: to be
    looked up at each call, as for TorchScript, where that takes as long as a layer.
    """
    if _compat.is_script(module):
        return None
    found = inspect.getattr_static(type(module), "forward")
    if isinstance(found, types.FunctionType):
        return True
    bound_without = isinstance(found, (staticmethod, classmethod))
    return False if bound_without or not hasattr(found, "__get__") else None


def _given_partly(module: nn.Module) -> functools.partialmethod[Any] | None:
    """A forward that is a function with some arguments given: Dynamo does not trace how it is
    bound, and runs it as a part of no region."""
    if _compat.is_script(module):
        return None
    found = inspect.getattr_static(type(module), "forward")
    whole = isinstance(found, functools.partialmethod) and isinstance(
        found.func, types.FunctionType
    )
    return found if whole else None


def _unbound(module: nn.Module) -> Call:
    forward = _compat.forward_of_class(module)
    return getattr(forward, "__func__", forward)


class Restore:
    """One layer around a forward; `remove()` removes this layer and no other.

    Attributes:
        kind: tells layers apart, see `find_layer`.
        owner: whoever put it on, if that is not the user; it may be asked when the layer is found.
        about: what whoever put it on needs to make another handle of it.
    """

    def __init__(
        self,
        override: _ForwardOverride,
        make_call: Callable[[Call], Call],
        kind: str,
        for_replica: Callable[[Call], Call],
    ) -> None:
        self._override: _ForwardOverride | None = override
        self.make_call = make_call
        self.kind = kind
        self.for_replica = for_replica
        self.owner: Any = None
        self.about: Any = None

    @property
    def active(self) -> bool:
        return self._override is not None

    @property
    def bypassed(self) -> bool:
        """Whether somebody has put a forward in its place that does not lead to it."""
        module = None if self._override is None else self._override._module()
        if module is None:
            return False
        return not leads_to(module.__dict__.get("forward"), self._override)

    def remove(self) -> None:
        override, self._override = self._override, None
        if override is None:
            return
        override.layers.remove(self)
        override.rebuild()
        if not override.layers:
            for entry in (override, *override.companions):
                entry.uninstall()


def override_forward(
    module: nn.Module,
    make_call: Callable[[Call], Call],
    *,
    kind: str = "override",
    for_replica: Callable[[Call], Call] | None = None,
) -> Restore:
    """Make every call of `module.forward` run `make_call(forward)` in its place.

    `make_call` is called at once, and again whenever a layer is added or removed; it is given the
    module's own `forward` or the layer below. `kind` tells layers apart, see `find_layer`.
    `for_replica` replaces it on the replicas that `nn.DataParallel` makes. Neither `make_call` nor
    what it returns should hold a strong reference to the module.

    Raises:
        UsageError: the module's class decides at each access what its forward is.
    """
    override = find_override(module)
    if override is None:
        override = _ForwardOverride(module)
        override.install()
        if module.forward is not override:
            override.uninstall()
            raise _not_shadowed(module)
    for entry in override.companions:
        entry.install()
    layer = Restore(override, make_call, kind, for_replica or make_call)
    override.layers.append(layer)
    try:
        override.rebuild()
    except BaseException:
        layer.remove()
        raise
    return layer


def _not_shadowed(module: nn.Module) -> UsageError:
    kind = type(module).__name__
    found = inspect.getattr_static(type(module), "forward")
    what = "a property" if isinstance(found, property) else "made anew at each access"
    return UsageError(
        f"the forward of this {kind} is {what}, so a call of the module would never reach what "
        "lowtide puts around it. Make it a method (which may call whatever the property chose), or "
        "set self.forward in __init__."
    )


def add_entry(entry: InstanceEntry) -> None:
    """Install one more entry, removed together with the last layer around the module's forward."""
    override = find_override(entry.module())
    if override is None:
        raise RuntimeError("add_entry needs a module with an override")
    override.companions.append(entry)
    entry.install()


def find_override(module: nn.Module) -> _ForwardOverride | None:
    """The override on `module`, also if somebody has wrapped its forward since. If that is another
    module's, of whose `__dict__` this one has a copy, it is taken off the copy."""
    found = _override_in(module)
    if found is None or not found.came_along(module):
        return found
    make_plain(module)
    return _override_in(module)


def _override_in(module: nn.Module) -> _ForwardOverride | None:
    forward = module.__dict__.get("forward")
    for _ in range(32):  # a wrapper may name itself as what it wraps
        if isinstance(forward, _ForwardOverride):
            return forward
        forward = getattr(forward, _OVERRIDE, None) or getattr(forward, "__wrapped__", None)
        if forward is None:
            return None
    return None


def find_layer(module: nn.Module, kind: str) -> Restore | None:
    """A layer of that kind around `module.forward`."""
    override = find_override(module)
    layers = [] if override is None else override.layers
    return next((layer for layer in layers if layer.kind == kind), None)


def has_override(module: nn.Module, kind: str) -> bool:
    """Whether a layer of that kind is around `module.forward`."""
    return find_layer(module, kind) is not None
