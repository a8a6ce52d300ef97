"""Train by a loop of Accelerate's, plain and inside a limit, in mixed precision, bit for bit.

The data are scikit-learn's handwritten digits, 1797 real images of 8 x 8 that it ships: nothing is
downloaded. The second training differs in one line, `lowtide.fit(model, limit)` before `prepare`.
Gradients are accumulated over two batches and clipped; autocast is Accelerate's.

    python examples/loop_accelerate.py --limit 0.6 --precision bf16
    accelerate launch --cpu examples/loop_accelerate.py
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Digits(nn.Module):
    """A transformer over the eight rows of an image."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.rows(images)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def loader(batch: int) -> DataLoader[tuple[Tensor, ...]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    return DataLoader(data, batch, shuffle=True, drop_last=True)


def train(
    options: argparse.Namespace, limit: float | str | None
) -> tuple[list[float], list[Tensor], lowtide.FittedBudget | None]:
    """Losses of the micro-batches, the weights at the end, and the budget."""
    set_seed(0)
    accelerator = Accelerator(
        cpu=True, mixed_precision=options.precision, gradient_accumulation_steps=2
    )
    model: nn.Module = Digits(options.width, options.depth)
    budget = lowtide.fit(model, limit) if limit is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(options.batch))
    losses = []
    for _, (images, digits) in zip(range(options.steps), batches, strict=False):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), digits)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [p.detach() for p in model.parameters()], budget


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="0.6", help='"20 MiB", or a fraction of the plain peak')
    parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="bf16")
    parser.add_argument("--steps", type=int, default=8, help="batches; two make an update")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()
    try:
        limit: float | str = float(options.limit)
    except ValueError:
        limit = options.limit
    torch.set_num_threads(1)  # sums keep one order

    plain, expected, _ = train(options, None)
    limited, found, budget = train(options, limit)
    assert budget is not None
    report = budget.report()
    print(report)

    assert report.measured_peak is not None
    assert report.limit is not None
    inside = report.measured_peak <= report.limit
    same_losses, same_bits = plain == limited, all(map(torch.equal, expected, found))
    answers = {True: "yes", False: "NO"}
    print(f"\nlosses: {plain[0]:.3f} to {plain[-1]:.3f}")
    print(f"all {len(plain)} losses identical:          {answers[same_losses]}")
    print(f"all final weights identical:   {answers[same_bits]}")
    print(f"peak within the limit:         {answers[inside]}")
    return 0 if same_losses and same_bits and inside else 1


if __name__ == "__main__":
    sys.exit(main())
