"""Kernels copy tensors of another layout than they read: transposed sequences, and channels-last
models with inputs that are not (rule 13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from instructions import avx512_workspaces, exact_workspaces
from lowtide._compat import fakes
from lowtide.dryrun.shapes import Shapes
from lowtide.kernels.workspace import kernel_workspace
from lowtide.planner import plain_peak
from once import on_one_recorder
from test_modelled import modelled_and_measured, others

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

aten = torch.ops.aten
LAST = torch.channels_last

# ---------------------------------------------------------------------------- first steps


def _labels() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(1, 200, (8, 16)), torch.full((8,), 64), torch.full((8,), 16)


def _convolved(x: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), torch.randn(8, 200, 3, requires_grad=True))


TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "ctc": lambda x: F.ctc_loss(x.log_softmax(-1).transpose(0, 1), *_labels()),
    "a product": lambda x: x.softmax(-1).transpose(1, 2) @ torch.ones(8, 64, 5),
    "a normalization": lambda x: F.layer_norm(F.gelu(x).transpose(1, 2), (64,)),
    "a running sum": lambda x: x.softmax(-1).transpose(1, 2).cumsum(-1),
    "a convolution of a softmax": lambda x: _convolved(x.softmax(-1)),
    "a convolution of GELU": lambda x: _convolved(F.gelu(x)),
    "a convolution of a normalization": lambda x: _convolved(F.layer_norm(x, (200,))),
}


@avx512_workspaces
@pytest.mark.parametrize("size", [8, 16, 30])
@pytest.mark.parametrize("channels", [1, 3])
def test_where_patches_are_few_their_parameter_is_the_largest(channels: int, size: int) -> None:
    """Its gradient is made in the kernel's own layout, and both are there when it is reordered."""
    layer, x = nn.Conv2d(channels, 64, 8, 8), torch.randn(2, channels, size, size)

    def step() -> Tensor:
        return layer(x).square().mean()

    modelled = lowtide.plan(step, limit=1.0).plain_peak
    measured = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    assert modelled == pytest.approx(measured, rel=0.01)


@exact_workspaces
@pytest.mark.parametrize("name", TURNED)
def test_the_gradient_of_what_is_read_transposed_is_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Linear(16, 200), torch.randn(8, 64, 16)

    def step(budget: lowtide.Budget) -> None:
        with budget:
            loss = TURNED[name](layer(x)).square().mean()
        loss.backward()

    modelled, measured = modelled_and_measured(monkeypatch, step)
    assert 0.98 <= plain_peak(modelled) / plain_peak(measured) <= 1.03
    for guess, real in zip(others(modelled), others(measured), strict=True):
        assert guess >= 0.98 * real - 4096


