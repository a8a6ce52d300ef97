"""A 3D vision transformer of vision_architectures at every training level, bit for bit.

The patches are of the MNI152 template at 2 mm that nilearn ships: real data, nothing is downloaded.
`lowtide.ActivationCheckpointing` is put in the place of the library's class of that name before its
nets are imported; the nets are not touched, and take their `checkpointing_level` as ever.

    pip install --no-deps vision-architectures loguru munch
    python examples/levels_vit.py
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
import vision_architectures.utils.activation_checkpointing as theirs
from nilearn import datasets
from torch import Tensor, nn

import lowtide
from lowtide.limits import format_bytes

theirs.ActivationCheckpointing = lowtide.ActivationCheckpointing

from vision_architectures.nets.vit_3d import ViT3DEncoderWithPatchEmbeddings  # noqa: E402


def patches(count: int, size: int) -> Tensor:
    """Cubes of the brain, mean 0, (count, 1, size, size, size)."""
    scan = datasets.load_mni152_template(resolution=2).get_fdata(dtype=np.float32)
    scan = torch.from_numpy((scan - scan.mean()) / scan.std())
    corners = np.linspace(20, 60 - size // 2, count).astype(int)
    return torch.stack([scan[c : c + size, c : c + size, c : c + size] for c in corners])[:, None]


def build(options: argparse.Namespace, level: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = ViT3DEncoderWithPatchEmbeddings(
        {
            "dim": options.width,
            "num_heads": 4,
            "mlp_ratio": 4,
            "layer_norm_eps": 1e-6,
            "attn_drop_prob": 0.1,
            "proj_drop_prob": 0.1,
            "mlp_drop_prob": 0.1,
            "encoder_depth": options.depth,
            "patch_size": (4, 4, 4),
            "in_channels": 1,
            "num_class_tokens": 1,
        },
        checkpointing_level=level,
    )
    return model.train()


def step(model: nn.Module, images: Tensor) -> tuple[list[Tensor], int]:
    """Loss and gradients of a step, and its peak in bytes above what stood before."""
    losses: list[Tensor] = []

    def run() -> None:
        model.zero_grad()
        torch.manual_seed(1)
        tokens = model(images, spacings=torch.ones(len(images), 3))[0]
        loss = tokens.square().mean()
        loss.backward()
        losses.append(loss.detach())

    run()  # what is made once is not part of the peak
    model.zero_grad()
    peak = lowtide.measure(run, device="cpu").peak_bytes
    return [losses[-1], *(p.grad for p in model.parameters() if p.grad is not None)], peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=2)
    parser.add_argument("--size", type=int, default=24, help="of a patch, in voxels of 2 mm")
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums keep one order

    images = patches(options.patches, options.size)
    expected, plain_peak = step(build(options, 0), images)
    identical, peaks = True, [plain_peak]
    print(f"level 0: {format_bytes(plain_peak)}")
    for level in range(1, 6):
        found, peak = step(build(options, level), images)
        identical &= len(found) == len(expected) and all(map(torch.equal, expected, found))
        peaks.append(peak)
        print(f"level {level}: {format_bytes(peak)}")
    lower = min(peaks) < plain_peak
    answers = {True: "yes", False: "NO"}
    print(f"\nlosses and gradients identical at every level: {answers[identical]}")
    print(f"a level takes less than the plain step:        {answers[lower]}")
    return 0 if identical and lower else 1


if __name__ == "__main__":
    sys.exit(main())
