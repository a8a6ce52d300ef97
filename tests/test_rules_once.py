"""Rules 1 to 3: same bits, once, random state; and no more is replayed than needed.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from against_plain import WAYS, Way, check, counted, gradients, leaf
from lowtide.backward.operation import costs, describe
from lowtide.tape.operators import facts_of, hidden_statistics

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


# Rule 1: only what leads to the requested tensor is replayed, with the same bits.


def test_only_the_operations_that_lead_to_the_requested_tensor_run() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)

        def region(x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin().cos().exp(), x.tanh().sigmoid().sqrt()

        one, _ = way(region, x)
        return gradients(one.sum(), x)

    replayed = check(scenario)
    # exp saves its output, cos its input; sin saves x, which is an external.
    assert replayed.names() == {"aten::sin": 1, "aten::cos": 1, "aten::exp": 1}
    assert replayed.nbytes == 3 * 8 * 4


def test_the_tail_that_nobody_saves_is_not_replayed() -> None:
    """torch calls this early stop: operations after the last saved tensor are not replayed."""

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        y = way(lambda x: x.sin().cos().mul(2).add(1).sum().neg(), x)
        return gradients(y, x)

    replayed = check(scenario)
    assert replayed.names() == {"aten::sin": 1}


def test_a_cheap_operation_between_kept_ones_is_replayed_alone() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, weight = leaf(4, 4), leaf(4, 4)
        y = way(lambda x: (x @ weight).relu() @ weight, x, policy=lowtide.policies.KeepProducts())
        return gradients(y.sum(), x, weight)

    def plain_or_kept(function: Any, *args: Any, policy: Any) -> Any:
        return function(*args)

    with counted() as replayed:
        torch.manual_seed(0)
        found = scenario(lowtide.checkpoint)
    torch.manual_seed(0)
    expected = scenario(plain_or_kept)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
    assert replayed.names() == {"aten::relu": 1}


@every_way
def test_nothing_is_replayed_twice_for_values_saved_twice(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(16)

        def region(x: Tensor) -> Tensor:
            a = x.sin()
            return (a * a.cos() + a.exp() * a).sum()

        return gradients(way(region, x), x)

    assert check(scenario, way)["sin"] <= 1


@every_way
def test_higher_order_gradients_have_the_same_bits(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(3, 4), leaf(4, 4)
        y = way(lambda x: (x @ w).tanh().mul(x).exp().sum(), x)
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return [first, second, *gradients(second.sin().sum(), x, w)]

    check(scenario, way)


# Rule 2: user code runs once.


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.log: list[str] = []
        self.norm.register_forward_hook(lambda *_: self.log.append("hook"))

    def forward(self, x: Tensor) -> Tensor:
        self.log.append("forward")
        for _ in range(random.randint(1, 3)):  # a second run would take other branches
            x = self.linear(self.norm(x).relu())
        return x * float(np.random.rand())


@every_way
def test_forward_hooks_counters_and_branches_run_once(way: Way) -> None:
    logs = []

    def scenario(way: Way) -> list[Tensor | None]:
        random.seed(1)
        np.random.seed(1)
        model = Counting()
        x = leaf(5, 6)
        found = gradients(way(model, x).square().sum(), x, *model.parameters())
        logs.append(model.log)
        return [*found, *model.buffers()]

    check(scenario, way)
    assert logs[0] == logs[1]
    assert logs[0].count("forward") == 1


def test_batch_norm_moves_once_although_it_is_replayed() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))
        x = torch.randn(2, 1, 7, 7)
        found = gradients(way(model, x).square().sum(), *model.parameters())
        norm = model[1]
        assert int(norm.num_batches_tracked) == 1
        return [*found, norm.running_mean, norm.running_var]

    replayed = check(scenario)
    assert replayed["native_batch_norm"] == 1
    assert replayed["add_"] == 0, "num_batches_tracked was counted again"


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_twice_in_a_region(momentum: float | None) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        norm = nn.BatchNorm1d(4, momentum=momentum)
        x = leaf(6, 4)
        y = way(lambda x: norm(norm(x).sin()).cos(), x)
        return [*gradients(y.square().sum(), x, *norm.parameters()), *norm.buffers()]

    replayed = check(scenario)
    assert replayed["native_batch_norm"] == 2


class InParts(torch.autograd.Function):
    """A BatchNorm made of the kernels that `SyncBatchNorm` is made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        batch_mean, batch_variance = torch.batch_norm_update_stats(x, mean, variance, 0.1)
        scale = (batch_variance + 1e-5).rsqrt()
        ctx.save_for_backward(batch_mean, scale)
        return (x - batch_mean[:, None, None]) * scale[:, None, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mean, scale = ctx.saved_tensors
        return grad * scale[:, None, None] + mean[:, None, None], None, None


@every_way
def test_a_batch_norm_in_parts_moves_once(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, mean, variance = leaf(2, 3, 5, 5), torch.zeros(3), torch.ones(3)
        y = way(lambda x: InParts.apply(x.sin(), mean, variance).tanh(), x)
        return [*gradients(y.sum(), x), mean, variance]

    replayed = check(scenario, way)
    if way is lowtide.checkpoint:
        assert replayed["batch_norm_update_stats"] > 0


@pytest.mark.parametrize("name", ["batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"])
def test_what_a_device_has_of_it_is_known_to_move_statistics(name: str) -> None:
    facts = facts_of(getattr(torch.ops.aten, name).default)
    given = dict.fromkeys(range(8), torch.ones(3))
    assert hidden_statistics(facts, tuple(given.values())) == (3, 4)
    assert hidden_statistics(facts, (*map(given.get, range(3)), None, None)) == ()


def test_spectral_norm_vectors_move_once() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4), n_power_iterations=2)
        x = leaf(3, 5)
        y = way(lambda x: layer(x).sin().exp(), x)
        return [*gradients(y.sum(), x, *layer.parameters()), *layer.buffers()]

    check(scenario)


