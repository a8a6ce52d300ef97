"""A dry run has the operators and the bytes of the real step, also where torch does something else
on fake tensors: the step follows the plan made for it (rule 13)."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, stack_module_state, vmap

import lowtide
from lowtide import _compat
from lowtide._compat import fakes
from lowtide.backward.operation import costs, describe
from lowtide.dryrun.shapes import Shapes
from lowtide.tape.operators import facts_of
from once import on_one_recorder

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


def follows(step: Callable[..., Tensor], *args: Any, source: str = "fake") -> bool:
    """Whether a first step follows, to its end, a plan for the smallest limit."""
    made = lowtide.plan(step, *args)
    assert made.source == source
    budget = lowtide.budget(lowtide.plan(step, *args, limit=made.minimum_peak))
    with budget:
        loss = step(*args)
    loss.backward()
    report = budget.report()
    return report.planned and report.left_plan_at is None


@pytest.mark.parametrize("case", ["labels", "count from labels", "router"])
def test_one_hot(case: str) -> None:
    # It asks for the highest class. What a router has chosen is not known without a real step.
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    x, labels, usual = torch.randn(64, 16), torch.randint(8, (64,)), F.one_hot
    labels[0] = 7

    def step(x: Tensor, labels: Tensor) -> Tensor:
        shares = model(x).softmax(-1)
        chosen = shares.argmax(-1) if case == "router" else labels
        return (shares * F.one_hot(chosen, -1 if case == "count from labels" else 8)).sum()

    assert follows(step, x, labels)
    assert F.one_hot is usual


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["int64", "int32", "lists"])
def test_a_loss_of_sequences_needs_their_lengths_only(kind: str, reduction: str) -> None:
    layers, usual = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10)), torch.ctc_loss
    x, labels = torch.randn(20, 8, 16), torch.randint(1, 10, (8, 5))
    lengths: tuple[Any, Any] = torch.full((8,), 20), torch.tensor([5, 4, 3, 5, 1, 2, 5, 5])
    lengths = tuple(t.tolist() if kind == "lists" else t.to(getattr(torch, kind)) for t in lengths)
    loss = nn.CTCLoss(reduction=reduction, zero_infinity=kind == "int32")

    def step(x: Tensor, labels: Tensor, ends: Any, most: Any) -> Tensor:
        return loss(layers(x).log_softmax(-1), labels, ends, most)

    assert follows(step, x, labels, *lengths)
    assert torch.ctc_loss is usual


@pytest.mark.parametrize("how", ["function", "method", "operator", "autocast"])
def test_product_with_a_batch_of_one(how: str) -> None:
    # One per item, unless the one needs a gradient, is a fake tensor or meets a dispatch mode.
    one, before, after = torch.randn(1, 32, 24), nn.Linear(32, 32), nn.Linear(24, 32)
    x, usual = torch.randn(8, 16, 32), torch.matmul

    def product(x: Tensor) -> Tensor:
        if how == "function":
            return torch.matmul(x, one)
        if how == "method":
            return x.matmul(one.sin())
        return x @ one.sin()

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return after(product(before(x).tanh()).sigmoid()).exp().float().sum()

    assert follows(step, x)
    assert torch.matmul is usual
    assert not {"matmul", "__matmul__"} & vars(fakes.fake_type()).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalizations_under_autocast(dtype: torch.dtype) -> None:
    # Parameters of float32 make the statistics of a half-precision input float32.
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.GELU(), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.LayerNorm(62), nn.GELU(), nn.InstanceNorm1d(8, affine=True),
    ).to(dtype)  # fmt: skip
    x = torch.randn(8, 4, 64, dtype=dtype)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    assert follows(step)


def test_fold() -> None:
    # The result keeps a storage as large as what it sums.
    x = torch.randn(2, 3, 16, 16, requires_grad=True)

    def step() -> Tensor:
        patches = F.unfold(x.sin(), 3, padding=1)
        return F.fold(patches.cos(), (16, 16), 3, padding=1).sin().sum()

    assert follows(step)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("offsets", ["first", "last too", "none"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, offsets: str, padding: int | None) -> None:
    """What is counted for the bags may lie in a storage of one number more than its tensor has."""
    torch.manual_seed(0)
    last = offsets == "last too"
    bags = nn.EmbeddingBag(50, 16, mode=mode, include_last_offset=last, padding_idx=padding)
    layers = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16), nn.Tanh())))
    indices = torch.randint(50, (64, 5) if offsets == "none" else (320,))
    starts = None if offsets == "none" else torch.arange(0, 320 + last, 5)

    def step(indices: Tensor) -> Tensor:
        return layers(bags(indices, starts)).square().mean()

    assert follows(step, indices)


def test_unpooling_in_channels_last_format() -> None:
    layer, x = nn.Conv2d(4, 4, 3, padding=1), torch.randn(2, 4, 16, 16)
    x = x.to(memory_format=torch.channels_last)

    def step(x: Tensor) -> Tensor:
        pooled, places = F.max_pool2d(layer(x).tanh(), 2, return_indices=True)
        return layer(F.max_unpool2d(pooled, places, 2)).tanh().square().mean()

    assert follows(step, x)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_recurrent_layer_whose_input_is_transposed(kind: type[nn.RNNBase]) -> None:
    # It adds a bias in place, unless it is called under a mode or on fake tensors.
    layer, recurrent = nn.Linear(16, 16), kind(16, 16, batch_first=True)
    x = torch.randn(8, 12, 16)
    assert follows(lambda: recurrent(layer(x).tanh())[0].square().mean())


def test_a_recurrent_layer_takes_what_its_plan_says() -> None:
    # Its gates write to parts of one memory, of which autograd goes on with the new content.
    recurrent, x = nn.GRU(32, 32, batch_first=True), torch.randn(32, 5, 32)

    def step() -> Tensor:
        return recurrent(x)[0].square().mean()

    limit = int(0.7 * lowtide.plan(step).plain_peak)
    plan = lowtide.plan(step, limit=limit)
    budget = lowtide.budget(plan)

    def trained() -> None:
        with budget:
            loss = step()
        loss.backward()

    peak = lowtide.measure(trained, device="cpu").peak_bytes
    assert budget.report().planned
    assert peak == pytest.approx(plan.peak, rel=0.01)
    assert peak <= limit


@pytest.mark.parametrize(
    "kind", [nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Softplus, nn.SiLU]
)
def test_a_transposed_gradient_of_an_activation(kind: type[nn.Module]) -> None:
    # What it returns is transposed, too, and copied by the convolution.
    model, x = nn.Sequential(nn.Conv1d(4, 64, 1), kind()), torch.randn(16, 4, 256)

    def step() -> Tensor:
        return model(x).transpose(1, 2).mean(2).exp().sum()

    peak = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    model.zero_grad()
    assert lowtide.plan(step).plain_peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
def test_the_gradient_of_a_full_reduction(name: str, dtype: torch.dtype) -> None:
    # Zeros are there while it counts the ties; without memory they are not. Modelled alike.
    x = torch.randn(1 << 12, dtype=dtype, requires_grad=True)
    one = getattr(x, name)()
    backward = lowtide.measure(lambda: one.backward(retain_graph=True), device="cpu").peak_bytes
    call = describe(facts_of(getattr(torch.ops.aten, name).default), (x,), {}, "cpu")
    assert call is not None
    modelled = costs([call])[call]
    assert modelled is not None
    assert modelled.peak == pytest.approx(backward, abs=64)

    def step() -> Tensor:
        out: Tensor = getattr(x.sin(), name)()
        return out

    peak = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    x.grad = None
    assert lowtide.plan(step).plain_peak == pytest.approx(peak, abs=64)


@pytest.mark.filterwarnings("ignore:the step cannot run on fake tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated
def test_quantized_tensors_need_a_real_step() -> None:
    # Of a fake tensor torch makes one in float32, which it then does not have to dequantize.
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def step(x: Tensor) -> Tensor:
        y = model(x)
        rounded = torch.quantize_per_tensor(y.detach(), 0.05, 0, torch.qint8).dequantize()
        return (y.tanh() + rounded).exp().mean()

    assert follows(step, torch.randn(64, 32), source="recorded")


@pytest.mark.parametrize("bias", [True, False])
def test_an_ensemble(bias: bool) -> None:
    # `linear` adds its bias in place, but not to the results of a `vmap` over parameters.
    members = [nn.Sequential(nn.Linear(8, 16, bias), nn.Tanh(), nn.Linear(16, 4, bias))] * 3
    parameters, buffers = stack_module_state(members)
    member = copy.deepcopy(members[0]).to("meta")
    x = torch.randn(32, 8)

    def step(stacked: dict[str, Tensor]) -> Tensor:
        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            out: Tensor = functional_call(member, (parameters, buffers), (x,))
            return out

        return vmap(one)(stacked, buffers).square().mean()

    assert follows(step, parameters)


# torch's own warning, at the first use of forward-mode differentiation
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_spectrum_that_is_read_as_two_real_tensors_too() -> None:
    """One memory of two dtypes, of which autograd saves a part of the real one first."""
    weight = nn.Parameter(torch.randn(64, 33, 32))

    def step() -> Tensor:
        spectrum = torch.fft.rfft(weight * 2).mT
        parts = torch.view_as_real(spectrum).movedim(-1, 1)
        return (torch.sin(parts[:, 0]) * (spectrum * spectrum).abs()).mean()

    plan = lowtide.plan(step)
    assert plan.source == "fake"
    measured = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    assert plan.plain_peak == pytest.approx(measured, rel=0.01)


def test_an_operator_that_makes_no_tensor() -> None:
    # The derivatives of a dual ask of many tensors whether they are alike.
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)])

    def step(x: Tensor) -> Tensor:
        out, slope = jvp(model, (x,), (torch.ones_like(x),))
        return (out - slope).square().mean()

    assert follows(step, torch.randn(32, 8))


# the same warning
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_derivative_of_a_dual_is_not_added_in_place() -> None:
    # A `linear` adds its bias in place, but not the terms of its derivative.
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def step(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            out, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            return (out - slope).square().mean()

    assert follows(step, torch.randn(32, 8))


class Experts(nn.Module):
    """Every token goes to the expert that its number says, as transformers' mixtures compute it."""

    def __init__(self, dtype: torch.dtype, transposed: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 64, dtype=dtype) / 8)
        down = (4, 32, 64) if transposed else (4, 64, 32)
        self.down, self.transposed = nn.Parameter(torch.randn(down, dtype=dtype) / 8), transposed

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        down = self.down.mT if self.transposed else self.down
        for _ in range(3):
            x = x + torch._grouped_mm(
                F.silu(torch._grouped_mm(x, self.up, offs=ends)), down, offs=ends
            )
        return x.square().mean()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_mixture_of_experts(dtype: torch.dtype, transposed: bool) -> None:
    # torch's shape function takes bfloat16 only, its kernels all of them.
    torch.manual_seed(0)
    model, ends = Experts(dtype, transposed), torch.tensor([50, 100, 220, 256], dtype=torch.int32)
    x = torch.randn(256, 32, dtype=dtype)
    assert follows(model, x, ends)

    def step(budget: lowtide.Budget | None = None) -> None:
        model.zero_grad()
        with budget or contextlib.nullcontext():
            loss = model(x, ends)
        loss.backward()

    step()
    model.zero_grad()
    plain = lowtide.measure(step, device="cpu").peak_bytes
    model.zero_grad()
    made = lowtide.plan(model, x, ends)
    if dtype == torch.float32 or not _compat.onednn_takes(dtype):
        assert abs(made.plain_peak / plain - 1) < 0.01
    else:  # the matrices of each group are packed, whose sizes are not known
        assert made.plain_peak >= plain
    # A first step, of whose backward nothing was measured, is not refused what it can do with.
    budget = lowtide.budget(int(1.05 * made.minimum_peak))
    assert lowtide.measure(step, budget, device="cpu").peak_bytes <= budget.limit


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
@pytest.mark.parametrize("name", ["exponential_", "geometric_", "log_normal_", "cauchy_"])
def test_noise_from_a_generator(name: str, own: bool) -> None:
    """Without memory torch draws it from the default generator only, so a Gumbel softmax, which
    draws from a copy where the core is loaded, needed a real step."""
    layer, x = nn.Linear(16, 8), torch.randn(64, 16)
    generator = torch.Generator() if own else None
    parameters = (0.5,) if name == "geometric_" else ()

    def step(x: Tensor) -> Tensor:
        noise = getattr(torch.empty(64, 8), name)(*parameters, generator=generator)
        return F.softmax(torch.tanh(layer(x)) + 1 / (1 + noise.abs()), -1).square().sum()

    assert follows(step, x)


