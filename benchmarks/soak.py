"""Thousands of steps whose shapes change, under one budget: nothing grows, every limit is kept.

    PYTHONPATH=src python benchmarks/soak.py

A small network is trained on batches of many sizes, with an optimizer, under one limit in bytes
that is below the plain peak of the larger ones. A copy trains on the same data without a budget.

- every step: loss and random state are compared with the copy's, bit for bit;
- every `--sample` steps: parameters, gradients and buffers too, and the step is measured;
- at a fifth of the run and at its end: live tensors, live objects, watched storages, memory in use.

Exits with 1 if a bit differs, a limit is exceeded, or something has grown.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import lowtide
from lowtide import engine
from lowtide.tape import watch
from models import arguments, mebibytes, results

SHARE = 0.4  # of the plain peak of the largest batch
_SLACK_OBJECTS = 0.02  # of all live objects
_SLACK_BYTES = 16 << 20  # resident memory comes in pages and arenas


class Net(nn.Module):
    """Convolutions, BatchNorm, dropout and a branch that some batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Dropout(0.1)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        if len(x) % 2:  # a branch that only odd batches take
            x = x.tanh()
        return self.head(x.mean((2, 3)))


def batches(count: int) -> list[tuple[int, int]]:
    """(samples, side) for each step: some sizes come often, others rarely."""
    draw = torch.Generator().manual_seed(3)
    often = [(8, 16), (6, 16), (4, 24), (7, 12)]
    sizes = []
    for _ in range(count):
        if torch.rand((), generator=draw) < 0.8:
            sizes.append(often[int(torch.randint(0, len(often), (), generator=draw))])
        else:
            samples = int(torch.randint(1, 9, (), generator=draw))
            sizes.append((samples, 4 * int(torch.randint(2, 7, (), generator=draw))))
    return sizes


class Training:
    """A network with its optimizer and its stream of random numbers."""

    def __init__(self, net: nn.Module, budget: lowtide.Budget | None) -> None:
        self.net, self.budget = net, budget
        self.optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, foreach=False)
        self.random = torch.Generator().manual_seed(1).get_state()

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        torch.set_rng_state(self.random)
        if self.budget is None:
            loss = nn.functional.cross_entropy(self.net(x), target)
        else:
            with self.budget:
                loss = nn.functional.cross_entropy(self.net(x), target)
        loss.backward()
        self.random = torch.get_rng_state()
        return loss.detach()

    def state(self) -> list[Tensor]:
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        return [*self.net.parameters(), *self.net.buffers(), *gradients]


@dataclass
class Census:
    """What is alive in this process; memory in bytes."""

    tensors: int
    objects: int
    watched: int
    resident: int

    @staticmethod
    def take() -> Census:
        watch.sweep()
        gc.collect()
        found = gc.get_objects()
        tensors = sum(issubclass(type(o), Tensor) for o in found)
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * 4096
        core = engine.core()
        records = 0 if core is None else core.count_records()  # the collector does not list them
        return Census(tensors, len(found) + records, len(watch.counts()), resident)

    def grown(self, later: Census) -> list[str]:
        """What has grown by more than it should, compared with a later census."""
        found = []
        if later.tensors > self.tensors:
            found.append(f"tensors {self.tensors} -> {later.tensors}")
        if later.objects > self.objects * (1 + _SLACK_OBJECTS):
            found.append(f"objects {self.objects} -> {later.objects}")
        if later.watched > self.watched:
            found.append(f"watched storages {self.watched} -> {later.watched}")
        if later.resident > self.resident + _SLACK_BYTES:
            found.append(f"MiB {mebibytes(self.resident)} -> {mebibytes(later.resident)}")
        return found


@dataclass
class Soak:
    """The findings of a run."""

    limit: int
    peaks: list[int] = field(default_factory=list)
    plain_peaks: list[int] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    refused: int = 0
    replayed: int = 0
    planned: int = 0
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """For each step, plain and under the budget."""


