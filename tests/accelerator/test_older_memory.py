"""Memory that a step finds and frees: counted as freed, so the device holds no more (rule 13)."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

import lowtide
from accelerator.test_limits import ZERO


class WideOutput(nn.Module):
    """A residual net whose output is as large as several of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(8)
        )
        self.head = nn.Linear(256, 2048)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return self.head(x)


def test_a_loop_that_keeps_its_output_until_the_next() -> None:
    """Training and validation assign to one variable, so a step finds a large output or a small
    one. It is measured where it frees a large one: above its start, a step after a validation takes
    more than its limit, and the device still no more than the limit above what is there at most."""
    gc.collect()
    torch.manual_seed(0)
    model = WideOutput().to(ZERO)
    x = torch.randn(512, 256).to(ZERO)
    outputs: dict[str, Tensor] = {}

    def train(budget: lowtide.Budget | None) -> None:
        if budget is None:
            outputs["last"] = model(x)
            loss = outputs["last"].square().mean()
        else:
            with budget:
                outputs["last"] = model(x)
                loss = outputs["last"].square().mean()
        loss.backward()
        model.zero_grad()

    def validate() -> None:
        with torch.no_grad():
            outputs["last"] = model(x[:16])

    plain = max(lowtide.measure(train, None, device=ZERO).peak_bytes for _ in range(2))
    limit = int(0.8 * plain)
    budget = lowtide.budget(limit)
    starts, peaks, after = [], [], []
    for number in range(16):
        if number in (7, 11):
            validate()
        starts.append(torch.accelerator.memory_allocated(ZERO))
        peaks.append(lowtide.measure(train, budget, device=ZERO).peak_bytes)
        after.append(number in (7, 11))
    assert all(peak <= limit for peak, late in zip(peaks, after, strict=True) if not late)
    held = [start + peak for start, peak in zip(starts, peaks, strict=True)]
    assert max(held) <= max(starts) + limit
