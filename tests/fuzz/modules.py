"""Modules that programs own: what they count, cache and average is part of the comparison.

The problem: state that a forward moves (buffers, attributes, caches, hooks on modules) is moved
once or twice, before or after it is read.

The invariant: every module here is deterministic but for torch's default generator. It imports
torch only.

Rejected: whole networks, which `tests/zoo` has. Here one module is one statement of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Codebook(nn.Module):
    """A vector quantizer: codes are averages of what was assigned to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 3))
        self.register_buffer("sizes", torch.ones(4))
        self.codes: Tensor
        self.sizes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        found = self.codes[nearest]
        with torch.no_grad():
            hot = F.one_hot(nearest, 4).to(x.dtype)
            self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(hot.t() @ x, alpha=0.1)
        return x + (found - x).detach() + 0.25 * (x - found.detach()).square()


class Cached(nn.Module):
    """Keeps keys of earlier calls in a buffer, and a table in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(3, 3)
        self.register_buffer("keys", torch.zeros(4, 3))
        self.keys: Tensor
        self.table: dict[int, Tensor] = {}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if len(x) not in self.table:
            self.table[len(x)] = torch.arange(len(x)).float()[:, None].sin()
        key = self.key(x)
        with torch.no_grad():
            self.keys[self.calls % 4].copy_(key[0])
        return torch.softmax(key @ self.keys.clone().t(), -1) @ self.keys.clone() + (
            key * self.table[len(x)]
        )


class Tied(nn.Module):
    """One weight, read by two layers and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).sigmoid() @ self.a.weight.t()


class Scheduled(nn.Module):
    """Behaves by a counter, and switches a child between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.count = nn.BatchNorm1d(3, momentum=None), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.norm.train(self.count % 2 == 1)
        return self.norm(F.dropout(x, 0.1 * min(self.count, 5)))


def hooked(module: nn.Module) -> nn.Module:
    """With hooks around forward and backward that change what passes."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * 1.5, *args[1:]), kwargs

    def after(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        return torch.tanh(out) + args[0].mean()

    def backward(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in inputs)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)
    module.register_full_backward_pre_hook(lambda _, grads: tuple(g * 2 for g in grads))
    module.register_full_backward_hook(backward)
    return module


