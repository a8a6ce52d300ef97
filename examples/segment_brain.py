"""Train a 3D U-Net on a brain scan, plain and in half of its memory, and compare bit for bit.

The scan is the MNI152 template at 1 mm that nilearn ships, with its grey- and white-matter maps:
real data, nothing is downloaded. MONAI's `UNet` learns to tell background, grey matter and white
matter apart. A coronal slab of the brain is held out: no crop for training touches it, and the Dice
scores are those of the slab. The second training differs from the first in one line,
`with lowtide.budget(limit):`.

Run it with `make demo`, or `python examples/segment_brain.py --help`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from nilearn import datasets
from torch import Tensor, nn

import lowtide

matplotlib.use("Agg")

CLASSES = ("background", "grey matter", "white matter")
# Planes of the brain, counted from the back, that no crop for training touches.
HELD_OUT = slice(76, 108)


@dataclass
class Run:
    """One training and what is compared of it."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    prediction: Tensor = field(default_factory=lambda: torch.empty(0))
    dice: tuple[float, ...] = ()


def load_brain() -> tuple[Tensor, Tensor]:
    """The scan as (1, x, y, z) floats of mean 0, and the class of each voxel, around the brain."""
    t1, grey, white = (
        torch.from_numpy(load(resolution=1).get_fdata(dtype=np.float32))
        for load in (
            datasets.load_mni152_template,
            datasets.load_mni152_gm_template,
            datasets.load_mni152_wm_template,
        )
    )
    inside = (grey + white > 0).nonzero()
    box = tuple(
        slice(int(low), int(high) + 1) for low, high in zip(*inside.aminmax(dim=0), strict=True)
    )
    labels = torch.stack([1 - grey - white, grey, white]).argmax(0)
    scan = (t1 - t1.mean()) / t1.std()
    return scan[box].unsqueeze(0), labels[box].unsqueeze(0)


class Crops:
    """Random crops in front of and behind the held-out slab; the seed decides all of them."""

    def __init__(self, scan: Tensor, labels: Tensor, size: int, seed: int) -> None:
        self.scan, self.labels, self.size = scan, labels, size
        self.generator = torch.Generator().manual_seed(seed)
        self.parts = (range(HELD_OUT.start), range(HELD_OUT.stop, scan.shape[2]))

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def next(self) -> tuple[Tensor, Tensor]:
        part = self.parts[self.draw(0, 1)]
        _, width, _, height = self.scan.shape
        corner = (
            self.draw(0, width - self.size),
            self.draw(part.start, part.stop - self.size),
            self.draw(0, height - self.size),
        )
        window = (slice(None), *(slice(at, at + self.size) for at in corner))
        scan, labels = self.scan[window], self.labels[window]
        if self.draw(0, 1):
            scan, labels = scan.flip(1), labels.flip(1)
        scale, shift = torch.empty(2).uniform_(-0.1, 0.1, generator=self.generator)
        noise = torch.empty_like(scan).normal_(0, 0.05, generator=self.generator)
        image = scan * (1 + scale) + shift + noise
        return image.contiguous().unsqueeze(0), labels.contiguous().unsqueeze(0)


def build_net(seed: int) -> nn.Module:
    """MONAI's U-Net with 16 features a voxel, and a linear layer from them to the classes.

    With three output channels in the U-Net itself, its last 3 x 3 x 3 convolution would take a
    workspace of 81 floats a voxel on the CPU: more than all activations, and not to be recomputed.
    """
    torch.manual_seed(seed)
    features = 16
    unet = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=features,
        channels=(16, 32, 64, 128),
        strides=(1, 2, 2),
        num_res_units=1,
        dropout=0.1,
    )
    return nn.Sequential(unet, nn.Conv3d(features, len(CLASSES), kernel_size=1))


def train(
    run: Run, crops: Crops, steps: int, seed: int, budget: lowtide.Budget | None
) -> nn.Module:
    """Train a fresh net for some steps, within the budget where there is one."""
    net = build_net(seed)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    torch.manual_seed(seed + 1)  # the dropout of both trainings draws the same numbers

    for index in range(steps):
        image, labels = crops.next()
        optimizer.zero_grad()

        def step(image: Tensor = image, labels: Tensor = labels) -> None:
            with budget or contextlib.nullcontext():
                loss = criterion(net(image), labels)
            loss.backward()
            run.losses.append(loss.item())

        measured = lowtide.measure(step, device="cpu")
        run.seconds.append(measured.seconds)
        run.peak = max(run.peak, measured.peak_bytes)
        optimizer.step()
        schedule.step()
        show_progress(run, index + 1, steps)
    return net


def show_progress(run: Run, step: int, steps: int) -> None:
    """One line that is rewritten on a terminal; a line every ten steps elsewhere."""
    line = (
        f"{run.name:8} step {step:3}/{steps}  loss {run.losses[-1]:.4f}  "
        f"peak {mebibytes(run.peak)}  {run.seconds[-1]:5.2f} s"
    )
    if sys.stdout.isatty():
        print(f"\r{line}", end="" if step < steps else "\n", flush=True)
    elif step % 10 == 0 or step in (1, steps):
        print(line, flush=True)


