"""What the engine costs as the number of operations grows: recording, replaying, planning, memory.

    PYTHONPATH=src python benchmarks/scaling.py

Problem: a cost that grows faster than the step is invisible in small networks and fatal in large
ones. Two kinds of step, a chain with skips and a transformer, run on tiny tensors, so that hardly
anything but overhead is left. Per operation of the forward:

- record: the forward under a planned budget that keeps everything, less the plain forward;
- keep all: the same for the whole step, so including the answers to autograd's requests;
- idle: the whole step under a limit of more than twice its peak, which is not recorded at all;
- replay: a step that recomputes everything in one region, less the plain step and a plain forward;
- bytes: host memory with the graph of a forward alive, less what the plain graph takes;
- first step: a budget's first step, unplanned and watched; next: the planning between two steps;
- dry run, solve: `lowtide.plan` for half of the plain peak: its dry run and its search.

The figures of steps are for planned steps that are not measured. `--long` shows what training pays
in the mean of its first 1,000 steps, which are measured now and then, and planned again beside.

The last table is the same for DenseNet121: everything kept, recorded and idle.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import engine
from models import WORKLOADS, arguments, clear, learn, markdown, results, settle, timed_step, turns

SIZES = (100, 300, 1_000, 3_000, 10_000, 30_000)
_PATIENCE = 40.0  # seconds: if one size takes longer, the next is left out

Forward = Callable[[], Tensor]


# ---------------------------------------------------------------------------- steps


class Chain(nn.Module):
    """A chain of elementwise operations; every tenth adds the input from ten before."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.operations = operations
        self.start = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        x = skip = self.start
        for index in range(1, self.operations + 1):
            if index % 10:
                x = x.sin()
            else:
                x = skip = x + skip
        return x.sum()


class Transformer(nn.Module):
    """Encoder layers of width 8 on four tokens."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        count = max(1, round(operations / 24))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))
        self.register_buffer("x", torch.randn(1, 4, 8))

    def forward(self) -> Tensor:
        x = self.x
        for layer in self.layers:
            x = layer(x)
        return x.sum()


ROOM = "10 GiB"  # so much that steps are not recorded, once they were a few times
_LITTLE_ROOM = 1.5  # times the plain peak: everything is kept, and every step recorded
_UNTIL_IDLE = 12  # steps
_TAPES = ("kept", "idle")


def under(budget: lowtide.Budget, net: nn.Module) -> Callable[[], None]:
    def step() -> None:
        with budget:
            loss = net()
        loss.backward()

    return step


def recording(net: nn.Module) -> lowtide.Budget:
    """A budget that keeps everything and records every step, once it has learned."""
    budget = lowtide.budget(ROOM)
    for _ in range(2):  # the second has gradients already
        under(budget, net)()
    peak = budget.report().plain_peak
    assert peak is not None
    budget = lowtide.budget(int(_LITTLE_ROOM * peak))
    learn(under(budget, net))
    return budget


KINDS = {"chain with skips": Chain, "transformer": Transformer}


def backward(forward: Forward) -> Callable[[], None]:
    return lambda: forward().backward()


# ---------------------------------------------------------------------------- figures


def seconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fastest time of each; anything above it is due to other load."""
    turns(runs, 2)
    return {name: min(spent) for name, spent in turns(runs, rounds).items()}


def engine_costs(net: nn.Module, budget: lowtide.Budget, rounds: int) -> dict[str, float]:
    """Microseconds per operation for recording and replaying. `budget` has learned."""
    count = budget.report().recorded_operations

    def recorded() -> None:
        with budget:
            net()

    idle = under(lowtide.budget(ROOM), net)
    for _ in range(_UNTIL_IDLE):
        idle()
    spent = seconds(
        {
            "forward": lambda: net(),
            "recorded": recorded,
            "plain": backward(net),
            "kept": under(budget, net),
            "idle": idle,
            "replayed": backward(lambda: lowtide.checkpoint(net)),
        },
        rounds,
    )
    micro = {name: value / count * 1e6 for name, value in spent.items()}
    return {
        "operations": count,
        "plain": micro["plain"],
        "record": micro["recorded"] - micro["forward"],
        "keep all": micro["kept"] - micro["plain"],
        "idle": micro["idle"] - micro["plain"],
        "replay": micro["replayed"] - micro["plain"] - micro["forward"],
    }


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def in_use() -> int:
    """Bytes of Python objects allocated since tracing began, and of the C library's heap."""
    gc.collect()
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Heap
    traced = tracemalloc.get_traced_memory()[0] - tracemalloc.get_tracemalloc_memory()
    return traced + read().uordblks


