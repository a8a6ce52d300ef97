"""The networks of the suite, in three sizes.

Invariant: `cpu` is the size of the other benchmarks, for networks that they have. `tiny` shows that
everything runs; its times are mostly fixed costs. `gpu` is for one card of 80 GB or more, in bf16
autocast, as people train there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from benchmarks.models import (
    WORKLOADS,
    Batch,
    Workload,
    dice_loss,
    images,
    in_autocast,
    language_loss,
    logits_loss,
    of_type,
    volumes,
)
from torch import nn

SIZES = ("tiny", "cpu", "gpu")
Place = tuple[nn.Module, str, list[nn.Module]]
"""Where a network keeps blocks that run one after the other: owner, attribute, the blocks."""


@dataclass(frozen=True)
class Case(Workload):
    """A workload with its batch size, and what its library offers."""

    title: str
    count: int
    examples: Callable[[int], Batch]
    """Makes a batch of this many samples."""
    chain: Callable[[nn.Module], Place] | None = None
    checkpointed: Callable[[], nn.Module] | None = None
    """The same network, checkpointed by its library."""
    levels: tuple[int, ...] = ()
    """Checkpointing levels of vision_architectures, by `at_level`."""
    at_level: Callable[[int], nn.Module] | None = None


def sized(work: Workload, title: str, count: int, examples: Callable[[int], Batch], **more: Any):
    """`work` with batches of `count` samples."""
    build = more.pop("build", work.build)
    batch = partial(examples, count)
    return Case(work.name, build, batch, work.loss, work.blocks, title, count, examples, **more)


def tokens(vocabulary: int, length: int) -> Callable[[int], Batch]:
    return lambda count: (torch.randint(0, vocabulary, (count, length)),)


def pictures(size: int) -> Callable[[int], Batch]:
    return lambda count: images(count, size)


def bodies(*sides: int) -> Callable[[int], Batch]:
    return lambda count: volumes(sides, torch.float32, count)


# ---------------------------------------------------------------------------- chains


def flat_stages(model: nn.Module) -> Place:
    encoder = model.resnet.encoder
    return encoder, "stages", [layer for stage in encoder.stages for layer in stage.layers]


def flat_features(model: nn.Module) -> Place:
    parts: list[nn.Module] = []
    for part in model.features:
        parts += part if type(part).__name__ == "_DenseBlock" else [part]
    return model, "features", parts


def listed(*path: str) -> Callable[[nn.Module], Place]:
    def find(model: nn.Module) -> Place:
        owner = model.get_submodule(".".join(path[:-1]))
        return owner, path[-1], list(getattr(owner, path[-1]))

    return find


# ---------------------------------------------------------------------------- networks


def with_loss(model: nn.Module) -> nn.Module:
    """Name the loss; otherwise the library warns, and the warning causes a graph break."""
    model.loss_type = "ForCausalLM"
    return model


def unet(size: str) -> Case:
    widths, count, side = {
        "tiny": ((16, 32, 64, 128), 1, 32),
        "cpu": ((16, 32, 64, 128), 1, 64),
        "gpu": ((32, 64, 128, 256), 4, 128),
    }[size]
    strides = (1, 2, 2)

    def build(checkpointed: bool = False) -> nn.Module:
        from monai.networks.nets import unet as nets

        kind = nets.CheckpointUNet if checkpointed else nets.UNet
        net = kind(3, 1, 16, widths, strides, num_res_units=1, dropout=0.1)
        return nn.Sequential(net, nn.Conv3d(16, 3, kernel_size=1))

    return sized(
        WORKLOADS["unet3d"],
        f"MONAI UNet 3D, {count} x {side}^3",
        count,
        bodies(side, side, side),
        build=build,
        checkpointed=partial(build, True),
    )


def swin_unetr(size: str) -> Case:
    width, count, sides = {
        "tiny": (12, 1, (64, 32, 32)),
        "cpu": (12, 1, (64, 32, 32)),
        "gpu": (48, 2, (96, 96, 96)),
    }[size]

    def build(flag: bool = False) -> nn.Module:
        from monai.networks.nets import SwinUNETR

        return SwinUNETR(1, 3, feature_size=width, spatial_dims=3, use_checkpoint=flag)

    examples = bodies(*sides)
    work = Workload(
        "swin_unetr",
        build,
        partial(examples, count),
        dice_loss,
        of_type("SwinTransformerBlock", "UnetResBlock"),
    )
    shape = " x ".join(map(str, (count, *sides)))
    title = f"MONAI SwinUNETR, {width} features, {shape}"
    return sized(work, title, count, examples, checkpointed=partial(build, True))


def densenet121(size: str) -> Case:
    count, side = {"tiny": (1, 64), "cpu": (2, 128), "gpu": (128, 224)}[size]
    title = f"MONAI DenseNet121, {count} x {side}^2"
    return sized(WORKLOADS["densenet121"], title, count, pictures(side), chain=flat_features)


def resnet50(size: str) -> Case:
    count, side = {"tiny": (2, 64), "cpu": (8, 96), "gpu": (256, 224)}[size]
    title = f"ResNet-50, {count} x {side}^2"
    return sized(WORKLOADS["resnet50"], title, count, pictures(side), chain=flat_stages)


def vit(size: str) -> Case:
    width, heads, count = {"tiny": (192, 3, 1), "cpu": (192, 3, 2), "gpu": (768, 12, 128)}[size]

    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            num_labels=10,
            hidden_dropout_prob=0.1,
        )
        return ViTForImageClassification(config)

    title = f"ViT-{'B' if width == 768 else 'Ti'}/16, {count} x 224^2"
    chain = listed("vit", "layers")
    return sized(WORKLOADS["vit"], title, count, pictures(224), build=build, chain=chain)


def gpt2(size: str) -> Case:
    layers, width, heads, words, count, length = {
        "tiny": (4, 128, 4, 500, 4, 64),
        "cpu": (6, 384, 6, 5000, 4, 128),
        "gpu": (12, 768, 12, 50257, 16, 1024),
    }[size]

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            vocab_size=words,
            n_positions=length,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return with_loss(GPT2LMHeadModel(config))

    title = f"GPT-2, {layers} layers of {width}, {count} x {length} tokens"
    chain = listed("transformer", "h")
    return sized(WORKLOADS["gpt2"], title, count, tokens(words, length), build=build, chain=chain)


def llama(size: str) -> Case:
    layers, width, words, count, length = {
        "tiny": (4, 128, 500, 4, 64),
        "cpu": (8, 256, 4096, 4, 256),
        "gpu": (16, 2048, 32000, 4, 2048),
    }[size]

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            vocab_size=words,
            use_cache=False,
        )
        return with_loss(LlamaForCausalLM(config))

    examples = tokens(words, length)
    work = Workload(
        "llama", build, partial(examples, count), language_loss, of_type("LlamaDecoderLayer")
    )
    title = f"Llama, {layers} layers of {width}, {count} x {length} tokens"
    return sized(work, title, count, examples, chain=listed("model", "layers"))


def vision_swin(size: str) -> Case:
    """A network of vision_architectures, which its levels are made for."""
    width, count, side = {"tiny": (12, 1, 16), "cpu": (24, 1, 64), "gpu": (48, 4, 96)}[size]
    stage = {
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 4,
        "window_size": (4, 4, 4) if side > 16 else (2, 2, 2),
        "layer_norm_eps": 1e-6,
        "use_relative_position_bias": True,
    }
    merging = {"merge_window_size": (2, 2, 2), "in_dim": width, "out_dim": 2 * width}
    stages = [dict(stage, dim=width), dict(stage, dim=2 * width, patch_merging=merging)]
    patches = {"patch_size": (4, 4, 4) if side == 16 else (2, 2, 2), "in_channels": 1, "dim": width}

    class Net(nn.Module):
        def __init__(self, level: int) -> None:
            super().__init__()
            nets = importlib.import_module("vision_architectures.nets.swin_3d")
            self.net = nets.Swin3DEncoderWithPatchEmbeddings(
                {**patches, "stages": stages}, checkpointing_level=level
            )
            self.head = nn.Linear(2 * width, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spacings = torch.ones(len(x), 3, device=x.device)
            return self.head(self.net(x, spacings=spacings).flatten(2).mean(2))

    def examples(count: int) -> Batch:
        return volumes(side, torch.float32, count)[0], torch.randint(0, 10, (count,))

    work = Workload(
        "vision_swin",
        partial(Net, 0),
        partial(examples, count),
        logits_loss,
        of_type("Swin3DBlock"),
    )
    title = f"Swin3D of vision_architectures, {count} x {side}^3"
    return sized(work, title, count, examples, levels=(1, 2, 3, 4, 5), at_level=Net)


CASES: dict[str, Callable[[str], Case]] = {
    "unet3d": unet,
    "swin_unetr": swin_unetr,
    "densenet121": densenet121,
    "resnet50": resnet50,
    "vit": vit,
    "gpt2": gpt2,
    "llama": llama,
    "vision_swin": vision_swin,
}


def case_of(name: str, size: str) -> Case:
    """A network of the suite in one size."""
    case = CASES[name](size)
    if size != "gpu":
        return case
    loss = partial(in_autocast, case.loss)
    return replace(case, loss=loss, title=f"{case.title}, bf16 autocast")


NEEDS = {"vision_swin": "vision_architectures"}


def missing(name: str) -> str | None:
    """Why a network is not available here, or None."""
    library = NEEDS.get(name)
    if library is None or importlib.util.find_spec(library) is not None:
        return None
    return f"{library} is not installed: pip install --no-deps vision-architectures loguru munch"
