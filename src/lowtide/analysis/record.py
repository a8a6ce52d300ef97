"""An explanation as JSON types: the figures behind its sentences.

Problem: programs read figures, and `Explanation.to_dict`, the command line's ``--json`` and the
page must have the same ones. Invariant: a figure that is not known is null, never a guess; each
site stands once. Imports advice, options, timeline. Rejected: one format for each picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from lowtide.analysis.advice import holders
from lowtide.analysis.options import Option
from lowtide.analysis.timeline import Timeline
from lowtide.dryrun.ledger import Site

if TYPE_CHECKING:
    from lowtide.explain import Explanation

FORMAT = "lowtide.step"
VERSION = 1
_REASONS = 40


def record(told: Explanation) -> dict[str, Any]:
    """What an explanation knows: both timelines, what autograd holds, the plan, the sentences."""
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
        "plan": None if told.plan is None else told.plan.to_dict(),
        "saved": subject.saved.to_dict(),
        "curve": None,  # these three are in the page alone, see `lowtide.export.document`
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
        "trials": [],
        "trial_refused": None,
        "sites": sites.rows,
    }


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
