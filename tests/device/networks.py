"""The networks of the benchmarks: a GPT-2, a ResNet-50 and MONAI's 3D U-Net, at published sizes.

Problem: figures are meaningful only for steps that users really run, but a machine that is lent for
minutes has torch and perhaps nothing else. Invariant: the first two need torch alone; batches are
as large as the device's memory suggests, in powers of two, and are shown with each figure. Imports
place. Rejected: transformers and torchvision, which may not be installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device.place import GIB, Place, Skipped

Batch = tuple[Tensor, Tensor]


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        wide = F.gelu(self.wide(self.between(x)), approximate="tanh")
        out: Tensor = x + self.drop(self.narrow(wide))
        return out


class Gpt(nn.Module):
    """GPT-2 small, unless other sizes are given."""

    def __init__(
        self,
        words: int = 50257,
        length: int = 1024,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.words(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(True), nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.past: nn.Module = nn.Identity()
        if stride > 1 or given != 4 * width:
            self.past = nn.Sequential(
                nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.past(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50, unless other sizes are given."""

    def __init__(self, width: int = 64, stages: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks, given = [], width
        for stage, count in enumerate(stages):
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(given, width << stage, stride))
                given = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(given, 1000)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


@dataclass
class Work:
    """One training step.

    Attributes:
        name: its name and batch, as shown in the tables.
        net: the network; each of its blocks runs through `call`.
        batch: makes a batch, of a share of the usual length if it has a length.
        blocks: the blocks one would checkpoint by hand.
        call: what each block runs through; None: nothing.
    """

    place: Place
    name: str
    net: nn.Module
    batch: Callable[[float], Batch]
    blocks: list[nn.Module]
    autocast: torch.dtype | None = torch.bfloat16
    call: Callable[..., Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for block in self.blocks:
            block.forward = self._around(block.forward)  # type: ignore[method-assign]

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            return forward(x) if self.call is None else self.call(forward, x)

        return run

    def clear(self) -> None:
        """Drop gradients, so that each step allocates its own and old ones do not count."""
        self.net.zero_grad(set_to_none=True)

    def step(self, batch: Batch, limit: Any = None) -> None:
        """Forward and backward."""
        given, wanted = batch
        with (
            limit or contextlib.nullcontext(),
            torch.autocast(self.place.kind, self.autocast, enabled=self.autocast is not None),
        ):
            out = self.net(given)
            loss = F.cross_entropy(out.flatten(0, -2) if out.dim() == 3 else out, wanted)
        loss.backward()


def _times(place: Place, for_80_gib: int) -> int:
    """A batch size scaled to the device's memory."""
    count = for_80_gib
    while count > 1 and count / for_80_gib > 1.1 * place.memory() / (80 * GIB):
        count //= 2
    return count


def _size(place: Place, name: str) -> str:
    return f"tiny net like {name}" if place.quick else name


def gpt(place: Place) -> Work:
    sizes = {"words": 64, "length": 48, "width": 32, "heads": 2, "layers": 2} if place.quick else {}
    count, length = (4, 48) if place.quick else (_times(place, 16), 1024)
    words = sizes.get("words", 50257)
    net = Gpt(**sizes).to(place.device)

    def batch(share: float) -> Batch:
        tokens = torch.randint(words, (count, int(share * length) + 1), device=place.device)
        return tokens[:, :-1], tokens[:, 1:].flatten()

    return Work(
        place, f"{_size(place, 'GPT-2 small')}, {count} x {length}, bf16", net, batch, [*net.blocks]
    )


def resnet(place: Place) -> Work:
    # in anything smaller, rounding of blocks to 512 bytes would outweigh activations
    count, size = (32, 48) if place.quick else (_times(place, 256), 224)
    net = ResNet(4, (1, 1)) if place.quick else ResNet()
    net = net.to(place.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(share: float) -> Batch:
        x = torch.randn(count, 3, size, size, device=place.device)
        wanted = torch.randint(1000, (count,), device=place.device)
        return x.to(memory_format=torch.channels_last), wanted

    return Work(
        place, f"{_size(place, 'ResNet-50')}, {count} x {size}^2, bf16", net, batch, [*net.blocks]
    )


def unet(place: Place) -> Work:
    try:
        from monai.networks.nets import UNet
    except ImportError as error:
        raise Skipped(f"MONAI cannot be imported ({error})") from error
    count, size = (2, 16) if place.quick else (_times(place, 4), 128)
    channels = (8, 8) if place.quick else (16, 32, 64, 128)
    strides = (1,) if place.quick else (1, 2, 2)
    net = UNet(3, 1, 3, channels, strides, num_res_units=1, dropout=0.1).to(place.device)

    def batch(share: float) -> Batch:
        shape = (count, size, size, size)
        x = torch.randn(count, 1, size, size, size, device=place.device)
        return x, torch.randint(3, shape, device=place.device)

    return Work(
        place,
        f"{_size(place, 'MONAI UNet')}, {count} x {size}^3, fp32",
        net,
        batch,
        unet_blocks(net),
        autocast=None,
    )


def unet_blocks(net: nn.Module) -> list[nn.Module]:
    """The blocks of the encoder, the bottleneck, and those of the decoder."""
    found: list[nn.Module] = []

    def visit(level: nn.Module) -> None:
        parts = list(level.children())
        if len(parts) == 3 and type(parts[1]).__name__ == "SkipConnection":
            found.extend((parts[0], parts[2]))
            visit(parts[1].submodule)  # type: ignore[arg-type]
        else:
            found.append(level)

    visit(net.model)  # type: ignore[arg-type]
    return found


WORKS: dict[str, Callable[[Place], Work]] = {"gpt": gpt, "resnet": resnet, "unet": unet}