def bytes_of_records(net: nn.Module, budget: lowtide.Budget, operations: int) -> float:
    """Bytes per operation, with the graph of a forward alive."""

    def grown(around: AbstractContextManager[Any]) -> int:
        before = in_use()
        with around:
            held = net()
        after = in_use()
        held.backward()
        return after - before

    tracemalloc.start()
    try:
        taped, plain = grown(budget), grown(contextlib.nullcontext())
    finally:
        tracemalloc.stop()
    return (taped - plain) / operations


def long_run(net: nn.Module, limit: int | str, steps: int = 1_000) -> dict[str, float]:
    """Milliseconds of CPU time for a plain step, and for one in the mean of so many under a budget,
    with all searches for plans beside them; and the median, which shows none of that."""
    plain, each = [], []
    budget = lowtide.budget(limit)
    whole = time.process_time()
    spent_plain = 0.0
    for step in range(steps):
        began = time.process_time()
        if step % 10 == 0:  # plain steps in turns: the machine's speed varies
            net().backward()
            plain.append(time.process_time() - began)
            spent_plain += plain[-1]
            began = time.process_time()
        with budget:
            loss = net()
        loss.backward()
        each.append(time.process_time() - began)
    whole = time.process_time() - whole - spent_plain
    return {
        "plain": 1e3 * statistics.median(plain),
        "mean": 1e3 * whole / steps,
        "median": 1e3 * statistics.median(each),
        "measured": budget.report().measured_steps,
    }


def first_steps(net: nn.Module, count: int) -> dict[str, float]:
    """Microseconds per operation for a budget's first step and for planning the next."""
    budget = lowtide.budget("10 GiB")
    began = time.perf_counter()
    with budget:
        loss = net()
    loss.backward()
    ended = time.perf_counter()
    budget.report()  # learns from the step, as the start of the next step would
    planned = time.perf_counter()
    return {
        "first step": (ended - began) / count * 1e6,
        "next": (planned - ended) / count * 1e6,
    }


