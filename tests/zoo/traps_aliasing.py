"""Views, in-place operations, layouts, dtypes, sizes, and indexing.

Problem: a tensor is a window on a storage, and a storage changes; replay has to give back the
version that the forward saw, through the window that it had (semantics rules 4 and 6).
Invariant: every plain step here is one that autograd itself accepts. May import: `zoo.case`, torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import DYNAMIC, Apply, Batch, Case, in_channels_last, integers, noise, smooth


def _net(function: Any, wide: int = 6) -> nn.Module:
    return Apply(function, first=nn.Linear(wide, 8), last=nn.Linear(8, 3))


def _in_place_chain(self: Any, x: Tensor) -> object:
    hidden = self.first(x).mul_(2.0).add_(1.0).relu_()
    hidden = (hidden * 2).sub_(hidden.mean()).clamp_(-1, 1)
    hidden *= 1.5
    return self.last(hidden.tanh_())


def _writes_through_views(self: Any, x: Tensor) -> object:
    hidden = self.first(x).clone()
    hidden[:, :4] = torch.sigmoid(hidden[:, 4:])
    hidden.t()[1].mul_(2.0)
    hidden.view(-1, 2, 4).transpose(1, 2)[:, 0].add_(hidden[:, :2].detach().sin())
    diagonal = hidden.diagonal()
    diagonal.copy_(diagonal.clone().sin())
    hidden.narrow(1, 2, 3).unsqueeze(0).squeeze_(0).neg_()
    for row in hidden.unbind(0)[:1]:
        saved = row.sigmoid()
    hidden.as_strided((4, 2), (8, 4), 1).mul_(0.5)
    return self.last(hidden.cos()) + saved.mean()


def _overlapping_reads(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    windows = hidden.unfold(1, 4, 2)
    strided = hidden.as_strided((4, 3, 4), (8, 2, 1))
    expanded = hidden[:, :1].expand(4, 8)
    wide = (windows * strided).flatten(1).sigmoid()[:, :8]
    hidden = hidden + 0  # A new storage, so that the old one may change below.
    hidden[:, 0] = 3.0
    return self.last(wide * expanded + hidden)


def _saved_then_overwritten_inputs(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    first = hidden * 2
    buffer = torch.zeros(4, 8)
    total = torch.zeros(4, 8)
    for scale in (1.0, 2.0, 3.0):
        buffer.copy_(first.detach()).mul_(scale)
        total = total + first * buffer.clone()
        buffer.zero_()
    return self.last(total)


def _changes_its_input(self: Any, x: Tensor) -> object:
    hidden = self.first(x.clone())
    x.mul_(0.5).add_(1.0)
    other = self.first(x.clone())
    x.zero_()
    return self.last(hidden * other), x


def _returns_aliases(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    return x, x[:, 1:], hidden, hidden.t(), [hidden.detach(), hidden.view(2, 2, 8)]


def _changes_its_output(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model(*batch)
    head = hidden[:, :2]
    head.mul_(2.0)
    return smooth([hidden.add_(1.0), head])


def _splits(self: Any, x: Tensor) -> object:
    left, right = self.first(x).chunk(2, 1)
    pieces = torch.split(left * right.sigmoid(), [1, 3], 1)
    stacked = torch.stack([piece.sum(1) for piece in pieces], 1)
    joined = torch.cat([left, stacked.repeat(1, 2)], 1)
    return self.last(joined), torch.hstack(pieces), torch.broadcast_tensors(left[:1], right)


def _into_out(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    with torch.no_grad():
        out = torch.empty(4, 8)
        torch.mul(hidden, 2.0, out=out)
        torch.sigmoid(out, out=out)
        top = torch.empty(0)
        torch.topk(out, 2, dim=1, out=(top, torch.empty(0, dtype=torch.long)))
        resized = torch.empty(0).resize_(4, 8).copy_(out)
        resized.set_(resized.untyped_storage(), 0, (4, 8), (8, 1))
    return self.last(hidden * out * resized * top.sum())


def _through_data(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    hidden.data.mul_(0.5)
    detached = hidden.detach()
    hidden = hidden.clone()
    return self.last(hidden.sin() * detached)


class Growing(nn.Module):
    """A dense block: every layer reads the concatenation of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(2 + 2 * number), nn.ReLU(True), nn.Conv2d(2 + 2 * number, 2, 1)
            )
            for number in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class FlatParameters(nn.Module):
    """All weights are views of one flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(6 * 8 + 8 + 8 * 3) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        first, bias, last = self.flat.split([48, 8, 24])
        hidden = F.linear(x, first.view(8, 6), bias).tanh()
        output: Tensor = hidden @ last.view(8, 3)
        return output


def _sorting(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    values, order = hidden.sort(dim=1, descending=True)
    top, where = hidden.topk(3, dim=1)
    return (
        values.cumsum(1),
        torch.quantile(hidden, 0.3, dim=1),
        hidden.median(1).values,
        hidden.kthvalue(2, 1).values,
        hidden.cummax(1).values,
        hidden.cumprod(1),
        hidden.logcumsumexp(1),
        top * where,
        hidden.gather(1, order),
        torch.unique(where).float() * hidden.amax(),
        torch.bincount(where.flatten(), minlength=8) * hidden.mean(0),
        torch.histc(hidden.detach(), 4),
        torch.searchsorted(values.flip(1).contiguous().detach(), hidden.detach()),
    )


def _indexing(self: Any, x: Tensor, rows: Tensor) -> object:
    hidden = self.first(x)
    result = torch.zeros(6, 8)
    result.index_put_((rows,), hidden, accumulate=True)
    result = result.scatter_add(0, rows[:, None].expand(4, 8), hidden.sin())
    result = result.scatter_reduce(0, rows[:, None].expand(4, 8), hidden, "amax")
    result = result.clone()
    result[rows[:2]] = hidden[:2]
    result[result > 1.0] = 0.5
    result.masked_fill_(result < -1.0, 0.0)
    picked = result[rows] + torch.take_along_dim(result[:4], rows[:, None], 1)
    chosen = picked.masked_select(picked > 0)
    placed = torch.zeros(4, 8).masked_scatter(picked > 0, chosen)
    rolled = torch.where(placed > 0.2, placed.roll(1, 1), picked.flip(0)).index_fill(1, rows, 0.1)
    return self.last(rolled), result.nonzero().float().mean() * result.sum()


def _einsums(self: Any, x: Tensor) -> object:
    hidden = self.first(x).view(4, 2, 4)
    scores = torch.einsum("bhd,chd->hbc", hidden, hidden).softmax(-1)
    mixed = torch.einsum("hbc,chd->bhd", scores, hidden)
    return torch.tensordot(mixed, self.last.weight.view(3, 2, 4), dims=([1, 2], [1, 2]))


def _no_elements(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    none = hidden[:0].exp()
    padded = torch.cat([none, hidden, torch.zeros(0, 8)])
    return self.last(padded), none.sum(), none.new_zeros(0, 3).t()


def _numbers(self: Any, x: Tensor) -> object:
    hidden = self.first(x)
    bad = torch.tensor([float("nan"), float("inf"), -0.0, 0.0]).repeat(2)
    strange = hidden.detach() * bad
    cleaned = torch.nan_to_num(strange, nan=0.0, posinf=1.0, neginf=-1.0)
    return (
        self.last(cleaned * hidden),
        strange,
        (hidden > 0) & (x.sum() > 0),
        hidden.round().to(torch.int8),
    )


def _half_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    return net.half()


def _odd_weights() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 2, 3))
    in_channels_last(net)
    net[0].weight = nn.Parameter(torch.randn(3, 3, 2, 4).permute(3, 2, 0, 1))
    return net


def _complex_net(self: Any, x: Tensor) -> object:
    spectrum = torch.view_as_complex(self.first(x).view(4, 4, 2))
    mixed = (spectrum.conj() @ self.mixing).mul(1j).exp().conj().resolve_conj()
    return mixed.real, mixed.imag.clone(), mixed.abs(), torch.view_as_real(mixed * spectrum)


ROWS = noise((4, 6))
IMAGES = noise((2, 2, 8, 8))
PLAIN = Case(
    "aliasing_transposed_input",
    lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    lambda: (torch.randn(6, 4).t(),),
)

CASES = [
    Case("aliasing_in_place_chain", lambda: _net(_in_place_chain), ROWS),
    Case(
        "aliasing_in_place_chain_penalty",
        lambda: _net(_in_place_chain),
        ROWS,
        gradient_penalty=True,
    ),
    Case("aliasing_writes_through_views", lambda: _net(_writes_through_views), ROWS),
    Case("aliasing_overlapping_reads", lambda: _net(_overlapping_reads), ROWS),
    Case("aliasing_scratch_buffer", lambda: _net(_saved_then_overwritten_inputs), ROWS),
    Case("aliasing_changes_its_input", lambda: _net(_changes_its_input), ROWS),
    Case("aliasing_returns_aliases", lambda: _net(_returns_aliases), ROWS),
    Case(
        "aliasing_changes_its_output",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4)),
        ROWS,
        _changes_its_output,
    ),
    Case("aliasing_splits", lambda: _net(_splits), ROWS),
    Case("aliasing_into_out", lambda: _net(_into_out), ROWS),
    Case("aliasing_through_data", lambda: _net(_through_data), ROWS),
    Case("aliasing_growing_concatenation", Growing, noise((2, 2, 4, 4))),
    Case("aliasing_flat_parameters", FlatParameters, ROWS),
    PLAIN,
    PLAIN.but("aliasing_expanded_input", batch=lambda: (torch.randn(1, 6).expand(4, 6),)),
    PLAIN.but("aliasing_strided_input", batch=lambda: (torch.randn(8, 12)[::2, ::2],)),
    Case("aliasing_odd_weights", _odd_weights, IMAGES),
    Case(
        "aliasing_double_precision",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()).double(),
        noise((4, 6), dtype=torch.float64),
    ),
    Case("aliasing_half_precision", _half_net, noise((4, 6), dtype=torch.float16)),
    Case(
        "aliasing_bfloat16_parameters",
        lambda: _half_net().bfloat16(),
        noise((4, 6), dtype=torch.bfloat16),
    ),
    Case(
        "aliasing_complex",
        lambda: Apply(
            _complex_net,
            first=nn.Linear(6, 8),
            mixing=0.1 * torch.randn(4, 4, dtype=torch.complex64),
        ),
        ROWS,
    ),
    Case("indexing_sorts", lambda: _net(_sorting), ROWS, tags=DYNAMIC),
    Case(
        "indexing_scatters",
        lambda: _net(_indexing),
        lambda: (torch.randn(4, 6), integers(6, 4)),
        tags=DYNAMIC,
    ),
    Case("indexing_einsum", lambda: _net(_einsums), ROWS),
    Case("indexing_no_elements", lambda: _net(_no_elements), ROWS),
    Case("indexing_no_rows_kept", lambda: _net(_no_elements), noise((1, 6))),
    Case("indexing_unusual_numbers", lambda: _net(_numbers), ROWS),
]
