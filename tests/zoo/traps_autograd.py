"""Custom functions, hooks, nested differentiation, detached and frozen parts, other checkpoints.

Problem: these reach past the operators: into autograd's own graph, into kernels that the dispatcher
does not see, into a second or a partial differentiation (semantics rules 1, 5, 7, 8 and 9).
Invariant: every plain step here is one that autograd itself accepts. May import: `zoo.case`, torch,
numpy.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from zoo.case import Apply, Batch, Case, integers, noise, smooth


class SavesIntermediates(Function):
    """Saves its input, an output and a tensor that is neither; keeps another on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: float) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(x)
        output = inner.pow(2) * power
        ctx.save_for_backward(x, inner, output)
        ctx.on_context = inner * 2
        ctx.power = power
        ranks = x.argsort(dim=-1)
        ctx.mark_non_differentiable(ranks)
        return output, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        x, inner, output = ctx.saved_tensors
        scale = ctx.on_context + 0.01 * output + 0.01 * x
        return grad * ctx.power * scale * (1 - inner * inner), None


class MarksDirty(Function):
    """Changes its input in place and saves the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return cast(Tensor, grad * output)


class Unseen(Function):
    """Fills a fresh tensor through numpy: a kernel that the dispatcher cannot see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fresh: Any) -> Tensor:
        output = fresh(x.shape, dtype=x.dtype)
        np.tanh(x.detach().numpy(), out=output.numpy())
        ctx.save_for_backward(output)
        return cast(Tensor, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return grad * (1 - output * output), None


class Cube(Function):
    """Differentiable twice: its backward is made of operations that autograd follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cast(Tensor, 3 * x.square() * grad)


class RunsAgain(Function):
    """Runs its module again in backward, as hand-written checkpoints and reversible nets do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        ctx.module = module
        with torch.no_grad():
            output: Tensor = x + module(x.detach())
        ctx.save_for_backward(x, *weights)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            output = inner + ctx.module(inner)
        first, *others = torch.autograd.grad(output, [inner, *weights], grad)
        return first, None, *others


def _net(function: Any) -> nn.Module:
    return Apply(function, first=nn.Linear(6, 8), last=nn.Linear(8, 3))


def _saving_function(self: Any, x: Tensor) -> object:
    output, ranks = SavesIntermediates.apply(self.first(x), 1.5)
    return self.last(output), ranks


def _dirty_function(self: Any, x: Tensor) -> object:
    hidden = MarksDirty.apply(self.first(x) * 0.5)
    return self.last(hidden * hidden)


def _unseen(fresh: Any) -> Any:
    def run(self: Any, x: Tensor) -> object:
        hidden = Unseen.apply(self.first(x), fresh)
        return self.last(torch.sin(hidden) * hidden)

    return run


def _written_in_place_unseen(self: Any, x: Tensor) -> object:
    hidden = torch.relu(self.first(x))
    table = torch.ones(8)
    table.numpy()[:] = np.linspace(0.1, 1.0, 8)
    shares = np.full(8, 2.0, dtype=np.float32)
    return self.last(hidden * table * torch.from_numpy(shares))


def _cube(self: Any, x: Tensor) -> object:
    return self.last(Cube.apply(self.first(x)))


def _running_again(self: Any, x: Tensor) -> object:
    hidden = torch.tanh(self.first(x))
    for block in self.blocks:
        hidden = RunsAgain.apply(hidden, block, *block.parameters())
    return hidden


def _own_checkpoint(reentrant: bool) -> Any:
    def run(self: Any, x: Tensor) -> object:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        return hidden

    return run


def _checkpointed(reentrant: bool) -> nn.Module:
    return Apply(
        _own_checkpoint(reentrant),
        first=nn.Linear(6, 8),
        layers=nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        ),
    )


def _forces(self: Any, x: Tensor) -> object:
    positions = x.detach().requires_grad_()
    energy = self.last(torch.tanh(self.first(positions)).pow(2)).sum()
    (force,) = torch.autograd.grad(energy, positions, create_graph=True)
    return energy, force


def _detached_branches(self: Any, x: Tensor) -> object:
    hidden = torch.tanh(self.first(x))
    with torch.no_grad():
        target = self.last(hidden).softmax(-1)
    with torch.inference_mode():
        scale = self.last(hidden).abs().sum().item()
    straight_through = (hidden.round() - hidden).detach() + hidden
    unused = torch.exp(hidden.detach() * 2)
    return self.last(straight_through) * scale - target, unused


def _tensor_hooks(self: Any, x: Tensor) -> object:
    hidden = torch.tanh(self.first(x))
    hidden.register_hook(lambda grad: grad * 0.5)
    hidden.retain_grad()
    output = self.last(hidden * hidden)
    output.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return output


def _module_hooks() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net.register_buffer("norms", torch.zeros(2))

    def after(module: nn.Module, into: Any, out: Any) -> tuple[Tensor]:
        net.get_buffer("norms")[0] += out[0].norm()
        return (into[0] * 0.9,)

    def before(module: nn.Module, out: Any) -> tuple[Tensor]:
        net.get_buffer("norms")[1] += 1
        return (out[0] * 1.1,)

    net[1].register_full_backward_hook(after)
    net[2].register_full_backward_pre_hook(before)
    return net


def _offloaded(self: Any, x: Tensor) -> object:
    with torch.autograd.graph.save_on_cpu():
        hidden = torch.tanh(self.first(x)) * torch.sigmoid(self.first(x))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        hidden = F.softplus(hidden * hidden)
    return self.last(hidden)