def planning(net: nn.Module, count: int) -> dict[str, float]:
    """Microseconds per operation for a dry run and for the search for a plan at half the peak."""
    began = time.perf_counter()
    plain = lowtide.plan(net)
    passed = time.perf_counter()
    limit = max(plain.minimum_peak, plain.peak // 2)
    least = time.perf_counter()
    plan = lowtide.plan(net, limit=limit)
    return {
        "dry run": (passed - began) / count * 1e6,
        "minimum": (least - passed) / count * 1e6,
        "solve": plan.solve_seconds / count * 1e6,
    }


# ---------------------------------------------------------------------------- tables


def scale(kind: str, way: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{kind}, engine: {way}; microseconds an operation\n")
    head = ("operations", "plain step", "record", "keep all", "idle", "replay", "bytes")
    print(markdown(head, []))
    for size in sizes:
        torch.manual_seed(0)
        net = KINDS[kind](size)
        row: dict[str, Any] = {"kind": kind, "engine": way}
        budget = recording(net)
        row |= engine_costs(net, budget, rounds if size < 10_000 else 2)
        row["bytes"] = bytes_of_records(net, budget, row["operations"])
        rows.append(row)
        cells = [f"{row[key]:.2f}" for key in head[2:-1]]
        cells.insert(0, f"{row['plain']:.2f}")
        cells.append(f"{row['bytes']:.0f}")
        print(f"| {row['operations']} | " + " | ".join(cells) + " |", flush=True)
    return rows


def scale_planning(kind: str, sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{kind}: planning, microseconds an operation\n")
    keys = ("first step", "next", "dry run", "minimum", "solve")
    print(markdown(("operations", *keys), []))
    for size in sizes:
        torch.manual_seed(0)
        net = KINDS[kind](size)
        began = time.perf_counter()
        row = first_steps(net, size) | planning(net, size)
        rows.append({"kind": kind, "operations": size, **row})
        print(f"| {size} | " + " | ".join(f"{row[key]:.0f}" for key in keys) + " |", flush=True)
        if time.perf_counter() - began > _PATIENCE:
            print(f"\nlarger ones are left out: this one took over {_PATIENCE:.0f} s")
            break
    return rows


def over_many_steps(way: str, size: int, steps: int) -> list[dict[str, Any]]:
    rows = []
    print(f"\nThe mean of {steps} steps, engine: {way}; milliseconds\n")
    table = []
    for kind, make in KINDS.items():
        for share in (None, 0.7):
            torch.manual_seed(0)
            net = make(size)
            peak = lowtide.plan(net).plain_peak
            limit: int | str = ROOM if share is None else int(share * peak)
            try:
                row = long_run(net, limit, steps)
            except lowtide.BudgetError:  # nothing in this kind of step can be dropped
                continue
            rows.append({"kind": kind, "engine": way, "share": share, **row})
            added = [f"{100 * (row[key] / row['plain'] - 1):+.0f} %" for key in ("median", "mean")]
            whose = "all kept" if share is None else f"{share:.0%} of the plain peak"
            cells = (f"{row['plain']:.2f}", f"{row['median']:.2f}", f"{row['mean']:.2f}", *added)
            table.append((kind, whose, *cells, str(row["measured"])))
    head = ("step", "limit", "plain", "median", "mean", "median", "mean", "steps measured")
    print(markdown(head, table))
    return rows


def keep_all_over_densenet(way: str, rounds: int) -> dict[str, Any]:
    """Seconds of a plain step, of one that is recorded and keeps everything, and of an idle one."""
    work = WORKLOADS["densenet121"]
    model, batch = work.make(), work.batch()
    roomy = lowtide.budget(ROOM)
    idle = timed_step(work, model, batch, roomy)
    for _ in range(_UNTIL_IDLE):
        idle()
        settle()
    peak = roomy.report().plain_peak
    assert peak is not None
    kept = timed_step(work, model, batch, lowtide.budget(int(_LITTLE_ROOM * peak)))
    learn(kept)
    spent = turns({"plain": timed_step(work, model, batch), "kept": kept, "idle": idle}, rounds)
    clear(model)
    return {
        "engine": way,
        "plain": statistics.median(spent["plain"]),
        **{name: shares(spent[name], spent["plain"]) for name in _TAPES},
    }


def shares(spent: list[float], plain: list[float]) -> tuple[float, float, float]:
    """The share of the plain step that another one adds: the median of pairs, and quartiles."""
    added = sorted(mine / other - 1 for mine, other in zip(spent, plain, strict=True))
    return statistics.median(added), added[len(added) // 4], added[-1 - len(added) // 4]


def ways(wanted: list[str]) -> list[str]:
    """The engines that are available here."""
    found = []
    for way in wanted:
        try:
            with engine.use(way):
                found.append(way)
        except lowtide.UsageError as error:
            print(error)
    return found


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__ or "", models=False)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--engines", nargs="+", default=["python", "compiled"])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--no-planning", action="store_true")
    parser.add_argument("--long", action="store_true", help="the mean of 1,000 steps, and no more")
    options = parser.parse_args()
    rounds = 3 if options.quick else 7
    sizes = options.sizes[:4] if options.quick else options.sizes
    with results(options) as rows:
        if options.long:
            for way in ways(options.engines):
                with engine.use(way):
                    rows += over_many_steps(way, 300, 200 if options.quick else 1_000)
            return
        for way in ways(options.engines):
            with engine.use(way):
                for kind in options.kinds:
                    rows += scale(kind, way, sizes, rounds)
        if not options.no_planning:
            for kind in options.kinds:
                rows += scale_planning(kind, sizes)
        print("\nDenseNet121 with everything kept\n")
        table = []
        for way in ways(options.engines):
            with engine.use(way):
                row = keep_all_over_densenet(way, 9 if options.quick else 41)
            rows.append(row)
            cells = (
                "{:.1f} % ({:.1f} to {:.1f})".format(*(100 * x for x in row[name]))
                for name in _TAPES
            )
            table.append((way, f"{row['plain']:.3f}", *cells))
        print(
            markdown(
                ("engine", "plain, s", "recorded adds (quartiles of pairs)", "idle adds"), table
            )
        )


if __name__ == "__main__":
    main()
