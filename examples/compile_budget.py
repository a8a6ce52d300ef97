"""Train a compiled step, plain and inside a limit, and compare bit for bit.

The data are scikit-learn's handwritten digits, 1797 real images of 8 x 8 that it ships: nothing is
downloaded. Both steps are Inductor's code; the second one is compiled with
`backend=lowtide.CompileBudget(limit)`, which decides what it saves for its backward.

    python examples/compile_budget.py --limit 0.5
    python examples/compile_budget.py --limit "12 MiB" --compiler aot_eager
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lowtide
from lowtide.limits import format_bytes


class Block(nn.Module):
    """A residual perceptron. Masks of dropout that are computed again are the same ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inside(x)
        return out


def train(options: argparse.Namespace, backend: Any) -> tuple[list[Tensor], list[Tensor], int]:
    """Losses, the weights at the end, and the peak of a step in bytes, above what stood before."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    blocks = [Block(options.width) for _ in range(options.depth)]
    model = nn.Sequential(nn.Linear(64, options.width), *blocks, nn.Linear(options.width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target)

    @torch.compile(backend=backend)
    def loss_of(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(rows), wanted)

    losses, peak = [], 0
    for _ in range(options.steps):
        chosen = torch.randint(len(images), (options.batch,))
        rows, wanted = images[chosen], targets[chosen]

        def step(rows: Tensor = rows, wanted: Tensor = wanted) -> None:
            loss = loss_of(rows, wanted)
            loss.backward()
            losses.append(loss.detach())

        optimizer.zero_grad()
        peak = lowtide.measure(step, device="cpu").peak_bytes
        optimizer.step()
    return losses, [p.detach() for p in model.parameters()], peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="0.5", help='"20 MiB", or a fraction of the plain peak')
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6)
    options = parser.parse_args()
    try:
        limit: float | str = float(options.limit)
    except ValueError:
        limit = options.limit
    torch.set_num_threads(1)  # sums keep one order

    plain, expected, plain_peak = train(options, options.compiler)
    budget = lowtide.CompileBudget(limit, compiler=options.compiler)
    limited, found, peak = train(options, budget)
    report = budget.report()
    print(report)

    assert report.limit is not None
    same_losses = all(map(torch.equal, plain, limited))
    same_bits, inside = all(map(torch.equal, expected, found)), peak <= report.limit
    answers = {True: "yes", False: "NO"}
    print(f"\nmeasured: {format_bytes(plain_peak)} plain, {format_bytes(peak)} inside the limit")
    print(f"all {len(plain)} losses identical:          {answers[same_losses]}")
    print(f"all final weights identical:   {answers[same_bits]}")
    print(f"peak within the limit:         {answers[inside]}")
    return 0 if same_losses and same_bits and inside else 1


if __name__ == "__main__":
    sys.exit(main())