@exact_workspaces
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("after", ["normalized", "rectified", "squared"])
def test_gradients_of_channels_last_images_are_copied_only_if_they_are_not(
    after: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory torch says that a convolution's result is contiguous, and all gradients seemed
    to be copied: a third of what the backward took."""
    layer = nn.Conv2d(32, 32, 3, padding=1, groups=groups)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), layer).to(memory_format=LAST)
    model.append(
        {"normalized": nn.BatchNorm2d(32), "rectified": nn.ReLU()}.get(after, nn.Identity())
    )
    x = torch.randn(4, 3, 34, 34).to(memory_format=LAST)

    def step(budget: lowtide.Budget) -> None:
        with budget:
            loss = model(x).square().mean()
        loss.backward()

    modelled, measured = modelled_and_measured(monkeypatch, step)
    (place,) = [n for n, event in enumerate(measured.events) if event.value == 0]
    mine, real = modelled.events[place], measured.events[place]
    more = (mine.peak_other - mine.other) - (real.peak_other - real.other)
    assert 0 <= more <= 40 << 10  # a scratchpad, which is not known before it was measured


# ---------------------------------------------------------------------------- convolutions


def convolution(shape: tuple[int, ...], kernel: tuple[int, ...], groups: int = 1) -> Any:
    x, weight = torch.randn(shape), torch.randn(kernel)
    spatial = len(shape) - 2
    options = [1] * spatial, [kernel[-1] // 2] * spatial, [1] * spatial, False, [0] * spatial
    return x, weight, (*options, groups)


def sequence() -> Any:
    _, weight, options = convolution((4, 64, 128), (64, 64, 5))
    return torch.randn(4, 128, 64).transpose(1, 2), weight, options


def images(channels: int, kernel: int, groups: int = 1) -> Any:
    shape = (32 if groups == 1 else channels, channels // groups, kernel, kernel)
    x, weight, options = convolution((4, channels, 32, 32), shape, groups)
    return x, weight.to(memory_format=LAST), options


CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "a transposed sequence": sequence,
    "a parameter with its channels last": lambda: images(32, 3),
    "a pointwise one": lambda: images(64, 1),
    "one for each channel": lambda: images(24, 5, 24),
    "one for each of 16 channels": lambda: images(16, 7, 16),
}


@exact_workspaces
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("back", [False, True])
def test_a_convolution_copies_what_it_does_not_read_as_it_is(name: str, back: bool) -> None:
    x, weight, options = CONVOLUTIONS[name]()
    call, args = aten.convolution.default, (x, weight, None, *options)
    if back:
        given = torch.randn_like(call(*args)).contiguous()
        call, args = aten.convolution_backward.default, (
            given, x, weight, None, *options, [True, True, False],
        )  # fmt: skip
    results = call(*args) if back else [call(*args)]
    made = sum(t.untyped_storage().nbytes() for t in results if t is not None)
    del results
    peak = lowtide.measure(call, *args, device="cpu").peak_bytes
    tensors = [a for a in args if isinstance(a, Tensor)]
    modelled = made + kernel_workspace(call._schema.name, tensors, args, made)
    assert peak - (48 << 10) <= modelled <= 1.01 * peak


FLAT: dict[str, tuple[tuple[int, int, int], int, int]] = {
    "deeper than it is wide": ((4, 2, 2), 3, 0),
    "as deep as the kernel": ((3, 2, 2), 3, 1),
    "flatter than the kernel": ((2, 6, 6), 3, 1),
    "flatter, with much padding": ((4, 8, 8), 5, 2),
    "flatter, with little padding": ((4, 8, 8), 5, 1),
}


FAR = {
    "dilated, on a large image": (24, 6, 6),
    "dilated, on a small image": (8, 6, 6),
    "padded by more than half": (2, 1, 2),
}


def assert_modelled(x: Tensor, weight: Tensor, *options: Any) -> None:
    """What a convolution's backward takes is what is measured, or up to a tenth more."""
    given = torch.randn_like(aten.convolution.default(x, weight, None, *options))
    call = aten.convolution_backward.default
    args = (given, x, weight, None, *options, [True, True, False])
    call(*args)
    peak, made = lowtide.measure(call, *args, device="cpu").peak_bytes, x.nbytes + weight.nbytes
    modelled = made + kernel_workspace(call._schema.name, [given, x, weight], args, made)
    assert 0.98 * peak <= modelled <= 1.1 * peak


@exact_workspaces
@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("groups", [1, 2])
def test_an_image_is_unfolded_if_a_kernel_reaches_further(name: str, groups: int) -> None:
    """As the dilated layers of DeepLab do, whose last images are small."""
    size, dilation, padding = FAR[name]
    x, weight = torch.randn(2, 64 * groups, size, size), torch.randn(64 * groups, 64, 3, 3)
    assert_modelled(x, weight, [1] * 2, [padding] * 2, [dilation] * 2, False, [0] * 2, groups)


@exact_workspaces
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_volume_is_unfolded_if_it_is_flatter_than_the_kernel(name: str, groups: int) -> None:
    """However small it is otherwise: latent videos have few points in an image."""
    space, kernel, padding = FLAT[name]
    x = torch.randn(2, 32 * groups, *space)
    weight = torch.randn(64 * groups, 32, kernel, kernel, kernel)
    around = [padding, kernel // 2, kernel // 2]
    assert_modelled(x, weight, [1] * 3, around, [1] * 3, False, [0] * 3, groups)


# ---------------------------------------------------------------------------- dry runs


def last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=LAST)


def last3d(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last_3d)


def turned(*shape: int) -> Tensor:
    """In neither of the usual formats."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT


def normalized(x: Tensor) -> tuple[Any, ...]:
    ones = [torch.ones(4) for _ in range(4)]
    return x, *ones, True, 0.1, 1e-5


def normalized_back(given: Tensor, x: Tensor) -> tuple[Any, ...]:
    ones = [torch.ones(4) for _ in range(5)]
    return given, x, *ones, True, 1e-5, [True] * 3


LAID_OUT: dict[str, tuple[Any, ...]] = {
    "mse_loss_backward": (torch.ones(()), last(2, 4, 6, 6), last(2, 4, 6, 6), 1),
    "smooth_l1_loss_backward": (torch.ones(()), last(2, 4, 6, 6), last(2, 4, 6, 6), 1, 1.0),
    "huber_loss_backward": (torch.ones(()), last(2, 4, 6, 6), last(2, 4, 6, 6), 1, 1.0),
    "glu_backward": (last(2, 2, 6, 6), last(2, 4, 6, 6), 1),
    "log_sigmoid_forward": (last(2, 4, 6, 6),),
    "rrelu_with_noise": (last(2, 4, 6, 6), last(2, 4, 6, 6), 0.1, 0.3, True),
    "channel_shuffle": (last(2, 4, 6, 6), 2),
    "roll": (last(2, 4, 6, 6), [1], [2]),
    "reflection_pad2d_backward": (last(2, 4, 8, 8), last(2, 4, 6, 6), [1, 1, 1, 1]),
    "replication_pad2d_backward": (last(2, 4, 8, 8), last(2, 4, 6, 6), [1, 1, 1, 1]),
    "replication_pad3d": (last3d(2, 4, 5, 6, 7), [1] * 6),
    "replication_pad3d_backward": (torch.ones(2, 4, 7, 8, 9), last3d(2, 4, 5, 6, 7), [1] * 6),
    "roll of volumes": (last3d(2, 4, 5, 6, 7), [1], [2]),
    "native_batch_norm": normalized(last(2, 4, 6, 6)),
    "native_batch_norm of a transposed sequence": normalized(turned(2, 4, 6)),
    "native_batch_norm of transposed images": normalized(turned(2, 4, 6, 6)),
    "native_batch_norm of a transposed matrix": normalized(turned(8, 4)),
    "native_batch_norm_backward": normalized_back(last(2, 4, 6, 6), turned(2, 4, 6, 6)),
    "native_batch_norm_backward of a plain gradient": normalized_back(
        torch.ones(2, 4, 6, 6), last(2, 4, 6, 6)
    ),
    "native_batch_norm_backward of a gradient with channels last": normalized_back(
        last(2, 4, 6, 6), torch.ones(2, 4, 6, 6)
    ),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_fake_results_have_the_layout_of_real_ones(name: str) -> None:
    call, args = getattr(aten, name.split()[0]).default, LAID_OUT[name]
    mode = fakes.fake_mode()
    with mode:
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        found = Shapes(mode)(call, tuple(fake), {})
    real = call(*args)
    several = isinstance(real, tuple)
    strides = [t.stride() for t in (real if several else [real])]
    assert [t.stride() for t in (found if several else [found])] == strides


def test_linear_layers_after_a_normalization_of_a_transposed_sequence() -> None:
    """The normalization's result is contiguous, so that each layer, which reads it turned back,
    saves a copy (PatchTST took a seventh more than was predicted)."""
    into, norm, out = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
    x = torch.randn(64, 32, 8)

    def step() -> Tensor:
        normal = norm(into(x).mT).mT
        return (out(normal).sigmoid() * out(normal).tanh()).square().mean()

    predicted = lowtide.plan(step).plain_peak
    measured = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    assert predicted == pytest.approx(measured, rel=0.01)
