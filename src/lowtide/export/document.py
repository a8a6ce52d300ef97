"""Everything that is known about a step, as one JSON document.

Problem: the page and the command line's ``--json`` must show the same figures. Invariant: the page
draws what is in its document and computes only positions; a figure that is not known is null, never
a guess. Imports explain. Rejected: one format for each picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.explain import Explanation
from lowtide.frontier import Curve


@dataclass(frozen=True, slots=True)
class Trial:
    """One real step, and what was predicted for it. In bytes and seconds.

    Attributes:
        label: "plain", "planned", or "unplanned" for a step that left its plan (as one that runs
            backward more than once does) and was kept within the limit.
        predicted: the peak predicted by the dry run, or by the plan that the step followed.
        measured: the measured peak, counted allocation by allocation.
    """

    label: str
    predicted: int
    measured: int
    seconds: float


def document(
    told: Explanation,
    *,
    curve: Curve | None = None,
    trials: Sequence[Trial] = (),
    trial_refused: str | None = None,
) -> dict[str, Any]:
    """The document of a step, with `curve` and `trials` if they are given."""
    return {
        **told.to_dict(),
        "curve": None if curve is None else curve.to_dict()["curve"],
        "trials": [asdict(trial) for trial in trials],
        "trial_refused": trial_refused,
    }
