"""MONAI's nets under lowtide: CheckpointUNet, and DenseNet121 by name pattern and by budget."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import counted
from by_hand import absent, same
from lowtide import replay
from lowtide.errors import UncountedWarning, UsageError
from lowtide.measure import measure
from lowtide.modules import checkpoint_modules, is_checkpointed
from once import on_one_recorder

pytest.importorskip("monai")

from monai.networks.nets import DenseNet121, UNet
from monai.networks.nets.unet import CheckpointUNet as MonaisCheckpointUNet

from lowtide.monai import CheckpointUNet

pytestmark = pytest.mark.usefixtures("one_thread")


def build(kind: Callable[..., nn.Module], dims: int = 3, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_res_units": 2, "norm": "batch", "dropout": 0.1}
    settings = {"strides": (2, 2, 2), **settings, **options}
    return kind(dims, 1, 2, (4, 8, 8, 16), **settings)


def step(model: nn.Module, dims: int = 3, size: int = 16) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(torch.randn(2, 1, *[size] * dims)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"num_res_units": 0}, {"norm": "instance", "act": "relu"}, {"dropout": 0.0}]
)
def test_the_same_bits_as_the_plain_net(
    dims: int, options: dict[str, Any], replayed: Callable[[], int]
) -> None:
    """Rules 1 and 2."""
    model, plain = build(CheckpointUNet, dims, **options), build(UNet, dims, **options)
    for _ in range(3):
        assert same(step(model, dims), step(plain, dims))
    assert replayed() > 0


@pytest.mark.parametrize("dims", [2, 3])
def test_with_nested_regions_it_takes_no_more_than_monais(dims: int) -> None:
    """MONAI's has them; without them less is replayed, and more is kept."""
    options: dict[str, Any] = {"num_res_units": 0, "dropout": 0.0, "strides": (1, 2, 2)}
    nested = functools.partial(CheckpointUNet, nested=True)
    peaks = []
    for kind in (MonaisCheckpointUNet, nested, CheckpointUNet):
        model = build(kind, dims, **options)
        peaks.append(measure(lambda model=model: step(model, dims, 32), device="cpu").peak_bytes)  # type: ignore[misc]
    monais, found, default = peaks
    assert found <= monais < default
    model, plain = build(nested, dims, **options), build(UNet, dims, **options)
    with counted() as seen:
        assert same(step(model, dims), step(plain, dims))
    times = seen["convolution"]
    names = [name for name, m in model.named_modules() if is_checkpointed(m)]
    assert {"model.1.submodule", "model.1.submodule.1.submodule"} <= set(names)
    with counted() as seen:
        step(build(CheckpointUNet, dims, **options), dims)
    assert 0 < seen["convolution"] < times
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [name for name, m in each.named_modules() if is_checkpointed(m)] == names


def test_nested_is_a_bool() -> None:
    with pytest.raises(UsageError, match="nested is True or False, not 2"):
        build(CheckpointUNet, nested=2)


@pytest.mark.parametrize("dims", [2, 3])
def test_batch_norm_counts_once_at_every_depth(dims: int) -> None:
    model = build(CheckpointUNet, dims)
    for number in (1, 2):
        step(model, dims)
        counts = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
        assert len(counts) == 13
        assert all(int(count) == number for count in counts)


def test_it_is_a_unet_with_a_unets_names() -> None:
    """Rule 11."""
    model, plain = build(CheckpointUNet), build(UNet)
    assert isinstance(model, UNet)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [(n, type(m)) for n, m in model.named_modules() if n] == [
        (n, type(m)) for n, m in plain.named_modules() if n
    ]


@pytest.mark.parametrize("inside", [False, True])
def test_weights_load_both_ways(inside: bool) -> None:
    def placed(model: nn.Module) -> nn.Module:
        return nn.Sequential(model) if inside else model

    sources = [build(UNet), build(MonaisCheckpointUNet)]
    for source in sources:
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        model = build(CheckpointUNet)
        assert not any(placed(model).load_state_dict(placed(source).state_dict()))
        plain = build(UNet)
        assert not any(placed(plain).load_state_dict(placed(model).state_dict()))
        for one, two in zip(source.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, two)


def test_nothing_is_recomputed_in_eval(replayed: Callable[[], int]) -> None:
    """Rule 12."""
    model, plain = build(CheckpointUNet).eval(), build(UNet).eval()
    with pytest.warns(UncountedWarning, match="in eval mode"):
        assert same(step(model), step(plain))
    model.train()
    with torch.no_grad():
        model(torch.randn(1, 1, 16, 16, 16))
    assert replayed() == 0