# How a module is made, and how it is called with a tensor `x` of any shape.
MODULES: tuple[tuple[str, str], ...] = (
    ("Codebook()", "{m}(sized({x}, 5, 3).float())"),
    ("Cached()", "{m}(sized({x}, 2, 3).float())"),
    ("Tied()", "{m}(sized({x}, 2, 3).float())"),
    ("Scheduled()", "{m}(sized({x}, 4, 3).float())"),
    ("hooked(torch.nn.Linear(3, 3))", "{m}(sized({x}, 2, 3).float())"),
    ("hooked(torch.nn.LayerNorm(3))", "{m}(sized({x}, 2, 3).float())"),
    ("torch.nn.GRU(3, 2, 2, dropout=0.3, batch_first=True)", "{m}(sized({x}, 2, 3, 3).float())[0]"),
    ("torch.nn.GRU(3, 2, batch_first=True)", "packed({m}, sized({x}, 3, 4, 3).float())"),
    (
        "torch.nn.LSTM(3, 4, batch_first=True, bidirectional=True, proj_size=2)",
        "packed({m}, sized({x}, 3, 4, 3).float())",
    ),
    ("torch.nn.RNN(3, 2, nonlinearity='relu')", "{m}(sized({x}, 3, 2, 3).float())[0]"),
    ("torch.nn.GRUCell(3, 3)", "{m}(sized({x}, 2, 3).float(), {m}(sized({x}, 2, 3).float()))"),
    ("torch.nn.LSTMCell(3, 2)", "torch.cat({m}(sized({x}, 2, 3).float()))"),
    (
        "torch.nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)",
        "{m}(*[sized({x}, 2, 3, 4).float()] * 3, need_weights=False)[0]",
    ),
    (
        "torch.nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)",
        "{m}(*[sized({x}, 2, 3, 4).float()] * 3,"
        " key_padding_mask=torch.tensor([[False, False, True]] * 2))[0]",
    ),
    ("torch.nn.MultiheadAttention(4, 2).eval()", "{m}(*[sized({x}, 3, 2, 4).float()] * 3)[0]"),
    (
        "torch.nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)",
        "{m}(sized({x}, 2, 3, 4).float())",
    ),
    (
        "torch.nn.TransformerEncoderLayer(4, 2, 6, 0.2, 'gelu', norm_first=True).eval()",
        "{m}(sized({x}, 2, 3, 4).float())",
    ),
    (
        "torch.nn.TransformerDecoderLayer(4, 2, 6)",
        "{m}(sized({x}, 2, 1, 4).float(), sized({x}, 3, 1, 4).float())",
    ),
    ("torch.nn.EmbeddingBag(4, 3, mode='mean')", "{m}({i}[None]) * sized({x}, 3)"),
    ("torch.nn.EmbeddingBag(4, 3, mode='max')", "{m}({i}[None]) * sized({x}, 3)"),
    ("torch.nn.EmbeddingBag(4, 3, mode='sum', sparse=True)", "{m}({i}[None]) * sized({x}, 3)"),
    ("torch.nn.Embedding(4, 3, max_norm=0.5)", "{m}({i}).clone() * sized({x}, 3)"),
    ("torch.nn.Embedding(4, 3, sparse=True)", "{m}({i}) * sized({x}, 3)"),
    ("torch.nn.Embedding(4, 3, scale_grad_by_freq=True)", "{m}({i}) * sized({x}, 3)"),
    ("torch.nn.BatchNorm1d(3, momentum=None)", "{m}(sized({x}, 4, 3).float())"),
    ("torch.nn.BatchNorm1d(3).eval()", "{m}(sized({x}, 4, 3).float())"),
    ("torch.nn.BatchNorm2d(2, affine=False)", "{m}(sized({x}, 2, 2, 2, 2).float())"),
    ("torch.nn.BatchNorm1d(3, track_running_stats=False)", "{m}(sized({x}, 4, 3).float())"),
    (
        "torch.nn.InstanceNorm1d(2, affine=True, track_running_stats=True)",
        "{m}(sized({x}, 3, 2, 4).float())",
    ),
    ("torch.nn.SyncBatchNorm(3)", "{m}(sized({x}, 4, 3).float())"),
    (
        "torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3))",
        "{m}(sized({x}, 2, 3).float())",
    ),
    (
        "torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))",
        "{m}(sized({x}, 2, 3).float())",
    ),
    (
        "torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(3, 3))",
        "{m}(sized({x}, 2, 3).float())",
    ),
    ("torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3))", "{m}(sized({x}, 2, 3).float())"),
    ("torch.nn.Bilinear(3, 2, 2)", "{m}(sized({x}, 4, 3).float(), sized({x}, 4, 2).float())"),
    ("torch.nn.PReLU(2)", "{m}(sized({x}, 3, 2, 2).float())"),
    ("torch.nn.AdaptiveLogSoftmaxWithLoss(3, 5, [2])", "{m}(sized({x}, 2, 3).float(), {i}[:2])[1]"),
    (
        "torch.nn.Conv2d(2, 2, 2, groups=2, padding_mode='circular', padding=1)",
        "{m}(sized({x}, 1, 2, 3, 3).float())",
    ),
    (
        "torch.nn.Conv2d(2, 3, 2, dilation=2)",
        "{m}(sized({x}, 1, 2, 4, 4).float().to(memory_format=torch.channels_last))",
    ),
    (
        "torch.nn.ConvTranspose1d(2, 3, 2, stride=2, output_padding=1)",
        "{m}(sized({x}, 1, 2, 3).float())",
    ),
    ("torch.nn.FractionalMaxPool2d(2, output_size=2)", "{m}(sized({x}, 1, 2, 4, 4).float())"),
    (
        "torch.nn.Sequential(torch.nn.Dropout2d(0.4, inplace=True), torch.nn.ReLU(inplace=True))",
        "{m}(sized({x}, 1, 4, 2, 2).float() * 1)",
    ),
    (
        "torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.CELU(inplace=True))",
        "{m}(sized({x}, 2, 3).float())",
    ),
    ("torch.ao.quantization.FakeQuantize()", "{m}(sized({x}, 2, 3).float())"),
)
