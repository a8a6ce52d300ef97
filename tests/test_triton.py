"""Rule 4 with Triton itself, whose kernels are interpreted here: no GPU is needed.

It is no dependency of lowtide's: these run where it is installed.
"""

from __future__ import annotations

import pytest

from apart import ran_apart

PROGRAM = """
import torch
import triton
import triton.language as tl
import lowtide


@triton.jit
def turn(x, cos, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * tl.load(cos + at, mask=at < n), mask=at < n)


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos):
        x = x.contiguous()
        turn[(x.numel() // 64,)](x, cos, x.numel(), BLOCK=64)
        ctx.save_for_backward(cos)
        return x

    @staticmethod
    def backward(ctx, given):
        return given * ctx.saved_tensors[0], None


layers = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
x, cos = torch.randn(32, 16), torch.randn(32, 16)


def forward(x):
    for layer in layers:
        x = Rotary.apply((x @ layer).sin() @ layer, cos).cos()
    return x.sum()


wanted = torch.autograd.grad(forward(x), layers)
seen = []
lowtide.replay.listeners.append(lambda operations: seen.extend(op.facts.name for op in operations))
found = torch.autograd.grad(lowtide.checkpoint(forward, x), layers)
assert all(map(torch.equal, wanted, found))
print(sorted(set(seen)))
"""


@pytest.mark.parametrize("recorder", ["python", "compiled"])
def test_an_interpreted_kernel_that_works_in_place(recorder: str) -> None:
    pytest.importorskip("triton", exc_type=ImportError)
    done = ran_apart(PROGRAM, TRITON_INTERPRET="1", LOWTIDE_ENGINE=recorder)
    assert "aten::cos" in done.stdout
    assert "aten::sin" in done.stdout
