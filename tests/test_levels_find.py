"""Levels found in models of every kind, by structure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from by_hand import Residual, ResNet, Transformer
from lowtide.levels import checkpoint_levels, find_levels


def found(model: nn.Module) -> dict[int, tuple[str, ...]]:
    levels = find_levels(model)
    return {n: levels.names(n) for n in range(1, 6)}


def test_a_residual_net() -> None:
    levels = found(ResNet())
    assert levels[2] == (
        *("layer1.0", "layer1.1"),
        *("layer2.0", "layer2.1", "layer2.2"),
        "layer3.0",
    )
    assert levels[3] == levels[5] == ()
    assert levels[4] == ("layer1", "layer2", "layer3")
    assert levels[1][0] == "stem"
    assert levels[1][-1] == "fc"
    assert "layer1.0.norm" in levels[1]


def test_a_transformer() -> None:
    levels = found(Transformer())
    layers = [f"encoder.layers.{n}" for n in range(3)]
    assert levels[2] == tuple(f"{n}.{part}" for n in layers for part in ("attention", "mlp"))
    assert levels[3] == tuple(layers)
    assert levels[4] == ()
    assert levels[5] == ("encoder",)
    assert "embed" not in levels[1], "an embedding saves only its indices"
    assert {"encoder.norm", "head"} <= set(levels[1])


def test_torchs_transformer() -> None:
    levels = found(nn.Transformer(8, 2, 2, 2, 16, batch_first=True))
    assert levels[2] == (
        *("encoder.layers.0.self_attn", "encoder.layers.1.self_attn"),
        *("decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"),
        *("decoder.layers.1.self_attn", "decoder.layers.1.multihead_attn"),
    )
    assert levels[3] == tuple(f"{side}.layers.{n}" for side in ("encoder", "decoder") for n in "01")
    assert levels[5] == ("encoder", "decoder")
    assert not any("out_proj" in name for name in levels[1]), "out_proj is never called"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Linear(2, 2), ("",)),
        (nn.LSTM(2, 2, 2), ("",)),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), ("0", "2")),
        (nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU())), ("0",)),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout()), ("0", "1")),
    ],
)
def test_models_of_single_layers(model: nn.Module, names: tuple[str, ...]) -> None:
    levels = found(model)
    if names == ("0",):  # the only unit's wrapper is the model itself
        names = ("0.0", "0.1")
    assert levels == {1: names, 2: (), 3: (), 4: (), 5: ()}


def test_a_flat_feature_extractor_is_no_small_block() -> None:
    class Vgg(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(*(nn.Conv2d(1, 1, 3) for _ in range(10)))
            self.classifier = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x

    levels = found(Vgg())
    assert levels[2] == ("classifier",)
    assert levels[5] == ("features",)


def test_parallel_parts_are_one_block() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x

    mixture = Mixture()
    mixture.experts = nn.ModuleList(Expert() for _ in range(3))
    levels = find_levels(nn.Sequential(mixture, nn.Linear(4, 4)))
    assert levels.names(2) == ("0",)
    assert levels.at(2)[0].reason == "3 parallel small blocks"


def test_anonymous_pairs_of_layers_inside_a_layer_are_no_stage() -> None:
    class TwoMlps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1)
            self.mlps = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            return x

    levels = found(nn.Sequential(TwoMlps(), TwoMlps(), nn.Linear(4, 4)))
    assert levels[2] == tuple(
        f"{n}.{part}" for n in "01" for part in ("attention", "mlps.0", "mlps.1")
    )
    assert levels[3] == ("0", "1")
    assert levels[4] == ()


def test_an_adapter_is_the_layer_it_adapts() -> None:
    class Adapted(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 24)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base_layer(x) + self.up(self.down(x))
            return out

    model = Transformer()
    plain = found(model)
    for layer in model.encoder.layers:
        layer.attention.qkv = Adapted(layer.attention.qkv)
    assert found(model) == plain


def test_a_wrapped_model_has_the_levels_of_the_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.module(x)
            return out

    plain = found(ResNet())
    assert found(Wrapper(ResNet())) == {
        level: tuple(f"module.{name}" for name in names) for level, names in plain.items()
    }


def old_style(layer: nn.Module, way: str) -> nn.Module:
    """As most published code still writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed: nn.Module = getattr(nn.utils, way)(layer)
    return normed


@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.orthogonal,
        lambda layer: old_style(layer, "spectral_norm"),
        lambda layer: old_style(layer, "weight_norm"),
    ],
)
def test_layers_whose_weights_are_computed_are_layers(norm: Callable[..., nn.Module]) -> None:
    """A net of them has the levels that it has without."""

    def net(norm: Callable[..., nn.Module]) -> nn.Module:
        def block() -> nn.Module:
            return nn.Sequential(norm(nn.Linear(4, 4)), nn.LayerNorm(4), norm(nn.Linear(4, 4)))

        return nn.Sequential(block(), block(), nn.Linear(4, 2))

    levels = found(net(norm))
    assert levels == found(net(lambda layer: layer))
    assert levels[2] == ("0", "1")


