"""What reaches a recorder otherwise than through the dispatcher.

Problem: the forward of a custom Function, the launch of a kernel and generated code are called by
Python, and so are the operators inside of them, which are parts of them and no operations.
Invariant: what is handed to a recorder is recorded as one call, or as none, and the modes of the
program see what it calls as in the plain step. Imports `_compat` and encoding. Rejected: operators
of torch's dispatcher for such calls, which would need the types of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide import _compat
from lowtide.tape.encoding import Encoding


class Handed(Encoding):
    """The part of a recorder that code of ours calls where operators are not dispatched to it.

    Attributes:
        run: runs a call that was not dispatched, and records it.
    """

    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    _inside = False  # of what was handed to it

    def unseen(self, run: Callable[[], Any]) -> Any:
        """Run what calls operators that must not be recorded: its results are kept (rule 5)."""
        self.met_unusual()
        result = self._aside(run)
        if self.next_step is None:
            self._register(None, result, [])
        return result

    def met_unusual(self) -> None:
        """Something happens that operator calls do not show, such as a region. The compiled
        recorder does not idle in such steps."""

    def _aside(self, run: Callable[[], Any]) -> Any:
        with _compat.disable_dispatch():
            return run()

    def hand(self, call: Any, args: tuple[Any, ...]) -> Any:
        """Run what is no operator (see `Facts.handed`) like one; what it calls is none."""
        self.met_unusual()
        return self._beside(lambda: self.run(call, args, {}))

    def met_lazy(self) -> None:
        """A lazily conjugated or negated tensor was made where no operator was seen."""
        self._lazy_bits = True

    def _beside(self, run: Callable[[], Any]) -> Any:
        """Run in the modes of the program, all but this one."""
        self._inside = True
        try:
            return run()
        finally:
            self._inside = False
