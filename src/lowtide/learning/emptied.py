"""Parameters that the program takes out of memory between a forward and its backward, by `.data`.

Problem: DeepSpeed's ZeRO 3 gathers a module's parameters for its forward, gives them empty memory
when that ends, and gathers them again in backward; code that keeps layers on the CPU does the same.
A replay has to find what the forward read, so the old memory stays (rule 4), and a step takes more
than without lowtide. Invariant: this is said once per budget, when the context of a step that was
watched ends. Imports `lowtide.errors` and bytes as text. Rejected: reading what was gathered again,
as that may be another part of another storage; gathering it for a replay, as ranks that recompute
different things would wait for each other.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from lowtide.errors import KeptWarning, users_frame
from lowtide.limits import format_bytes

if TYPE_CHECKING:
    from lowtide.running.decide import StepDecisions


class Emptied:
    """Whether it was said."""

    def __init__(self) -> None:
        self._said = False

    def look(self, decisions: StepDecisions) -> None:
        """A context has ended."""
        count, nbytes = decisions.emptied
        if self._said or not count:
            return
        self._said = True
        warnings.warn(
            f"{count} parameters that the forward has read have no memory any more as it ends, or "
            "are on another device: the program has changed their .data (DeepSpeed's ZeRO 3 does). "
            f"What they had, {format_bytes(nbytes)}, stays in memory until backward is done with "
            "it, as replays read it, and counts towards the limit. If that is too much, use FSDP2, "
            "or leave the parameters where they are.",
            KeptWarning,
            stacklevel=users_frame(),
        )
