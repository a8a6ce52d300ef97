"""What a module consists of, and what torch has made of it: a script, a checkpointed region.

Problem: a module may already be scripted or checkpointed, and torch cannot be asked whether it is.
Invariant: as in `lowtide._compat`, of which this is a part; what only has to be recognised is
recognised by name, not imported. Imports torch. Rejected: trying, and reading the error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch


def is_script(module: object) -> bool:
    return isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction)


def forward_of_class(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward that a module would have without an entry of its own in its `__dict__`.

    The class of a TorchScript module has none to give: asked for it, it raises, and Python goes on
    to the module's `__getattr__`.
    """
    kind = type(module)
    found = next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    bind = getattr(found, "__get__", None)
    try:
        return found if bind is None else bind(module, kind)  # type: ignore[no-any-return]
    except AttributeError:
        return module.__getattr__("forward")  # type: ignore[return-value]


def calling_module(name: str = "self") -> torch.nn.Module | None:
    """The module that torch's code for modules, which has called the function that asks, does it
    for, and calls by this name; None if that code has not called it.

    It calls `self.forward` without a word of who that is, and an entry in a `__dict__` is not bound
    to a module: only the frame of the call knows. `load_state_dict` says `module`.
    """
    frame = sys._getframe(2)
    if frame.f_globals is not vars(torch.nn.modules.module):
        return None
    found = frame.f_locals.get(name)
    return found if isinstance(found, torch.nn.Module) else None


def is_never_called(module: torch.nn.Module) -> bool:
    """Whether a module has no forward of its own: it only holds others, as `ModuleList` does."""
    if "forward" in module.__dict__:
        return False
    return inspect.getattr_static(type(module), "forward") is torch.nn.Module.forward


def parameters_and_buffers(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries themselves, which can be changed without the module's `__setattr__`."""
    return module._parameters, module._buffers


def plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Its attributes, without parameters, buffers and modules."""
    registered = module._parameters, module._buffers, module._modules
    return {k: part for k, part in vars(module).items() if all(part is not r for r in registered)}


def forward_pre_hooks(module: torch.nn.Module) -> tuple[Callable[..., Any], ...]:
    """The hooks that run before a module's forward; torch has no accessor for them."""
    return tuple(module._forward_pre_hooks.values())


# Where torch defines its checkpoint wrapper and its composable checkpoint: recognised by name, as
# importing them loads torch.distributed. Unnecessary when torch tells whether a module has them.
CHECKPOINT_WRAPPER_HOME = "torch.distributed.algorithms._checkpoint"
COMPOSABLE_CHECKPOINT_HOME = "torch.distributed._composable.checkpoint_activation"


def selective_policy(context: object) -> Callable[..., Any] | None:
    """The policy function inside a context of `create_selective_checkpoint_contexts`.

    torch has no accessor for it. Unnecessary when the caching mode has a public `policy_fn`.
    """
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    if isinstance(context, _CachingTorchDispatchMode):
        policy: Callable[..., Any] = context.policy_fn
        return policy
    return None


def torchscripts(error: RuntimeError) -> bool:
    """Whether TorchScript's interpreter raised this in place of a Python error inside.

    It says so in the text only, and does not keep that error, or its text.
    """
    return type(error) is RuntimeError and "TorchScript interpreter" in str(error)
