"""What a call switched on in a model, and how it is taken off again.

Problem: people meet several of these, for budgets, regions and transformers' models, and learn one.
Invariant: `remove()` makes the model plain again and may be called twice; the end of a ``with``
calls it. Imports nothing of lowtide. Rejected: a protocol, under which each would say the same for
itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
