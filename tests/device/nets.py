"""The small nets of the checks, and the training in which their bits are compared.

Problem: each net exercises something that devices do differently (layouts, fused kernels that draw,
streams, generators, several devices). Invariant: a net has the same initial values each time, runs
its blocks through `call`, and is wide enough for its activations to outweigh its gradients.
Imports place. Rejected: one large model, whose failure would not say what failed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from device.place import Place, Skipped
from lowtide import _compat

STEPS = 3
Call = Callable[..., Any]


class Net(nn.Module):
    """Blocks in sequence, each run through `call` if it is given."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.call: Call | None = None
        self.blocks = nn.ModuleList(self.make())

    def size(self, full: int, quick: int) -> int:
        return quick if self.place.quick else full

    def make(self) -> list[nn.Module]:
        return []

    def inside(self, function: Call, x: Tensor) -> Tensor:
        out: Tensor = function(x) if self.call is None else self.call(function, x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.inside(block, x)
        return x

    def example(self) -> Tensor:
        raise NotImplementedError

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.place.device)


class ConvNet(Net):
    """Convolutions with BatchNorm, dropout and an in-place activation."""

    def make(self) -> list[nn.Module]:
        narrow, wide = self.size(32, 8), self.size(64, 8)
        return [
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(True), nn.Dropout(0.1)
            )
            for a, b in itertools.pairwise([3, narrow, narrow, wide, wide])
        ]

    def example(self) -> Tensor:
        return self.random(self.size(16, 4), 3, self.size(64, 16), self.size(64, 16))


class ChannelsLast(ConvNet):
    """The same in channels-last format."""

    def example(self) -> Tensor:
        self.to(memory_format=torch.channels_last)
        return super().example().to(memory_format=torch.channels_last)


class Transformer(Net):
    """torch's own layers, which select their attention kernel."""

    def make(self) -> list[nn.Module]:
        width, heads = self.size(256, 16), self.size(8, 2)
        return [
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(4)
        ]

    def example(self) -> Tensor:
        return self.random(self.size(16, 4), self.size(128, 32), self.size(256, 16))


class CausalAttention(nn.Module):
    """One fused kernel that draws its own dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Attention(Transformer):
    """Causal attention with dropout through `scaled_dot_product_attention`."""

    def make(self) -> list[nn.Module]:
        return [CausalAttention(self.size(256, 16), self.size(4, 2)) for _ in range(4)]


class Kernel(Attention):
    """The same attention by one of torch's kernels, on a device that has it."""

    backend: SDPBackend

    def __init__(self, place: Place) -> None:
        place.need("cuda", "the choice of an attention kernel")
        super().__init__(place)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        if half is torch.float32 and self.backend in HALVES:
            raise Skipped(f"{self.backend.name} takes no {half}")
        with sdpa_kernel(self.backend):
            return super().forward(x)


HALVES = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def by_kernel(backend: SDPBackend) -> type[Net]:
    return type(f"{backend.name}", (Kernel,), {"backend": backend})


