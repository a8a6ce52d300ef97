"""Every CUDA check, on a machine that has a GPU: ``python tests/cuda/check_cuda.py``.

Prints a table and exits with 1 if a check fails; without a device it says so and exits with 0.
Each check runs the plain step twice first: where the device itself is not deterministic, the check
could not tell lowtide's bits from the device's and fails by saying so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from torch import Tensor, nn

import lowtide
import lowtide.tracing
from lowtide import engine

MIB = 1 << 20
STEPS = 3
Around = Callable[[], Any]


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, dropout and a pool, wide enough for activations to weigh."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        widths = [3, 32, 32, 64, 64]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.1)
            )
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(64, 10)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out

    @staticmethod
    def example() -> Tensor:
        return torch.randn(16, 3, 64, 64, device="cuda")


class Transformer(nn.Module):
    def __init__(self, call: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
            for _ in range(4)
        )
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return x

    @staticmethod
    def example() -> Tensor:
        return torch.randn(16, 128, 256, device="cuda")


class TwoStreams(nn.Module):
    """Two branches, one of them on a stream of its own."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1))
        self.two = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(1024, 256)
        self.call = call
        self.side = torch.cuda.Stream()

    def inside(self, x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            two = self.two(x)
            two = two * two.sigmoid()
        one = self.one(x)
        current.wait_stream(self.side)
        two.record_stream(current)
        out: Tensor = self.head(one * two)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x) if self.call is None else self.call(self.inside, x)
        return out

    @staticmethod
    def example() -> Tensor:
        return torch.randn(2048, 256, device="cuda")


def train(
    kind: Any, call: Any = None, around: Around = contextlib.nullcontext, *, fp16: bool = False
) -> list[Tensor]:
    """Some steps; everything that they leave behind."""
    torch.manual_seed(0)
    model = kind(call).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=fp16)
    limit = around()
    left: list[Tensor] = []
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        x = kind.example()
        optimizer.zero_grad()
        with limit, torch.autocast("cuda", torch.float16, enabled=fp16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        left.append(loss.detach().clone())
        left += [p.grad.clone() for p in model.parameters()]
        left += [b.clone() for b in model.buffers()]
        left += [torch.cuda.get_rng_state().clone(), torch.get_rng_state().clone()]
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()
    return left


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


def bits(kind: Any, how: str, *, fp16: bool = False) -> str:
    plain = train(kind, fp16=fp16)
    if not same(plain, train(kind, fp16=fp16)):
        raise AssertionError("the plain step is not deterministic here: nothing to compare with")
    replayed: list[int] = []
    lowtide.replay.listeners.append(lambda ops: replayed.append(len(ops)))
    try:
        if how == "checkpoint":
            other = train(kind, lowtide.checkpoint, fp16=fp16)
        else:
            other = train(kind, around=lambda: lowtide.budget(0.7), fp16=fp16)
    finally:
        lowtide.replay.listeners.pop()
    if not same(plain, other):
        wrong = sum(not torch.equal(a, b) for a, b in zip(plain, other, strict=True))
        raise AssertionError(f"{wrong} of {len(plain)} tensors differ")
    if not sum(replayed):
        raise AssertionError("nothing was recomputed")
    return f"{len(plain)} tensors equal, {sum(replayed)} operations replayed"


def peak_of_steps(kind: Any, limit: Any) -> list[int]:
    """Of each step, above what stood when it began."""
    torch.manual_seed(0)
    model = kind().cuda()
    for p in model.parameters():
        p.grad = None
    x = kind.example()
    model(x).sum().backward()  # kernels and workspaces are loaded once
    peaks = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)

        def step() -> None:
            with limit:
                loss = model(x).square().mean()
            loss.backward()

        peaks.append(lowtide.measure(step).peak_bytes)
    return peaks


def limits(kind: Any, share: float) -> str:
    plain = max(peak_of_steps(kind, contextlib.nullcontext()))
    allowed = int(share * plain)
    peaks = peak_of_steps(kind, lowtide.budget(allowed))
    said = ", ".join(f"{p / MIB:.1f}" for p in peaks)
    if max(peaks) > allowed:
        raise AssertionError(f"limit {allowed / MIB:.1f} MiB, measured {said} MiB")
    return f"plain {plain / MIB:.1f}, limit {allowed / MIB:.1f}, measured {said} MiB"


def snapshot() -> str:
    """What https://pytorch.org/memory_viz reads of a step: the allocator's own events."""
    torch.manual_seed(0)
    net, x = ConvNet().cuda(), ConvNet.example()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pickle"
        lowtide.tracing.memory_snapshot(path, lambda x: net(x).square().mean(), x, limit=0.6)
        page = torch.cuda._memory_viz.trace_plot(written := pickle.loads(path.read_bytes()))
    events = [event for trace in written["device_traces"] for event in trace]
    allocated = [event["size"] for event in events if event["action"] == "alloc"]
    if not allocated or not written["segments"] or "<html" not in page.lower():
        raise AssertionError(f"{len(events)} events, {len(written['segments'])} segments")
    return f"{len(allocated)} allocations of {sum(allocated) / MIB:.1f} MiB in all"


CHECKS: dict[str, Callable[[], str]] = {
    "memory snapshot of a planned step": snapshot,
    **{
        f"{kind.__name__}, {how}{', fp16 + GradScaler' if fp16 else ''}": (
            lambda kind=kind, how=how, fp16=fp16: bits(kind, how, fp16=fp16)
        )
        for kind in (ConvNet, Transformer, TwoStreams)
        for how in ("checkpoint", "budget")
        for fp16 in (False, True)
    },
    **{
        f"{kind.__name__}, limit {share:.0%}": lambda kind=kind, share=share: limits(kind, share)
        for kind in (ConvNet, Transformer)
        for share in (0.8, 0.6)
    },
}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    if not torch.cuda.is_available():
        say("check_cuda.py needs a CUDA device; this machine has none, so nothing was checked.")
        return 0
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    engines = ["python"]
    try:
        with engine.use("compiled"):
            engines.append("compiled")
    except lowtide.UsageError as error:
        say(str(error))
    runs = [(way, name, check) for way in engines for name, check in CHECKS.items()]
    failed = 0
    for way, name, check in runs:
        try:
            with engine.use(way):
                result, verdict = check(), "ok"
        except Exception as error:
            failed += 1
            verdict = "FAILED"
            result = f"{type(error).__name__}: {error}"
            if not isinstance(error, AssertionError):
                traceback.print_exc()
        say(f"{verdict:<7} {way:<8} {name:<45} {result}")
    say(f"{len(runs) - failed} of {len(runs)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
