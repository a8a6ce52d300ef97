"""Regions by module: which modules of a model run checkpointed.

Problem: users think in layers and blocks, the engine in regions. Invariant (rules 11 and 12): the
model keeps its class, names, weights, pickles and copies; a region exists only where a chosen
module is called in training with grad enabled, and `remove()` leaves no trace. Imports checkpoint,
override, copied, passed, selection, foreign, keys and errors. Rejected: wrapper modules,
which put their own name into every key below them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence  # noqa: F401 - as UnionType
from types import UnionType  # noqa: F401 - for tools that evaluate what `Which` is written with
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lowtide import _compat
from lowtide.checkpoint import TORCH_KEYWORDS, checkpoint
from lowtide.errors import UsageError
from lowtide.models.copied import GoesAlong
from lowtide.models.entries import Call, InstanceEntry, make_plain
from lowtide.models.foreign import refuse_active_checkpointing
from lowtide.models.keys import without_wrapper_keys
from lowtide.models.override import (
    Restore,
    add_entry,
    find_override,
    has_override,
    override_forward,
)
from lowtide.models.passed import PassedThrough
from lowtide.models.removable import Removable
from lowtide.policies import PolicyLike, check_policy
from lowtide.selection import Every, Which, is_container, select  # noqa: F401 - as UnionType

__all__ = [
    "ActivationCheckpointWrapper",
    "CheckpointedModules",
    "checkpoint_modules",
]

_M = TypeVar("_M", bound=nn.Module)

_KIND = "checkpoint"
_TOO_LATE = "already compiled with torch.compile; apply lowtide first, then compile"

# Keywords of `lowtide.checkpoint` itself: a forward's own keyword of the same name goes to it.
_CHECKPOINT_KEYWORDS = frozenset({"function", "policy", *TORCH_KEYWORDS})


class CheckpointedModules(Removable):
    """The modules that one call checkpointed; `remove()` switches them off again.

    Also a context manager that calls `remove()` at the end. It does not keep the model alive.

    Attributes:
        names: the qualified names of the modules.
    """

    def __init__(self, names: Sequence[str], restores: Sequence[Restore], description: str) -> None:
        self.names: tuple[str, ...] = tuple(names)
        self._restores = tuple(restores)
        self._description = description

    @property
    def active(self) -> bool:
        """Whether any of the modules is still checkpointed by this handle."""
        return any(restore.active for restore in self._restores)

    def remove(self) -> None:
        """Restore every module's own forward. A second call does nothing."""
        for restore in self._restores:
            restore.remove()

    def describe(self) -> str:
        """Describe what was chosen and why, as text."""
        return self._description or "\n".join(name or "(the model itself)" for name in self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (say, of a model that holds it) names the modules, but is on none: those of a
        copied model are plain."""
        return CheckpointedModules, (self.names, (), self._description)

    def __repr__(self) -> str:
        shown = ", ".join(name or "(the model itself)" for name in self.names[:4])
        more = f", and {len(self.names) - 4} more" if len(self.names) > 4 else ""
        state = "checkpointed" if self.active or not self.names else "no longer checkpointed"
        modules = "1 module" if len(self.names) == 1 else f"{len(self.names)} modules"
        return (
            f"<lowtide.CheckpointedModules: {modules} {state}{': ' if shown else ''}{shown}{more}>"
        )


def checkpoint_modules(
    model: nn.Module,
    which: Which,
    *,
    policy: PolicyLike | None = None,
    in_eval: bool = False,
) -> CheckpointedModules:
    """Checkpoint the modules of `model` that `which` selects.

    Args:
        model: any module; it stays the object it is.
        which: a type, or a union of types; a glob pattern for qualified names ("encoder.layers.*";
            `*` matches inside one part of a name, `**` and a leading `*.` match any number of
            parts); one of the model's modules; a predicate `(name, module) -> bool`;
            `every(n, ...)` of these; or a list, a set or the like that mixes them. A module chosen
            together with one inside it gives nested regions.
        policy: what to keep inside the regions, as for `lowtide.checkpoint`.
        in_eval: also while a module is in eval mode and grad is enabled: a backbone in ``.eval()``
            under adapters, a perceptual loss, an attack on the input. Without it such a module is a
            plain one, and the first backward through it gives an `UncountedWarning`.

    Returns:
        A handle, whose `remove()` switches checkpointing off again. Copies and pickles of the
        model are plain (rule 11): checkpoint them anew.

    Raises:
        UsageError: ``model`` is not a module; an entry of `which` matches no module that is called
            (the text says what came close); or a module cannot be checkpointed, because it already
            is, by lowtide or by its own flag, or because it is compiled or TorchScript.
    """
    check_model(model, "checkpoint_modules")
    chosen = select(model, which)
    return switch_on(model, chosen, policy=policy, in_eval=in_eval, caller="checkpoint_modules")


def switch_on(
    model: nn.Module,
    chosen: Sequence[tuple[str, nn.Module]],
    *,
    policy: Any,
    in_eval: bool,
    caller: str,
    description: str = "",
) -> CheckpointedModules:
    """Checkpoint all of `chosen`, or none if one cannot be."""
    check_policy(policy, caller)
    if not isinstance(in_eval, bool):
        raise UsageError(f"{caller}: in_eval is True or False, not {in_eval!r}")
    passed = None if in_eval else PassedThrough()
    refuse_active_checkpointing(model, caller)
    _refuse_unfit(model, chosen, caller)
    restores: list[Restore] = []
    try:
        for _, module in chosen:
            restores.append(_checkpoint_one(module, policy, passed))
    except BaseException:
        for restore in restores:
            restore.remove()
        raise
    return CheckpointedModules([name for name, _ in chosen], restores, description)


def check_model(
    model: object, caller: str, instead: str = "lowtide.checkpoint(function, *args)"
) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"{caller} takes a module, not the class {model.__name__}: make one of it, "
            f"{model.__name__}(...), and pass that"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{caller} takes a torch.nn.Module, not {type(model).__name__}; for a function use "
            f"{instead}"
        )


def is_checkpointed(module: nn.Module) -> bool:
    """Whether lowtide runs this module itself as a region."""
    return has_override(module, _KIND)


def _checkpoint_one(module: nn.Module, policy: Any, passed: PassedThrough | None) -> Restore:
    """`passed`: tells of a backward through the module in eval mode, where it is a plain one; None:
    it is none there."""
    reference = weakref.ref(module)

    def make_call(forward: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            owner = reference()
            if owner is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if passed is not None and not owner.training:
                return passed.watch(owner, forward(*args, **kwargs))
            return run_region(forward, args, kwargs, policy)

        return call

    return override_forward(module, make_call, kind=_KIND)


def run_region(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Any
) -> Any:
    if not _CHECKPOINT_KEYWORDS.isdisjoint(kwargs):
        return checkpoint(functools.partial(function, **kwargs), *args, policy=policy)
    return checkpoint(function, *args, policy=policy, **kwargs)


def _refuse_unfit(model: nn.Module, chosen: Sequence[tuple[str, nn.Module]], caller: str) -> None:
    modules = model.named_modules(remove_duplicate=False)
    compiled = [name for name, module in modules if _compat.is_compiled_module(module)]
    for name, module in chosen:
        shown = repr(name) if name else "the model itself"
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{caller}: {shown} is a TorchScript module, whose operations run where lowtide "
                "cannot see them; use the Python module it was made from"
            )
        for outer in compiled:
            if name == outer:
                raise UsageError(f"{caller}: {shown} is {_TOO_LATE}")
            if not outer or name.startswith(f"{outer}."):
                inside = repr(outer) if outer else "the model"
                raise UsageError(f"{caller}: {shown} is inside {inside}, which is {_TOO_LATE}")
        if is_checkpointed(module):
            raise UsageError(
                f"{caller}: {shown} ({type(module).__name__}) is already checkpointed by lowtide; "
                "call .remove() on the handle of that call (where there is none, as in a "
                "CheckpointUNet, ActivationCheckpointWrapper.remove(module)), or select only other "
                "modules"
            )


class _WrapperType(type):
    """Makes a call of the class return its argument, and `isinstance` recognise that module."""

    def __call__(cls, module: _M, *, policy: PolicyLike | None = None, in_eval: bool = False) -> _M:
        check_model(module, "ActivationCheckpointWrapper")
        if is_container(module):
            raise UsageError(
                f"ActivationCheckpointWrapper: a {type(module).__name__} has no forward; wrap the "
                "modules in it instead"
            )
        if is_checkpointed(module):
            # Which of two policies holds must not depend on who was first.
            given = "the policy" if policy is not None else "in_eval" if in_eval else ""
            if given:
                raise UsageError(
                    f"ActivationCheckpointWrapper: this {type(module).__name__} is already "
                    f"checkpointed by lowtide, and {given} would have no effect; give it in the "
                    "first call, or call ActivationCheckpointWrapper.remove(module) before"
                )
            return module
        caller = "ActivationCheckpointWrapper"
        switch_on(module, [("", module)], policy=policy, in_eval=in_eval, caller=caller)
        _as_wrapper(module, policy, in_eval)
        return module

    __call__.__qualname__ = "ActivationCheckpointWrapper"  # what Python's own errors name

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and is_checkpointed(instance)


class ActivationCheckpointWrapper(nn.Module, metaclass=_WrapperType):
    """Checkpoint one module: `block = ActivationCheckpointWrapper(block)`.

    The name and the call are MONAI's. It returns the module itself, checkpointed, not a module
    around it: type, parameter names and `state_dict` stay as they were, nothing is recomputed in
    eval (unless `in_eval` is given), and plain weights load. Weights saved through a wrapper (keys
    that begin with "module.") load too. Deep copies are checkpointed as well, as those that
    `nn.TransformerEncoder(block, 6)` makes; pickles and shallow copies are plain modules (rule 11).
    To a type checker, too, the result has the type of the block.

    `ActivationCheckpointWrapper(module, policy=None, in_eval=False)`: `module` is any module with a
    forward, and returned as it is if it is already checkpointed; `policy` says what to keep inside
    the region, as for `lowtide.checkpoint`; `in_eval` is as for `lowtide.checkpoint_modules`.

    Raises:
        UsageError: the argument is not a module or has no forward; the module is compiled,
            TorchScript, or checkpointed by its own flag; a policy, or `in_eval`, is given for a
            module that lowtide already checkpoints; or the class is subclassed.
    """

    if TYPE_CHECKING:  # of a metaclass' call, mypy takes no notice

        def __new__(  # type: ignore[misc]  # what a call returns is no instance of the class
            cls, module: _M, *, policy: PolicyLike | None = None, in_eval: bool = False
        ) -> _M: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise UsageError(
            f"{cls.__name__}: ActivationCheckpointWrapper cannot be subclassed, because it returns "
            "the module it is called with; write an nn.Module and checkpoint its parts"
        )

    @staticmethod
    def remove(module: nn.Module) -> None:
        """Switch off the checkpointing of this one module. On a plain one it does nothing."""
        check_model(module, "ActivationCheckpointWrapper.remove")
        override = find_override(module)
        for layer in list(override.layers) if override is not None else []:
            if layer.kind == _KIND:
                layer.remove()


def _as_wrapper(module: nn.Module, policy: Any, in_eval: bool) -> None:
    """What a wrapped module has besides the layer around its forward."""

    def wrapped(copied: nn.Module) -> None:
        _checkpoint_one(copied, policy, None if in_eval else PassedThrough())
        _as_wrapper(copied, policy, in_eval)

    add_entry(_LoadEitherForm(module))
    add_entry(GoesAlong(module, _KIND, wrapped))


class _LoadEitherForm(InstanceEntry):
    """`_load_from_state_dict` that also accepts the keys of a model saved with wrappers in it."""

    attribute = "_load_from_state_dict"

    def __call__(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        loaded = _compat.calling_module("module")
        if loaded is not None and self.came_along(loaded):
            make_plain(loaded)
            loaded._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            return
        known_keys = functools.partial(self.module().state_dict, keep_vars=True)
        without_wrapper_keys(state_dict, prefix, known_keys)
        self.plain()(state_dict, prefix, *args, **kwargs)