class Recurrent(Net):
    """Layers of cuDNN, whose parameters are pieces of one memory."""

    def __init__(self, place: Place) -> None:
        place.need("cuda", "cuDNN")
        super().__init__(place)

    def make(self) -> list[nn.Module]:
        width = self.size(128, 16)
        self.mix = nn.LSTM(width, width, 2, dropout=0.1)
        return [nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = super().forward(x)
        out: Tensor = x + self.mix(x)[0]
        return out

    def example(self) -> Tensor:
        return self.random(self.size(64, 8), self.size(64, 16), self.size(128, 16))


class TwoStreams(Net):
    """Two branches, one of them on a stream of its own. Only that one has a `Tanh`."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.side = torch.Stream(place.device)

    def make(self) -> list[nn.Module]:
        width, wide = self.size(256, 32), self.size(1024, 128)
        return [
            nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Dropout(0.1)),
            nn.Sequential(nn.Linear(width, wide), nn.Tanh(), nn.Dropout(0.1)),
            nn.Linear(wide, width),
        ]

    def both(self, x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream(self.place.device)
        here, there, head = self.blocks
        self.side.wait_stream(current)
        with self.side:
            two = there(x)
            two = two * two.sigmoid()
        one = here(x)
        current.wait_stream(self.side)
        x.record_stream(self.side)
        two.record_stream(current)
        out: Tensor = head(one * two)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.both, x)

    def example(self) -> Tensor:
        return self.random(self.size(2048, 64), self.size(256, 32))


class Noise(Net):
    """Draws from a generator of its own, and from the device's."""

    def make(self) -> list[nn.Module]:
        self.drawn = torch.Generator(self.place.device)
        self.drawn.manual_seed(3)
        width = self.size(256, 32)
        return [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        ]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.inside(lambda x, block=block: block(self.noisy(x)), x)
        return x

    def noisy(self, x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.9, generator=self.drawn)
        return x * mask + 0.1 * torch.randn_like(x)

    def example(self) -> Tensor:
        return self.random(self.size(2048, 64), self.size(256, 32))


class TwoDevices(Noise):
    """The blocks alternate between two devices."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        count = torch.accelerator.device_count()
        if count < 2:
            raise Skipped(f"there is {count} device of the kind {place.kind}, and it takes two")
        second = (place.device.index + 1) % count
        self.where = [place.device, torch.device(place.kind, second)] * 2

    def to(self, *args: Any, **kwargs: Any) -> Any:  # a model spread over devices is not moved
        for block, device in zip(self.blocks, self.where, strict=True):
            block.to(device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        for block, device in zip(self.blocks, self.where, strict=True):
            x = self.inside(block, F.dropout(x.to(device), 0.1))
        return x.to(self.place.device)


def launched(place: Place) -> Net:
    if os.environ.get("TRITON_INTERPRET") != "1":
        place.need("cuda", "a kernel of Triton's")
    try:
        from device.launched import Launched
    except ImportError as error:
        raise Skipped(f"Triton cannot be imported ({error})") from error
    return Launched(place)


NETS: dict[str, Callable[[Place], Net]] = {
    "conv net": ConvNet,
    "conv net, channels last": ChannelsLast,
    "transformer": Transformer,
    "attention": Attention,
    **{
        f"attention, {kind.name}": by_kernel(kind)
        for kind in SDPBackend.__members__.values()
        if kind.name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    },
    "LSTM": Recurrent,
    "two streams": TwoStreams,
    "generator of its own": Noise,
    "two devices": TwoDevices,
    "kernels of Triton's": launched,
}
PRECISIONS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def build(place: Place, kind: str, call: Call | None = None) -> Net:
    torch.manual_seed(0)
    net: Net = NETS[kind](place).to(place.device)
    net.call = call
    return net


def clear(net: nn.Module) -> None:
    """Drop gradients, so that each step allocates its own and old ones do not count."""
    net.zero_grad(set_to_none=True)


def step(net: Net, x: Tensor, limit: Any = None) -> Tensor:
    """Forward and backward."""
    with limit or contextlib.nullcontext():
        loss = net(x).float().square().mean()
    loss.backward()
    return loss.detach()


def left_behind(net: Net, loss: Tensor) -> list[Tensor]:
    """Everything that a step leaves, copied to the CPU."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    found = [loss, *gradients, *net.buffers(), torch.get_rng_state()]
    for index in range(torch.accelerator.device_count()):
        generator = _compat.default_generator(torch.device(net.place.kind, index))
        found += [] if generator is None else [generator.get_state()]
    drawn = getattr(net, "drawn", None)
    found += [] if drawn is None else [drawn.get_state()]
    return [tensor.detach().cpu().clone() for tensor in found]


def train(
    place: Place, kind: str, precision: str, call: Call | None = None, limit: Any = None
) -> list[Tensor]:
    """Some steps; everything that they leave behind."""
    net = build(place, kind, call)
    dtype = PRECISIONS[precision]
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler(place.kind, init_scale=1024.0, enabled=dtype is torch.float16)
    left: list[Tensor] = []
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        x = net.example()
        optimizer.zero_grad()
        with (
            limit or contextlib.nullcontext(),
            torch.autocast(place.kind, dtype, enabled=dtype is not None),
        ):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        left += left_behind(net, loss)
        scaler.step(optimizer)
        scaler.update()
    torch.accelerator.synchronize(place.device)
    return left


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and differing(one, two) == 0


def differing(one: list[Tensor], two: list[Tensor]) -> int:
    """How many tensors differ, compared as bytes (a NaN equals itself)."""
    return sum(not torch.equal(_bytes(a), _bytes(b)) for a, b in zip(one, two, strict=True))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
