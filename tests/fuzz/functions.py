"""Custom autograd Functions that random programs call.

The problem: saved tensors of custom Functions reach autograd by another way than those of
built-in operations, and what they save (inputs, outputs, intermediates, nothing) matters.

The invariant: every Function here is deterministic and right to second order, unless it says
otherwise, so that a difference is the engine's. It imports torch only.

Rejected: generating the bodies of Functions as well. A random backward that does not belong to
its forward tests nothing more, and each failure would be harder to read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class SaveInput(Function):
    """x * x * y, saving both inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * x * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return 2 * x * y * grads[0], x * x * grads[0]


class SaveOutput(Function):
    """tanh, saving its own output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.tanh(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (out,) = ctx.saved_tensors
        return grads[0] * (1 - out * out)


class SaveInside(Function):
    """softplus-like, saving a tensor that is neither input nor output; first order only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inside = torch.sigmoid(x) + 0.5
        ctx.save_for_backward(inside)
        return inside * inside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (inside,) = ctx.saved_tensors
        return grads[0] * 2 * inside * (inside - 0.5) * (1.5 - inside)


class TwoOutputs(Function):
    """Two outputs, one of them not differentiable, and state on ctx beside the saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sign = torch.sign(x.detach())
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        ctx.scale = 0.75
        return x * sign * ctx.scale, sign

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (sign,) = ctx.saved_tensors
        return grads[0] * sign * ctx.scale


class WriteInput(Function):
    """Doubles its input in place and saves what it made of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2.0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2.0 + 0.0 * x


class SetupContext(Function):
    """The newer form: forward without ctx, saving an input and an output afterwards."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x) * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, y = inputs
        ctx.save_for_backward(x, y, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None
        x, y, output = ctx.saved_tensors
        return grads[0] * torch.cos(x) * y, grads[0] * torch.sin(x) + 0.0 * output