@pytest.mark.parametrize("name", ["_fft_r2c", "_fft_c2c", "_fft_c2r"])
def test_the_layout_of_a_transform(name: str) -> None:
    """Dimensions with equal strides, as those that are expanded, get an order of their own."""
    mode = fakes.fake_mode()
    shapes = Shapes(mode)
    draws, operator = random.Random(0), getattr(torch.ops.aten, name).default
    for _ in range(100):
        dims = draws.randint(3, 4)
        sizes = [draws.choice((2, 3, 4)) for _ in range(dims)]
        order, over = draws.sample(range(dims), dims), draws.sample(range(dims), 1)
        dtype = torch.float32 if name == "_fft_r2c" else torch.complex64
        here = torch.randn([1 if draws.random() < 0.5 else sizes[d] for d in order], dtype=dtype)
        here = here.permute([order.index(d) for d in range(dims)]).expand(sizes)
        last = 2 * sizes[over[-1]] - 2 if name == "_fft_c2r" else True
        made = operator(here, over, 0, last)
        fake = fakes.faked(mode, here, here.device)
        assert shapes(operator, (fake, over, 0, last), {}).stride() == made.stride()


@pytest.mark.parametrize("lazily", [torch.Tensor.conj, torch.Tensor.adjoint])
def test_what_is_conjugated_lazily_and_saved(lazily: Callable[[Tensor], Tensor]) -> None:
    """It is kept as it is, on the device that the fake tensor stands for."""
    weight = torch.randn(64, 64, dtype=torch.complex128, requires_grad=True)

    def step() -> Tensor:
        return (weight @ lazily(weight).matmul(lazily(weight))).abs().sum()

    plan = lowtide.plan(step)
    assert plan.source == "fake"
    real = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    assert plan.peak == pytest.approx(real, rel=0.02)
