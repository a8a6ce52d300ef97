"""Models of other libraries on a device: bits and limits of one for each family of timm's.

    python tests/device/families.py --part 0/4 --seconds 150

Problem: timm and torchvision do not come with the CPU build of torch that the tests use, and most
people who train on pictures take their networks from there. Invariant: a model is compared only if
two plain trainings of it agree, and where lowtide's differs, a third one too; each step of a
training within a budget is measured; what was not reached is counted. Imports catalogue, checks,
nets, place. Rejected: a list of models, which would be those that work.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[2] / "src"),
                    str(Path(__file__).resolve().parents[1])]  # fmt: skip

import torch
from torch import Tensor, nn

import lowtide
from device import place
from device.nets import clear, differing
from device.place import MIB, Place, peak, settle
from device.report import say

STEPS = 5
SHARES = (0.8, 0.6)  # of the plain peak
LARGEST = 60e6  # parameters of a model
Make = Callable[[], tuple[nn.Module, Any]]


# ------------------------------------------------------------------------------ the models


def families(where: Place) -> Iterator[tuple[str, Make]]:
    """By name, what makes a model and its input: the first small one in each module of timm, and
    each detector and segmentation network of torchvision."""
    batch = 2 if where.quick else 8
    with contextlib.suppress(ImportError):
        import timm

        for module in timm.list_modules():
            found = timm.list_models(module=module)
            if found:
                yield module, lambda found=found: _of_timm(found, batch, where.device)
    with contextlib.suppress(ImportError):
        from torchvision import models

        for kind in (models.segmentation, models.detection):
            for name in models.list_models(module=kind):
                yield name, lambda name=name: _of_torchvision(name, batch, where.device)


def _of_timm(names: Sequence[str], batch: int, device: torch.device) -> tuple[nn.Module, Any]:
    import timm

    with torch.device("meta"):  # the size of each, without its memory
        sizes = {name: _parameters(timm.create_model(name)) for name in names[:8]}
    name = min(sizes, key=lambda name: sizes[name])
    if sizes[name] > LARGEST:
        raise ValueError(f"the smallest, {name}, has {sizes[name]:.0f} parameters")
    net = timm.create_model(name, num_classes=10).to(device)
    shape = net.default_cfg["input_size"]
    return net, (torch.randn(batch, *shape, device=device),)


def _of_torchvision(name: str, batch: int, device: torch.device) -> tuple[nn.Module, Any]:
    from torchvision import models

    net = models.get_model(name, weights=None, weights_backbone=None).to(device)
    if name not in models.list_models(module=models.detection):
        return net, (torch.randn(batch, 3, 128, 128, device=device),)
    corners = torch.rand(3, 2, device=device) * 60
    boxes = torch.cat([corners, corners + 40], 1)
    target = {"boxes": boxes, "labels": torch.ones(3, dtype=torch.int64, device=device)}
    if "mask" in name:
        target["masks"] = torch.ones(3, 160, 160, dtype=torch.uint8, device=device)
    if "keypoint" in name:
        target["keypoints"] = torch.ones(3, 17, 3, device=device) * 30
    pictures = [torch.rand(3, 160, 160, device=device) for _ in range(2)]
    return net, (pictures, [target, target])


def _parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list | tuple):
        return [tensor for item in found for tensor in tensors(item)]
    return [found] if torch.is_tensor(found) and found.requires_grad else []


# ------------------------------------------------------------------------------ comparing


class Training:
    """Trainings of one model from the same state, with the same random numbers."""

    def __init__(self, where: Place, make: Make) -> None:
        self.where = where
        torch.manual_seed(0)
        self.net, self.given = make()
        self.net.train()
        self.state = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.peaks: list[int] = []

    def loss(self) -> Tensor:
        with torch.autocast(self.where.kind, torch.bfloat16):
            found = tensors(self.net(*self.given))
        return torch.stack([each.float().square().mean() for each in found]).sum()

    def run(self, call: Any = None, limit: Any = None) -> list[Tensor]:
        """What the steps leave behind; `peaks` has the peak of each."""
        self.net.load_state_dict(self.state)
        self.peaks, left = [], []
        for number in range(STEPS):
            torch.manual_seed(number)
            clear(self.net)
            losses: list[Tensor] = []
            self.peaks.append(peak(self.where, lambda to=losses: to.append(self.step(call, limit))))
            settle()
            gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
            left += [t.detach().cpu() for t in (*losses, *gradients)]
            with torch.no_grad():
                for p in self.net.parameters():
                    if p.grad is not None:
                        p -= 1e-4 * p.grad
        left += [t.cpu() for t in self.net.buffers()]
        return [*left, torch.cuda.get_rng_state() if self.where.kind == "cuda" else left[0]]

    def step(self, call: Any, limit: Any) -> Tensor:
        with limit or contextlib.nullcontext():
            loss = self.loss() if call is None else call(self.loss)
        loss.backward()
        return loss.detach()


def verdict(where: Place, make: Make) -> tuple[str, str]:
    """What became of a model: "same", "different", "over", "undetermined" or "cannot run"."""
    try:
        training = Training(where, make)
        plain = training.run()
        largest = max(training.peaks[1:])
        if differing(plain, training.run()):
            return "undetermined", "two plain trainings differ"
    except Exception as error:
        return "cannot run", f"{type(error).__name__}: {error}"
    said = [f"plain {largest / MIB:.1f} MiB"]
    for way in ("checkpoint", *SHARES):
        try:
            found, says = _one_way(training, way, largest)
        except Exception as error:
            return "different", f"{way}: {type(error).__name__}: {error}"
        said.append(says)
        if found and (len(found) != len(plain) or differing(plain, found)):
            if differing(plain, training.run()):
                return "undetermined", f"{way}: a further plain training differs too"
            return "different", f"{way}: {differing(plain, found)} of {len(plain)} tensors"
        if "OVER" in says:
            return "over", ", ".join(said)
    return "same", ", ".join(said)


def _one_way(training: Training, way: str | float, largest: int) -> tuple[list[Tensor], str]:
    if isinstance(way, str):
        return training.run(call=lowtide.checkpoint), f"region {max(training.peaks) / MIB:.1f}"
    allowed = int(way * largest)
    for _ in range(3):
        try:
            found = training.run(limit=lowtide.budget(allowed))
        except lowtide.BudgetError as error:
            if error.minimum <= allowed:
                raise
            allowed = error.minimum
            continue
        most = max(training.peaks)
        over = f" OVER at {[p for p in training.peaks if p > allowed]}" if most > allowed else ""
        return found, f"{way:.0%} {most / MIB:.1f} of {allowed / MIB:.1f}{over}"
    return [], f"{way:.0%} refused"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--part", default="0/1", help="part I of N of the families, as I/N")
    parser.add_argument("--seconds", type=float, default=600, help="no model is begun after that")
    parser.add_argument("--quick", action="store_true", help="small batches")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device")
    options = parser.parse_args(given)
    if options.emulated:
        from accelerator import install

        install()
    where = place.find(options.quick, options.seconds / 60)
    if where is None:
        say("families.py needs an accelerator; this machine has none: nothing was run.")
        return 0
    at, parts = map(int, options.part.split("/"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for name, make in [each for each in families(where) if options.only in each[0]][at::parts]:
        if where.left() <= 0:
            counts["not reached"] += 1
            continue
        began = time.monotonic()
        what, says = verdict(where, make)
        place.fresh(where)
        counts[what] += 1
        say(f"{what:<12} {name} ({time.monotonic() - began:.1f} s) {says[:300]}".rstrip())
    say(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return 1 if counts["different"] or counts["over"] else 0


if __name__ == "__main__":
    sys.exit(main())
