"""The checks: functions that return what they saw, raise, or skip what the device cannot do.

Problem: promises about bits, limits, streams, waiting and errors may hold on the CPU and be broken
on a device. Invariant: a check compares with the plain step on the same device and fails if nothing
was recomputed, so none passes by doing nothing; if the plain step is not deterministic, it says so
instead. Imports place, nets. Rejected: tolerances.
"""

from __future__ import annotations

import functools
import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowtide
import lowtide.tracing
from device.nets import (
    NETS,
    PRECISIONS,
    Net,
    build,
    clear,
    differing,
    left_behind,
    same,
    step,
    train,
)
from device.place import MIB, Place, Skipped, capacity, peak, peak_by_torch, settle, waits
from lowtide.errors import UnsupportedError

LEARN = 6  # after so many steps a budget measures only now and then
# How far a plan's peak may be from the measured one, as shares of the plain peak. An allocator's
# counters do not tell whether memory was freed before or after an allocation, so a plan errs to the
# high side.
TOO_LOW, TOO_HIGH = 0.005, 0.05
ROUNDED = 0.02  # the same, too low, for tiny nets: blocks are rounded up to 512 bytes
SHARES = (0.1, 0.25, 0.4, 0.6, 0.7, 0.73)  # of the plain peak, for which the device has room
SHARE = 0.75  # of the plain peak, in the checks that are not about limits
REFUSALS = 5
Check = Callable[[Place], str]
At = tuple[str, int] | None  # a device and its stream; None: a factory


@contextmanager
def replayed() -> Iterator[list[At]]:
    """The places (`At`) of the operations that are replayed inside, not the operations themselves,
    which would hold memory."""
    found: list[At] = []

    def note(operations: list[Any]) -> None:
        found.extend(
            None if op.stream is None else (str(op.stream.device), op.stream.stream_id)
            for op in operations
        )

    lowtide.replay.listeners.append(note)
    try:
        yield found
    finally:
        lowtide.replay.listeners.remove(note)


# ------------------------------------------------------------------------------ bits

_references: dict[tuple[str, str], list[Tensor]] = {}


def reference(place: Place, kind: str, precision: str) -> list[Tensor]:
    """The results of plain steps, which do not depend on the recorder."""
    found = _references.get((kind, precision))
    if found is None:
        found = train(place, kind, precision)
        if not same(found, train(place, kind, precision)):
            raise AssertionError("the plain step is not deterministic here: nothing to compare")
        _references[kind, precision] = found
    return found


def bits(place: Place, kind: str, how: str, precision: str) -> str:
    if precision == "bf16" and place.kind == "cuda" and not torch.cuda.is_bf16_supported():
        raise Skipped("this card has no bf16")
    plain = reference(place, kind, precision)
    with replayed() as operations:
        if how == "checkpoint":
            other = train(place, kind, precision, lowtide.checkpoint)
        else:
            other = within(lambda limit: train(place, kind, precision, limit=limit))
    return equal(plain, other, operations)


def equal(plain: list[Tensor], other: list[Tensor], operations: list[At]) -> str:
    """What to say of two runs with the same bits, in the second of which something was replayed."""
    wrong = differing(plain, other)
    if wrong:
        raise AssertionError(f"{wrong} of {len(plain)} tensors differ")
    if not operations:
        raise AssertionError("nothing was recomputed")
    return f"{len(plain)} tensors equal, {len(operations)} operations replayed"


def within(run: Callable[[lowtide.Budget], list[Tensor]]) -> list[Tensor]:
    """What a run leaves under `SHARE` of the plain peak, or under the smallest limit that is not
    refused: memory that a second stream has read is freed late, and how late depends on timing."""
    asked: float | int = SHARE
    for _ in range(REFUSALS):
        try:
            return run(lowtide.budget(asked))
        except lowtide.BudgetError as error:
            if error.minimum <= asked:
                raise
            asked = error.minimum
    raise AssertionError(f"refused {REFUSALS} times, at last at {asked} bytes, which was named")


# ------------------------------------------------------------------------------ limits


