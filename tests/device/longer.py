"""Trainings of many steps on a device: steps that idle, that go unwatched, that vary, and FSDP2.

Problem: what a budget does after its first steps (it records no more, or watches no more, or
follows one plan for many sizes) is not seen by checks of three steps. Invariant: as in `checks`,
each compares all bits with the plain training on the same device; it also fails where the way that
it is about was not gone, or a step took more than its limit. Imports checks, nets, place. Rejected:
`lowtide.measure` around every step, inside which none idles or goes unwatched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from device.checks import Check, equal, replayed, within
from device.nets import Net, build, clear, differing, left_behind, same
from device.place import MIB, Place, peak, peak_by_torch, settle
from lowtide import engine
from lowtide.loop import Loop
from lowtide.running.decide import StepDecisions

MEASURED = 10  # so many steps are measured, for a budget may reset the allocator's counters in them
ACTIVATIONS = ("gelu", "silu", "relu", "tanh")
Peaks = list[int]
Training = Callable[[Place, lowtide.Budget | None, Peaks], list[Tensor]]


def steps_of(place: Place) -> int:
    return 24 if place.quick else 60


def compared(place: Place, train: Training, limit: lowtide.Budget, largest: int) -> list[int]:
    """The peaks of a training within a limit of `largest` bytes that left the plain one's bits."""
    plain = train(place, None, [])
    if not same(plain, train(place, None, [])):
        raise AssertionError("the plain training is not deterministic here: nothing to compare")
    peaks: Peaks = []
    wrong = differing(plain, train(place, limit, peaks))
    if wrong:
        raise AssertionError(f"{wrong} of {len(plain)} tensors differ")
    over = {number: took for number, took in enumerate(peaks) if took > largest}
    if over:
        raise AssertionError(f"limit {largest} bytes; over it, by step: {over}")
    return peaks


def most(place: Place, train: Training) -> int:
    """The largest peak of a plain training, after one that loaded kernels and workspaces."""
    train(place, None, [])
    peaks: Peaks = []
    train(place, None, peaks)
    return max(peaks)


# ------------------------------------------------------------------------------ the same each time


def repeated(place: Place, limit: lowtide.Budget | None, peaks: Peaks, kind: str) -> list[Tensor]:
    """Equal steps; what the last ones leave."""
    net = build(place, kind)
    left: list[Tensor] = []
    for number in range(steps_of(place)):
        torch.manual_seed(100 + number)
        x = net.example()
        clear(net)
        losses = []
        count = peak if number < MEASURED else peak_by_torch
        peaks.append(count(place, lambda x=x, to=losses: to.append(one(net, x, limit))))
        settle()
        if number >= steps_of(place) - 3:
            left += left_behind(net, losses[0])
    return left


def one(net: Net, x: Tensor, limit: lowtide.Budget | None) -> Tensor:
    with limit or contextlib.nullcontext():
        loss = net(x).float().square().mean()
    loss.backward()
    return loss.detach()


def idle(place: Place, kind: str) -> str:
    """Steps that fit as they are: they are not recorded any more."""
    train = functools.partial(repeated, kind=kind)
    allowed = 3 * most(place, train)  # one that takes half of its limit or less may idle
    limit = lowtide.budget(allowed)
    peaks = compared(place, train, limit, allowed)
    count = limit.report().idle_steps
    if not count and engine.name() == "compiled":
        raise AssertionError(f"none of {steps_of(place)} steps went unrecorded")
    return (
        f"{count} of {steps_of(place)} steps were not recorded; {max(peaks) / MIB:.2f} MiB at most"
    )


# ------------------------------------------------------------------------------ other each time


