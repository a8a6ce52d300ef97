"""Everything that draws: dropouts, noisy activations, samplers, and every kind of generator.

Problem: a replay has to draw what the forward drew and leave every generator where plain leaves it
(semantics rule 3), also where the draw is in-place, explicit, or made by Python or numpy.
Invariant: every net here draws in every step. May import: `zoo.case`, torch, numpy.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Apply, Case, noise


def _around(*layers: nn.Module) -> nn.Module:
    """Layers between two small convolutions, so that something upstream and downstream trains."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Conv2d(4, 2, 1))


def _linear_net(function: Any, **more: nn.Module | Tensor) -> nn.Module:
    return Apply(function, first=nn.Linear(6, 8), last=nn.Linear(8, 3), **more)


def _in_place_draws(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    mask = torch.empty_like(hidden).bernoulli_(0.7)
    shift = torch.zeros(hidden.shape).normal_().mul_(0.1)
    scale = torch.empty(hidden.shape).uniform_(0.5, 1.5).add_(torch.empty(8).exponential_())
    return self.last(torch.tanh(hidden * mask * scale + shift.log_normal_(0.0, 0.1)))


def _samplers(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    chosen = torch.multinomial(hidden.softmax(-1), 3)
    order = torch.randperm(8)
    counts = torch.poisson(hidden.exp()) + torch.binomial(torch.full((8,), 5.0), torch.rand(8))
    jitter = torch.rand_like(hidden) + torch.randn(8) + torch.randint_like(hidden, 3)
    mixed = hidden[:, order] * jitter / (1 + counts)
    return self.last(mixed + hidden.gather(1, chosen).sum(1, keepdim=True))


def _distributions(self: Any, x: Tensor) -> object:
    mean, spread = self.first(x).chunk(2, -1)
    spread = F.softplus(spread) + 0.1
    normal = torch.distributions.Normal(mean, spread)
    gamma = torch.distributions.Gamma(spread, 1.0)
    dirichlet = torch.distributions.Dirichlet(spread)
    beta = torch.distributions.Beta(spread[:, :2], spread[:, 2:])
    samples = (normal.rsample(), gamma.rsample(), dirichlet.rsample(), beta.rsample())
    return *samples, normal.log_prob(samples[0].detach())


def _gumbel(self: Any, x: Tensor) -> object:
    logits = self.first(x)
    soft = F.gumbel_softmax(logits, tau=0.7)
    hard = F.gumbel_softmax(logits, hard=True)
    return self.last(soft) + self.last(hard)


def _stochastic_depth(self: Any, x: Tensor) -> object:
    for block in self.blocks:
        if torch.rand(()).item() < 0.6:
            x = x + block(x)
        if random.random() < 0.5:
            x = x * (1.0 + 0.1 * float(np.random.rand()))
    return x


def _numpy_mask(self: Any, x: Tensor) -> object:
    hidden = torch.relu(self.first(x))
    mask = torch.from_numpy(np.random.binomial(1, 0.7, hidden.shape).astype(np.float32))
    hidden = hidden * mask
    hidden[:, random.sample(range(8), 2)] = 0.5
    return self.last(hidden)


def _reseeding(self: Any, x: Tensor) -> object:
    hidden = F.dropout(self.first(x), 0.3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        hidden = hidden + torch.randn_like(hidden)
    hidden = F.dropout(hidden, 0.3)
    state = torch.get_rng_state()
    once = F.dropout(hidden, 0.5)
    torch.set_rng_state(state)
    return self.last(once + F.dropout(hidden, 0.5))


class OwnGenerator(nn.Module):
    """Draws from a generator of its own, which moves on from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        for _ in range(2):
            mask = torch.rand(hidden.shape, generator=self.generator) > 0.3
            hidden = torch.tanh(hidden * mask)
            hidden = hidden + torch.empty_like(hidden).normal_(generator=self.generator)
        return hidden[torch.randperm(hidden.shape[0], generator=self.generator)]


def _mixed_dropouts(self: Any, x: Tensor) -> object:
    hidden = F.dropout(self.first(x), 0.2, inplace=True)
    hidden = F.dropout(hidden, 0.0) + F.dropout(hidden, 1.0)
    hidden = F.dropout(hidden, 0.4, training=False)
    kept, mask = torch.native_dropout(hidden, 0.3, True)
    return self.last(torch.sigmoid(kept)), mask


IMAGE = noise((2, 2, 8, 8))
ROWS = noise((4, 6))

CASES = [
    Case("random_rrelu", lambda: _around(nn.RReLU()), IMAGE),
    Case("random_rrelu_in_place", lambda: _around(nn.RReLU(inplace=True)), IMAGE),
    Case(
        "random_alpha_dropouts",
        lambda: _around(nn.SELU(), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)),
        IMAGE,
    ),
    Case(
        "random_feature_dropouts",
        lambda: _around(nn.Dropout2d(0.3), nn.SiLU(), nn.Dropout(0.3, inplace=True)),
        IMAGE,
    ),
    Case("random_mixed_dropouts", lambda: _linear_net(_mixed_dropouts), ROWS),
    Case(
        "random_dropout_penalty",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Dropout(0.3), nn.Linear(8, 2)),
        ROWS,
        gradient_penalty=True,
    ),
    Case("random_in_place_draws", lambda: _linear_net(_in_place_draws), ROWS),
    Case("random_samplers", lambda: _linear_net(_samplers), ROWS),
    Case("random_distributions", lambda: _linear_net(_distributions), ROWS),
    Case("random_gumbel_softmax", lambda: _linear_net(_gumbel), ROWS),
    Case(
        "random_stochastic_depth",
        lambda: Apply(
            _stochastic_depth,
            stem=nn.Linear(6, 6),
            blocks=nn.ModuleList(
                nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(5)
            ),
        ),
        ROWS,
        tags=frozenset({"dynamic"}),
    ),
    Case("random_numpy_mask", lambda: _linear_net(_numpy_mask), ROWS),
    Case("random_reseeding", lambda: _linear_net(_reseeding), ROWS),
    Case("random_own_generator", OwnGenerator, ROWS),
    Case(
        "random_own_generator_autocast",
        OwnGenerator,
        ROWS,
        autocast=True,
    ),
]
