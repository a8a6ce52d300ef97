"""Which values of a watched step no replay makes, and what FSDP2 takes in its backward.

Problem: FSDP2 frees the parameters of a module as its forward ends, so that what later modules read
of it has to be held, although the record has the operation. Invariant: a value is cut off if
something reads or saves it after that, whatever plan is followed; only numbers are kept. Imports
lives and leaves. Rejected: asking the tape which values it holds for good, which a plan may have
chosen as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide.observing.leaves import Leaves
from lowtide.observing.lives import Lives
from lowtide.tape.values import Handle, Value

if TYPE_CHECKING:
    from lowtide.memory.marks import Marks

_TURNOVER = 4
"""In backward, FSDP2 has as much as it gathers for one module so many times: the parameters of that
module and of the one before, their gradients, and copies of either on the way to other ranks."""


class CutOff(Lives):
    """The part of an observer that is told of FSDP2.

    Attributes:
        cut: the values that no replay makes, see `ValueNode`.
        turnover: bytes that FSDP2 takes in backward, all along; a guess.
    """

    def __init__(self, memory: Marks | None) -> None:
        super().__init__(memory)
        self.leaves = Leaves()
        self.cut: set[int] = set()
        self.turnover = 0
        self._cut_off = 0  # values with lower numbers are, once something reads them

    def gathered(self, keys: list[int], nbytes: int, parts: int) -> None:
        """See `lowtide.tape.tape.Decisions`."""
        self.leaves.parts.update(dict.fromkeys(keys, parts))
        self.turnover = max(self.turnover, _TURNOVER * nbytes)

    def cut_off(self, numbers: int) -> None:
        """See `lowtide.tape.tape.Decisions`."""
        self._cut_off = numbers

    def saved(self, value: Value, handle: Handle) -> None:
        super().saved(value, handle)
        self._needs((value.number,))

    def _needs(self, numbers: Iterable[int]) -> None:
        """These values are read or saved now."""
        if self._cut_off:
            self.cut.update([number for number in numbers if 0 <= number < self._cut_off])
