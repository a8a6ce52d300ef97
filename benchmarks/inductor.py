"""Compiled steps under a limit of lowtide's, and under torch's own `activation_memory_budget`.

torch's ratio is swept; the measured peak of its compiled step is given to `lowtide.CompileBudget`
as the limit. Both steps then run in turns in one process, and the last figure is the median of the
ratios of their CPU seconds in each turn. At a ratio of 1 both run the same code: any difference is
noise. Ratios that lead to the same code are shown once.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from models import (
    WORKLOADS,
    Workload,
    arguments,
    clear,
    markdown,
    mebibytes,
    results,
    turns,
)

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
EQUAL = 1.02  # times torch's time: smaller differences are noise


class Residual(nn.Module):
    """A perceptron with residuals: the kind of network that torch's ratio was designed for."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


MLP = Workload("mlp", Residual, lambda: (torch.randn(2048, 256),), square, lambda model: [])
ALL = {MLP.name: MLP, **WORKLOADS}


def step_of(
    work: Workload, model: nn.Module, batch: Any, backend: Any, ratio: float
) -> Callable[[], object]:
    """A compiled step of forward, loss and backward, already warmed up."""
    with torch._functorch.config.patch(activation_memory_budget=ratio):
        compiled = torch.compile(lambda given: work.loss(model, given), backend=backend)

        def step() -> None:
            clear(model)
            compiled(batch).backward()

        for _ in range(2):
            step()
    return step


def peak_of(step: Callable[[], object], model: nn.Module) -> int:
    clear(model)
    return lowtide.measure(step, device="cpu").peak_bytes


def compare(work: Workload, compiler: str, ratio: float, plain: Any, rounds: int) -> dict[str, Any]:
    # Only here: a reset between the two would compile torch's step again, at another ratio.
    torch._dynamo.reset()
    model, batch = plain
    theirs_model, ours_model = copy.deepcopy(model), copy.deepcopy(model)
    theirs = step_of(work, theirs_model, batch, compiler, ratio)
    limit = peak_of(theirs, theirs_model)
    row: dict[str, Any] = {"model": work.name, "ratio": ratio, "limit": limit}
    backend = lowtide.CompileBudget(limit, compiler=compiler)
    began = time.perf_counter()
    try:
        ours = step_of(work, ours_model, batch, backend, 1.0)
    except lowtide.BudgetError as error:
        return {**row, "minimum": error.minimum}
    row["compile"] = time.perf_counter() - began
    row["peak"] = peak_of(ours, ours_model)
    spent = turns({"torch": theirs, "lowtide": ours}, rounds)
    row |= {name: statistics.median(times) for name, times in spent.items()}
    pairs = zip(spent["lowtide"], spent["torch"], strict=True)
    row["share"] = statistics.median(mine / torchs for mine, torchs in pairs)
    if (after := peak_of(theirs, theirs_model)) != limit:
        raise AssertionError(
            f"torch's step is not the one of its ratio: {after}, not {limit} bytes"
        )
    row["report"] = str(backend.report())
    return row


def cells(row: dict[str, Any]) -> list[str]:
    start = [row["model"], f"{row['ratio']:g}", mebibytes(row["limit"])]
    if "peak" not in row:
        return [*start, f"refused, at least {mebibytes(row['minimum'])}", "", "", "", "NO"]
    over = "!" if row["peak"] > row["limit"] else ""
    met = "yes" if row["share"] <= EQUAL and not over else "NO"
    return [
        *start,
        mebibytes(row["peak"]) + over,
        f"{row['torch']:.3f}",
        f"{row['lowtide']:.3f}",
        f"{row['share']:.2f}",
        met,
    ]


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--models", nargs="+", choices=ALL, default=["mlp", "gpt2", "vit"])
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    options = parser.parse_args()
    rounds = 5 if options.quick else 25
    head = (
        "network",
        "torch's ratio",
        "torch's peak = limit, MiB",
        "lowtide's peak (!: over)",
        "torch, s",
        "lowtide, s",
        "lowtide / torch",
        "no slower",
    )
    with results(options) as rows:
        print(markdown(head, []), flush=True)
        for name in options.models:
            work = ALL[name]
            plain = work.make(), work.batch()
            seen: set[int] = set()
            for ratio in options.ratios:
                row = compare(work, options.compiler, ratio, plain, rounds)
                if row["limit"] not in seen:
                    seen.add(row["limit"])
                    rows.append(row)
                    print("| " + " | ".join(cells(row)) + " |", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
