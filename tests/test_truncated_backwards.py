"""Truncated back-propagation through time whose state is not detached: each backward retains its
graph, and the next one goes through it, in another context (rule 13)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from once import on_one_recorder

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

Context = contextlib.AbstractContextManager[object]
PARTS, LENGTH, WIDTH = 4, 5, 64


def train(
    cell: nn.Module, head: nn.Module, context: Context, steps: int
) -> tuple[list[list[int]], list[Tensor]]:
    """Peaks of the parts of each step in bytes, and all gradients."""
    peaks: list[list[int]] = []
    found: list[Tensor] = []

    def part(x: Tensor, state: Tensor, *, last: bool) -> Tensor:
        with context:
            loss = x.new_zeros(())
            for row in x:
                state = cell(row, state)
                loss = loss + head(state).square().mean()
            loss.backward(retain_graph=not last)
        return state

    def measured(x: Tensor, state: Tensor, *, last: bool) -> Tensor:
        out: list[Tensor] = []
        peak = lowtide.measure(lambda: out.append(part(x, state, last=last)), device="cpu")
        peaks[-1].append(peak.peak_bytes)
        return out[0]

    torch.manual_seed(0)
    for _ in range(steps):
        x, state = torch.randn(PARTS, LENGTH, WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH)
        cell.zero_grad()
        head.zero_grad()
        peaks.append([])
        for place in range(PARTS):
            state = measured(x[place], state, last=place == PARTS - 1)
        parameters = [*cell.parameters(), *head.parameters()]
        found += [p.grad.clone() for p in parameters if p.grad is not None]
    return peaks, found


def nets(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("share", [0.75, 0.8])
def test_a_backward_has_room_for_what_it_takes_in_earlier_graphs(
    share: float, replayed: Callable[[], int]
) -> None:
    """The second part of the first step is the first to go through another one's graph."""
    plain, expected = train(*nets(nn.GRUCell), contextlib.nullcontext(), 2)
    limit = int(share * max(map(max, plain)))
    peaks, found = train(*nets(nn.GRUCell), lowtide.budget(limit), 2)
    assert same(expected, found)
    assert max(peaks[0][:2]) <= limit
    assert replayed() > 0
