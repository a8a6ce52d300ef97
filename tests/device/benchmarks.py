"""What a step costs, what an allocator wastes, and what one operation costs, side by side.

Problem: figures of different runs cannot be compared, and a lent device has ten minutes. Invariant:
contenders of one table run in turns in one process; each time is the median of its rounds, with
quartiles; every peak is the allocator's; and when its time is up, a benchmark ends with the rounds
it has. Imports networks, place. Rejected: timing by device events, which leave out what the host
does between kernels.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from device.networks import WORKS, Work
from device.place import Place, Skipped, capacity, fresh, peak, settle
from device.place import statistics as allocator
from lowtide import engine

LEARN = 6  # steps in which a budget learns a step
ROUNDS = 15
LEAST = 3  # rounds that are run however long they take
CAPS = (1.05, 1.1, 1.2, 1.3)  # of what is allocated at the highest
NAMED = ", what the refusal named"
LASTS = 0.05  # seconds that one turn takes at least, so that waiting at its end is negligible
TORCH = functools.partial(torch_checkpoint, use_reentrant=False)
Run = Callable[[], object]
Row = dict[str, Any]


def spread(times: list[float]) -> Row:
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return {"median": median, "first quartile": first, "third quartile": third}


def turns(place: Place, runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Wall seconds per call of each contender, one figure per round; each round starts with another
    contender.

    A turn has enough calls to last `LASTS` seconds, and waits for the device before and after.
    """
    settle()
    calls = {}
    for name, run in runs.items():
        once = _timed(place, run, 1)
        calls[name] = 1 if place.quick else max(1, min(50, round(LASTS / max(once, 1e-6))))
    spent: dict[str, list[float]] = {name: [] for name in runs}
    began, rounds = time.monotonic(), 2 if place.quick else ROUNDS  # quartiles take two
    for number in range(rounds):
        if number >= LEAST and time.monotonic() - began > seconds:
            break
        order = list(runs)
        at = number % len(order)
        for name in order[at:] + order[:at]:
            spent[name].append(_timed(place, runs[name], calls[name]))
    return spent


