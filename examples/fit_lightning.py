"""Fit a small convolutional net with Lightning, plain and inside a limit, and compare the bits.

The data are scikit-learn's handwritten digits, 1797 real images of 8 x 8 that it ships: nothing is
downloaded. The second fit differs in one line, the callback `MemoryBudget(limit)`.

    python examples/fit_lightning.py --limit 0.5
    torchrun --nproc-per-node 2 examples/fit_lightning.py --devices 2
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.lightning import MemoryBudget


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU(),
            nn.Dropout(0.1), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.inside(x))


class Digits(LightningModule):
    """Tells the digits apart; its layers are made in `configure_model`, as sharded models are."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.net: nn.Sequential | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            blocks = [Residual(self.width) for _ in range(self.depth)]
            first, last = nn.Conv2d(1, self.width, 3, padding=1), nn.Linear(self.width, 10)
            pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.net = nn.Sequential(first, *blocks, pool, last)

    def loss(self, batch: list[Tensor]) -> Tensor:
        assert self.net is not None
        images, digits = batch
        return F.cross_entropy(self.net(images), digits)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loaders(batch: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Images to train on and images that are held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    held_out = len(data) // 5
    train, rest = torch.utils.data.random_split(
        data, [len(data) - held_out, held_out], torch.Generator().manual_seed(0)
    )
    return DataLoader(train, batch, drop_last=True), DataLoader(rest, batch)


def fit(options: argparse.Namespace, *callbacks: MemoryBudget) -> tuple[Digits, Trainer]:
    seed_everything(0, verbose=False)
    module = Digits(options.width, options.depth)
    trainer = Trainer(
        max_epochs=options.epochs, accelerator="cpu", devices=options.devices, logger=False,
        strategy="ddp" if options.devices > 1 else "auto", log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_train_batches=options.batches, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, *loaders(options.batch))
    return module, trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="0.5", help='"20 MiB", or a fraction of the plain peak')
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8, help="batches of an epoch")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--devices", type=int, default=1, help="processes, under torchrun")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()
    try:
        limit: float | str = float(options.limit)
    except ValueError:
        limit = options.limit
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(1)  # sums keep one order

    plain, trainer = fit(options)
    held_out = float(trainer.logged_metrics["val_loss"])
    print(f"plain:   {len(plain.losses)} steps, held-out loss {held_out}")
    memory = MemoryBudget(limit, group=True if options.devices > 1 else None)
    limited, trainer = fit(options, memory)
    print(
        f"limited: {len(limited.losses)} steps, held-out loss {trainer.logged_metrics['val_loss']}"
    )
    report = memory.report()
    print(report)

    one, two = plain.state_dict(), limited.state_dict()
    same_bits = all(torch.equal(one[name], two[name]) for name in one)
    assert report.measured_peak is not None
    assert report.limit is not None
    inside = report.measured_peak <= report.limit
    answers = {True: "yes", False: "NO"}
    same_losses = plain.losses == limited.losses
    print(f"\nall {len(plain.losses)} losses identical:          {answers[same_losses]}")
    print(f"all final weights identical:   {answers[same_bits]}")
    print(f"peak within the limit:         {answers[inside]}")
    return 0 if same_losses and same_bits and inside else 1


if __name__ == "__main__":
    sys.exit(main())
