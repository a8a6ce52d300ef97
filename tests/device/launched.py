"""A net with kernels of Triton's, as libraries of kernels have them.

Problem: lowtide sees Triton's launches and launches kernels again, which only a device can show to
give the same bits. Invariant: the kernels are of the kinds that libraries have (a norm with two
results, a rotation in place, an activation that is tuned), in Functions that do not say what they
write. Imports nets and Triton. Rejected: a library's kernels, which the device may not have.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from device.nets import Net


@triton.jit
def _norm(x, weight, out, scale, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value) / width + 1e-6)
    tl.store(scale + row, factor)
    value = value * factor * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, value, mask=inside)


@triton.jit
def _rotate(x, cos, sin, width, HALF: tl.constexpr, BACK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, HALF)
    first, second = x + row * width + at, x + row * width + HALF + at
    a, b = tl.load(first).to(tl.float32), tl.load(second).to(tl.float32)
    c, s = tl.load(cos + row * HALF + at), tl.load(sin + row * HALF + at)
    if BACK:
        s = -s
    tl.store(first, a * c - b * s)
    tl.store(second, b * c + a * s)


@triton.autotune([triton.Config({"BLOCK": size}) for size in (256, 1024)], key=["count"])
@triton.jit
def _gate(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    value = value / (1.0 + tl.exp(-value)) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value, mask=inside)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        out, scale = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32)
        width = x.shape[-1]
        _norm[(x.shape[0],)](x, weight, out, scale, width, BLOCK=triton.next_power_of_2(width))
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        normed, given = x.float() * scale, given.float()
        through = given * weight
        slope = scale * (through - normed * (through * normed).mean(-1, keepdim=True))
        return slope.to(x.dtype), (given * normed).sum(0).to(weight.dtype)


class Rotate(torch.autograd.Function):
    """In place, which nobody is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.contiguous()
        _rotate[(x.shape[0],)](x, cos, sin, x.shape[-1], HALF=x.shape[-1] // 2, BACK=False)
        ctx.save_for_backward(cos, sin)
        return x

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        given = given.clone(memory_format=torch.contiguous_format)
        half = given.shape[-1] // 2
        _rotate[(given.shape[0],)](given, cos, sin, 2 * half, HALF=half, BACK=True)
        return given, None, None


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _gate[lambda meta: (triton.cdiv(out.numel(), meta["BLOCK"]),)](gate, up, out, out.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return given * up * s * (1 + gate * (1 - s)), given * gate * s


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.turn, self.gate = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.turn(Norm.apply(x, self.weight))
        angles = torch.arange(y.shape[0] * y.shape[1] // 2, device=y.device).view(y.shape[0], -1)
        y = Rotate.apply(y, (angles / 7).cos(), (angles / 7).sin()).sin()
        return x + self.down(Gate.apply(self.gate(y), self.up(y)))


class Launched(Net):
    """Blocks of a norm, a rotation and a gated activation."""

    def make(self) -> list[nn.Module]:
        return [Block(self.size(512, 32)) for _ in range(4)]

    def example(self) -> Tensor:
        return self.random(self.size(4096, 16), self.size(512, 32))
