"""What torch's convolutions on the CPU allocate, next to what lowtide's model predicts.

    PYTHONPATH=src python benchmarks/workspace.py --threads 1 2

One row per convolution, forward and backward, in KiB: the peak of the call, including its results.
The model is used to plan a first step, before anything was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lowtide
from lowtide.kernels.workspace import kernel_workspace

KIB = 1024


@dataclass(frozen=True)
class Convolution:
    batch: int
    channels: tuple[int, int]
    kernel: int
    stride: int
    size: int
    dims: int = 2
    transposed: bool = False
    first: bool = False
    """The first of a network: its input needs no gradient."""
    last: bool = False
    """Channels-last memory format."""

    def __str__(self) -> str:
        kind = "transposed " if self.transposed else ""
        layout = ", channels last" if self.last else ""
        into, out = self.channels
        return (
            f"{kind}{into}->{out}, kernel {self.kernel}, stride {self.stride}, "
            f"{self.batch} x {self.size}^{self.dims}{', first' if self.first else ''}{layout}"
        )

    def tensors(self) -> tuple[Tensor, Tensor]:
        into, out = self.channels
        x = torch.randn(self.batch, into, *[self.size] * self.dims)
        first, second = (into, out) if self.transposed else (out, into)
        weight = torch.randn(first, second, *[self.kernel] * self.dims)
        if self.last:
            layout = torch.channels_last if self.dims == 2 else torch.channels_last_3d
            x = x.to(memory_format=layout)
        return x, weight


CASES = [
    *(
        Convolution(2, pair, 3, 1, 32)
        for pair in ((64, 64), (128, 32), (24, 24), (48, 24), (16, 2))
    ),
    *(
        Convolution(3, pair, 3, 1, 16, dims=dims)
        for dims in (2, 3)
        for pair in ((1, 8), (2, 2), (4, 12), (12, 1), (17, 2))
    ),
    *(Convolution(1, (channels, 8), 3, 1, 64) for channels in (5, 8)),
    *(Convolution(2, pair, 3, 2, 32) for pair in ((64, 128), (24, 24))),
    *(Convolution(2, pair, 1, 1, 32) for pair in ((128, 128), (24, 3))),
    *(Convolution(2, (3, 64), 7, 2, 128, first=first) for first in (True, False)),
    Convolution(2, (3, 192), 16, 16, 112, first=True),
    Convolution(8, (512, 1024), 1, 2, 12),
    Convolution(2, (96, 96), 5, 1, 3, dims=3),
    *(Convolution(n, (16, 16), 3, 1, 32, dims=3) for n in (1, 2)),
    *(Convolution(n, (24, 24), 3, 1, 32, dims=3) for n in (1, 2)),
    *(Convolution(2, (96, 96), 3, 1, size, dims=3) for size in (2, 4)),
    *(Convolution(2, pair, 2, 2, 16, transposed=True) for pair in ((64, 32), (24, 24), (16, 2))),
    *(Convolution(3, pair, 2, 2, 12, 3, transposed=True) for pair in ((12, 2), (48, 8))),
    *(Convolution(2, pair, 3, 1, 32, transposed=True) for pair in ((64, 32), (32, 8))),
    Convolution(2, (64, 64), 3, 1, 32, last=True),
    Convolution(2, (32, 32), 3, 1, 16, dims=3, last=True),
]


def measured(call: Callable[[], object]) -> int:
    call()
    return lowtide.measure(call, device="cpu").peak_bytes


def row(case: Convolution) -> str:
    x, weight = case.tensors()
    aten = torch.ops.aten
    dims = case.dims
    options: tuple[Any, ...] = (
        [case.stride] * dims, [case.kernel // 2] * dims, [1] * dims, case.transposed, [0] * dims, 1
    )  # fmt: skip
    y = aten.convolution(x, weight, None, *options)
    gradient = torch.randn_like(y)
    mask = [not case.first, True, False]
    forward = measured(lambda: aten.convolution(x, weight, None, *options))
    backward = measured(
        lambda: aten.convolution_backward(gradient, x, weight, None, *options, mask)
    )
    args = (x, weight, None, *options)
    model = y.nbytes + kernel_workspace("aten::convolution", [x, weight], args, y.nbytes)
    made = weight.nbytes + (0 if case.first else x.nbytes)
    args = (gradient, x, weight, None, *options, mask)
    back = made + kernel_workspace("aten::convolution_backward", [gradient, x, weight], args, made)
    figures = (forward, model, backward, back)
    return f"| {case} | " + " | ".join(f"{figure / KIB:.0f}" for figure in figures) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    for threads in parser.parse_args().threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} threads, KiB\n")
        print("| convolution | forward | modelled | backward | modelled |\n" + "|---" * 5 + "|")
        for case in CASES:
            print(row(case), flush=True)


if __name__ == "__main__":
    main()
