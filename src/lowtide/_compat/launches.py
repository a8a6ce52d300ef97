"""Where Triton launches a kernel, which no dispatcher sees.

Problem: a kernel may write to what it is given, and Triton has no hook that gets the arguments of a
launch before it happens. Invariant: as in `lowtide._compat`, of which this is a part; Triton is not
imported, and nothing of it is changed before the program has imported it. Unnecessary once there is
such a hook (`knobs.runtime.launch_enter_hook` gets no arguments). Imports `imports` and torch.
Rejected: torch's `identify_accessed_tensors`, which had another name a release before, imports
Inductor, compiles once more, and follows no address that was loaded.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from lowtide._compat.imports import when_imported

Launched = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of a launch, with the kernel, with what launches it, and with its arguments."""

# What launches kernels: compiled ones, interpreted ones (TRITON_INTERPRET=1).
_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
)
_MARK = "_lowtide_launched"
_REST = "_lowtide_rest"

DEFAULT = inspect.Parameter.empty


def watch_launches(launched: Launched) -> None:
    """From now on, call `launched` in place of each launch of a kernel of Triton's."""
    for module, name in _LAUNCHERS:
        _watch(module, name, launched)


def _watch(module: str, name: str, launched: Launched) -> None:
    loaded = sys.modules.get(module)
    if loaded is None:
        when_imported(module, lambda: _watch(module, name, launched))
        return
    if hasattr(loaded, name):
        watch_class(getattr(loaded, name), launched)


def watch_class(kind: Any, launched: Launched) -> None:
    """From now on, call `launched` in place of each launch of kernels of this class."""
    if _MARK in vars(kind):
        return
    original = kind.run

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return launched(self, original, args, kwargs)

    kind.run = run
    setattr(kind, _MARK, True)


def is_warmup(kwargs: dict[str, Any]) -> bool:
    """Whether a call of `run` compiles a kernel and does not launch it."""
    return bool(kwargs.get("warmup"))


def kernel_name(kernel: Any) -> str:
    return str(getattr(getattr(kernel, "fn", None), "__name__", kernel))


def known_of(kernel: Any) -> dict[Any, Any]:
    """What is known of the launches of a kernel; kept with it, as most kernels live for ever."""
    known: dict[Any, Any] = vars(kernel).setdefault("_lowtide_known", {})
    return known


def in_order(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a launch, those that are parameters first, in their order."""
    names = [name for name in kernel.arg_names[len(args) :] if name in kwargs]
    return {name: kwargs[name] for name in names} | kwargs


def bound(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, bool]]:
    """The arguments of a launch in the order of the kernel's parameters (those of `*args` as one
    tuple), `DEFAULT` where one is left out, and whether each is a constant of the compilation."""
    rest = _rest_of(kernel)
    if rest is not None:
        args = (*args[:rest], args[rest:])
    constants = getattr(kernel, "constexprs", ())  # few
    found = [(argument, place in constants) for place, argument in enumerate(args)]
    for place in range(len(args), len(kernel.arg_names)):
        argument = kwargs.get(kernel.arg_names[place], DEFAULT)
        found.append((argument, place in constants))
    return found


def _rest_of(kernel: Any) -> int | None:
    """The place of `*args` among a kernel's parameters; None: it has none."""
    known = vars(kernel)
    if _REST not in known:  # looked for once, as it takes as long as a launch
        kinds = [each.kind for each in inspect.signature(kernel.fn).parameters.values()]
        rest = inspect.Parameter.VAR_POSITIONAL
        known[_REST] = kinds.index(rest) if rest in kinds else None
    found: int | None = known[_REST]
    return found


def has_hooks(kernel: Any) -> bool:
    """Whether functions of the program run before each launch."""
    return bool(getattr(kernel, "pre_run_hooks", None))


def pointers(argument: Any) -> list[torch.Tensor | None]:
    """Of each pointer or descriptor that a kernel gets of an argument, the tensor behind it; None:
    it is not known."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if argument is None or isinstance(argument, int | float | str):  # as most are
        return []
    if isinstance(argument, tuple | list):
        return [each for part in argument for each in pointers(part)]
    base = getattr(argument, "base", None)  # of a descriptor, or of a tensor seen as another type
    if isinstance(base, torch.Tensor):
        return [base]
    return [None] if hasattr(argument, "data_ptr") else []


def constant_kind(argument: Any) -> Any:
    """What a constant of a compilation has in common with those that make the same code. Functions
    of Triton's have their code, as two of them may have one name."""
    if isinstance(argument, tuple | list):
        return (type(argument), *map(constant_kind, argument))
    code = getattr(getattr(argument, "value", argument), "cache_key", None)
    return repr(argument) if code is None else code


def pointer_kind(argument: Any) -> Any:
    """What an argument that has `pointers` and is no tensor has in common with those that make the
    same code: its type, its dtypes and the shape of its block."""
    base, block = getattr(argument, "base", None), getattr(argument, "block_shape", None)
    dtypes = getattr(argument, "dtype", None), getattr(base, "dtype", None)
    return (type(argument), *dtypes, None if block is None else tuple(block))


def ttir_of(
    kernel: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """The kernel in Triton's own representation, as it is compiled for these arguments; None if it
    has none, as where it is interpreted or written in another language."""
    compiled = run(kernel, *args, **{**kwargs, "warmup": True})
    text = getattr(compiled, "asm", {}).get("ttir")
    return text if isinstance(text, str) else None
