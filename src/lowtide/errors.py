"""Everything lowtide raises on its own account.

Problem: a user must be able to tell lowtide's refusals from torch's errors, and to catch them
without catching everything. Invariant: every error derives from `LowtideError` and its text says
what happened, with which values, why, and the way out. Imports nothing. Rejected: bare
`RuntimeError`s, which callers can only tell apart by their text. Each class also derives from the
built-in that torch would raise in its place, so that existing `except RuntimeError` keeps working.
"""

from __future__ import annotations

import sys


def users_frame() -> int:
    """The `stacklevel` of the nearest frame outside of lowtide, for a warning of the caller's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("lowtide", "contextlib", "functools")


class LowtideError(Exception):
    """The root of every error that lowtide raises."""


class BudgetError(LowtideError, RuntimeError):
    """The step cannot be run inside its limit (rule 13).

    Attributes:
        limit: the limit asked for, in bytes.
        minimum: the smallest limit known to do, in bytes; where the step was refused before it was
            known to its end, one that leaves room for the rest.
    """

    def __init__(self, message: str, *, limit: int, minimum: int) -> None:
        super().__init__(message)
        self.limit = limit
        self.minimum = minimum

    def again(self) -> BudgetError:
        """The same, to be raised: one that is kept must not keep the frames it was raised in, nor
        what stands in them."""
        return BudgetError(str(self), limit=self.limit, minimum=self.minimum)


class ReplayError(LowtideError, RuntimeError):
    """A saved tensor can neither be handed back nor be rematerialized (rules 4 and 5)."""


class UsageError(LowtideError, ValueError):
    """An argument or a combination of features that lowtide does not take."""


class UnsupportedError(LowtideError, RuntimeError):
    """A feature of torch that cannot run under lowtide, named with the way out."""


class CompiledWarning(UserWarning):
    """A compiled function runs without its compilation, a compiled model without its budget, or
    compiled code with inputs larger than its limit was planned for."""


class DryRunWarning(UserWarning):
    """A step had to be run, because it cannot be gone through on fake tensors."""
