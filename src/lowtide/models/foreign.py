"""Finding checkpointing that somebody else has switched on in a model.

Problem: a module that already recomputes itself, through its library's flag or wrapper, runs its
Python again in backward. Inside a lowtide region it would be recomputed twice, save nothing more,
and move BatchNorm statistics twice after all. Invariant: nothing is imported to find out; classes
are recognised by name and home, flags by value, so a library that is not installed costs nothing.
Imports torch, `_compat` and `errors`. Rejected: switching the flags off ourselves, which would
change a model behind its owner's back.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide import _compat
from lowtide.errors import UsageError

# The flags as they are spelt: MONAI (`use_checkpoint` in SwinUNETR, AutoencoderKL and Hyena,
# `use_checkpointing` in VQVAE and the MAISI ControlNet), transformers and diffusers
# (`gradient_checkpointing`), timm (`grad_checkpointing`), torchvision's DenseNet
# (`memory_efficient`), OpenMMLab (`with_cp`), vision_architectures (`perform_checkpointing`).
_FLAGS = (
    "use_checkpoint",
    "use_checkpointing",
    "use_gradient_checkpointing",
    "use_activation_checkpointing",
    "gradient_checkpointing",
    "grad_checkpointing",
    "activation_checkpointing",
    "checkpoint_activations",
    "memory_efficient",
    "perform_checkpointing",
    "with_cp",
)

_NAMED = 4  # modules named in a refusal, for each way in which they checkpoint themselves

# Wrapper classes by (home, name); a home is a module or a package.
_WRAPPERS = (
    (_compat.CHECKPOINT_WRAPPER_HOME, "CheckpointWrapper"),
    ("monai.networks.blocks", "ActivationCheckpointWrapper"),
)


def find_active_checkpointing(model: nn.Module) -> list[tuple[str, str]]:
    """The modules of `model` that checkpoint themselves by other means than lowtide.

    Each is a pair: its qualified name ("" for the model itself), and a line that says what is on
    and how to switch it off.
    """
    return [(name, what) for name, module in model.named_modules() for what in _found_on(module)]


def refuse_active_checkpointing(model: nn.Module, caller: str) -> None:
    """Raise `UsageError` if `model` is already checkpointed by other means."""
    found = find_active_checkpointing(model)
    if not found:
        return
    by_what: dict[str, list[str]] = {}
    for name, what in found:
        by_what.setdefault(what, []).append(name or "(the model itself)")
    lines = [f"  {what}: {_first(names)}" for what, names in by_what.items()]
    raise UsageError(
        f"{caller}: this {type(model).__name__} is already checkpointed by other means in "
        f"{len(found)} of its modules. Two mechanisms on one module recompute it twice and save "
        "nothing more. Switch the other off first:\n" + "\n".join(lines)
    )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _found_on(module: nn.Module) -> Iterator[str]:
    if _is_lowtides(module):
        return
    for home, name in _WRAPPERS:
        if any(
            c.__name__ == name and f"{c.__module__}.".startswith(f"{home}.")
            for c in type(module).__mro__
        ):
            yield f"{home.split('.')[0]}'s {name}; use the module inside it instead"
    yield from _flags_on(module)
    forward = module.__dict__.get("forward")
    function = forward.func if isinstance(forward, functools.partial) else forward
    if str(getattr(function, "__module__", "")).startswith("fairscale."):
        yield "fairscale's checkpoint_wrapper; build the model without it"
    if any(
        getattr(hook, "__module__", None) == _compat.COMPOSABLE_CHECKPOINT_HOME
        for hook in _compat.forward_pre_hooks(module)
    ):
        yield "torch's composable checkpoint(); build the model without it"


def _flags_on(module: nn.Module) -> Iterator[str]:
    for flag in _FLAGS:
        # Read from the dictionaries: `getattr` could run a property or a wrapper's delegation.
        value = module.__dict__.get(flag)
        if value is None:
            value = next((vars(c)[flag] for c in type(module).__mro__ if flag in vars(c)), None)
        if value is not True:
            continue
        if flag == "gradient_checkpointing":
            if not _runs_lowtide(module.__dict__.get("_gradient_checkpointing_func")):
                yield (
                    "gradient_checkpointing is True; call model.activation_checkpointing_disable() "
                    "(gradient_checkpointing_disable() in older transformers), or, if Trainer "
                    "switched it on, leave it out of TrainingArguments"
                )
        else:
            yield f"{flag} is True; build the model with {flag}=False or set it to False"


def _is_lowtides(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == "lowtide"


def _runs_lowtide(function: Any) -> bool:
    """Whether the function that transformers' layers were given is lowtide's own."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).split(".")[0] == "lowtide"


@contextlib.contextmanager
def taken_for_real() -> Iterator[None]:
    """While this is open, libraries that ask whether a tensor is fake are told that it is not.

    transformers computes its masks differently for fake tensors than for real ones, and a plan has
    to be for what the real step does.
    """
    home = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(home, "is_fake_tensor", None)
    if home is None or asked is None:
        yield
        return
    home.is_fake_tensor = lambda tensor: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        home.is_fake_tensor = asked  # type: ignore[attr-defined]
