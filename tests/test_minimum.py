"""Rule 13: the smallest limit that a dry run names is one that the step keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from instructions import exact_workspaces
from lowtide.kernels.workspace import kernel_workspace, room_for
from lowtide.learning.planning import Planning
from lowtide.limits import format_bytes
from lowtide.observing.graphs import graph_of
from lowtide.observing.observer import Observer
from lowtide.planner import HOLD, Event, Graph, OpNode, Simulator, Solution, ValueNode, keep_all
from lowtide.refusal import refusal
from once import on_one_recorder
from one_step import peak_of

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

# ---------------------------------------------------------------------------- whole steps


class Patches(nn.Module):
    """The first layer of a vision transformer is at the peak: a wide kernel, whose backward is a
    matrix product, and a gradient that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 96, 16, 16)
        self.layers = nn.Sequential(*(Feed(96) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.cut(x).flatten(2).transpose(1, 2)
        return self.layers(F.dropout(tokens, 0.1)).square().mean()


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outward(F.gelu(self.inward(x)))
        return out


class Residuals(nn.Module):
    """As in a ResNet: a block's input is released right before its result is added to in place, and
    the shortcut is a strided pointwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(16 << i, 32 << i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(into, out, 3, 2, 1), nn.BatchNorm2d(out)
        self.second, self.around = nn.Conv2d(out, out, 3, 1, 1), nn.Conv2d(into, out, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        rest = self.around(x)
        x = self.second(F.relu(self.norm(self.first(x))))
        x += rest
        return F.relu(x)


class Dense(nn.Module):
    """The gradient of each part of a concatenation is a slice, which a convolution copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16 * (i + 1), 16, 3, padding=1) for i in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(F.relu(x))], 1)
        return x.square().mean()


class Masked(nn.Module):
    """Attention with a mask and dropout, for which the CPU has no fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(128, 128, dtype=torch.bool).tril()
        for layer in self.inward:
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in layer(x).split(64, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, mask, 0.1)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x.square().mean()


class Encoder(nn.Module):
    """torch's own attention, whose products read a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Recalled(nn.Module):
    """As in a U-Net++: early values are held by user code until the end of the forward, which has
    more in memory at once than the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.third, self.fourth = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.silu(self.first(x))
        two = F.silu(self.second(one))
        three = F.silu(self.third(two))
        four = F.silu(self.fourth(three))
        return four.mean() * spread(four) * (one.numel() / three.numel())


class Cached(nn.Module):
    """As with a cache of keys and values that is emptied halfway: afterwards as much is in memory
    at once as before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Feed(64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x)
            cache.append(x.sigmoid())
            x = x * cache[-1]
            if number % 4 == 3:
                x = x * spread(x)
                cache.clear()
        return x.square().mean()


