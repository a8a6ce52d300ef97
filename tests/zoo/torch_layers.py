"""Torch's own recurrent, attention, normalization, convolution and signal layers.

Problem: each reaches autograd through a different kind of operation: opaque workspaces, fused
kernels with reserve space, statistics that move, complex and sparse tensors.
Invariant: dropout is on wherever the layer has it. May import: `zoo.case` and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Apply, Batch, Case, integers, noise


def _multilayer_perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(12, 12),
        nn.BatchNorm1d(12, momentum=None),
        nn.GELU(),
        nn.Linear(12, 3),
    )


def _recurrent(kind: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    return kind(5, 7, num_layers=2, dropout=0.2, batch_first=True, **settings)


def _packed(self: Any, x: Tensor) -> object:
    lengths = torch.tensor([6, 4, 2])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    output, hidden = self.lstm(packed)
    return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0], hidden


def _cells(self: Any, x: Tensor) -> object:
    hidden, cell, other = (torch.zeros(x.shape[0], 7) for _ in range(3))
    for now in x.unbind(1):
        hidden, cell = self.lstm(now, (hidden, cell))
        other = self.gru(hidden, other)
    return hidden, cell, other


def _transformer_encoder(**settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _masked_attention(self: Any, x: Tensor) -> object:
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -1] = True
    return self.attention(x, x, x, key_padding_mask=padding, need_weights=True)


def _causal_attention(self: Any, x: Tensor) -> object:
    query, key, value = self.project(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)


def _normalizations() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.SiLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.LocalResponseNorm(2),
        nn.BatchNorm2d(8, affine=False),
        nn.Conv2d(8, 8, 1),
        nn.LayerNorm([8, 6, 6]),
        nn.RMSNorm(6),
    )


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=2, dilation=2, padding_mode="circular"),
        nn.PReLU(8),
        nn.PixelUnshuffle(2),
        nn.Conv2d(32, 8, 1),
        nn.ELU(inplace=True),
        nn.PixelShuffle(2),
        nn.ConvTranspose2d(2, 4, 4, stride=2, padding=1, output_padding=1),
        nn.Hardswish(inplace=True),
        nn.MaxPool2d(2, return_indices=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Softplus(),
        nn.AdaptiveMaxPool2d(3),
        nn.ChannelShuffle(2),
        nn.Mish(inplace=True),
    )


def _pools(self: Any, x: Tensor) -> object:
    pooled, indices = F.max_pool2d(self.conv(x), 2, return_indices=True)
    unpooled = F.max_unpool2d(torch.sin(pooled), indices, (2, 2))
    fractional = F.fractional_max_pool2d(unpooled, 2, output_ratio=(0.6, 0.6))
    return F.lp_pool2d(fractional.abs() + 0.1, 2.0, 2), F.avg_pool2d(unpooled, 3, 1, 1)


def _interpolations(self: Any, x: Tensor) -> object:
    x = self.conv(x)
    return [
        F.interpolate(x, scale_factor=1.5, mode=mode, **settings)
        for mode, settings in (
            ("nearest", {}),
            ("nearest-exact", {}),
            ("bilinear", {"align_corners": True}),
            ("bilinear", {"antialias": True}),
            ("bicubic", {"align_corners": False}),
            ("area", {}),
        )
    ]


def _spatial_transformer(self: Any, x: Tensor) -> object:
    theta = self.localize(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    modes = (("bilinear", "border"), ("bicubic", "zeros"), ("nearest", "reflection"))
    return [F.grid_sample(x, grid, mode, padding, align_corners=False) for mode, padding in modes]


def _spectral_convolution(self: Any, x: Tensor) -> object:
    spectrum = torch.fft.rfft2(self.lift(x))
    spectrum = torch.einsum("bixy,ioxy->boxy", spectrum, self.weight)
    return F.gelu(torch.fft.irfft2(spectrum, s=x.shape[-2:])), spectrum.abs(), spectrum.angle()


def _short_time_fourier(self: Any, x: Tensor) -> object:
    window = torch.hann_window(8)
    spectrum = torch.stft(self.project(x), 8, 4, window=window, return_complex=True)
    return torch.istft(
        spectrum * torch.polar(spectrum.abs(), spectrum.angle()), 8, 4, window=window
    )


def _sparse_product(self: Any, x: Tensor) -> object:
    adjacency = torch.sparse_coo_tensor(
        self.edges, self.weights, (5, 5), check_invariants=True
    ).coalesce()
    return torch.sparse.mm(adjacency, torch.relu(torch.sparse.mm(adjacency, self.project(x))))


def _embeddings(self: Any, tokens: Tensor, offsets: Tensor) -> object:
    each = self.plain(tokens).relu_()
    return each, self.bag(tokens, offsets), self.biggest(tokens, offsets), self.sparse(tokens)


def _ctc(model: nn.Module, batch: Batch) -> Tensor:
    scores, targets = batch
    log_probabilities = model(scores).log_softmax(-1).transpose(0, 1)
    lengths = torch.tensor([8, 7]), torch.tensor([3, 2])
    return F.ctc_loss(log_probabilities, targets, *lengths, zero_infinity=True)


def _many_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, labels = batch
    logits = model(x)
    probabilities = logits.sigmoid()
    losses = [
        F.cross_entropy(logits, labels, label_smoothing=0.1),
        F.nll_loss(logits.log_softmax(-1), labels),
        F.multi_margin_loss(logits, labels),
        F.binary_cross_entropy(probabilities, F.one_hot(labels, 3).float()),
        F.kl_div(logits.log_softmax(-1), x[:, :3].softmax(-1), reduction="batchmean"),
        F.huber_loss(logits, x[:, :3]),
        F.smooth_l1_loss(logits, x[:, :3]),
        F.triplet_margin_loss(logits, x[:, :3], x[:, 3:]),
        F.cosine_embedding_loss(logits, x[:, :3], labels.sign() * 2 - 1),
        torch.logsumexp(logits, 1).square().mean(),
    ]
    return cast(Tensor, sum(losses))


def _linear_algebra(self: Any, x: Tensor) -> object:
    square = self.project(x)
    positive = square @ square.mT + torch.eye(4)
    factor = torch.linalg.cholesky(positive)
    return (
        torch.linalg.solve(positive, x),
        torch.cholesky_solve(x, factor),
        torch.linalg.eigvalsh(positive),
        torch.linalg.matrix_exp(square * 0.1),
        torch.linalg.det(positive),
        torch.cdist(square, x),
        torch.linalg.qr(square + 2 * torch.eye(4))[1],
    )


MLP = Case("torch_mlp_batch_norm", _multilayer_perceptron, noise((8, 6)))
ENCODER = Case("torch_transformer_encoder", _transformer_encoder, noise((2, 5, 8)))

CASES = [
    MLP,
    MLP.but("torch_mlp_autocast", autocast=True),
    MLP.but("torch_mlp_penalty", gradient_penalty=True),
    Case("torch_lstm", lambda: _recurrent(nn.LSTM), noise((3, 6, 5))),
    Case(
        "torch_lstm_bidirectional_projected",
        lambda: _recurrent(nn.LSTM, bidirectional=True, proj_size=3),
        noise((3, 6, 5)),
    ),
    Case(
        "torch_lstm_packed",
        lambda: Apply(_packed, lstm=_recurrent(nn.LSTM)),
        noise((3, 6, 5)),
    ),
    Case("torch_gru", lambda: _recurrent(nn.GRU, bidirectional=True), noise((3, 6, 5))),
    Case("torch_rnn", lambda: _recurrent(nn.RNN, nonlinearity="relu"), noise((3, 6, 5))),
    Case(
        "torch_recurrent_cells",
        lambda: Apply(_cells, lstm=nn.LSTMCell(5, 7), gru=nn.GRUCell(7, 7)),
        noise((3, 6, 5)),
    ),
    Case(
        "torch_transformer",
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.2, batch_first=True),
        noise((2, 5, 8), (2, 4, 8)),
    ),
    ENCODER,
    ENCODER.but("torch_transformer_encoder_autocast", autocast=True),
    Case(
        "torch_transformer_encoder_norm_first",
        lambda: _transformer_encoder(norm_first=True, activation="gelu"),
        noise((2, 5, 8)),
    ),
    Case(
        "torch_multihead_attention",
        lambda: Apply(
            _masked_attention,
            attention=nn.MultiheadAttention(8, 2, 0.2, batch_first=True, add_bias_kv=True),
        ),
        noise((2, 5, 8)),
    ),
    Case(
        "torch_sdpa_dropout",
        lambda: Apply(_causal_attention, project=nn.Linear(8, 24)),
        noise((2, 5, 8)),
    ),
    Case("torch_normalizations", _normalizations, noise((2, 2, 8, 8))),
    Case("torch_convolutions", _convolutions, noise((2, 2, 8, 8))),
    Case(
        "torch_convolutions_penalty",
        _convolutions,
        noise((2, 2, 8, 8)),
        gradient_penalty=True,
    ),
    Case("torch_pools", lambda: Apply(_pools, conv=nn.Conv2d(2, 4, 3)), noise((2, 2, 14, 14))),
    Case(
        "torch_interpolations",
        lambda: Apply(_interpolations, conv=nn.Conv2d(2, 4, 3)),
        noise((2, 2, 8, 8)),
    ),
    Case(
        "torch_spatial_transformer",
        lambda: Apply(_spatial_transformer, localize=nn.Linear(72, 6)),
        noise((2, 2, 6, 6)),
    ),
    Case(
        "torch_spectral_convolution",
        lambda: Apply(
            _spectral_convolution,
            lift=nn.Conv2d(2, 3, 1),
            weight=torch.randn(3, 3, 8, 5, dtype=torch.complex64),
        ),
        noise((2, 2, 8, 8)),
    ),
    Case(
        "torch_short_time_fourier",
        lambda: Apply(_short_time_fourier, project=nn.Linear(32, 32)),
        noise((2, 32)),
    ),
    Case(
        "torch_sparse_product",
        lambda: Apply(
            _sparse_product,
            project=nn.Linear(4, 4),
            edges=torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 3, 3, 0]]),
            weights=torch.randn(6),
        ),
        noise((5, 4)),
    ),
    Case(
        "torch_embeddings",
        lambda: Apply(
            _embeddings,
            plain=nn.Embedding(11, 4, max_norm=1.0),
            bag=nn.EmbeddingBag(11, 4, mode="mean"),
            biggest=nn.EmbeddingBag(11, 4, mode="max"),
            sparse=nn.Embedding(11, 4, sparse=True, scale_grad_by_freq=False),
        ),
        lambda: (integers(11, 9), torch.tensor([0, 4, 6])),
    ),
    Case(
        "torch_ctc",
        lambda: nn.Linear(6, 5),
        lambda: (torch.randn(2, 8, 6), 1 + integers(4, 2, 3)),
        _ctc,
    ),
    Case(
        "torch_many_losses",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda: (torch.randn(5, 6), integers(3, 5)),
        _many_losses,
    ),
    Case(
        "torch_linear_algebra",
        lambda: Apply(_linear_algebra, project=nn.Linear(4, 4)),
        noise((4, 4), dtype=torch.float32),
    ),
]
