"""What a call switched on in a model, and how it is taken off again.

Problem: people meet several of these, for budgets, regions and transformers' models, and learn one.
Invariant: `remove()` makes the model plain again and may be called twice; the end of a ``with``
calls it; who takes it for the model is told. Imports errors. Rejected: a protocol, under which each
would say the same for itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import nn

from lowtide.errors import UsageError


class Removable(ABC):
    """Something that is on a model until `remove()`, which the end of a ``with`` calls."""

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether any of it is still on the model."""

    @abstractmethod
    def remove(self) -> None:
        """Make the model's forward plain again. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    if not TYPE_CHECKING:  # a type checker knows that neither is there, and says so

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            """`model = lowtide.fit(model, ...)` is written by who knows torch.compile or DDP."""
            raise UsageError(_not_the_model(self))

        def __getattr__(self, name: str) -> NoReturn:
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(nn.Module, name):
                said += f": {_not_the_model(self)}"
            raise AttributeError(said, name=name, obj=self)


def _not_the_model(handle: Removable) -> str:
    return (
        f"a {type(handle).__name__} is not the model, which stays the object it was. Give it a "
        "variable of its own, as in budget = lowtide.fit(model, limit), and go on with the model."
    )