# Rule 3: random state.


def test_another_thread_draws_at_the_same_moment() -> None:
    """Between the reading of a state and the draw, and while a replay has put a state back."""
    shared = torch.Generator().manual_seed(0)
    ones = torch.ones(64)
    draws = (
        lambda: F.dropout(ones, 0.5),
        lambda: torch.empty(64).exponential_(),
        lambda: torch.randn_like(ones),
        lambda: torch.randn(64),
        lambda: torch.poisson(ones),
        lambda: torch.randn(64, generator=shared),
    )
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(8)
            torch.rand(8, generator=shared)

    others = [threading.Thread(target=draw) for _ in range(2)]
    for other in others:
        other.start()
    try:
        with counted() as replayed:
            for made in draws * 60:
                noise: list[Tensor] = []

                def region(x: Tensor, made: Any = made, noise: list[Tensor] = noise) -> Tensor:
                    drawn = made()
                    noise.append(drawn.clone())
                    return x * drawn

                x = torch.ones(64, requires_grad=True)
                lowtide.checkpoint(region, x).sum().backward()
                assert x.grad is not None
                assert torch.equal(x.grad, noise[0])
    finally:
        stop.set()
        for other in others:
            other.join()
    assert replayed["bernoulli_"] == replayed["randn_like"] == 60


@every_way
def test_an_explicit_generator_draws_once(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(3)
        x = leaf(32)

        def region(x: Tensor) -> Tensor:
            mask = torch.rand(32, generator=generator) < 0.5
            noise = torch.empty(32).normal_(generator=generator)
            return ((x * mask).sin() * noise).exp()

        y = way(region, x)
        after_forward = generator.get_state()
        found = gradients(y.sum(), x)
        assert torch.equal(generator.get_state(), after_forward), "a replay moved the generator"
        return [*found, generator.get_state(), torch.rand(4, generator=generator)]

    check(scenario, way)


RANDOM = {
    "dropout": nn.Dropout(0.3),
    "alpha_dropout": nn.AlphaDropout(0.3),
    "feature_alpha_dropout": nn.FeatureAlphaDropout(0.3),
    "dropout1d": nn.Dropout1d(0.3),
    "rrelu": nn.RReLU(),
    "rrelu_in_place": nn.Sequential(nn.Identity(), nn.RReLU(inplace=True)),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "multinomial": lambda x: x.flatten(1)[:, torch.multinomial(torch.ones(12), 5)],
    "normal_of_tensors": lambda x: torch.normal(x.detach(), x.detach().abs() + 1) * x,
    "poisson": lambda x: torch.poisson(x.detach().abs()) * x,
    "rand_like": lambda x: torch.rand_like(x) * x,
    "uniform_in_place": lambda x: x * torch.empty(4, 3, 4).uniform_(-1, 1),
}


@pytest.mark.parametrize("layer", RANDOM.values(), ids=RANDOM)
def test_what_draws_is_replayed_with_the_state_it_drew_from(layer: Any) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4, 3, 4)
        y = way(lambda x: layer(layer((x * 1.5).sin()).reshape(4, -1).cos().repeat(1, 3)
                                [:, :12].reshape(4, 3, 4)).exp(), x)  # fmt: skip
        torch.rand(3)  # the live generator moves on before backward
        return gradients(y.square().sum(), x)

    assert check(scenario).operations > 0


def test_a_backward_leaves_the_generator_as_replay_found_it() -> None:
    x = leaf(16)
    y = lowtide.checkpoint(lambda x: F.dropout(x.sin(), 0.5).cos().exp(), x)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    with counted() as replayed:
        y.sum().backward()
    assert replayed.operations > 0
    assert torch.equal(before, torch.get_rng_state())


def _noise_of_no_device(h: Tensor) -> Tensor:
    """Without a device argument, as TorchScript calls them; Python's `torch.rand` passes one."""
    first, second = torch.ops.aten.rand.default, torch.ops.aten.randn.default
    return (h * (first([64, 64]) + second([64, 64]))).tanh()


def test_the_room_for_a_draw_is_found_out_without_drawing() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(64, 64)
        found: list[Tensor | None] = []
        for _ in range(3):
            found += gradients(way(lambda: _noise_of_no_device(x.sin()).exp().sin().sum()), x)
        return found

    budget = lowtide.budget(0.9)

    def tight(function: Any, *args: Any) -> Any:
        with budget:
            return function(*args)

    replayed = check(scenario, tight)
    assert replayed.operations > 0


def test_the_cost_of_the_backward_of_a_draw_is_found_out_without_drawing() -> None:
    state = torch.get_rng_state()
    rand = torch.ops.aten.rand.default
    call = describe(facts_of(rand), ([8],), {}, "cpu")
    assert call is not None
    assert costs([call])[call] is not None
    assert torch.equal(torch.get_rng_state(), state)
