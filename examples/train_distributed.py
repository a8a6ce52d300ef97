"""Train on several processes, plain and inside a limit, and compare bit for bit on every rank.

By DDP or by FSDP2, on scikit-learn's handwritten digits, which it ships: nothing is downloaded. The
second training differs in one line, `with lowtide.budget(limit, group=True):`, by which the ranks
plan alike and, should the limit be too small for one of them, stop together.

    torchrun --nproc-per-node 2 examples/train_distributed.py --by ddp
    torchrun --nproc-per-node 4 examples/train_distributed.py --by fsdp2 --limit 0.6
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

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


class Transformer(nn.Module):
    """Reads an image of 8 x 8 row by row."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(options.width, options.depth)
    if options.by == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(options: argparse.Namespace, budget: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of this rank, and the gradients of its last step and its weights after it."""
    model = build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(options.steps):
        rows = torch.randint(len(images), (options.batch,), generator=generator)
        optimizer.zero_grad()
        with budget:
            loss = F.cross_entropy(model(images[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    left = [tensor for p in model.parameters() for tensor in (p.grad, p.detach())]
    return losses, [t.to_local() if hasattr(t, "to_local") else t for t in left if t is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--limit", default="0.6", help='"20 MiB", or a fraction of the plain peak')
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256, help="images of a rank's batch")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()
    try:
        limit: float | str = float(options.limit)
    except ValueError:
        limit = options.limit
    dist.init_process_group("gloo")

    plain, expected = train(options, contextlib.nullcontext())
    budget = lowtide.budget(limit, group=True)
    limited, found = train(options, budget)
    report = budget.report()
    assert report.measured_peak is not None
    assert report.limit is not None
    answers = [
        all(map(torch.equal, plain, limited)),
        len(expected) == len(found) and all(map(torch.equal, expected, found)),
        report.measured_peak <= report.limit,
    ]
    rank = dist.get_rank()
    every: list[Any] = [None] * dist.get_world_size()
    # By a group of its own, whose threads destroy_process_group() waits for. DDP keeps the default
    # group alive beyond it, and a thread of gloo that still lets go of tensors while Python ends
    # aborts the process, after all is done (pytorch issue 190489).
    dist.all_gather_object(every, (answers, str(report)), group=dist.new_group())
    dist.destroy_process_group()
    if rank == 0:
        for number, (_, text) in enumerate(every):
            print(f"rank {number}\n{text}\n")
        words = ("losses identical", "gradients and weights identical", "peaks within the limit")
        for number, word in enumerate(words):
            holds = all(entry[0][number] for entry in every)
            print(f"{word + ' on every rank:':50}{'yes' if holds else 'NO'}")
    return 0 if all(all(entry[0]) for entry in every) else 1


if __name__ == "__main__":
    sys.exit(main())