def evaluate(run: Run, net: nn.Module, scan: Tensor, labels: Tensor, size: int) -> None:
    """Predict the held-out slab, with its surroundings as context, and score it."""
    net.eval()
    before = (size - (HELD_OUT.stop - HELD_OUT.start)) // 2
    first = max(0, HELD_OUT.start - before)
    with torch.no_grad():
        scores = sliding_window_inference(
            scan[:, :, first : first + size].unsqueeze(0), (size,) * 3, 1, net, overlap=0.25
        )
    inside = slice(HELD_OUT.start - first, HELD_OUT.stop - first)
    run.prediction = scores.argmax(1)[0, :, inside]
    truth = labels[0, :, HELD_OUT]
    run.dice = tuple(dice(run.prediction == c, truth == c) for c in range(1, len(CLASSES)))
    run.state = net.state_dict()


def dice(found: Tensor, true: Tensor) -> float:
    return float(2 * (found & true).sum() / (found.sum() + true.sum()))


def save_picture(path: Path, scan: Tensor, labels: Tensor, run: Run) -> None:
    """The middle plane of the held-out slab: scan, truth, prediction."""
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    middle = (HELD_OUT.start + HELD_OUT.stop) // 2
    colours = ("#101418", "#5aa9e6", "#f4d35e")
    planes = (
        ("scan", scan[0, :, middle], "gray"),
        ("grey and white matter", labels[0, :, middle], ListedColormap(colours)),
        (
            f"prediction, Dice {mean(run.dice):.3f}",
            run.prediction[:, middle - HELD_OUT.start],
            ListedColormap(colours),
        ),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
    for axis, (title, plane, colour) in zip(axes, planes, strict=True):
        limits = {} if title == "scan" else {"vmin": 0, "vmax": len(CLASSES) - 1}
        axis.imshow(plane.T.numpy(), origin="lower", cmap=colour, interpolation="nearest", **limits)
        axis.set_title(title)
        axis.axis("off")
    patches = [Patch(color=c, label=n) for c, n in zip(colours[1:], CLASSES[1:], strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def mean(numbers: tuple[float, ...] | list[float]) -> float:
    return sum(numbers) / len(numbers)


def same_bits(plain: Run, budgeted: Run) -> tuple[bool, bool]:
    """Whether all losses, and whether all parameters and buffers at the end, are identical."""
    names = plain.state.keys() == budgeted.state.keys()
    state = names and all(torch.equal(plain.state[k], budgeted.state[k]) for k in plain.state)
    return plain.losses == budgeted.losses, state


def show_table(plain: Run, budgeted: Run, report: lowtide.BudgetReport) -> bool:
    """Print the comparison; whether the budget held and every bit is the same."""
    saved = report.kept_bytes + report.recomputed_bytes
    share = report.recomputed_bytes / saved if saved else 0.0
    # The first step plans; the table shows the steps after it.
    pace = [mean(run.seconds[1:] or run.seconds) for run in (plain, budgeted)]
    rows = [
        ("", plain.name, budgeted.name),
        ("measured peak", mebibytes(plain.peak), mebibytes(budgeted.peak)),
        ("budget", "none", mebibytes(report.limit)),
        ("seconds a step", f"{pace[0]:.2f}", f"{pace[1]:.2f}"),
        ("first step", f"{plain.seconds[0]:.2f}", f"{budgeted.seconds[0]:.2f}"),
        ("replayed share of bytes", "0%", f"{share:.0%}"),
        ("operations replayed a step", "0", str(report.replayed_operations)),
        ("loss, last step", f"{plain.losses[-1]:.6f}", f"{budgeted.losses[-1]:.6f}"),
        *(
            (f"Dice, {name}", f"{a:.4f}", f"{b:.4f}")
            for name, a, b in zip(CLASSES[1:], plain.dice, budgeted.dice, strict=True)
        ),
    ]
    print()
    for name, *cells in rows:
        print(f"{name:28}" + "".join(f"{cell:>16}" for cell in cells))
    losses, state = same_bits(plain, budgeted)
    print(f"\nall {len(plain.losses)} losses identical:          {'yes' if losses else 'NO'}")
    print(f"all final parameters identical: {'yes' if state else 'NO'}")
    held = budgeted.peak <= report.limit
    print(f"peak within the budget:         {'yes' if held else 'NO'}")
    return losses and state and held


def parse_limit(text: str, plain_peak: int) -> int | str:
    """A fraction of the plain peak, bytes, or text such as "150 MiB"."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number * plain_peak) if number <= 1 else int(number)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--limit", default="0.5", help="bytes, '150 MiB', or a fraction of the plain peak (0.5)"
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each training (40)")
    parser.add_argument("--size", type=int, default=64, help="edge of a crop, a multiple of 8 (64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("output/segment_brain.png"))
    arguments = parser.parse_args()
    if arguments.size % 8 or not 32 <= arguments.size <= 72:
        parser.error(f"--size is a multiple of 8 from 32 to 72, not {arguments.size}")
    if arguments.steps < 1:
        parser.error(f"--steps is at least 1, not {arguments.steps}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    size, steps, seed = arguments.size, arguments.steps, arguments.seed
    scan, labels = load_brain()
    print(
        f"MNI152 template, {' x '.join(map(str, scan.shape[1:]))} voxels of 1 mm; crops of {size}"
    )

    plain, budgeted = Run("plain"), Run("budgeted")
    net = train(plain, Crops(scan, labels, size, seed), steps, seed, None)
    evaluate(plain, net, scan, labels, size)

    budget = lowtide.budget(parse_limit(arguments.limit, plain.peak))
    net = train(budgeted, Crops(scan, labels, size, seed), steps, seed, budget)
    evaluate(budgeted, net, scan, labels, size)

    good = show_table(plain, budgeted, budget.report())
    save_picture(arguments.output, scan, labels, budgeted)
    print(f"picture: {arguments.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
