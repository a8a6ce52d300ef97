"""MONAI's larger nets by budget, and its SupervisedTrainer, bit for bit equal to the plain step.

`test_monai.py` has the checkpointed U-Net and DenseNet. Rules of docs/semantics.md are cited by
number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide.errors import BudgetError, UsageError
from lowtide.models.foreign import find_active_checkpointing
from once import on_one_recorder

pytest.importorskip("monai")

from monai.data.meta_tensor import MetaTensor
from monai.networks import nets

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


def swin(**options: Any) -> nn.Module:
    settings = {"feature_size": 12, "depths": (1, 1, 1, 1), "drop_rate": 0.1, **options}
    model: nn.Module = nets.SwinUNETR(in_channels=1, out_channels=2, spatial_dims=2, **settings)
    return model


def dynamic(dims: int = 2) -> nn.Module:
    model: nn.Module = nets.DynUNet(
        dims, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 16], dropout=0.1,
        norm_name="batch", deep_supervision=True, deep_supr_num=1,
    )  # fmt: skip
    return model


def residual() -> nn.Module:
    model: nn.Module = nets.SegResNet(2, init_filters=8, dropout_prob=0.1, use_conv_final=True)
    return model


def diffusion() -> nn.Module:
    model: nn.Module = nets.DiffusionModelUNet(
        2, 1, 1, channels=(16, 16, 16), attention_levels=(False, False, True), num_res_blocks=1,
        norm_num_groups=8, num_head_channels=8,
    )  # fmt: skip
    return model


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "SwinUNETR": (swin, 64),
    "DynUNet": (dynamic, 64),
    "SegResNet": (residual, 64),
    "DiffusionModelUNet": (diffusion, 32),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, nets.DiffusionModelUNet):
        out = model(x, timesteps=torch.tensor([3, 500]))
    else:
        out = model(x)
    return out.square().mean()


def train(build: Callable[[], nn.Module], size: int, around: Any = None) -> list[Tensor]:
    """Everything that three updates leave."""
    torch.manual_seed(0)
    model = build().train()
    for parameter in model.parameters():  # diffusion nets initialize some layers to zero
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    left = []
    for _ in range(3):
        x = torch.randn(2, 1, size, size)
        optimizer.zero_grad()
        if around is None:
            loss = loss_of(model, x)
        else:
            with around:
                loss = loss_of(model, x)
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*left, *model.state_dict().values(), torch.get_rng_state()]


def plain_peak(build: Callable[[], nn.Module], size: int) -> int:
    model = build().train()
    x = torch.randn(2, 1, size, size)
    loss_of(model, x).backward()
    model.zero_grad()
    return lowtide.measure(lambda: loss_of(model, x).backward(), device="cpu").peak_bytes


@pytest.mark.parametrize("name", list(NETS))
def test_nets_by_budget(name: str, replayed: Callable[[], int]) -> None:
    build, size = NETS[name]
    expected = train(build, size)
    limit = int(0.7 * plain_peak(build, size))
    budget = lowtide.budget(limit)
    assert same(train(build, size, budget), expected)
    assert replayed() > 0
    report = budget.report()
    assert report.measured_peak is not None
    assert report.measured_peak <= limit


def test_in_three_dimensions(replayed: Callable[[], int]) -> None:
    def build() -> nn.Module:
        return dynamic(3)

    def step(around: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = build().train()
        with around:
            loss = loss_of(model, torch.randn(1, 1, 24, 24, 24))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    import contextlib

    assert same(step(lowtide.budget(0.8)), step(contextlib.nullcontext()))
    assert replayed() > 0


# --- models whose own flag is on ----------------------------------------------------------------


def vector_quantized() -> nn.Module:
    model: nn.Module = nets.VQVAE(
        2, 1, 1, channels=(8, 8), num_res_channels=(8, 8), num_embeddings=8, embedding_dim=8,
        downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        use_checkpointing=True,
    )  # fmt: skip
    return model


def autoencoder() -> nn.Module:
    model: nn.Module = nets.AutoencoderKL(
        2, channels=(8, 8), attention_levels=(False, False), num_res_blocks=1, norm_num_groups=8,
        use_checkpoint=True,
    )  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("build", "flag"),
    [
        (lambda: swin(use_checkpoint=True), "use_checkpoint"),
        (vector_quantized, "use_checkpointing"),
        (autoencoder, "use_checkpoint"),
    ],
    ids=["SwinUNETR", "VQVAE", "AutoencoderKL"],
)
def test_a_flag_that_is_on_is_explained(build: Callable[[], nn.Module], flag: str) -> None:
    model = build()
    names = [name for name, what in find_active_checkpointing(model) if what.startswith(flag)]
    assert names
    match = (
        rf"already checkpointed by other means(.|\n)*{flag} is True; build the model with {flag}"
    )
    with pytest.raises(UsageError, match=match):
        lowtide.fit(model, 0.7)
    with pytest.raises(UsageError, match=match):
        lowtide.checkpoint_modules(model, nn.Conv2d)


def test_a_flag_inside_a_budget_is_still_right() -> None:
    """A `with` does not know the model; a module that checkpoints itself runs its Python again."""

    def flagged() -> nn.Module:
        return swin(use_checkpoint=True, drop_rate=0.0)

    expected = train(lambda: swin(drop_rate=0.0), 64)
    assert same(train(flagged, 64, lowtide.budget(0.9)), expected)


# --- SupervisedTrainer ------------------------------------------------------------------------


def supervised(limit: float | int | None = None, **options: Any) -> tuple[list[Tensor], Any]:
    """Two epochs of MONAI's engine on images with metadata, with validation in between."""
    pytest.importorskip("ignite")
    from monai.data import DataLoader, Dataset
    from monai.data.synthetic import create_test_image_2d
    from monai.engines import SupervisedEvaluator, SupervisedTrainer
    from monai.handlers import ValidationHandler
    from monai.inferers import SlidingWindowInferer
    from monai.losses import DiceCELoss
    from monai.transforms import Compose, EnsureTyped, RandFlipd
    from numpy.random import RandomState

    random = RandomState(0)
    data = []
    for _ in range(6):
        image, label = create_test_image_2d(
            48, 48, num_objs=3, rad_max=12, num_seg_classes=1, channel_dim=0, random_state=random
        )
        data.append({"image": image, "label": label})
    flip = RandFlipd(["image", "label"], prob=0.5)
    flip.set_random_state(seed=1)
    transforms = Compose([EnsureTyped(["image", "label"], track_meta=True), flip])
    torch.manual_seed(0)
    net = nets.UNet(2, 1, 2, (8, 16, 16), (2, 2), num_res_units=2, dropout=0.1, norm="batch")
    budget = lowtide.fit(net, limit) if limit is not None else None
    losses: list[Tensor] = []
    evaluator = SupervisedEvaluator(
        device=torch.device("cpu"),
        val_data_loader=DataLoader(Dataset(data[:2], transforms), batch_size=1),
        network=net,
        inferer=SlidingWindowInferer((32, 32), overlap=0.25),
    )
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=2,
        train_data_loader=DataLoader(Dataset(data, transforms), batch_size=2),
        network=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.01),
        loss_function=DiceCELoss(to_onehot_y=True, softmax=True),
        train_handlers=[ValidationHandler(interval=1, validator=evaluator)],
        **options,
    )

    from ignite.engine import Events

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine: Any) -> None:
        out = engine.state.output
        out = out[0] if isinstance(out, list) else out
        assert isinstance(out["image"], MetaTensor)
        losses.append(torch.as_tensor(out["loss"]).detach().as_subclass(Tensor).clone())

    trainer.run()
    assert len(losses) == 6
    return [*losses, *net.state_dict().values(), torch.get_rng_state()], budget


def test_supervised_trainer(replayed: Callable[[], int]) -> None:
    """Activations are MONAI's MetaTensors throughout the net."""
    expected, _ = supervised()
    assert replayed() == 0
    found, budget = supervised(0.75)
    assert same(found, expected)
    assert replayed() > 0
    assert budget.report().steps == 6


def test_supervised_trainer_with_a_limit_that_is_too_small() -> None:
    with pytest.raises(BudgetError, match="does not fit in"):
        supervised(200_000)
