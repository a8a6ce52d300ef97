"""What one checkpointed call costs on tiny tensors: plain, torch's non-reentrant, lowtide.

On tensors this small only the time of Python and of the dispatcher matters. The contenders run in
turns, on one thread, and the medians of CPU time are compared. "Forward twice" is the plain step
with a second forward that autograd does not see: recomputation by an engine without any overhead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from models import arguments, interleave, markdown, results


def cases() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return {
        "3-layer MLP": (mlp, torch.randn(4, 8, requires_grad=True)),
        "TransformerEncoderLayer": (layer, torch.randn(2, 4, 16, requires_grad=True)),
    }


def repeat(forward: Callable[[], Tensor], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            forward().sum().backward()

    return run


def again(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        module(x)
    out: Tensor = module(x)
    return out


def contenders(module: nn.Module, x: Tensor, count: int) -> dict[str, Callable[[], object]]:
    return {
        "plain": repeat(lambda: module(x), count),
        "twice": repeat(lambda: again(module, x), count),
        "torch": repeat(lambda: torch_checkpoint(module, x, use_reentrant=False), count),
        "lowtide": repeat(lambda: lowtide.checkpoint(module, x), count),
    }


def main() -> None:
    options = arguments(__doc__ or "", models=False).parse_args()
    count, rounds = (30, 9) if options.quick else (100, 31)
    table = []
    with results(options) as rows:
        for name, (module, x) in cases().items():
            runs = contenders(module, x, count)
            interleave(runs, 2)  # warm up
            spent = interleave(runs, rounds)
            micro = {key: seconds / count * 1e6 for key, seconds in spent.items()}
            ratio = micro["lowtide"] / micro["torch"]
            rows.append({"case": name, **micro, "ratio": ratio})
            cells = [f"{value:.0f}" for value in micro.values()]
            table.append([name, *cells, f"{ratio:.2f}", "yes" if ratio <= 1 else "NO"])
        head = ("forward and backward, microseconds", "plain", "forward twice", "torch", "lowtide")
        print(markdown((*head, "lowtide / torch", "goal <= 1"), table))


if __name__ == "__main__":
    main()