def test_shared_and_parametrized_modules_are_found_once() -> None:
    block = Residual()
    model = nn.Sequential(block, nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), block)
    levels = found(model)
    assert levels[2] == ("0",)
    assert "1" in levels[1]
    assert not any("parametrizations" in name for name in levels[1])


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_layers_have_their_levels_before_the_first_forward() -> None:
    def block(width: int) -> nn.Module:
        convolutions = nn.LazyConv2d(width, 3, padding=1), nn.LazyConvTranspose2d(width, 3)
        return nn.Sequential(*convolutions, nn.LazyBatchNorm2d(), nn.LazyInstanceNorm2d())

    model = nn.Sequential(block(2), block(3), nn.Flatten(), nn.LazyLinear(3))
    levels = found(model)
    assert levels[1][0] == "0.0"
    assert levels[2] == ("0", "1")
    with checkpoint_levels(model, 2):
        model(torch.randn(2, 1, 4, 4)).sum().backward()
    assert found(model) == levels


def monai_nets() -> Iterator[tuple[str, Callable[[], nn.Module], dict[int, Any]]]:
    pytest.importorskip("monai")
    from monai.networks import nets

    yield (
        "SwinUNETR",
        lambda: nets.SwinUNETR(1, 2, feature_size=12),
        {2: 26, 3: 13, 4: tuple(f"swinViT.layers{n}.0" for n in (1, 2, 3, 4)), 5: ("swinViT",)},
    )
    yield (
        "DenseNet121",
        lambda: nets.DenseNet121(2, 1, 2),
        {2: 58, 3: 0, 4: tuple(f"features.denseblock{n}" for n in (1, 2, 3, 4)), 5: ("features",)},
    )
    yield (
        "SegResNet",
        lambda: nets.SegResNet(init_filters=8),
        {2: 12, 4: tuple(f"down_layers.{n}" for n in range(4)), 5: 0},
    )
    yield (
        "UNETR",
        lambda: nets.UNETR(1, 2, (32, 32, 32), 4, 24, 48, 2),
        {3: 18, 5: ("vit",)},
    )
    yield (
        "UNet",
        lambda: nets.UNet(3, 1, 2, (4, 8, 8, 8), (2, 2, 2), num_res_units=2),
        {2: 7, 5: 0},
    )
    yield (
        "BasicUNet",
        lambda: nets.BasicUNet(2, 1, 2, (8, 8, 8, 8, 8, 8)),
        {2: 9, 3: tuple(f"upcat_{n}" for n in (4, 3, 2, 1)), 4: 0, 5: 0},
    )
    yield ("ViT", lambda: nets.ViT(1, (8, 8), (4, 4), 24, 48, 4, 2, spatial_dims=2), {2: 8, 3: 4})
    yield ("ResNet", lambda: nets.resnet18(spatial_dims=2, n_input_channels=1), {2: 8, 4: 4, 5: 0})


def test_monais_nets() -> None:
    for name, build, expected in monai_nets():
        levels = found(build())
        for level, want in expected.items():
            got: Any = len(levels[level]) if isinstance(want, int) else levels[level]
            assert got == want, f"{name}, level {level}: {levels[level]}"


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}


def transformers_nets() -> Iterator[tuple[str, Callable[[], nn.Module], dict[int, Any]]]:
    t = pytest.importorskip("transformers")
    image = {"image_size": 16, "patch_size": 4}
    yield (
        "GPT-2",
        lambda: t.GPT2LMHeadModel(t.GPT2Config(n_layer=2, n_embd=16, n_head=2, **TEXT)),
        {2: 4, 3: ("transformer.h.0", "transformer.h.1"), 4: 0, 5: ("transformer",)},
    )
    yield (
        "Llama",
        lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, **TEXT)
        ),
        {2: 4, 3: ("model.layers.0", "model.layers.1"), 4: 0, 5: ("model",)},
    )
    yield (
        "Mixtral",
        lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, **TEXT)
        ),
        {2: 4, 3: ("model.layers.0", "model.layers.1"), 4: 0, 5: ("model",)},
    )
    yield (
        "T5",
        lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=20)
        ),
        {2: 10, 3: 4, 4: 0, 5: ("encoder", "decoder")},
    )
    yield (
        "BERT",
        lambda: t.BertForSequenceClassification(
            t.BertConfig(**SMALL, intermediate_size=32, vocab_size=20)
        ),
        {2: 2, 3: tuple(f"bert.encoder.layer.{n}" for n in "01"), 4: 0, 5: ("bert.encoder",)},
    )
    yield (
        "ViT",
        lambda: t.ViTForImageClassification(t.ViTConfig(**SMALL, intermediate_size=32, **image)),
        {2: 4, 3: 2, 4: 0, 5: 1},
    )
    yield (
        "Swin",
        lambda: t.SwinForImageClassification(
            t.SwinConfig(
                embed_dim=8,
                depths=[1, 2],
                num_heads=[1, 2],
                window_size=2,
                image_size=16,
                patch_size=2,
            )
        ),
        {2: 6, 3: 3, 4: ("swin.encoder.layers.0", "swin.encoder.layers.1"), 5: ("swin.encoder",)},
    )
    yield (
        "ConvNeXt",
        lambda: t.ConvNextForImageClassification(
            t.ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 2], num_stages=2)
        ),
        {2: 3, 3: 0, 4: 2, 5: ("convnext.encoder",)},
    )
    yield (
        "ResNet",
        lambda: t.ResNetForImageClassification(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2])
        ),
        {2: 4, 3: 0, 4: 2, 5: ("resnet.encoder",)},
    )


def test_transformers_models() -> None:
    for name, build, expected in transformers_nets():
        levels = found(build())
        for level, want in expected.items():
            got: Any = len(levels[level]) if isinstance(want, int) else levels[level]
            assert got == want, f"{name}, level {level}: {levels[level]}"
