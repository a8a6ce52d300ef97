"""The errors and warnings that lowtide raises itself.

Problem: a user must be able to tell lowtide's refusals from torch's errors, and to catch them
without catching everything. Invariant: every error derives from `LowtideError`, and its text says
what happened, with which values, why, and the way out. Each class also derives from the built-in
that torch would raise in its place, so that an existing `except RuntimeError` keeps working.
Imports nothing. Rejected: bare `RuntimeError`s, which callers can only tell apart by their text.
"""

from __future__ import annotations

import sys


def users_frame() -> int:
    """The `stacklevel` of the nearest frame outside lowtide, and outside torch that has called it,
    for a warning by the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("lowtide", "torch", "contextlib", "functools")


class LowtideError(Exception):
    """The base class of every error that lowtide raises."""


class BudgetError(LowtideError, RuntimeError):
    """The step does not fit inside its limit (rule 13).

    The text of a refusal contains "out of memory.", by which accelerate's
    ``find_executable_batch_size`` and Trainer's ``auto_find_batch_size`` know that a smaller batch
    may fit.

    Attributes:
        limit: the limit that was given, in bytes.
        minimum: the smallest limit known to suffice, in bytes. If the step was refused before all
            of it was known, an estimate of it, which may be too small.

    Both are 0 if a library made another error of this class of the text alone.
    """

    def __init__(self, message: str, *, limit: int = 0, minimum: int = 0) -> None:
        # Who raises an error again with another text (pyro), or gets it from another process, makes
        # it of the text alone.
        super().__init__(message)
        self.limit = limit
        self.minimum = minimum

    def again(self) -> BudgetError:
        """A copy to raise: an error that is stored must not hold the frames it was raised in, nor
        what is in them."""
        copy = BudgetError(str(self), limit=self.limit, minimum=self.minimum)
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy


class ReplayError(LowtideError, RuntimeError):
    """A saved tensor can be neither handed back nor recomputed (rules 4 and 5)."""


class UsageError(LowtideError, ValueError):
    """An argument or a combination of features that lowtide does not accept."""


class UnsupportedError(LowtideError, RuntimeError):
    """A feature of torch that cannot run under lowtide. The text names it and the way out."""


class LowtideWarning(UserWarning):
    """The root of all warnings that lowtide gives: one filter is for all of them."""


class CompiledWarning(LowtideWarning):
    """A compiled function runs eagerly, a compiled model runs without its budget, or compiled code
    runs on larger inputs than its limit was planned for."""


class KeptWarning(LowtideWarning):
    """What could be recomputed is kept: a setting of torch is in the way (rule 5), or a region
    returned a generator or coroutine, whose code runs after the region. Or parameters are kept that
    the program takes out of memory after the forward, as replays read them (rule 4)."""


class DeviceWarning(LowtideWarning):
    """A step computes on two devices, and its limit is for one of them (rule 13)."""


class UncountedWarning(LowtideWarning):
    """A backward went through checkpointed modules in eval mode, where they are plain (rule 12). Or
    there is memory that a limit does not count (rule 13): the forward of a fitted model has saved
    nothing, as it returns what is evaluated later or hides what it keeps in the `ctx` of a
    `torch.autograd.Function`; saved-tensor hooks of the program's own have taken all that a step
    saves; a budget was entered around a backward alone, or around a forward that has saved nothing
    and whose gradients exceed the limit; the forward of a fitted model was replaced, the model is
    trained without it, or it runs inside of another budget or of a region; or several forwards came
    before one backward, or the second after a differentiable one of the first, and each is a step
    that may take the whole limit."""


class DryRunWarning(LowtideWarning):
    """A real step was run, because the step cannot run on fake tensors; real steps that were asked
    for have moved parameters; or the step returned no loss, so that its backward is left out."""


class PlanWarning(LowtideWarning):
    """The first step of a budget is not the one that the budget's plan was made for. Its limit is
    kept all the same (rule 13)."""
