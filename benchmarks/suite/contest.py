"""One network, all methods: peaks, bits and seconds.

Invariant: each method runs the same three batches from the same random state, measured allocation
by allocation, and its loss, gradients, buffers and generator are compared with the plain step's;
then all methods that worked are timed in turns. A method that fails is a row with its error.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from benchmarks.models import Batch, clear, turns
from torch import Tensor

import lowtide

from .cases import Case
from .methods import (
    PLAIN,
    Method,
    NotThereError,
    Ready,
    compiled,
    compiled_name,
    peers,
    segment_counts,
    sequential,
    twin,
    under,
)

STEPS = 3
AGAIN = 4  # plain runs on a device, to learn which of its results they repeat
_NEAR = 0.01  # of the plain peak: of limits closer to each other than this, only the smaller is run


@dataclass
class Row:
    """The results of one method, in bytes and seconds; None: not known."""

    method: str
    family: str
    """"plain", "peer", "compile" or "lowtide"."""
    base: str = PLAIN
    limit: int | None = None
    peaks: list[int] = field(default_factory=list)
    """For each step, above what was in memory when it began."""
    bits: str = ""
    """"same", or how many tensors differ from the plain step's. On a GPU, some may differ from one
    plain run to the next: these are not compared, and the text says how many are."""
    seconds: float | None = None
    """Median of a step."""
    spread: tuple[float, float] | None = None
    """Quartiles."""
    minimum: int | None = None
    """If a limit was refused: the smallest that would suffice."""
    error: str = ""
    note: str = ""

    @property
    def peak(self) -> int | None:
        """The largest peak of a step; without a limit, the first is left out, as it may compile."""
        counted = self.peaks if self.limit is not None else self.peaks[1:]
        return max(counted, default=None)

    @property
    def held(self) -> bool:
        return self.limit is None or self.peak is None or self.peak <= self.limit


class Contender:
    """A prepared network, and its step, which can be called repeatedly."""

    def __init__(self, case: Case, ready: Ready) -> None:
        self.ready = ready
        self.forward = ready.wrap(partial(case.loss, ready.model))

    def step(self, batch: Batch) -> Tensor:
        with self.ready.budget or contextlib.nullcontext():
            loss = self.forward(batch)
        loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Drop gradients, which most contenders share with the plain network."""
        clear(self.ready.model)

    def state(self, loss: Tensor) -> list[Tensor]:
        """A copy of everything that a step changes."""
        model = self.ready.model
        left = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        bits = [t.detach().clone() for t in (*left, *model.buffers())]
        bits.append(torch.get_rng_state())
        if loss.is_cuda:
            bits.append(torch.cuda.get_rng_state())
        return bits