def _timed(place: Place, run: Run, calls: int) -> float:
    torch.accelerator.synchronize(place.device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    torch.accelerator.synchronize(place.device)
    return (time.perf_counter() - began) / calls


# ------------------------------------------------------------------------------ whole steps


def steps(place: Place, make: Callable[[Place], Work], seconds: float) -> Row:
    """Plain; per block with torch and with lowtide; and budgets: at the peak of torch's per-block
    step, and at 80 and 60 % of the plain peak."""
    torch.manual_seed(0)
    work = make(place)
    batch = work.batch(1.0)
    fresh(place)

    def under(call: Any, limit: Any = None) -> Run:
        def run() -> None:
            work.clear()
            work.call = call
            work.step(batch, limit)

        return run

    def counted(run: Run) -> int:
        work.clear()
        return peak(place, run)

    runs: dict[str, Run] = {
        "plain": under(None),
        "torch, per block": under(TORCH),
        "lowtide.checkpoint, per block": under(lowtide.checkpoint),
    }
    rows: dict[str, Row] = {}
    for name, run in runs.items():
        run()  # kernels and workspaces are loaded once
        rows[name] = {"peak": max(counted(run) for _ in range(2))}
    plain = rows["plain"]["peak"]
    bounds = {
        "lowtide.budget, at torch's peak": rows["torch, per block"]["peak"],
        "lowtide.budget, 80 %": int(0.8 * plain),
        "lowtide.budget, 60 %": int(0.6 * plain),
    }
    while bounds:
        name, bound = next(iter(bounds.items()))
        del bounds[name]
        limit = lowtide.budget(bound)
        run = under(None, limit)
        rows[name] = {"limit": bound}
        try:
            peaks = []
            for _ in range(LEARN // 2 if place.quick else LEARN):
                peaks.append(counted(run))
                settle()
        except lowtide.BudgetError as error:
            rows[name] |= {"refused": error.minimum, "peak": None}
            fresh(place)  # what the refused step made may stay in memory until it is collected
            if not name.endswith(NAMED):
                bounds = {name + NAMED: error.minimum, **bounds}
            continue
        report = limit.report()
        rows[name] |= {"peak": max(peaks), "peaks": peaks, "planned": report.planned_peak}
        runs[name] = run
    for name, times in turns(place, runs, seconds).items():
        rows[name] |= spread(times) | {"rounds": len(times)}
    for row in rows.values():
        if "median" in row:
            row["of plain"] = row["median"] / rows["plain"]["median"]
    return {"table": "steps", "of": work.name, "rows": rows}


def over(row: Row) -> list[str]:
    """The limits in a row of steps that were not kept, as text."""
    return [
        f"{name}: limit {one['limit']}, measured {one['peak']} bytes"
        for name, one in row["rows"].items()
        if one.get("peak") is not None and one["peak"] > one.get("limit", one["peak"])
    ]


# ------------------------------------------------------------------------------ the allocator


def fragmentation(place: Place, seconds: float) -> Row:
    """Reserved against allocated memory, over steps of one length and of changing lengths."""
    torch.manual_seed(0)
    work = WORKS["gpt"](place)
    count = 4 if place.quick else 30
    same = [1.0] * count
    changing = [1 - 0.5 * ((7 * number) % count) / count for number in range(count)]
    whole = work.batch(1.0)
    work.step(whole)
    work.clear()
    bound = int(0.6 * peak(place, lambda: work.step(whole)))
    rows: dict[str, Row] = {}
    began = time.monotonic()
    for what, shares in (("one length", same), ("changing lengths", changing)):
        for way in ("plain", "lowtide.budget, 60 %"):
            if time.monotonic() - began > seconds:
                rows[f"{way}, {what}"] = {"skipped": "no time was left"}
                continue
            limit = None if way == "plain" else lowtide.budget(bound)
            rows[f"{way}, {what}"] = found = _train(place, work, shares, limit)
            if limit is not None and "allocated" in found:
                rows |= _capped(place, work, shares, bound, what, found["allocated"])
    return {"table": "allocator", "of": work.name, "rows": rows}


def _capped(
    place: Place, work: Work, shares: list[float], bound: int, what: str, allocated: int
) -> dict[str, Row]:
    """The same under a cap, as on a device that is nearly full: the smallest of `CAPS` with which
    it ends."""
    rows: dict[str, Row] = {}
    fresh(place)
    for cap in CAPS:
        name = f"lowtide.budget, 60 %, {what}, at most {cap:g} of allocated"
        rows.clear()
        try:
            more = int(cap * allocated) - torch.accelerator.memory_reserved(place.device)
            with capacity(place, more):
                rows[name] = _train(place, work, shares, lowtide.budget(bound))
            break
        except torch.OutOfMemoryError as error:
            rows[name] = {"out of memory": str(error).partition(". ")[0]}
        except Skipped as reason:
            rows[name] = {"skipped": str(reason)}
            break
        finally:
            work.clear()
            fresh(place)
    return rows


def _train(place: Place, work: Work, shares: list[float], limit: Any) -> Row:
    optimizer = torch.optim.SGD(work.net.parameters(), 1e-3, momentum=0.9)
    fresh(place)
    before = allocator(place)
    allocated = reserved = 0
    try:
        for share in shares:
            work.clear()
            run = functools.partial(work.step, work.batch(share), limit)
            stood = torch.accelerator.memory_allocated(place.device)
            # For each step, as a measuring budget resets the peaks. Reserved memory only grows.
            allocated = max(allocated, stood + peak(place, run))
            reserved = max(reserved, torch.accelerator.memory_reserved(place.device))
            optimizer.step()
    except lowtide.BudgetError as error:
        return {"refused": error.minimum}
    after = allocator(place)
    found: Row = {"steps": len(shares), "allocated": allocated, "reserved": reserved}
    for key in ("retries", "ooms"):
        found[key] = after.get(key, 0) - before.get(key, 0)
    return found


# ------------------------------------------------------------------------------ one operation


def tiny(place: Place, seconds: float) -> Row:
    """Forward and backward of tiny nets, which take host time only, on each recorder."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Tanh() for _ in range(100)))
    mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    cases = {
        "100 x tanh": (chain, (4, 8)),
        "3-layer MLP": (mlp, (4, 8)),
        "TransformerEncoderLayer": (layer, (2, 4, 16)),
    }
    count = 2 if place.quick else 30
    rows: dict[str, Row] = {}
    for name, (net, shape) in cases.items():
        net.to(place.device)
        x = torch.randn(*shape, device=place.device, requires_grad=True)
        runs = _calls(net, x, count)
        for _ in range(LEARN // 2 if place.quick else LEARN):
            for run in runs.values():
                run()
                settle()
        spent = turns(place, runs, seconds / len(cases))
        rows[name] = {way: spread([time / count for time in times]) for way, times in spent.items()}
    return {"table": "tiny", "of": "forward and backward of one call", "rows": rows}


def _calls(net: nn.Module, x: Tensor, count: int) -> dict[str, Run]:
    runs: dict[str, Run] = {
        "plain": _repeated(lambda: net(x).sum().backward(), count),
        "torch": _repeated(lambda: TORCH(net, x).sum().backward(), count),
    }
    for way in recorders():
        region = _repeated(lambda: lowtide.checkpoint(net, x).sum().backward(), count)
        runs[f"lowtide.checkpoint, {way}"] = _on(way, region)
        runs[f"lowtide.budget, {way}"] = _on(way, _repeated(_budgeted(net, x), count))
    return runs


def _budgeted(net: nn.Module, x: Tensor) -> Run:
    """Under a limit that requires no dropping: the overhead of a budget alone."""
    limit = lowtide.budget("1 GiB", device=x.device)

    def run() -> None:
        with limit:
            loss = net(x).sum()
        loss.backward()

    return run


def _repeated(run: Run, count: int) -> Run:
    def several() -> None:
        for _ in range(count):
            run()

    return several


def _on(way: str, run: Run) -> Run:
    def there() -> None:
        with engine.use(way):
            run()

    return there


def recorders() -> list[str]:
    """The recorders that are available here."""
    try:
        with engine.use("compiled"):
            return ["python", "compiled"]
    except lowtide.UsageError:
        return ["python"]


def all_benchmarks() -> dict[str, Callable[[Place, float], Row]]:
    """Benchmarks by name, in the order in which they run; each gets the seconds that it has."""

    def of(make: Callable[[Place], Work]) -> Callable[[Place, float], Row]:
        return lambda place, seconds: steps(place, make, seconds)

    return {
        "tiny calls": tiny,
        **{f"steps: {name}": of(make) for name, make in WORKS.items()},
        "allocator": fragmentation,
    }
