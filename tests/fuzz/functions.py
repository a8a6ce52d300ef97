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


class ManyOutputs(Function):
    """Three outputs, of which the backward may get some gradients only; saves all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = torch.sin(x), torch.exp(-x * x)
        c = a * b
        ctx.save_for_backward(x, a, b, c)
        ctx.set_materialize_grads(False)
        return a, b, c

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, a, b, c = ctx.saved_tensors
        total = torch.zeros_like(x)
        for g, slope in zip(grads, (x.cos(), -2 * x * b, x.cos() * b - 2 * x * c), strict=True):
            if g is not None:
                total = total + g * slope
        return total + 0.0 * a


class Attributes(Function):
    """Keeps tensors in attributes of ctx instead of saving them; first order only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.x, ctx.made = x, {"slope": torch.cos(x) * y.detach()}
        ctx.save_for_backward(y)
        return torch.sin(x) * y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.saved_tensors  # noqa: B018 (asked for, so that it is checked)
        return grads[0] * ctx.made["slope"], grads[0] * torch.sin(ctx.x)


class RunsInside(Function):
    """Runs a forward with grad inside of its own, and its backward in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = (torch.tanh(inner) * inner).exp().clamp(max=5)
        ctx.inner, ctx.out = inner, out
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.autograd.grad(ctx.out, ctx.inner, grads[0], retain_graph=True)[0]


class RunsAgain(Function):
    """Saves its input and runs its forward again in the backward, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sigmoid(x) * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = torch.sigmoid(inner) * inner
        return torch.autograd.grad(out, inner, grads[0])[0]


class GradientInForward(Function):
    """Makes its gradient in the forward, as losses in chunks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            loss = (torch.tanh(inner).exp() * inner).sum()
            (gradient,) = torch.autograd.grad(loss, inner)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0]


class SavesView(Function):
    """Saves a part of its input and a transposed output, and returns a view of what it made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = torch.exp(x.clamp(-2, 2))
        ctx.save_for_backward(x.flatten()[:1], made.transpose(0, -1), x)
        return made.flatten()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part, made, x = ctx.saved_tensors
        slope = made.transpose(0, -1) * (x.abs() <= 2)
        return grads[0].view(slope.shape) * slope + 0.0 * part.sum()


class WritesTwo(Function):
    """Writes both inputs in place, one of them saved, and returns them with a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2.0)
        y.mul_(0.5)
        ctx.mark_dirty(x, y)
        made = x * x
        ctx.save_for_backward(x)
        return x, y, made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 + grads[2] * 4 * x, grads[1] * 0.5
