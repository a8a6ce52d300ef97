"""What a module consists of, and what torch has made of it: a script, a checkpointed region.

Problem: modules arrive scripted or checkpointed already, and torch cannot be asked whether they
are. Invariant: as in `lowtide._compat`, of which this is a part; what need only be recognised is
told by name and not imported. Imports torch. Rejected: trying, and reading the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_script(module: object) -> bool:
    return isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction)


def parameters_and_buffers(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries themselves: they can be changed without the module's `__setattr__`."""
    return module._parameters, module._buffers


def forward_pre_hooks(module: torch.nn.Module) -> tuple[Callable[..., Any], ...]:
    """The hooks that run before a module's forward; torch has no accessor for them."""
    return tuple(module._forward_pre_hooks.values())


# Where torch's wrapper and its composable function for checkpointing are at home: told by name, as
# importing them loads torch.distributed. Go when torch can be asked whether a module has them.
CHECKPOINT_WRAPPER_HOME = "torch.distributed.algorithms._checkpoint"
COMPOSABLE_CHECKPOINT_HOME = "torch.distributed._composable.checkpoint_activation"


def selective_policy(context: object) -> Callable[..., Any] | None:
    """The policy function inside a context of `create_selective_checkpoint_contexts`.

    torch gives no accessor; goes when the caching mode has a public `policy_fn`.
    """
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    if isinstance(context, _CachingTorchDispatchMode):
        policy: Callable[..., Any] = context.policy_fn
        return policy
    return None
