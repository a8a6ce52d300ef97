"""The largest batch that fits a given memory, and samples per second at it.

Invariant: "fits" is measured: the peak of a real step, forward and backward, is at most the given
memory. Peaks grow linearly with the batch, so two of them tell where to look; for lowtide they are
the minima of dry runs, which real steps then confirm. Parameters and the state of an optimizer come
on top and are the same for all.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from benchmarks.models import Batch, turns
from torch import nn

import lowtide

from .cases import Case
from .contest import Contender, clock_of, timed
from .methods import Method, Ready, per_block, twin, under

_REFUSED = (lowtide.BudgetError, torch.OutOfMemoryError)
_WARM = 3  # steps from which a budget learns


@dataclass
class Fit:
    """The largest batch of one method in `memory` bytes; times in seconds."""

    method: str
    memory: int
    batch: int = 0
    peak: int | None = None
    seconds: float | None = None
    needs: dict[int, int] = field(default_factory=dict)
    """Bytes for each batch that was tried."""

    @property
    def rate(self) -> float | None:
        """Samples per second."""
        return None if not self.seconds else self.batch / self.seconds


class Search:
    """Plain, per block and lowtide on one network."""

    def __init__(self, case: Case, device: torch.device, memory: int | None = None) -> None:
        """`memory` in bytes; default: the plain peak of twice the case's batch."""
        self.case, self.device = case, device
        self.plain = case.make().to(device)
        self.memory = memory or self._measured(keep, 2 * case.count)

    def run(self, rounds: int) -> list[Fit]:
        limited = partial(under, self.memory)
        plain = self._fit("plain", keep, partial(self._measured, keep))
        blocks = self._fit("torch per block", per_block, partial(self._measured, per_block))
        ours = self._fit("lowtide", limited, self._least)
        same = Fit("lowtide, batch of per block", self.memory, batch=blocks.batch)
        with contextlib.suppress(*_REFUSED):
            same.peak = self._measured(limited, same.batch)
        ways = [(plain, keep), (blocks, per_block), (ours, limited), (same, limited)]
        runs = {fit.method: self._steps(method, fit.batch) for fit, method in ways if fit.peak}
        for name, spent in turns(runs, rounds, clock_of(self.device)).items():
            fit = next(fit for fit, _ in ways if fit.method == name)
            fit.seconds = statistics.median(spent)
        return [fit for fit, _ in ways]

    def _fit(self, name: str, method: Method, need: Callable[[int], int]) -> Fit:
        fit = Fit(name, self.memory)

        def fits(batch: int) -> bool:
            try:
                fit.needs.setdefault(batch, need(batch))
            except _REFUSED:
                return False
            return fit.needs[batch] <= self.memory

        one, two = self.case.count, 2 * self.case.count
        fits(one), fits(two)
        slope = (fit.needs[two] - fit.needs[one]) / (two - one)
        batch = max(1, int(one + (self.memory - fit.needs[one]) / slope))
        pace = max(1, batch // 16)
        while batch > 0 and not fits(batch):
            batch -= pace
        while fits(batch + pace):
            batch += pace
        while batch > 0 and fit.peak is None:
            try:
                fit.peak = self._measured(method, batch)
            except _REFUSED:
                batch -= pace
        fit.batch = batch
        return fit

    # ------------------------------------------------------------------ one batch

    def _batch(self, count: int) -> Batch:
        torch.manual_seed(0)
        return tuple(t.to(self.device) for t in self.case.examples(count))

    def _measured(self, method: Method, count: int) -> int:
        """The largest peak of some steps; without a limit, the first step is left out."""
        contender = Contender(self.case, method(self.case, self.plain))
        batch, peaks = self._batch(count), []
        for _ in range(_WARM if contender.ready.budget else 2):
            contender.clear()
            peaks.append(
                lowtide.measure(lambda: contender.step(batch), device=self.device).peak_bytes
            )
        return max(peaks if contender.ready.budget else peaks[1:])

    def _least(self, count: int) -> int:
        """The lowest peak for which a dry run finds a plan."""
        forward = partial(self.case.loss, self.plain)
        return lowtide.plan(forward, self._batch(count)).minimum_peak

    def _steps(self, method: Method, count: int) -> Callable[[], None]:
        contender = Contender(self.case, method(self.case, self.plain))
        step = partial(timed, contender, self._batch(count))
        if contender.ready.budget:
            for _ in range(_WARM):
                step()
        return step


def keep(case: Case, plain: nn.Module) -> Ready:
    return Ready(twin(plain))