def limits(place: Place, kind: str, share: float) -> str:
    """Limits hold from the first step on, and the plan's peak agrees with torch's own counters."""
    net = build(place, kind)
    x = net.example()

    def cleared(count: Callable[[Place, Callable[[], object]], int], limit: Any = None) -> int:
        clear(net)
        taken = count(place, lambda: step(net, x, limit))
        settle()
        return taken

    step(net, x)  # kernels and workspaces are loaded once
    plain = max(cleared(peak) for _ in range(2))
    allowed = int(share * plain)
    limit = lowtide.budget(allowed)
    peaks = [cleared(peak, limit) for _ in range(LEARN)]
    took = cleared(peak_by_torch, limit)
    said = ", ".join(f"{p / MIB:.2f}" for p in [*peaks, took])
    if max(*peaks, took) > allowed:
        raise AssertionError(f"limit {allowed / MIB:.2f} MiB, measured {said} MiB")
    report = limit.report()
    if report.planned_peak is None or not report.planned:
        raise AssertionError(f"after {LEARN + 1} steps there is no plan")
    off = (report.planned_peak - took) / plain
    if not -(ROUNDED if place.quick else TOO_LOW) <= off <= TOO_HIGH:
        raise AssertionError(
            f"planned {report.planned_peak / MIB:.2f}, measured {took / MIB:.2f} MiB of a plain "
            f"peak of {plain / MIB:.2f}"
        )
    return (
        f"plain {plain / MIB:.2f}, limit {allowed / MIB:.2f}, measured {said} MiB; "
        f"predicted to {off:+.2%} of the plain peak"
    )


# ------------------------------------------------------------------------------ waiting, streams


def learned(place: Place, net: Net, x: Tensor) -> lowtide.Budget:
    """A budget that has stopped measuring."""
    clear(net)
    plain = peak(place, lambda: step(net, x))
    limit = lowtide.budget(int(SHARE * plain))
    for _ in range(LEARN):
        clear(net)
        step(net, x, limit)
        settle()
    return limit


def no_waiting(place: Place, kind: str) -> str:
    """Neither a planned step nor a region makes the host wait for the device."""
    net = build(place, kind)
    x = net.example()
    step(net, x)
    limit = learned(place, net, x)
    torch.accelerator.synchronize(place.device)

    def waited(limit: Any = None) -> int:
        clear(net)
        return waits(place, lambda: step(net, x, limit))

    try:
        plain = waited()
    except (RuntimeError, AssertionError) as error:
        raise AssertionError(f"the plain step waits by itself: {error}") from error
    with replayed() as operations:
        for _ in range(3):
            found = waited(limit)
            if found > plain:
                raise AssertionError(f"a planned step waits {found} times, the plain one {plain}")
        by_plan = len(operations)
        net.call = lowtide.checkpoint
        found = waited()
    if found > plain:
        raise AssertionError(f"a region waits {found} times, the plain step {plain}")
    if not by_plan or len(operations) == by_plan:
        raise AssertionError("nothing was recomputed")
    return f"{len(operations)} operations replayed, and the host has waited {plain} times"


def streams(place: Place) -> str:
    """Replayed operations were recorded on both streams, and run there again."""
    net = build(place, "two streams")
    x = net.example()
    step(net, x)
    net.call = lowtide.checkpoint
    with replayed() as operations:
        step(net, x)
    here = torch.accelerator.current_stream(place.device)
    counted = Counter(at for at in operations if at is not None)
    if set(counted) != {(str(s.device), s.stream_id) for s in (here, net.side)}:
        raise AssertionError(f"replayed were operations of {sorted(counted)}")
    said = " and ".join(f"{number} of stream {at[1]}" for at, number in counted.items())
    return f"operations replayed: {said}; {kernels_there(place, net, x)}"


def kernels_there(place: Place, net: Net, x: Tensor) -> str:
    """On CUDA, by the profiler, `tanh` runs on the side stream each time."""
    if place.kind != "cuda":
        return "where their kernels ran is asked on cuda only"
    net.call = None
    plain = tanh_by_stream(kernels(lambda: step(net, x)))
    if not plain:
        return "the profiler shows no kernel of tanh"
    net.call = lowtide.checkpoint
    again = tanh_by_stream(kernels(lambda: step(net, x)))
    if set(again) != set(plain) or again.total() <= plain.total():
        raise AssertionError(f"tanh ran on streams {dict(plain)} plain, {dict(again)} with lowtide")
    return f"tanh ran {plain.total()} times plain and {again.total()} with lowtide, on one stream"