def _frozen_stem_with_adapter(self: Any, x: Tensor) -> object:
    hidden = F.gelu(self.stem(x))
    adapted = self.base(hidden) + self.up(F.dropout(self.down(hidden), 0.1)) * 2.0
    return self.head(F.gelu(adapted))


def _adapted() -> nn.Module:
    net = Apply(
        _frozen_stem_with_adapter,
        stem=nn.Linear(6, 8),
        base=nn.Linear(8, 8),
        down=nn.Linear(8, 2, bias=False),
        up=nn.Linear(2, 8, bias=False),
        head=nn.Linear(8, 3),
    )
    for part in (net.stem, net.base, net.head):
        cast(nn.Module, part).requires_grad_(False)
    return net


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 11))
    net[3].weight = net[0].weight
    return net


def _nested_outputs(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    return {
        "pair": (hidden, [self.last(hidden), None, {"deep": hidden.exp()}]),
        "constant": torch.ones(2),
        "integer": hidden.argmax(1),
        "frozen": hidden.detach(),
        "number": 3,
    }


def _two_backwards(model: nn.Module, batch: Batch) -> Tensor:
    """A first backward with the graph kept, before the one that the harness runs."""
    output = model(*batch)
    output.square().mean().backward(retain_graph=True)
    return smooth(output)


def _partial_backward(model: nn.Module, batch: Batch) -> Tensor:
    output = model(*batch)
    weight = next(model.parameters())
    torch.autograd.backward(output.sin().sum(), inputs=[weight], retain_graph=True)
    (slope,) = torch.autograd.grad(output.sum(), weight, retain_graph=True)
    return smooth(output) + slope.square().sum()


def _implicit(self: Any, x: Tensor) -> object:
    """A fixed point with its gradient through one application, as equilibrium nets do."""
    injected = self.first(x)
    with torch.no_grad():
        state = torch.zeros_like(injected)
        for _ in range(8):
            state = torch.tanh(self.mix(state) * 0.5 + injected)
    return torch.tanh(self.mix(state) * 0.5 + injected)


@torch.library.custom_op("lowtide_zoo::saving_its_result", mutates_args=())
def _saving_its_result(x: Tensor) -> Tensor:
    return torch.relu(x)


@torch.library.custom_op("lowtide_zoo::saving_its_inputs", mutates_args=())
def _saving_its_inputs(a: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(a) * b


@torch.library.custom_op("lowtide_zoo::half", mutates_args=())
def _half(x: Tensor) -> Tensor:
    return x * 0.5


def _of_a_gate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    open_ = torch.sigmoid(a)
    return gradient * b * open_ * (1 - open_), gradient * open_


_saving_its_result.register_autograd(
    lambda ctx, gradient: gradient * (ctx.saved_tensors[0] > 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
_saving_its_inputs.register_autograd(
    _of_a_gate, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
_half.register_autograd(
    lambda ctx, gradient: gradient * 0.5, setup_context=lambda ctx, inputs, output: None
)


def _custom_operators(self: Any, x: Tensor) -> object:
    """A replay reads what they have made, which is in memory only for that."""
    for layer in self.layers:
        x = x + torch.tanh(_half(layer(x))).square()
        x = torch.sin(_saving_its_inputs(layer(x), x)) * x
        x = x + _saving_its_result(layer(x.exp())).cos()
    return x


ROWS = noise((4, 6))

CASES = [
    Case("autograd_saving_function", lambda: _net(_saving_function), ROWS),
    Case("autograd_dirty_function", lambda: _net(_dirty_function), ROWS),
    Case("autograd_unseen_kernel_into_empty", lambda: _net(_unseen(torch.empty)), ROWS),
    Case("autograd_unseen_kernel_into_zeros", lambda: _net(_unseen(torch.zeros)), ROWS),
    Case(
        "autograd_custom_operators",
        lambda: Apply(_custom_operators, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(3))),
        noise((64, 6)),
    ),
    Case("autograd_unseen_write", lambda: _net(_written_in_place_unseen), ROWS),
    Case("autograd_twice_differentiable", lambda: _net(_cube), ROWS, gradient_penalty=True),
    Case(
        "autograd_own_rematerialization",
        lambda: Apply(
            _running_again,
            first=nn.Linear(6, 8),
            blocks=nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)),
        ),
        ROWS,
    ),
    Case("autograd_torch_checkpoint_inside", lambda: _checkpointed(False), ROWS),
    Case("autograd_reentrant_checkpoint_inside", lambda: _checkpointed(True), ROWS),
    Case("autograd_forces", lambda: _net(_forces), ROWS),
    Case("autograd_detached_branches", lambda: _net(_detached_branches), ROWS),
    Case("autograd_tensor_hooks", lambda: _net(_tensor_hooks), ROWS),
    Case("autograd_module_hooks", _module_hooks, ROWS),
    Case("autograd_other_saved_tensor_hooks", lambda: _net(_offloaded), ROWS),
    Case("autograd_frozen_stem_with_adapter", _adapted, ROWS),
    Case("autograd_tied_weights", _tied, lambda: (integers(11, 3, 5),)),
    Case("autograd_tied_weights_autocast", _tied, lambda: (integers(11, 3, 5),), autocast=True),
    Case("autograd_nested_outputs", lambda: _net(_nested_outputs), ROWS),
    Case(
        "autograd_two_backwards",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3)),
        ROWS,
        _two_backwards,
    ),
    Case(
        "autograd_partial_backward",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3)),
        ROWS,
        _partial_backward,
    ),
    Case(
        "autograd_implicit_layer",
        lambda: Apply(_implicit, first=nn.Linear(6, 8), mix=nn.Linear(8, 8)),
        ROWS,
    ),
]
