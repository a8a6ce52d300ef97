"""Random programs on tensors large enough to be measured: operations, views, writes and joins.

Problem: what a step takes at most is a claim about all programs, and gradients that are parts of
each other (`cat`), expanded, or made anew by views come in more ways than anyone lists. Invariant:
a program is a function of its seed, the same each time that it is called; later lines may read any
earlier result, so gradients wait for as long as they can. Imports torch alone. Rejected: the
programs of `fuzz`, whose tensors have some bytes each, less than a generator's state.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Step = Callable[..., Tensor]


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What both have in common of their sizes."""
    rows, columns = min(a.shape[0], b.shape[0]), min(a.shape[1], b.shape[1])
    return a[:rows, :columns].float(), b[:rows, :columns].float()


def _written(a: Tensor, b: Tensor) -> Tensor:
    a, b = _alike(a, b)
    out = a * 1
    out[:, ::2] = b[:, ::2]
    return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    inner = min(a.shape[1], b.shape[0])
    return a[:, :inner].float() @ b[:inner].float()


ONE: list[Callable[[Tensor], Tensor]] = [
    torch.tanh, torch.relu, torch.exp, torch.sigmoid, torch.sin, torch.abs, torch.square, F.gelu,
    F.silu, F.normalize, torch.clone, torch.Tensor.double, lambda t: t * 0.5, lambda t: t + 1,
    lambda t: t.softmax(-1), lambda t: t.log_softmax(0), lambda t: F.layer_norm(t, t.shape[-1:]),
    lambda t: t.clone().relu_(), lambda t: F.dropout(t, 0.3), lambda t: t.roll(1, 0),
    lambda t: t.cumsum(0), lambda t: t.bfloat16().float(), lambda t: F.pad(t, (0, 1, 1, 0)),
    lambda t: t.sort(0)[0], lambda t: torch.where(t > 0, t, t * 0.1),
    lambda t: t / (t.detach().abs() + 1),
]  # fmt: skip
VIEWS: list[Callable[[Tensor], Tensor]] = [
    torch.t, lambda t: t[: max(1, t.shape[0] // 2)], lambda t: t[:, ::2],
    lambda t: t.reshape(-1, t.shape[0]), lambda t: t.chunk(2)[0], lambda t: t.chunk(2, 1)[-1],
    lambda t: t[:1].expand(t.shape[0], -1), lambda t: t[:, :1].expand(-1, t.shape[1]),
    lambda t: t.sum(0, keepdim=True), lambda t: t.mean(1, keepdim=True),
    lambda t: t.diagonal()[None],
]  # fmt: skip
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: torch.add(*_alike(a, b)), lambda a, b: torch.mul(*_alike(a, b)),
    lambda a, b: torch.sub(*_alike(a, b)), lambda a, b: torch.cat(_alike(a, b)),
    lambda a, b: torch.cat([*_alike(a, b), _alike(a, b)[0]], 1),
    lambda a, b: torch.stack(_alike(a, b)).flatten(0, 1), lambda a, b: F.linear(*_alike(a, b)),
    lambda a, b: torch.stack(_alike(a, b)).sum(0), lambda a, b: torch.maximum(*_alike(a, b)),
    _written, _product,
]  # fmt: skip


def program(seed: int) -> Step:
    """A step that returns a loss, with gradients cleared; with `other`, its second half differs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sizes = (16, 64, 128)
    leaves = [
        (0.1 * torch.randn(draw.choice(sizes), draw.choice(sizes))).requires_grad_()
        for _ in range(draw.randint(1, 3))
    ]
    data = torch.randn(64, 64)
    lines = [[draw.random() for _ in range(5)] for _ in range(draw.choice((5, 10, 20, 40)))]
    ends = [draw.random() for _ in range(3)]

    def step(*, other: bool = False) -> Tensor:
        made = [*leaves, data]
        for leaf in leaves:
            leaf.grad = None

        def pick(place: float, *, recent: bool) -> Tensor:
            index = max(0, len(made) - 1 - int(4 * place)) if recent else int(len(made) * place)
            found = made[index]
            return found if found.numel() <= 200_000 else found[:64, :64]

        half = len(lines) // 2
        rest = lines[half:][::-1] if other else lines[half:]
        for kind, which, first, second, recent in lines[:half] + rest:
            one = pick(first, recent=recent < 0.6)
            if kind < 0.65:
                every = ONE if kind < 0.45 else VIEWS
                made.append(every[int(len(every) * which)](one))
            else:
                two = pick(second, recent=recent > 0.4)
                made.append(TWO[int(len(TWO) * which)](one, two))
        total = made[-1].float().mean() + leaves[0].sum() * 0
        for place in ends:
            total = total + made[int(len(made) * place)].float().sum() * 0.01
        return total

    return step