class Changing(nn.Module):
    """Layers over rows of any length, each followed by an activation that the step names."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        width = 32 if place.quick else 256
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True) for _ in range(4)
        )
        self.width = width

    def forward(self, x: Tensor, chosen: list[str]) -> Tensor:
        for number, name in enumerate(chosen):
            x = getattr(F, name)(self.layers[number % len(self.layers)](x)) + x
        return x.square().mean()


def changing(
    place: Place, limit: lowtide.Budget | None, peaks: Peaks, kinds: int, measured: bool
) -> list[Tensor]:
    """Steps of other lengths, with one of so many activations after each layer; of several, there
    are as many layers as the step happens to have."""
    torch.manual_seed(0)
    net, draw = Changing(place).to(place.device), random.Random(1)
    unit = 4 if place.quick else 32
    left: list[Tensor] = []
    for number in range(24 if place.quick else 2 * steps_of(place)):
        torch.manual_seed(number)
        x = torch.randn(4, unit * draw.randint(2, 8), net.width, device=place.device)
        depth = (
            (2 if place.quick else 4) if kinds == 1 else draw.randint(2, 3 if place.quick else 8)
        )
        chosen = [draw.choice(ACTIVATIONS[:kinds]) for _ in range(depth)]
        clear(net)
        losses: list[Tensor] = []

        def step(x: Tensor = x, chosen: list[str] = chosen, to: list[Tensor] = losses) -> None:
            with limit or contextlib.nullcontext():
                loss = net(x, chosen)
            loss.backward()
            to.append(loss.detach())

        count = peak if number < MEASURED or measured else peak_by_torch
        peaks.append(count(place, step))
        left += [losses[0].cpu(), *(p.grad.cpu() for p in net.parameters() if p.grad is not None)]
    return left


@contextlib.contextmanager
def ended() -> Iterator[list[bool]]:
    """For each step that ends inside, in order: whether it went unwatched."""
    steps: list[bool] = []
    finish = Loop._finish

    def noted(loop: Loop, decisions: StepDecisions) -> None:
        if decisions.ended:
            steps.append(decisions.headroom is not None)
        finish(loop, decisions)

    with mock.patch.object(Loop, "_finish", noted):
        yield steps


def unwatched(place: Place) -> str:
    """Steps of ever other operations, far below their limit."""
    train = functools.partial(changing, kinds=4, measured=False)
    allowed = 20 * most(place, train)
    with ended() as steps:
        peaks = compared(place, train, lowtide.budget(allowed), allowed)
    if not any(steps) and engine.name() == "compiled":
        raise AssertionError(f"each of {len(steps)} steps was watched")
    return (
        f"{sum(steps)} of {len(steps)} steps were not watched; {max(peaks) / MIB:.2f} MiB at most"
    )


def varying(place: Place, kinds: int) -> str:
    """The same near the limit, where each keeps it from its first operation on."""
    train = functools.partial(changing, kinds=kinds, measured=True)
    largest = most(place, train)
    allowed = 7 * largest // 10
    with replayed() as operations:
        peaks = compared(place, train, lowtide.budget(allowed), allowed)
    if not operations:
        raise AssertionError("nothing was recomputed")
    return (
        f"plain {largest / MIB:.2f}, limit {allowed / MIB:.2f}, at most {max(peaks) / MIB:.2f} MiB;"
        f" {len(operations)} operations replayed"
    )


# ------------------------------------------------------------------------------ FSDP2


@contextlib.contextmanager
def one_rank(place: Place) -> Iterator[Any]:
    """A process group of this process alone."""
    place.need("cuda", "FSDP2 with NCCL")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=place.device)
    try:
        yield dist.init_device_mesh(place.kind, (1,))
    finally:
        dist.destroy_process_group()


def sharded(place: Place, reshard: bool) -> str:
    """FSDP2 with NCCL on one rank, in bf16 with gradients of fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def train(limit: lowtide.Budget | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True) for _ in range(6))
        ).to(place.device)
        halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in net:
            fully_shard(block, mesh=mesh, mp_policy=halves, reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh, mp_policy=halves)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        losses: list[Tensor] = []
        for number in range(8):
            torch.manual_seed(number)
            x = torch.randn(16, 64, 128, device=place.device)
            with limit or contextlib.nullcontext():
                loss = net(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        whole = [p.full_tensor() for p in net.parameters()]
        return [t.detach().cpu() for t in (*losses, *whole)]

    with one_rank(place) as mesh:
        plain = train(None)
        if not same(plain, train(None)):
            raise AssertionError("the plain training is not deterministic here: nothing to compare")
        with replayed() as operations:
            return equal(plain, within(train), operations)


def all_checks() -> dict[str, Check]:
    """Checks by name, in the order in which they run."""
    found: dict[str, Check] = {
        f"bits: idle steps, {kind}": functools.partial(idle, kind=kind)
        for kind in ("conv net", "transformer")
    }
    found["bits: unwatched steps"] = unwatched
    found["bits: steps of other lengths"] = functools.partial(varying, kinds=1)
    found["bits: steps of other operations"] = functools.partial(varying, kinds=3)
    for reshard in (True, False):
        name = f"bits: FSDP2, {'' if reshard else 'not '}resharded after forward"
        found[name] = functools.partial(sharded, reshard=reshard)
    return found