class Gathered(nn.Module):
    """As in splines: of many knots, one is read for each point. Its gradient is zeros with one
    number in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.knots = nn.ModuleList(nn.Linear(8, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.knots:
            knots = layer(x).exp()
            x = x + knots.gather(-1, torch.arange(8).expand_as(x)).sin()
        return x.square().mean()


class Forces(nn.Module):
    """As in interatomic potentials: the loss has a gradient with respect to positions, and the
    gradients of what was read by index are zeros, filled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(3, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        one, other = torch.arange(400) % 100, torch.arange(400) * 7 % 100
        near = torch.tanh(self.inward(x[one] - x.index_select(0, other)))
        energy = self.outward(near.square()).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy.square() + forces.square().mean()


class Renormalized(nn.Module):
    """As in diffusion nets of preserved magnitude: each weight is normalized in place before it is
    read. Its old content, which the norm has read, must not be copied for replays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.copy_(F.normalize(layer.weight, dim=-1))
            x = F.silu(layer(x))
        return x.square().mean()


def spread(x: Tensor) -> Tensor:
    """Takes a lot of memory in the forward, and none in the backward."""
    with torch.no_grad():
        return torch.cat([x] * 24).abs().amax()


STEPS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "patches": (Patches, (2, 3, 160, 160)),
    "residuals": (Residuals, (8, 16, 64, 64)),
    "dense": (Dense, (4, 16, 48, 48)),
    "masked": (Masked, (8, 128, 64)),
    "encoder": (Encoder, (8, 128, 64)),
    "recalled": (Recalled, (4, 4, 64, 64)),
    "cached": (Cached, (8, 128, 64)),
    "gathered": (Gathered, (128, 8)),
    "forces": (Forces, (100, 3)),
    "renormalized": (Renormalized, (256, 128)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = STEPS[name]
    return build(), torch.randn(shape)


@exact_workspaces
@pytest.mark.parametrize("name", STEPS)
def test_the_minimum_that_is_named_is_kept(name: str) -> None:
    model, x = made(name)
    least = lowtide.plan(model, x).minimum_peak
    plan = lowtide.plan(model, x, limit=least)
    assert plan.peak < plan.plain_peak
    budget = lowtide.budget(plan)
    first = peak_of(model, x, budget)
    assert plan.peak == pytest.approx(first, rel=0.005)
    report = budget.report()
    assert report.replayed_operations > 0
    assert report.planned_peak == plan.peak  # the step was the planned one
    assert max(first, *(peak_of(model, x, budget) for _ in range(2))) <= least


@exact_workspaces
class Watching(nn.Module):
    """Makes something large for a moment, without a gradient: a statistic of its activations."""

    def __init__(self, at: int) -> None:
        super().__init__()
        pairs = [(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.layers, self.at = nn.ModuleList(layer for pair in pairs for layer in pair), at

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.at:
                with torch.no_grad():
                    x.repeat(1, 12).sum()
        return x.square().mean()


@pytest.mark.parametrize(("at", "share"), [(1, 1.05), (7, 0.8)])
def test_a_refusal_halfway_adds_no_models_margin_to_what_is_known(at: int, share: float) -> None:
    """What an operation of the forward takes is not modelled: with a margin on that as well, 1.1 of
    the plain step's peak was named."""
    torch.manual_seed(0)
    model, x = Watching(at), torch.randn(512, 64)
    plain = max(peak_of(model, x), peak_of(model, x))
    with pytest.raises(lowtide.BudgetError, match="A limit that gets past") as caught:
        peak_of(model, x, lowtide.budget(plain // 2))
    named = caught.value.minimum
    assert named <= share * plain
    budget = lowtide.budget(named)  # is not refused
    assert max([peak_of(model, x, budget) for _ in range(4)][1:]) <= named


def test_a_first_step_that_drops_too_little_is_planned_for_the_next_time() -> None:
    """It decides while it runs; the plan from its first operation on needs a fifth less."""
    model, x = made("masked")
    limit = int(1.08 * lowtide.plan(model, x).minimum_peak)
    budget = lowtide.budget(limit)
    with pytest.raises(lowtide.BudgetError, match="run it again with the same budget") as refused:
        peak_of(model, x, budget)
    assert refused.value.minimum > 1.1 * limit  # what a first step needs
    assert max(peak_of(model, x, budget) for _ in range(3)) <= limit
    report = budget.report()
    assert report.planned
    assert report.replayed_operations > 0
    with pytest.raises(lowtide.BudgetError, match="run it again"):  # one that knows nothing
        peak_of(model, x, lowtide.budget(limit))
    assert peak_of(model, x, lowtide.budget(refused.value.minimum)) <= refused.value.minimum


def test_a_limit_that_no_plan_keeps_is_refused_again() -> None:
    model, x = made("masked")
    budget = lowtide.budget(lowtide.plan(model, x).minimum_peak // 2)
    for _ in range(2):
        with pytest.raises(lowtide.BudgetError) as refused:
            peak_of(model, x, budget)
        assert "run it again" not in str(refused.value)


# ---------------------------------------------------------------------------- what is learned


def learned(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that budgets learn from now on."""
    graphs: list[Graph] = []
    learn = Planning.learn

    def learning(self: Planning, observer: Observer, decisions: Any) -> None:
        graphs.append(graph_of(observer))
        learn(self, observer, decisions)

    monkeypatch.setattr(Planning, "learn", learning)
    return graphs


def test_what_is_let_go_before_an_operation_is_not_its_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = learned(monkeypatch)
    model, x = made("residuals")
    plan = lowtide.plan(model, x, limit=lowtide.plan(model, x).minimum_peak)
    budget = lowtide.budget(plan)
    first = peak_of(model, x, budget)
    budget.report()
    workspaces = [op.workspace for op in graphs[0].ops if op.name in ("aten::add_", "aten::relu")]
    assert len(workspaces) == 12
    assert set(workspaces) == {0}
    # By construction, for the plan that ran, the simulated peak is the measured one.
    assert Simulator(graphs[0]).run(plan.retention.retain).peak == first


@exact_workspaces
def test_a_plan_that_kept_its_limit_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a search in the measured step finds."""
    model, x = made("dense")
    plan = lowtide.plan(model, x, limit=lowtide.plan(model, x).minimum_peak)

    def blind(graph: Graph, *args: Any, **kwargs: Any) -> Solution:
        everything = keep_all(graph)
        peak = Simulator(graph).run(everything.retain).peak
        return Solution("infeasible", everything, peak, 0.0, peak, None, 0, 0.0)

    for place in ("choosing.solve", "settling.minimum", "learned.solve", "learned.minimum"):
        monkeypatch.setattr(f"lowtide.learning.{place}", blind)
    budget = lowtide.budget(plan)
    peaks = [peak_of(model, x, budget) for _ in range(3)]
    assert max(peaks) <= plan.limit
    assert peaks[1] == peaks[2]


@exact_workspaces
def test_a_refusal_after_a_dry_run_says_what_had_been_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = made("dense")
    plan = lowtide.plan(model, x, limit=lowtide.plan(model, x).minimum_peak)
    low, prepared = plan.peak - 1000, lowtide.Plan.prepared
    monkeypatch.setattr(lowtide.Plan, "prepared", lambda plan: replace(prepared(plan), peak=low))
    budget = lowtide.budget(replace(plan, limit=low))
    first = peak_of(model, x, budget)
    with pytest.raises(lowtide.BudgetError) as caught:
        peak_of(model, x, budget)
    text, least = str(caught.value), caught.value.minimum
    assert least is not None
    assert first <= least <= 1.01 * first
    assert f"The smallest limit known to suffice is {least} bytes" in text
    assert f"was predicted, from sizes, to take {format_bytes(low)};" in text
    budget = lowtide.budget(least)
    assert max(peak_of(model, x, budget) for _ in range(3)) <= least


@pytest.mark.parametrize("name", STEPS)
def test_a_dry_run_sees_the_operations_of_the_recorder_in_force(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = learned(monkeypatch)
    model, x = made(name)
    dry = lowtide.plan(model, x).step.graph
    budget = lowtide.budget(1.0)
    peak_of(model, x, budget)
    budget.report()
    assert dry.fingerprint == graphs[0].fingerprint
    assert dry.values == graphs[0].values  # including what user code holds, and until when


@pytest.mark.parametrize("name", ["recalled", "cached", "masked"])
def test_until_when_the_program_has_a_value_is_seen_whatever_is_held(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(name)
    plain = lowtide.plan(model, x)
    least = lowtide.plan(model, x, limit=plain.minimum_peak)
    graphs = learned(monkeypatch)
    for plan in (plain, least):
        budget = lowtide.budget(replace(plan, limit=4 * plan.plain_peak))
        peak_of(model, x, budget)
        budget.report()
    held, dropped = graphs
    assert any(node.named >= 0 for node in held.values)
    assert dropped.values == held.values == plain.step.graph.values
    levels = [[(op.other, op.peak_other) for op in graph.ops] for graph in graphs]
    assert levels[0] == levels[1]


def test_a_refusal_says_what_the_program_has_in_memory() -> None:
    model, x = made("recalled")
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.plan(model, x, limit=lowtide.plan(model, x).minimum_peak // 2)
    held = format_bytes(3 * 4 * 16 * 64 * 64 * 4)  # one, two and three; four is used there
    assert f"Your program itself has references to {held} that" in str(caught.value)


@pytest.mark.full_search
def test_the_minimum_of_a_long_chain_nests_its_anchors() -> None:
    """One level of k anchors takes at least k + 480 / k of 480 equal values, so 43 of them."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(240):
            x = x + x.sin().exp()
        return x.sum()

    plan = lowtide.plan(chain, torch.randn(4096, requires_grad=True))
    one = 4096 * 4
    assert plan.plain_peak >= 480 * one
    assert plan.minimum_peak <= 20 * one


# ---------------------------------------------------------------------------- one kernel

# input, parameter, stride, groups; transposed: its padding of the output, else None
Shape = tuple[tuple[int, ...], tuple[int, ...], int, int, int | None]
KERNELS: dict[str, Shape] = {
    "wide": ((2, 3, 96, 96), (64, 3, 16, 16), 16, 1, None),
    "wide, 3D": ((1, 1, 48, 48, 48), (64, 1, 16, 16, 16), 16, 1, None),
    "wider than the input, 3D": ((2, 32, 3, 3, 3), (64, 32, 5, 5, 5), 1, 1, None),
    "pointwise, stride": ((8, 128, 24, 24), (256, 128, 1, 1), 2, 1, None),
    "pointwise, large": ((16, 64, 24, 24), (256, 64, 1, 1), 1, 1, None),
    "pointwise, 3D": ((1, 64, 16, 16, 16), (128, 64, 1, 1, 1), 1, 1, None),
    "narrow, stride": ((2, 8, 32, 32, 32), (16, 8, 3, 3, 3), 2, 1, None),
    "depthwise": ((4, 240, 16, 16), (240, 1, 5, 5), 1, 240, None),
    "depthwise, stride": ((4, 96, 49, 49), (96, 1, 3, 3), 2, 96, None),
    "transposed, stride 1": ((1, 32, 24, 24, 24), (32, 16, 3, 3, 3), 1, 1, 0),
    "transposed, few": ((2, 64, 32, 32), (64, 7, 2, 2), 2, 1, 0),
    "transposed, many inputs": ((1, 192, 16, 16, 16), (192, 32, 3, 3, 3), 2, 1, 1),
    "transposed, odd, stride 1": ((2, 17, 48, 48), (17, 3, 3, 3), 1, 1, 0),
    "transposed, one image": ((1, 8, 16, 16, 16), (8, 4, 2, 2, 2), 2, 1, 0),
    "transposed, half a block": ((2, 16, 32, 32), (16, 8, 3, 3), 2, 1, 1),
    "transposed, few, 3D": ((3, 48, 10, 10, 8), (48, 8, 3, 3, 3), 2, 1, 1),
    "transposed, two, 3D": ((2, 12, 16, 16, 16), (12, 2, 2, 2, 2), 2, 1, 0),
    "pointwise, stride, few": ((2, 8, 64, 64), (12, 8, 1, 1), 2, 1, None),
    "pointwise, stride, odd size": ((2, 6, 65, 65), (8, 6, 1, 1), 2, 1, None),
    "pointwise, stride, 3D": ((2, 8, 32, 32, 32), (12, 8, 1, 1, 1), 2, 1, None),
    "one image, small": ((1, 5, 64, 64), (8, 5, 3, 3), 1, 1, None),
    "one image, large": ((1, 8, 64, 64), (8, 8, 3, 3), 1, 1, None),
    "depthwise, few": ((2, 4, 64, 64), (4, 1, 3, 3), 1, 4, None),
    "groups of one point, 3D": ((2, 16, 16, 16, 16), (8, 4, 1, 1, 1), 1, 4, None),
    **{
        f"{into} to {out} channels, {len(size)}D": (
            (3, into, *size), (out, into, *[3] * len(size)), 1, 1, None
        )
        for size in ((64, 64), (16, 16, 16))
        for into, out in ((1, 8), (2, 2), (3, 17), (4, 12), (8, 8), (12, 1), (17, 2), (24, 5))
    },
    "few, stride": ((2, 8, 64, 64), (12, 8, 3, 3), 2, 1, None),
    "one, stride": ((4, 1, 128, 128), (32, 1, 3, 3), 2, 1, None),
    "few, one dimension": ((2, 6, 4096), (12, 6, 3), 1, 1, None),
}  # fmt: skip


def options(shape: Shape) -> tuple[Any, ...]:
    _, weight, stride, groups, more = shape
    dims, kernel = len(weight) - 2, weight[-1]
    padding = 0 if kernel == stride else kernel // 2
    return (
        [stride] * dims,
        [padding] * dims,
        [1] * dims,
        more is not None,
        [more or 0] * dims,
        groups,
    )


@exact_workspaces
@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed gradient"])
@pytest.mark.parametrize("name", KERNELS)
def test_what_a_convolution_takes(name: str, turned: bool) -> None:
    aten, shape = torch.ops.aten, KERNELS[name]
    into, size, _, groups, more = shape
    x, weight = torch.randn(into), torch.randn(size)
    bias = torch.randn(size[0] if more is None else size[1])
    rest = options(shape)
    y = aten.convolution(x, weight, bias, *rest)
    given = torch.randn_like(y).transpose(0, 1).contiguous().transpose(0, 1)
    if not turned:
        given = given.contiguous()
    mask = [True, True, groups == 1]
    calls = {
        "aten::convolution": (aten.convolution, (x, weight, bias, *rest)),
        "aten::convolution_backward": (
            aten.convolution_backward,
            (given, x, weight, [bias.numel()], *rest, mask),
        ),
    }
    for operator, (function, args) in calls.items():
        result = function(*args)  # some workspaces are allocated once
        results = result if isinstance(result, tuple) else (result,)
        made = sum(t.untyped_storage().nbytes() for t in results if t is not None)
        peak = lowtide.measure(lambda f=function, a=args: f(*a), device="cpu").peak_bytes
        tensors = [a for a in args if isinstance(a, Tensor)]
        modelled = made + kernel_workspace(operator, tensors, args, made)
        assert modelled == pytest.approx(peak, rel=0.02, abs=32 << 10), operator


PERMUTED: dict[str, Shape] = {
    "oneDNN": ((2, 64, 8, 8), (128, 64, 3, 3), 1, 1, None),
    "oneDNN, stride": ((2, 64, 16, 16), (128, 64, 3, 3), 2, 1, None),
    "oneDNN, transposed": ((2, 128, 8, 8), (128, 64, 2, 2), 2, 1, 0),
    "oneDNN, 1D": ((4, 128, 64), (128, 128, 3), 1, 1, None),
    "oneDNN, 3D": ((2, 64, 8, 8, 8), (64, 64, 3, 3, 3), 1, 1, None),
    "torch itself": ((1, 64, 8, 8), (128, 64, 3, 3), 1, 1, None),
    "torch itself, pointwise": ((2, 128, 8, 8), (256, 128, 1, 1), 1, 1, None),
    "torch itself, 3D": ((1, 16, 12, 12, 12), (128, 16, 3, 3, 3), 1, 1, None),
}


@exact_workspaces
@pytest.mark.parametrize("name", PERMUTED)
def test_a_parameter_that_is_stored_in_another_order_is_copied(name: str) -> None:
    """As in other frameworks: height, width, input, output."""
    shape = PERMUTED[name]
    into, size, *_ = shape
    x, rest = torch.randn(into), options(shape)
    weight = torch.randn(*size[2:], size[1], size[0]).movedim((-1, -2), (0, 1))
    y = torch.ops.aten.convolution(x, weight, None, *rest)
    back = (torch.randn_like(y), x, weight, None, *rest, [True, True, False])
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "aten::convolution": (torch.ops.aten.convolution, (x, weight, None, *rest)),
        "aten::convolution_backward": (torch.ops.aten.convolution_backward, back),
    }
    for operator, (function, args) in calls.items():
        result = function(*args)
        made = sum(
            t.nbytes for t in (result if isinstance(result, tuple) else (result,)) if t is not None
        )
        peak = lowtide.measure(lambda f=function, a=args: f(*a), device="cpu").peak_bytes
        tensors = [a for a in args if isinstance(a, Tensor)]
        modelled = made + kernel_workspace(operator, tensors, args, made)
        assert modelled == pytest.approx(peak, rel=0.01), operator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_room_for_a_convolution_is_not_less_than_it_takes(name: str, dtype: torch.dtype) -> None:
    """An unplanned step makes room before an operation runs, and so stays within its limit."""
    into, size, _, _, more = KERNELS[name]
    rest = options(KERNELS[name])
    x, weight = torch.randn(into, dtype=dtype), torch.randn(size, dtype=dtype)
    args = (x, weight, torch.randn(size[0] if more is None else size[1], dtype=dtype), *rest)
    function = torch.ops.aten.convolution.default
    function(*args)
    peak = lowtide.measure(lambda: function(*args), device="cpu").peak_bytes
    asked, nearest = (
        room_for("aten::convolution", function, args, {}, nearest=near) for near in (False, True)
    )
    assert asked + (40 << 10) >= nearest  # what oneDNN takes however small a tensor is
    if dtype == torch.float32 or "pointwise" in name:  # half types: others are not all known
        assert asked >= 0.95 * peak - (40 << 10)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "a part": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "channels last": lambda t: t.contiguous(
        memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [2, 3])
def test_what_resampling_takes(dims: int, layout: str) -> None:
    aten, placed = torch.ops.aten, LAYOUTS[layout]
    size = (4, 8, *([32] * dims if dims == 2 else [16] * dims))
    x, two, none = placed(torch.randn(size)), [2] * dims, [None] * dims
    pooled = torch.randn(4, 8, *(n // 2 for n in size[2:]))
    most = getattr(aten, f"max_pool{dims}d_with_indices")
    places = most(x, two, two)[1]
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (most, (x, two, two)),
        (
            getattr(aten, f"max_pool{dims}d_with_indices_backward"),
            (placed(pooled), x, two, two, [0] * dims, [1] * dims, False, places),
        ),
        (getattr(aten, f"avg_pool{dims}d"), (x, two, two)),
        (
            getattr(aten, f"avg_pool{dims}d_backward"),
            (placed(pooled), x, two, two, [0] * dims, False, True, None),
        ),
    ]
    ways: list[tuple[str, list[bool]]] = [("trilinear3d", [False])]
    if dims == 2:
        ways = [("nearest2d", []), ("bilinear2d", [False]), ("bicubic2d", [False])]
    for way, corners in ways:
        for factor in (2, 3) if dims == 2 else (2,):  # two kernels, by the size of the result
            out = [factor * n for n in size[2:]]
            given = placed(torch.randn(4, 8, *out))
            calls += [
                (getattr(aten, f"upsample_{way}"), (x, out, *corners, *none)),
                (getattr(aten, f"upsample_{way}_backward"), (given, out, size, *corners, *none)),
            ]
    for function, args in calls:
        result = function(*args)
        results = result if isinstance(result, tuple) else (result,)
        made = sum(t.untyped_storage().nbytes() for t in results)
        peak = lowtide.measure(lambda f=function, a=args: f(*a), device="cpu").peak_bytes
        tensors = [a for a in args if isinstance(a, Tensor)]
        name = str(function).replace(".", "::")
        modelled = made + kernel_workspace(name, tensors, args, made)
        assert modelled == pytest.approx(peak, rel=0.02, abs=32 << 10), name


@pytest.mark.parametrize("measured", [True, False])
def test_what_is_named_is_a_little_more_than_the_peak_also_where_nothing_lowers_it(
    measured: bool,
) -> None:
    """A fresh budget models its first step, maybe a little too high, and would refuse the peak."""
    step, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8)
    graph = lowtide.plan(step, x).graph
    held = keep_all(graph).retain
    error = refusal(graph, 1, held, measured=measured)
    peak = Simulator(graph).run(held).peak
    assert peak < (error.minimum or 0) <= 1.02 * peak


MIB = 1 << 20


@pytest.mark.parametrize(
    ("graph", "retain", "text"),
    [
        (
            (OpNode("f", 1.0, (0,), (1,)), Event(1, other=2 * MIB, peak_other=5 * MIB)),
            HOLD,
            "in the backward that reads the output of f, with 1.0 MiB of activations, 2.0 MiB of "
            "gradients and other memory from before, and 3.0 MiB that it takes itself (new",
        ),
        (
            (OpNode("f", 1.0, (0,), (1,), workspace=6 * MIB), Event(1, 2 * MIB, 4 * MIB)),
            0,
            "with 0 B of activations, 2.0 MiB of gradients and other memory from before, and "
            "7.0 MiB that a replay for it takes (results",
        ),
        (
            (OpNode("f", 1.0, (0,), (1,), peak_other=6 * MIB), Event(1, 2 * MIB, 4 * MIB)),
            HOLD,
            "of the forward, with 0 B of activations and 6.0 MiB of results, temporaries and",
        ),
    ],
    ids=["backward", "replay", "forward"],
)
def test_a_refusal_tells_what_was_there_from_what_is_taken_at_its_peak(
    graph: tuple[OpNode, Event], retain: int, text: str
) -> None:
    """Of 94 MiB that one convolution's backward took, it said "gradients, temporaries and kernel
    workspace", as of the gradients of a large model."""
    op, event = graph
    values = (ValueNode(MIB, -1), ValueNode(MIB, 0))
    whole = Graph(values, (op,), (replace(event, releases=(1,)),))
    assert text in str(refusal(whole, 1, [HOLD, retain], measured=True))