class Contest:
    """All methods on one network."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.plain = case.make().to(device)
        torch.manual_seed(0)
        self.data = [tuple(t.to(device) for t in case.batch()) for _ in range(STEPS)]
        self.rows: dict[str, Row] = {}
        self.runs: dict[str, Callable[[], object]] = {}
        self.expected: list[list[Tensor]] = []
        self.repeats: list[list[bool]] = []
        """Of the plain step's results, which have the same bits in each run."""

    # ------------------------------------------------------------------ one method

    def enter(self, row: Row, method: Method, steps: int = STEPS) -> Row:
        """Run a method's first steps; methods that work are timed later."""
        self.rows[row.method] = row
        try:
            contender = Contender(self.case, method(self.case, self.plain))
            with contender.ready.around():
                self._watch(row, contender, steps)
            self.runs[row.method] = partial(timed, contender, self.data[0])
        except NotThereError as reason:
            row.error = f"does not exist: {reason}"
        except lowtide.BudgetError as error:
            row.minimum, row.error = error.minimum, first_line(error)
        except Exception as error:
            row.error = f"{type(error).__name__}: {first_line(error)}"
        self._tidy()
        return row

    def _watch(self, row: Row, contender: Contender, steps: int) -> None:
        torch.manual_seed(1)
        differing, compared, left = 0, 0, 0
        for number, batch in enumerate(self.data[:steps]):
            contender.clear()
            losses: list[Tensor] = []
            took = lowtide.measure(
                lambda batch=batch, losses=losses: losses.append(contender.step(batch)),
                device=self.device,
            )
            row.peaks.append(took.peak_bytes)
            bits = contender.state(losses[0])
            if row.method == PLAIN:
                self.expected.append(bits)
                self.repeats.append([True] * len(bits))
            same = list(map(torch.equal, bits, self.expected[number]))
            repeats = self.repeats[number]
            differing += sum(r and not s for r, s in zip(repeats, same, strict=True))
            compared += sum(repeats)
            left += len(repeats) - sum(repeats)
        contender.clear()
        row.bits = "same" if not differing else f"{differing} of {compared} tensors differ"
        if left and not differing:
            row.bits = f"same, of the {compared} of {compared + left} that plain repeats"

    def _repeat(self) -> None:
        """Find out which results of the plain step are the same in each run."""
        contender = Contender(self.case, Ready(twin(self.plain)))
        torch.manual_seed(1)
        for number, batch in enumerate(self.data):
            contender.clear()
            bits = contender.state(contender.step(batch))
            same = map(torch.equal, bits, self.expected[number])
            self.repeats[number] = [
                r and s for r, s in zip(self.repeats[number], same, strict=True)
            ]

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ all of them

    def run(self, shares: Sequence[float], budgets: Sequence[float], rounds: int) -> list[Row]:
        """Every method; lowtide at `shares` of the plain peak and at each peer's peak.

        Args:
            shares: limits, as shares of the plain peak.
            budgets: activation memory budgets for torch.compile; if empty, it is left out.
            rounds: how many steps of each method are timed.
        """
        plain = self.enter(Row(PLAIN, "plain"), lambda case, model: Ready(twin(model)))
        if plain.peak is None:
            return list(self.rows.values())
        if self.device.type != "cpu":
            for _ in range(AGAIN):
                self._repeat()
            self._tidy()
        for name, method in peers(self.case).items():
            self.enter(Row(name, "peer"), method)
        self._sequential()
        for share in budgets:
            base = compiled_name(1.0, "inductor")
            row = Row(compiled_name(share, "inductor"), "compile", base)
            self.enter(row, partial(compiled, share, "inductor"))
        self._lowtide(plain.peak, shares)
        self._time(rounds)
        return list(self.rows.values())

    def _sequential(self) -> None:
        """`checkpoint_sequential`, with the number of segments that has the lowest peak."""
        name = "checkpoint_sequential"
        counts = segment_counts(self.case, self.plain)
        if not counts:
            note = "does not exist: not a sequence of blocks"
            self.rows[name] = Row(name, "peer", error=note)
            return
        tried = {}
        for count in counts:
            row = self.enter(Row(name, "peer"), partial(sequential, count), steps=2)
            tried[count] = row.peak
        found = [count for count in counts if tried[count] is not None]
        if not found:
            return
        best = min(found, key=lambda count: tried[count])
        note = f"{best} segments, of {', '.join(map(str, counts))}"
        self.enter(Row(name, "peer", note=note), partial(sequential, best))

    def _lowtide(self, plain: int, shares: Sequence[float]) -> None:
        known = [row for row in self.rows.values() if row.family in ("peer", "compile")]
        peaks: dict[int, str] = {}
        for row in sorted(known, key=lambda row: row.peak or plain):
            if row.peak is None or row.peak >= plain:
                continue
            if not any(row.peak - other < _NEAR * plain for other in peaks):
                peaks[row.peak] = row.method
        for peak, method in sorted(peaks.items(), reverse=True):
            self.enter(limited(peak, f"peak of {method}"), partial(under, peak))
        lowest = self._lowest()
        for share in shares:
            limit = int(share * plain)
            near = any(abs(limit - peak) < _NEAR * plain for peak in peaks)
            if not near and limit > lowest.peak:
                self.enter(limited(limit, f"{share:.0%}"), partial(under, limit))
        limit = lowest.limit or lowest.peak
        row = self.enter(limited(limit, "minimum"), partial(under, lowest))
        if row.minimum is not None:
            again = limited(row.minimum, "minimum, as refused")
            self.enter(again, partial(under, row.minimum))

    def _lowest(self) -> lowtide.Plan:
        """The plan with the lowest peak that a dry run finds."""
        with self._seeded():
            forward = partial(self.case.loss, self.plain)
            least = lowtide.plan(forward, self.data[0]).minimum_peak
            return lowtide.plan(forward, self.data[0], limit=least)

    @contextlib.contextmanager
    def _seeded(self) -> Any:
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)

    def _time(self, rounds: int) -> None:
        clock = clock_of(self.device)
        turns(self.runs, 1, clock)  # a last round in which budgets may learn
        for name, spent in turns(self.runs, rounds, clock).items():
            row = self.rows[name]
            row.seconds = statistics.median(spent)
            low, _, high = statistics.quantiles(spent, n=4, method="inclusive")
            row.spread = (low, high)


def timed(contender: Contender, batch: Batch) -> None:
    """A step, waiting until the device has finished it."""
    contender.clear()
    if contender.step(batch).is_cuda:
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> Callable[[], float]:
    """CPU time; the wall clock if an accelerator does the work."""
    return time.perf_counter if device.type == "cuda" else time.process_time


def limited(limit: int, what: str) -> Row:
    return Row(f"lowtide, {what}", "lowtide", limit=limit)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
