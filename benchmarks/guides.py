"""The figures in docs/guides: DenseNet by name and by budget, MONAI's U-Net, levels.

The peak of each way is measured allocation by allocation (for a budget, the largest of its first
three steps); then the ways run in turns without measuring, and the medians of their CPU seconds are
shown.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import lowtide
import lowtide.replay
from models import (
    WORKLOADS,
    Workload,
    arguments,
    brain_unet,
    densenet,
    dice_loss,
    gpt2,
    images,
    interleave,
    language_loss,
    learn,
    logits_loss,
    markdown,
    measured_peak,
    mebibytes,
    results,
    timed_step,
    unet_blocks,
    volumes,
    wrap_blocks,
)

LAYERS = "features.denseblock*.denselayer*"


@dataclass
class Way:
    """A model prepared in one way, and the budget that its step runs under."""

    name: str
    model: nn.Module
    budget: lowtide.Budget | None = None


def by_name(model: nn.Module, pattern: str, policy: Callable | None = None) -> nn.Module:
    model = copy.deepcopy(model)
    lowtide.checkpoint_modules(model, pattern, policy=policy)
    return model


def by_level(model: nn.Module, level: int, nested: bool) -> nn.Module:
    model = copy.deepcopy(model)
    lowtide.checkpoint_levels(model, level, nested=nested)
    return model


def compare(work: Workload, ways: list[Way], rounds: int) -> list[dict[str, object]]:
    """Peak, replayed operations and seconds of each way; for a refused budget, what it needs."""
    rows: dict[str, dict[str, object]] = {}
    runs: dict[str, Callable[[], object]] = {}
    batch = work.batch()
    for way in ways:
        row: dict[str, object] = {"way": way.name}
        rows[way.name] = row
        counts: list[int] = []
        lowtide.replay.listeners.append(
            lambda operations, counts=counts: counts.append(len(operations))
        )
        try:
            steps = 3 if way.budget is not None else 1
            peaks = []
            for _ in range(steps):
                counts.clear()
                peaks.append(measured_peak(work, way.model, way.budget))
            row["peak"], row["replayed"] = max(peaks), sum(counts)
            runs[way.name] = timed_step(work, way.model, batch, way.budget)
            if way.budget is not None:
                learn(runs[way.name])
        except lowtide.BudgetError as error:
            row["minimum"] = error.minimum
        finally:
            lowtide.replay.listeners.pop()
    for name, seconds in interleave(runs, rounds).items():
        rows[name]["seconds"] = seconds
    return list(rows.values())


def show(title: str, rows: list[dict]) -> None:
    base = rows[0]
    table = []
    for row in rows:
        if "peak" not in row:
            table.append(
                [row["way"], f"refused, at least {mebibytes(row['minimum'])}", "", "", "", ""]
            )
            continue
        table.append(
            [
                row["way"],
                mebibytes(row["peak"]),
                f"{row['peak'] / base['peak']:.0%}",
                row["replayed"],
                f"{row['seconds']:.2f}",
                f"{row['seconds'] / base['seconds'] - 1:+.0%}",
            ]
        )
    head = (title, "peak, MiB", "of plain", "operations replayed", "seconds", "added")
    print(markdown(head, table) + "\n", flush=True)


def densenet_ways(work: Workload) -> list[Way]:
    model = work.make()
    plain = Way("plain", copy.deepcopy(model))
    peak = measured_peak(work, copy.deepcopy(model))
    keep = lowtide.policies.KeepProducts()
    return [
        plain,
        Way("the four blocks, `features.denseblock*`", by_name(model, "features.denseblock*")),
        Way("every dense layer", by_name(model, LAYERS)),
        Way("every dense layer, `KeepProducts`", by_name(model, LAYERS, keep)),
        Way("every dense layer, `torch.utils.checkpoint`", wrap_blocks(work, copy.deepcopy(model))),
        *(
            Way(f"budget of {share}%", copy.deepcopy(model), lowtide.budget(peak * share // 100))
            for share in (80, 60, 50, 40)
        ),
    ]


def unet_ways(work: Workload) -> list[Way]:
    from monai.networks.nets.unet import CheckpointUNet as WrappedUNet

    from lowtide.monai import CheckpointUNet

    def around(unet: nn.Module) -> nn.Module:
        return nn.Sequential(unet, copy.deepcopy(plain[1]))

    plain = work.make()
    settings = (3, 1, 16, (16, 32, 64, 128), (1, 2, 2))
    ours = around(CheckpointUNet(*settings, num_res_units=1, dropout=0.1)).train()
    nested = around(CheckpointUNet(*settings, num_res_units=1, dropout=0.1, nested=True)).train()
    monais = around(WrappedUNet(*settings, num_res_units=1, dropout=0.1)).train()
    limit = max(measured_peak(work, ours) for _ in range(2))
    return [
        Way("`UNet`", plain),
        Way("MONAI's `CheckpointUNet`", monais),
        Way("`lowtide.monai.CheckpointUNet`", ours),
        Way("the same, `nested=True`", nested),
        Way("`UNet` under `lowtide.budget`, limit = that peak", work.make(), lowtide.budget(limit)),
    ]


def level_ways(work: Workload) -> list[Way]:
    model = work.make()
    return [
        Way("level 0", model),
        *(Way(f"level {n}", by_level(model, n, True)) for n in range(1, 6)),
        *(Way(f"level {n}, `nested=False`", by_level(model, n, False)) for n in range(3, 6)),
    ]


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(depths=[2, 2, 4, 2], num_labels=10))


SMALL = {
    "levels-gpt2": Workload(
        "GPT-2", gpt2, lambda: (torch.randint(0, 5000, (2, 128)),), language_loss, unet_blocks
    ),
    "levels-swin": Workload("Swin", swin, lambda: images(1, 224), logits_loss, unet_blocks),
    "levels-densenet": Workload(
        "DenseNet121", densenet, lambda: images(2, 64), logits_loss, unet_blocks
    ),
}
BRAIN = Workload("unet3d", brain_unet, partial(volumes, 48, torch.float32), dice_loss, unet_blocks)


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    topics = ("densenet", "unet", *SMALL)
    parser.add_argument("--topics", nargs="+", choices=topics, default=list(topics))
    options = parser.parse_args()
    rounds = 3 if options.quick else 7
    with results(options) as rows:
        if "densenet" in options.topics:
            work = WORKLOADS["densenet121"]
            found = compare(work, densenet_ways(work), rounds)
            rows.append({"topic": "densenet", "rows": found})
            show("DenseNet121, 2 images of 128 x 128", found)
        if "unet" in options.topics:
            found = compare(BRAIN, unet_ways(BRAIN), rounds)
            rows.append({"topic": "unet", "rows": found})
            show("3D U-Net, a volume of 48 x 48 x 48", found)
        for name in [topic for topic in options.topics if topic in SMALL]:
            found = compare(SMALL[name], level_ways(SMALL[name]), rounds)
            rows.append({"topic": name, "rows": found})
            show(SMALL[name].name, found)


if __name__ == "__main__":
    main()
