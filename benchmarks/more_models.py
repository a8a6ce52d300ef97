"""More networks, for limits only: common ones that no other benchmark has.

Problem: keeping limits on the networks that the memory formulas were fitted to shows little.
Invariant: as in `models`, networks as shipped by MONAI, transformers and torch, with random data;
plain peaks of 5 to 300 MiB, so that a run of all of them takes minutes. Imports models. Rejected:
the catalogue of the tests, whose networks are too small for shares of their peak to be meaningful.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from models import Batch, Workload

randn = torch.randn


def whole(model: nn.Module, batch: Batch) -> Tensor:
    """The network's own loss if it has one; else the squares of everything it returns."""
    numpy.random.seed(torch.initial_seed() % 1000)  # some networks mask their input by NumPy
    given = batch[0]
    out: Any = model(**given) if isinstance(given, dict) else model(*batch)
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss
    tensors = out if isinstance(out, list | tuple) else [out]
    parts = [t.float().square().mean() for t in tensors if torch.is_tensor(t) and t.requires_grad]
    return torch.stack(parts).sum()


def text(vocabulary: int, batch: int, length: int) -> Callable[[], Any]:
    def make() -> Any:
        tokens = torch.randint(3, vocabulary, (batch, length))
        return ({"input_ids": tokens, "labels": tokens},)

    return make


def pictures(size: int, labels: Callable[[], Tensor]) -> Callable[[], Any]:
    return lambda: ({"pixel_values": randn(4, 3, size, size), "labels": labels()},)


def monai(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(*args, **kwargs)

    return make


def hugging(name: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**fields))

    return make


def convolutions() -> nn.Module:
    """Strided, grouped, depthwise and transposed convolutions, with layers between them."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(32, 64, 3, 1, 1, groups=4),
        nn.BatchNorm2d(64),
        nn.SiLU(),
        nn.Conv2d(64, 64, 3, 2, 1, groups=64),
        nn.GELU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.GroupNorm(8, 32),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


SMALL = {"hidden_size": 128, "num_attention_heads": 4}
WHISPER = {
    "vocab_size": 500,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_source_positions": 200,
    "num_mel_bins": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def sound() -> Any:
    return ({"input_features": randn(2, 40, 400), "labels": torch.randint(3, 500, (2, 64))},)


def waves() -> Any:
    return ({"input_values": randn(2, 16000), "labels": torch.randint(1, 32, (2, 20))},)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "AttentionUnet, 3D": (
        monai("AttentionUnet", 3, 1, 3, (8, 16, 32, 64), (2, 2, 2)),
        lambda: (randn(1, 1, 48, 48, 48),),
    ),
    "VNet": (monai("VNet", 3, 1, 2), lambda: (randn(1, 1, 32, 32, 32),)),
    "SegResNet, 3D": (monai("SegResNet", 3, 8, 1, 3), lambda: (randn(1, 1, 48, 48, 48),)),
    "DynUNet, 3D": (
        monai(
            "DynUNet", 3, 1, 3, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32], res_block=True
        ),
        lambda: (randn(2, 1, 32, 32, 32),),
    ),
    "UNETR": (
        monai("UNETR", 1, 3, (48, 48, 48), 8, 64, 128, 4),
        lambda: (randn(1, 1, 48, 48, 48),),
    ),
    "BasicUNet++": (
        monai("BasicUNetPlusPlus", 2, 1, 2, features=(8, 8, 16, 32, 64, 8)),
        lambda: (randn(4, 1, 96, 96),),
    ),
    "HighResNet": (monai("HighResNet", 2, 1, 2), lambda: (randn(4, 1, 48, 48),)),
    "diffusion U-Net": (
        monai(
            "DiffusionModelUNet", 2, 1, 1, (1, 1), (16, 32), (False, True),
            num_head_channels=8, norm_num_groups=8,
        ),
        lambda: (randn(4, 1, 48, 48), torch.tensor([3, 7, 9, 1])),
    ),
    "AutoencoderKL": (
        monai("AutoencoderKL", 2, 1, 1, (1, 1), (16, 32), (False, False), norm_num_groups=8),
        lambda: (randn(2, 1, 64, 64),),
    ),
    "EfficientNet-B0": (
        monai("EfficientNetBN", "efficientnet-b0", pretrained=False, num_classes=4),
        lambda: (randn(4, 3, 96, 96),),
    ),
    "SE-ResNet-50": (
        monai("SEResNet50", spatial_dims=2, in_channels=3, num_classes=4),
        lambda: (randn(4, 3, 96, 96),),
    ),
    "LSTM": (
        lambda: nn.LSTM(128, 256, 2, batch_first=True, dropout=0.1),
        lambda: (randn(32, 64, 128),),
    ),
    "GRU, two ways": (
        lambda: nn.GRU(128, 128, 2, batch_first=True, bidirectional=True),
        lambda: (randn(32, 32, 128),),
    ),
    "nn.Transformer": (
        lambda: nn.Transformer(128, 4, 3, 3, 512, batch_first=True),
        lambda: (randn(8, 64, 128), randn(8, 64, 128)),
    ),
    "BERT": (
        hugging(
            "BertForMaskedLM", "BertConfig", vocab_size=2000, num_hidden_layers=4,
            intermediate_size=512, **SMALL,
        ),
        text(2000, 8, 128),
    ),
    "T5": (
        hugging(
            "T5ForConditionalGeneration", "T5Config", vocab_size=1000, d_model=128, d_kv=32,
            d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0,
        ),
        text(1000, 8, 96),
    ),
    "Mixtral": (
        hugging(
            "MixtralForCausalLM", "MixtralConfig", vocab_size=1000, intermediate_size=256,
            num_hidden_layers=3, num_key_value_heads=2, num_local_experts=4, **SMALL,
        ),
        text(1000, 4, 128),
    ),
    "Mamba": (
        hugging(
            "MambaForCausalLM", "MambaConfig", vocab_size=500, hidden_size=64,
            num_hidden_layers=2, state_size=8,
        ),
        text(500, 2, 64),
    ),
    "GPT-NeoX": (
        hugging(
            "GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=1000, num_hidden_layers=4,
            intermediate_size=512, **SMALL,
        ),
        text(1000, 8, 128),
    ),
    "ConvNeXt": (
        hugging(
            "ConvNextForImageClassification", "ConvNextConfig", depths=[2, 2, 3, 2],
            hidden_sizes=[32, 64, 96, 128],
        ),
        pictures(96, lambda: torch.tensor([0, 1, 0, 1])),
    ),
    "Swin": (
        hugging(
            "SwinForImageClassification", "SwinConfig", image_size=96, embed_dim=32,
            depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=6,
        ),
        pictures(96, lambda: torch.tensor([0, 1, 0, 1])),
    ),
    "SegFormer": (
        hugging(
            "SegformerForSemanticSegmentation", "SegformerConfig", num_labels=3,
            hidden_sizes=[16, 32, 64, 64], decoder_hidden_size=64,
        ),
        pictures(128, lambda: torch.randint(0, 3, (4, 128, 128))),
    ),
    "Whisper": (hugging("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), sound),
    "wav2vec 2.0": (
        hugging(
            "Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=32, num_hidden_layers=3,
            intermediate_size=256, conv_dim=[64] * 7, **SMALL,
        ),
        waves,
    ),
    "convolutions": (convolutions, lambda: (randn(8, 3, 160, 160),)),
}  # fmt: skip

MORE = {
    name: Workload(name, build, batch, whole, lambda model: [])
    for name, (build, batch) in NETWORKS.items()
}