def kernels(run: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels that the device has run, from the profiler's trace."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]


def tanh_by_stream(events: list[dict[str, Any]]) -> Counter[int]:
    """How often the forward of tanh ran, by stream."""
    return Counter(
        int(event["args"]["stream"])
        for event in events
        if "tanh" in event["name"] and "backward" not in event["name"]
    )


# ------------------------------------------------------------------------------ errors


def out_of_memory(place: Place, how: str) -> str:
    """A step that does not fit raises as the plain one does, or makes room by itself; its bits and
    those of the next step are right."""
    call = lowtide.checkpoint if how == "checkpoint" else None
    net = build(place, "transformer")
    x = net.example()

    def one(limit: Any = None) -> list[Tensor]:
        clear(net)
        torch.manual_seed(7)
        return left_behind(net, step(net, x, limit))

    plain = one()
    clear(net)
    room = peak(place, lambda: step(net, x))
    net.call = call
    limit = None if call else lowtide.budget(int(SHARE * room))
    raised: Counter[str] = Counter()

    def fits(found: list[Tensor]) -> None:
        if not same(found, plain):
            raise AssertionError("a step that went on without the memory it asked for is wrong")

    for share in SHARES:
        clear(net)
        with capacity(place, int(share * room)):
            raised[attempt(net, lambda: fits(one(limit)))] += 1
        if not same(one(limit), plain):
            raise AssertionError(f"the step after one in {share:.0%} of the peak is wrong")
    if not raised["forward"] + raised["backward"]:
        raise AssertionError("no step ran out of memory")
    return (
        f"out of memory {raised['forward']} times in forward and {raised['backward']} in backward "
        f"of {raised.total()} steps; those that fitted and each next one are right"
    )


def attempt(net: Net, run: Callable[[], object]) -> str:
    """Where a step runs out of memory; what it leaves is freed when this function returns."""
    where = "forward"

    def forward_over(_: Tensor) -> None:
        nonlocal where
        where = "backward"

    def watch(module: Any, args: Any, out: Tensor) -> None:
        out.register_hook(forward_over)

    hook = net.register_forward_hook(watch)
    try:
        run()
    except torch.OutOfMemoryError:
        return where
    finally:
        hook.remove()
    return "nowhere"


# ------------------------------------------------------------------------------ CUDA alone


def snapshot(place: Place) -> str:
    """A step's snapshot for https://pytorch.org/memory_viz has the allocator's own events."""
    place.need("cuda", "an allocator's history")
    net = build(place, "conv net")
    x = net.example()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pickle"
        lowtide.tracing.memory_snapshot(path, lambda x: net(x).square().mean(), x, limit=0.7)
        page = torch.cuda._memory_viz.trace_plot(written := pickle.loads(path.read_bytes()))
    events = [event for trace in written["device_traces"] for event in trace]
    allocated = [event["size"] for event in events if event["action"] == "alloc"]
    if not allocated or not written["segments"] or "<html" not in page.lower():
        raise AssertionError(f"{len(events)} events, {len(written['segments'])} segments")
    return f"{len(allocated)} allocations of {sum(allocated) / MIB:.1f} MiB in all"


def capture(place: Place) -> str:
    """Regions and budgets are refused while a CUDA graph is captured, and work afterwards."""
    place.need("cuda", "the capture of a graph")
    net = build(place, "transformer")
    x = net.example()
    step(net, x)
    limit = lowtide.budget(SHARE)
    ways: list[Callable[[], object]] = [lambda: lowtide.checkpoint(net, x), limit.__enter__]
    refused = 0
    for way in ways:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                way()
            except UnsupportedError:
                refused += 1
    if refused < len(ways):
        raise AssertionError(f"{refused} of {len(ways)} were refused")
    step(net, x, limit)
    return "a region and a budget are refused, and the next step runs"


def all_checks() -> dict[str, Check]:
    """Checks by name, in the order in which they run."""
    found: dict[str, Check] = {}
    for kind in NETS:
        for precision in PRECISIONS:
            for how in ("checkpoint", "budget"):
                scaled = " + GradScaler" if precision == "fp16" else ""
                found[f"bits: {kind}, {how}, {precision}{scaled}"] = functools.partial(
                    bits, kind=kind, how=how, precision=precision
                )
    for kind in ("conv net", "transformer"):
        for share in (0.8, 0.6):
            found[f"limit: {kind}, {share:.0%}"] = functools.partial(limits, kind=kind, share=share)
    for kind in ("conv net", "transformer", "attention"):
        found[f"no waiting: {kind}"] = functools.partial(no_waiting, kind=kind)
    found["streams: replayed where recorded"] = streams
    for how in ("checkpoint", "budget"):
        found[f"out of memory: {how}"] = functools.partial(out_of_memory, how=how)
    found["memory snapshot of a planned step"] = snapshot
    found["capture of a CUDA graph"] = capture
    return found


def needs_determinism(name: str) -> bool:
    """Whether a check compares bits. cuDNN's attention repeats its bits too, but torch refuses it
    where deterministic algorithms are asked for."""
    return name.startswith(("bits", "out of memory")) and "CUDNN_ATTENTION" not in name
