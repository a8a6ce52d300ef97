"""State that a forward changes, reads, or borrows: buffers, caches, counters, modes, containers.

Problem: rematerialization that runs user code again moves such state twice, and one that reads it
late reads what it has become (semantics rules 2 and 4). The plain step is right in each case here.
Invariant: everything that moves is a registered buffer or shows in the loss, so that a second move
cannot hide. May import: `zoo.case`, torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.case import DYNAMIC, Apply, Batch, Case, integers, noise, smooth


def _shared_norm(self: Any, x: Tensor) -> object:
    for _ in range(3):
        x = torch.relu(self.norm(self.conv(x)))
    return x


def _frozen_norm() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))
    net[1].eval().requires_grad_(False)
    return net


def _adversary(norm: bool) -> nn.Module:
    def wrap(layer: nn.Module) -> nn.Module:
        return layer if norm else nn.utils.parametrizations.spectral_norm(layer)

    discriminator = [wrap(nn.Conv2d(1, 4, 3, stride=2)), nn.LeakyReLU(0.2, inplace=True)]
    discriminator += [nn.BatchNorm2d(4)] if norm else []
    discriminator += [nn.Flatten(), wrap(nn.Linear(36, 1))]
    generator = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Tanh())
    return Apply(
        lambda self, z: self.generator(z).view(-1, 1, 8, 8),
        generator=generator,
        discriminator=nn.Sequential(*discriminator),
    )


def _adversarial_loss(model: Any, batch: Batch) -> Tensor:
    """The discriminator runs on real and on fake images before one backward."""
    real, z = batch
    fake = model(z)
    on_real, on_fake = model.discriminator(real), model.discriminator(fake)
    again = model.discriminator(fake.detach())
    loss: Tensor = F.softplus(-on_real).mean() + F.softplus(on_fake).mean() + again.tanh().mean()
    return loss


def _old_spectral_norm() -> nn.Module:
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(6, 8), n_power_iterations=2),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Linear(8, 2)),
    )


def _parametrized() -> nn.Module:
    parametrizations = nn.utils.parametrizations
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.Tanh(),
        parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(8, 2))),
    )


class KeyValueCache(nn.Module):
    """Writes this step's keys into a long-lived buffer in place and attends over all of it."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.register_buffer("cache", torch.zeros(2, 12, 8))
        self.position = 0

    def forward(self, x: Tensor) -> Tensor:
        query, fresh = self.project(x).split((4, 8), -1)
        length = x.shape[1]
        self.cache.detach_()
        self.cache[:, self.position : self.position + length] = fresh
        self.position += length
        key, value = self.cache[:, : self.position].chunk(2, -1)
        return F.scaled_dot_product_attention(query, key, value)


