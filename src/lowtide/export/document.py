"""Everything that is known about a step, as one JSON document.

Problem: the page and the command line's ``--json`` must show the same figures. Invariant: the page
draws what is in its document and computes only positions; a figure that is not known is null, never
a guess. Imports explain. Rejected: one format for each picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lowtide.analysis.advice import holders
from lowtide.analysis.options import Option
from lowtide.analysis.timeline import Timeline
from lowtide.dryrun.ledger import Site
from lowtide.explain import Explanation
from lowtide.frontier import Curve
from lowtide.plans import Plan

FORMAT = "lowtide.step"
VERSION = 1
_REASONS = 40


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
    subject, sites = told.study, _Sites()
    plain = _timeline(told.plain, sites)
    planned = None if told.planned is None else _timeline(told.planned, sites)
    refused = told.refused
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "name": subject.name,
        "source": subject.step.source,
        "device": subject.step.device,
        "operations": len(subject.step.graph.ops),
        "events": len(subject.step.graph.events),
        "standing": dict(subject.ledger.standing),
        "parameters": {
            "tensors": subject.ledger.parameters[0],
            "requires_grad": subject.ledger.parameters[1],
        },
        "refused": (
            None
            if refused is None
            else {"limit": refused.limit, "minimum": refused.minimum, "message": str(refused)}
        ),
        "plain": plain,
        "planned": planned,
        "plan": None if told.plan is None else plan_dict(told.plan),
        "saved": subject.saved.to_dict(),
        "curve": None if curve is None else curve_rows(curve),
        "options": option_rows(subject.options),
        "changes": [asdict(change) for change in told.changes],
        "kept": [{**asdict(kept), "shape": list(kept.shape)} for kept in told.kept[:_REASONS]],
        "outputs": [
            {
                "shape": list(output.shape),
                "dtype": output.dtype,
                "requires_grad": output.requires_grad,
                "reason": output.reason,
            }
            for output in told.outputs
        ],
        "sentences": list(told.sentences),
        "trials": [asdict(trial) for trial in trials],
        "trial_refused": trial_refused,
        "sites": sites.rows,
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    """What a plan costs, and what it decides for each module."""
    return {
        "fingerprint": plan.step.graph.fingerprint,
        "source": plan.source,
        "device": plan.step.device,
        "limit": plan.limit,
        "peak": plan.peak,
        "plain_peak": plan.plain_peak,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "status": plan.status,
        "modules": [
            {
                "module": row.module,
                "kept_bytes": row.kept_bytes,
                "recomputed_bytes": row.recomputed_bytes,
                "replayed_operations": row.replayed_operations,
                "seconds": row.seconds,
            }
            for row in plan.modules
        ],
    }


def curve_rows(curve: Curve) -> list[dict[str, Any]]:
    return [
        {
            "limit": plan.limit,
            "peak": plan.peak,
            "overhead": plan.overhead,
            "lower_bound": plan.lower_bound,
        }
        for plan in curve
    ]


def option_rows(options: Sequence[Option]) -> list[dict[str, Any]]:
    return [asdict(option) for option in options]


class _Sites:
    """Numbers the sites, so that a document contains each once."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self._known: dict[Site, int] = {}

    def number(self, site: Site) -> int:
        found = self._known.get(site)
        if found is None:
            found = self._known[site] = len(self.rows)
            self.rows.append([site.operator, site.module, site.line])
        return found


def _timeline(line: Timeline, sites: _Sites) -> dict[str, Any]:
    return {
        "peak": line.peak,
        "at": line.at,
        "by_kind": line.by_kind(),
        # phase, place, site, kept, recomputed, gradient, temporary
        "moments": [
            [m.phase, m.place, sites.number(m.site), m.kept, m.recomputed, m.gradient, m.temporary]
            for m in line.moments
        ],
        "items": [
            {
                "bytes": item.nbytes,
                "kind": item.kind,
                "site": sites.number(item.site),
                "shape": list(item.shape),
                "dtype": item.dtype,
                "name": item.name,
            }
            for item in line.items
        ],
        "holders": [asdict(holder) for holder in holders(line)],
    }
