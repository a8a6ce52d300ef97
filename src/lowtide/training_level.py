"""Levels in a program's own modules: whether a call is checkpointed, by its level and training's.

Problem: a library marks its pieces once, each with a level, and a training says up to which level
they are recomputed. Invariant: in training, a call whose level is at most the training's runs as a
region, and any other as if this were not there; its names are those of vision_architectures, whose
nets take this class in place of theirs. Imports modules, passed, errors and limits. Rejected: a
flag that is read once, as the level of the training may change between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from lowtide.errors import UsageError
from lowtide.limits import whole_number
from lowtide.models.passed import PassedThrough
from lowtide.modules import run_region

_T = TypeVar("_T")

LEVELS = range(6)
# What the class of vision_architectures has as plain attributes.
_THEIRS = ("fn_checkpoint_level", "training_checkpoint_level", "perform_checkpointing")


class ActivationCheckpointing(nn.Module):
    """Checkpoint a call if its level is at or below the training's level.

    `ac = ActivationCheckpointing(3, training_level)`, then `ac(function, *args, **kwargs)`. The
    call runs as a region if this object is in training mode (`.train()`, `.eval()`; as a submodule
    it follows its model) and `fn_checkpoint_level <= training_checkpoint_level`. So a training of
    level 0 checkpoints nothing but calls of level 0, which are regions at every training level. The
    first backward through a call that eval mode alone kept from being one gives an
    `UncountedWarning`.

    Args:
        fn_checkpoint_level: the level of the call: 1 single layers, 2 small blocks, 3 transformer
            layers and decoder blocks, 4 stages, 5 whole encoders and decoders; 0 whatever is
            always to be a region.
        training_checkpoint_level: the level of the training, 0 to 5. It may be set between steps.

    Raises:
        UsageError: a level is not an int from 0 to 5.
    """

    def __init__(self, fn_checkpoint_level: int, training_checkpoint_level: int) -> None:
        super().__init__()
        self._passed = PassedThrough()
        self.fn_checkpoint_level = fn_checkpoint_level
        self.training_checkpoint_level = training_checkpoint_level

    @property
    def fn_checkpoint_level(self) -> int:
        """The level of the call, 0 to 5. It may be set between steps."""
        return self._fn_level

    @fn_checkpoint_level.setter
    def fn_checkpoint_level(self, level: int) -> None:
        self._fn_level = check_level(level, "fn_checkpoint_level")
        self._set_to: bool | None = None

    @property
    def training_checkpoint_level(self) -> int:
        """The level of the training, 0 to 5. It may be set between steps."""
        return self._training_level

    @training_checkpoint_level.setter
    def training_checkpoint_level(self, level: int) -> None:
        self._training_level = check_level(level, "training_checkpoint_level")
        self._set_to = None

    @property
    def perform_checkpointing(self) -> bool:
        """Whether the levels ask for a region. What it is set to holds until a level is set."""
        if self._set_to is not None:
            return self._set_to
        return self.fn_checkpoint_level <= self.training_checkpoint_level

    @perform_checkpointing.setter
    def perform_checkpointing(self, perform: bool) -> None:
        if not isinstance(perform, bool):
            raise UsageError(f"perform_checkpointing is True or False, not {perform!r}")
        self._set_to = perform

    def forward(
        self,
        fn: Callable[..., Any] | None = None,
        /,
        *args: Any,
        use_reentrant: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what `fn(*args, **kwargs)` returns; `use_reentrant` has no effect.

        The function may be given by name too, `fn=function`.

        Raises:
            UsageError: `fn` is missing, or is no function.
        """
        if fn is None:
            fn = kwargs.pop("fn", None)
        if fn is None:
            raise UsageError(
                "ActivationCheckpointing got no function: call it as (function, *args, **kwargs)"
            )
        if not callable(fn):
            raise UsageError(
                f"ActivationCheckpointing got {type(fn).__name__} in place of a function: call it "
                "as (function, *args, **kwargs), with the function and not what it returns"
            )
        if not (self.perform_checkpointing and torch.is_grad_enabled()):
            return fn(*args, **kwargs)
        if not self.training:
            return self._passed.watch_call(fn(*args, **kwargs))
        return run_region(fn, args, kwargs, None)

    if TYPE_CHECKING:  # to a type checker, a call of any module returns Any

        @overload
        def __call__(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T: ...

        @overload
        def __call__(self, *, fn: Callable[..., _T], **kwargs: Any) -> _T: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A net pickled with vision_architectures' own class finds this one where it replaces that.
        super().__setstate__({name: state[name] for name in state if name not in _THEIRS})
        self._passed = PassedThrough()
        if all(name in state for name in _THEIRS):
            self.fn_checkpoint_level, self.training_checkpoint_level, perform = map(
                state.__getitem__, _THEIRS
            )
            if perform != self.perform_checkpointing:  # set by hand, or before a level was
                self.perform_checkpointing = perform

    def extra_repr(self) -> str:
        by_hand = "" if self._set_to is None else f", perform_checkpointing={self._set_to}"
        return f"{self.fn_checkpoint_level}, {self.training_checkpoint_level}{by_hand}"


def check_level(level: int, name: str) -> int:
    """Return `level` if it is an int from 0 to 5, else raise `UsageError`."""
    number = whole_number(level)
    if number is None:
        raise UsageError(
            f"{name} is a whole number from 0 to 5, not {level!r} ({type(level).__name__})"
        )
    if number not in LEVELS:
        raise UsageError(
            f"{name} is {number}, outside 0 to 5: 1 single layers, 2 small blocks, "
            "3 transformer layers and decoder blocks, 4 stages, 5 whole encoders and decoders"
        )
    return number
