"""What a planned step adds to each call of a training program, by the kind of call.

    PYTHONPATH=src python benchmarks/added_per_call.py

A chain of 40 such calls on a tiny tensor, under a budget that keeps everything, beside the same
chain alone: forward and backward, opening and closing the budget included. A chain of nothing shows
what these take. With one and a half times the plain peak as the limit every step is recorded; with
a limit far above it, steps are idle: their calls are only compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from models import arguments, interleave, markdown, results

CALLS = 40
LIMITS = {"recorded": 1.5, "idle": 1e6}  # times the plain peak
UNTIL_IDLE = 20  # steps

Call = Callable[[Tensor], Tensor]


def kinds() -> dict[str, Call]:
    weight = torch.randn(16, 16, requires_grad=True)
    own, fixed, out = torch.Generator(), torch.randn(16), torch.empty(16)
    return {
        "nothing": lambda x: x,
        "tanh": torch.tanh,
        "linear": lambda x: F.linear(x, weight),
        "in-place addition": lambda x: x.add_(0.1),
        "dropout": lambda x: F.dropout(x, 0.1),
        "times `torch.ones`": lambda x: x * torch.ones(x.shape),
        "times `torch.rand`": lambda x: x * torch.rand(x.shape),
        "the same, of a generator": lambda x: x * torch.rand(x.shape, generator=own),
        "plus `torch.add(..., out=)`": lambda x: x + torch.add(fixed, fixed, out=out),
    }


def chain(call: Call, start: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        x = start.sin()
        for _ in range(CALLS):
            x = call(x)
        return x.sum()

    return run


def budgeted(forward: Callable[[], Tensor], share: float) -> Callable[[], None]:
    budget = lowtide.budget(int(share * lowtide.plan(forward).plain_peak))

    def step() -> None:
        with budget:
            loss = forward()
        loss.backward()

    return step


def main() -> None:
    options = arguments(__doc__ or "", models=False).parse_args()
    rounds = 40 if options.quick else 400
    start, table = torch.randn(8, 16, requires_grad=True), []
    with results(options) as rows:
        for kind, call in kinds().items():
            forward = chain(call, start)
            runs = {"plain": lambda f=forward: f().backward()}
            runs |= {name: budgeted(forward, share) for name, share in LIMITS.items()}
            interleave(runs, UNTIL_IDLE)  # learn, and warm up
            micro = {name: spent * 1e6 for name, spent in interleave(runs, rounds).items()}
            rows.append({"kind": kind, **micro})
            added = [f"{(micro[name] - micro['plain']) / CALLS:.1f}" for name in LIMITS]
            table.append([kind, f"{micro['plain'] / CALLS:.1f}", *added])
        head = ("microseconds per call", "plain", "added by a recorded step", "by an idle one")
        print(markdown(head, table))


if __name__ == "__main__":
    main()