def test_copies_are_checkpointed_too(replayed: Callable[[], int]) -> None:
    model = build(CheckpointUNet)
    expected = step(build(UNet))
    names = [name for name, module in model.named_modules() if is_checkpointed(module)]
    assert names == [
        "model.0",
        "model.1.submodule.0",
        "model.1.submodule.1.submodule.0",
        "model.1.submodule.1.submodule.1.submodule",
        "model.1.submodule.1.submodule.2",
        "model.1.submodule.2",
        "model.2",
    ]
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert [name for name, m in each.named_modules() if is_checkpointed(m)] == names
        before = replayed()
        assert same(step(each), expected)
        assert replayed() > before


def test_a_region_that_is_gone_is_none_in_a_copy() -> None:
    """Switched off, or its module replaced: copies and pickles are made of the net as it is."""
    model = build(CheckpointUNet, 2)
    lowtide.ActivationCheckpointWrapper.remove(model.get_submodule("model.0"))
    replaced = model.get_submodule("model.1")
    setattr(model.get_submodule("model"), "1", nn.Identity())
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        names = [name for name, module in each.named_modules() if is_checkpointed(module)]
        assert names == ["model.2"]
    assert not is_checkpointed(model.get_submodule("model.0"))
    setattr(model.get_submodule("model"), "1", replaced)
    names = [name for name, m in copy.deepcopy(model).named_modules() if is_checkpointed(m)]
    assert names[0] == "model.1.submodule.0"
    assert names[-1] == "model.2"


@on_one_recorder  # it is about modules
@pytest.mark.parametrize("dims", [2, 3])
def test_torchscript_makes_of_it_what_it_makes_of_a_unet(dims: int) -> None:
    model, plain = build(CheckpointUNet, dims).eval(), build(UNet, dims).eval()
    x = torch.randn(1, 1, *[16] * dims)
    assert torch.equal(torch.jit.script(model)(x), torch.jit.script(plain)(x))


def test_it_takes_less_memory_than_the_plain_net_and_about_monais() -> None:
    peaks = {}
    for kind in (UNet, CheckpointUNet, MonaisCheckpointUNet):
        model = build(kind, 2)
        step(model, 2, 64)
        model.zero_grad()
        peaks[kind] = measure(lambda model=model: step(model, 2, 64), device="cpu").peak_bytes
    assert peaks[CheckpointUNet] < 0.7 * peaks[UNet]
    assert peaks[CheckpointUNet] < 1.1 * peaks[MonaisCheckpointUNet]


def test_no_operation_is_replayed_twice() -> None:
    model = build(CheckpointUNet, 2)
    step(model, 2)
    seen: list[int] = []

    def listener(operations: list[Any]) -> None:
        seen.extend(id(operation) for operation in operations)
        keep.extend(operations)

    keep: list[Any] = []
    replay.listeners.append(listener)
    try:
        step(model, 2)
    finally:
        replay.listeners.remove(listener)
    assert seen
    assert len(seen) == len(set(seen))


def test_a_subclass_with_other_blocks_is_checkpointed() -> None:
    class Wide(CheckpointUNet):
        def _get_bottom_layer(self, in_channels: int, out_channels: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1), nn.ReLU())

    model = build(Wide, 2)
    bottom = model.get_submodule("model.1.submodule.1.submodule.1.submodule")
    assert is_checkpointed(bottom)
    step(model, 2)


@on_one_recorder
def test_without_monai_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        absent("monai", monkeypatch),
        pytest.raises(ImportError, match=r"pip install 'monai>=1\.5'"),
    ):
        importlib.import_module("lowtide.monai")


# --- memory-efficient DenseNet ----------------------------------------------------------------


def dense() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = DenseNet121(spatial_dims=2, in_channels=1, out_channels=2, dropout_prob=0.1)
    return model


def dense_loss(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    loss: Tensor = model(torch.randn(4, 1, 64, 64)).square().mean()
    return loss


def peak(model: nn.Module) -> int:
    model.zero_grad()
    return measure(lambda: dense_loss(model).backward(), device="cpu").peak_bytes


@on_one_recorder  # both record a DenseNet in `test_zoo.py`
def test_densenet_by_name_pattern(replayed: Callable[[], int]) -> None:
    model, plain = dense(), dense()
    handle = checkpoint_modules(model, "features.denseblock*.denselayer*")
    assert len(handle.names) == 58
    for _ in range(2):
        assert same(step(model, 2, 64), step(plain, 2, 64))
    assert replayed() > 0

    assert peak(model) < 0.75 * peak(plain)


@on_one_recorder
def test_densenet_by_budget() -> None:
    reference, model = dense(), dense()
    limit = int(0.8 * peak(dense()))
    budget = lowtide.budget(limit)
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        expected = dense_loss(reference)
        expected.backward()
        with budget:
            loss = dense_loss(model)
        loss.backward()
        assert torch.equal(loss, expected)
        for one, two in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
        for one, two in zip(model.buffers(), reference.buffers(), strict=True):
            assert torch.equal(one, two)
    assert budget.report().measured_peak <= limit