class MovingAverages(nn.Module):
    """Reads buffers, changes them in place or replaces them, and reads them again."""

    average: Tensor
    count: Tensor
    codebook: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("codebook", torch.randn(5, 6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.linear(x)) * (self.average + 1)
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.count += 1
            self.calls += 1
        hidden = hidden - self.average.clone() / self.count
        nearest = torch.cdist(hidden, self.codebook.clone()).argmin(1)
        quantized = hidden + (self.codebook[nearest] - hidden).detach()
        with torch.no_grad():
            self.codebook = self.codebook.index_add(0, nearest, hidden.detach(), alpha=0.05)
        return quantized.sin() * self.calls


class RecurrentState(nn.Module):
    """Carries a detached state over steps and updates a running one in place within a step."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 4)
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        state, history = self.state.clone(), torch.zeros(3, x.shape[1], 4)
        for time in range(x.shape[1]):
            gate = self.cell(torch.cat([x[:, time], state], 1)).sigmoid()
            state = state.clone().mul_(gate).add_(x[:, time])
            history[:, time] = state
        self.state.copy_(state.detach())
        return history


class TopTwoExperts(nn.Module):
    """Routes tokens to two of four experts, with a load counter and a balancing loss."""

    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
            for _ in range(4)
        )
        self.register_buffer("load", torch.zeros(4, dtype=torch.long))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        self.load += torch.bincount(chosen.flatten(), minlength=4)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel():
                output.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        balance = (scores.mean(0) * self.load / self.load.sum()).sum()
        return {"tokens": output, "balance": balance}


def _weight_clipping(self: Any, x: Tensor) -> object:
    with torch.no_grad():
        for parameter in self.net.parameters():
            parameter.clamp_(-0.2, 0.2)
    return self.net(x)


def _lengths(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    while hidden.norm() > 2.0:
        hidden = torch.tanh(hidden) * 0.8
    kept = hidden[hidden.sum(1) > 0]
    return self.last(kept), hidden


def _default_dtype(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    try:
        torch.set_default_dtype(torch.float64)
        wide = torch.zeros(8).add_(0.1) + torch.linspace(0, 1, 8)
        hidden = torch.tanh(hidden * wide)
    finally:
        torch.set_default_dtype(torch.float32)
    return self.last(hidden.float()) * torch.full((3,), 0.5)


class _SineForTanh(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


def _modes(self: Any, x: Tensor) -> object:
    with _SineForTanh():
        hidden = torch.tanh(self.first(x))
    with torch.autocast("cpu", torch.bfloat16):
        wide = self.last(hidden)
        with torch.autocast("cpu", enabled=False):
            hidden = torch.tanh(self.last(hidden))
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        attended = F.scaled_dot_product_attention(hidden, hidden, hidden)
    return wide.float() + attended


@dataclasses.dataclass
class Parcel:
    """Tensors that reach a net inside a container."""

    image: Tensor
    extra: dict[str, list[Tensor]]


def _containers(self: Any, parcel: Parcel) -> Parcel:
    scale = torch.sigmoid(self.first(parcel.image))

    def closure(weight: Tensor) -> Tensor:
        return weight * scale + parcel.extra["bias"][0]

    hidden = closure(self.first(torch.tanh(parcel.extra["bias"][1])))
    return Parcel(self.last(hidden), {"scale": [scale, hidden.exp()]})


def _catching(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    try:
        hidden = torch.tanh(hidden)
        hidden = hidden @ hidden
    except RuntimeError:
        hidden = hidden * 2
    return self.last(F.dropout(hidden, 0.2))


def _counting_hooks() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net.register_buffer("seen", torch.zeros(2))

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        net.get_buffer("seen")[0] += 1
        return (args[0] * 1.5,)

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        net.get_buffer("seen")[1] += 1
        return output + net.get_buffer("seen")[1]

    net[0].register_forward_pre_hook(before)
    net[1].register_forward_hook(after)
    return net


def _linear_net(function: Any) -> nn.Module:
    return Apply(function, first=nn.Linear(6, 8), last=nn.Linear(8, 3))


def _changing_batch() -> Batch:
    return (torch.randn(int(integers(4, 1)) + 2, 1, 6 + 2 * int(integers(3, 1)), 8),)


ROWS = noise((4, 6))

CASES = [
    Case(
        "state_shared_batch_norm",
        lambda: Apply(_shared_norm, conv=nn.Conv2d(2, 2, 3), norm=nn.BatchNorm2d(2)),
        noise((2, 2, 9, 9)),
    ),
    Case("state_frozen_batch_norm", _frozen_norm, noise((2, 2, 8, 8))),
    Case(
        "state_gan_batch_norm",
        lambda: _adversary(True),
        noise((4, 1, 8, 8), (4, 3)),
        _adversarial_loss,
    ),
    Case(
        "state_gan_spectral_norm",
        lambda: _adversary(False),
        noise((4, 1, 8, 8), (4, 3)),
        _adversarial_loss,
    ),
    Case("state_old_spectral_norm", _old_spectral_norm, ROWS),
    Case("state_parametrizations", _parametrized, ROWS),
    Case("state_key_value_cache", KeyValueCache, noise((2, 4, 4)), tags=DYNAMIC),
    Case("state_moving_averages", MovingAverages, ROWS),
    Case("state_recurrent", RecurrentState, noise((3, 5, 4))),
    Case("state_top_two_experts", TopTwoExperts, noise((10, 6)), tags=DYNAMIC),
    Case(
        "state_weight_clipping",
        lambda: Apply(_weight_clipping, net=nn.Sequential(nn.Linear(6, 8), nn.Tanh())),
        ROWS,
    ),
    Case("state_data_dependent", lambda: _linear_net(_lengths), ROWS, tags=DYNAMIC),
    Case("state_default_dtype", lambda: _linear_net(_default_dtype), ROWS),
    Case(
        "state_modes",
        lambda: Apply(_modes, first=nn.Linear(6, 6), last=nn.Linear(6, 6)),
        ROWS,
    ),
    Case(
        "state_containers",
        lambda: _linear_net(_containers),
        lambda: (Parcel(torch.randn(4, 6), {"bias": [torch.randn(8), torch.randn(4, 6)]}),),
    ),
    Case("state_catches_errors", lambda: _linear_net(_catching), ROWS),
    Case("state_counting_hooks", _counting_hooks, ROWS),
    Case(
        "state_changing_shapes",
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        _changing_batch,
        tags=DYNAMIC,
    ),
    Case(
        "state_loss_outside_model",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)),
        ROWS,
        lambda model, batch: smooth([model(*batch), model(torch.sin(batch[0]))]),
    ),
]
