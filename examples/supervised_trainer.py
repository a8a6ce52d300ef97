"""Train with MONAI's SupervisedTrainer on brain slices, plain and inside a limit, bit for bit.

The slices are those of the MNI152 template that nilearn ships, with its white-matter map: real
data, nothing is downloaded. The second training differs in one line, `lowtide.fit(net, limit)`.

    python examples/supervised_trainer.py --limit 0.6
"""

from __future__ import annotations

import argparse
import logging
import sys

import numpy as np
import torch
from ignite.engine import Events
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import SegResNet
from monai.transforms import Compose, EnsureTyped, RandFlipd, RandSpatialCropd
from nilearn import datasets
from torch import Tensor

import lowtide


def slices(count: int) -> list[dict[str, np.ndarray]]:
    """Axial slices of the template, mean 0, with the places that are mostly white matter."""
    scan = datasets.load_mni152_template(resolution=2).get_fdata(dtype=np.float32)
    white = datasets.load_mni152_wm_template(resolution=2).get_fdata(dtype=np.float32)
    scan = (scan - scan.mean()) / scan.std()
    planes = np.linspace(30, 65, count).astype(int)
    return [{"image": scan[None, ..., z], "label": (white[None, ..., z] > 0.5)} for z in planes]


def train(
    options: argparse.Namespace, limit: float | str | None
) -> tuple[list[float], dict[str, Tensor], lowtide.FittedBudget | None]:
    """Every loss, the weights at the end, and the budget if there was one."""
    torch.manual_seed(0)
    net = SegResNet(2, init_filters=8, in_channels=1, out_channels=1, dropout_prob=0.1)
    budget = lowtide.fit(net, limit) if limit is not None else None
    names = ["image", "label"]
    crop = RandSpatialCropd(names, (options.size, options.size), random_size=False)
    transforms = Compose([EnsureTyped(names), crop, RandFlipd(names, prob=0.5)])
    transforms.set_random_state(seed=1)
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=options.epochs,
        train_data_loader=DataLoader(Dataset(slices(12), transforms), batch_size=4),
        network=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3),
        loss_function=DiceLoss(sigmoid=True),
    )
    losses: list[float] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep() -> None:
        losses.append(trainer.state.output[0]["loss"])

    trainer.run()
    return losses, net.state_dict(), budget


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="0.6", help='"20 MiB", or a fraction of the plain peak')
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="edge of a crop")
    options = parser.parse_args()
    try:
        limit: float | str = float(options.limit)
    except ValueError:
        limit = options.limit
    logging.disable(logging.INFO)

    plain, expected, _ = train(options, None)
    limited, found, budget = train(options, limit)
    assert budget is not None
    report = budget.report()
    print(report)
    assert report.measured_peak is not None
    assert report.limit is not None

    same_bits = all(torch.equal(expected[name], found[name]) for name in expected)
    inside = report.measured_peak <= report.limit
    answers = {True: "yes", False: "NO"}
    print(f"\nloss: {plain[0]:.4f} at the first step, {plain[-1]:.4f} at the last")
    print(f"all {len(plain)} losses identical:          {answers[plain == limited]}")
    print(f"all final weights identical:   {answers[same_bits]}")
    print(f"peak within the limit:         {answers[inside]}")
    return 0 if plain == limited and same_bits and inside else 1


if __name__ == "__main__":
    sys.exit(main())