def peak_of(training: Training, x: Tensor, target: Tensor, out: list[Tensor]) -> int:
    training.optimizer.zero_grad()
    return lowtide.measure(lambda: out.append(training.step(x, target)), device="cpu").peak_bytes


def largest_peak(net: nn.Module, sizes: list[tuple[int, int]]) -> int:
    samples, side = max(sizes, key=lambda size: size[0] * size[1] ** 2)
    probe = Training(copy.deepcopy(net), None)
    x, target = torch.randn(samples, 3, side, side), torch.randint(0, 10, (samples,))
    return max(peak_of(probe, x, target, []) for _ in range(2))


def run(steps: int, sample: int) -> tuple[Soak, list[str]]:
    torch.manual_seed(0)
    net = Net()
    sizes = batches(steps)
    limit = int(SHARE * largest_peak(net, sizes))
    budget = lowtide.budget(limit)
    soak = Soak(limit)
    ours, plain = Training(net, budget), Training(copy.deepcopy(net), None)
    early: Census | None = None
    for number, (samples, side) in enumerate(sizes):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(samples, 3, side, side, generator=generator)
        target = torch.randint(0, 10, (samples,), generator=generator)
        sampled = number % sample == 0
        losses: list[Tensor] = []
        if sampled:
            peak = peak_of(ours, x, target, losses)
            soak.peaks.append(peak)
            soak.plain_peaks.append(peak_of(plain, x, target, losses))
            if peak > limit:
                soak.over.append(f"step {number}: {peak} of {limit} bytes, {samples} x {side}^2")
        else:
            took = []
            for training in (plain, ours):
                began = time.process_time()
                losses.append(training.step(x, target))
                took.append(time.process_time() - began)
            soak.seconds.append((took[0], took[1]))
        same = torch.equal(losses[0], losses[1]) and torch.equal(ours.random, plain.random)
        if sampled:
            same = same and all(map(torch.equal, ours.state(), plain.state()))
        if not same:
            soak.differ.append(f"step {number}, {samples} x {side}^2")
        ours.optimizer.step()
        plain.optimizer.step()
        report = budget.report()
        soak.replayed += report.replayed_operations
        soak.planned += report.planned
        if number == steps // 5:
            early = Census.take()
    assert early is not None
    return soak, early.grown(Census.take())


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--steps", type=int, help="default: 10,000; 300 with --quick")
    parser.add_argument("--sample", type=int, default=10)
    options = parser.parse_args()
    steps = options.steps or (300 if options.quick else 10_000)
    with results(options) as rows:
        soak, grown = run(steps, options.sample)
        above = sum(peak > soak.limit for peak in soak.plain_peaks)
        quarter = len(soak.seconds) // 4
        added = [
            sum(ours for _, ours in part) / sum(plain for plain, _ in part) - 1
            for part in (soak.seconds[quarter : 2 * quarter], soak.seconds[-quarter:])
        ]
        rows.append(
            {
                "steps": steps,
                "limit": soak.limit,
                "measured": len(soak.peaks),
                "largest": max(soak.peaks),
                "plain_above": above,
                "over": soak.over,
                "differ": soak.differ,
                "grown": grown,
                "replayed": soak.replayed,
                "planned": soak.planned,
                "added": added,
            }
        )
        print(f"{steps} steps under {mebibytes(soak.limit)} MiB")
        print(
            f"measured {len(soak.peaks)}: largest peak {mebibytes(max(soak.peaks))} MiB; "
            f"{above} of the plain steps exceed the limit"
        )
        print(f"over the limit: {', '.join(soak.over) or 'none'}")
        print(f"bits that differ: {', '.join(soak.differ[:10]) or 'none'}")
        print(f"grown: {', '.join(grown) or 'nothing'}")
        print(f"{soak.planned} steps followed a plan, {soak.replayed} operations replayed")
        print(f"added time, second and last quarter: {added[0]:+.0%} {added[1]:+.0%}")
        print(
            f"median of a plain step {1e3 * statistics.median(p for p, _ in soak.seconds):.1f} ms"
        )
    if soak.over or soak.differ or grown:
        sys.exit(1)


if __name__ == "__main__":
    main()
