"""A step as a memory snapshot: its sums are the timeline's, and its blocks do not overlap."""

from __future__ import annotations

import json
import pickle
import pickletools
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.cuda import _memory_viz

import lowtide
from lowtide import cli
from lowtide.analysis.study import Study, study
from lowtide.analysis.timeline import Reader
from lowtide.errors import DryRunWarning, UsageError
from lowtide.export.snapshot import PICKLE_PROTOCOL, _changes, snapshot
from lowtide.plans import Plan
from lowtide.tracing import memory_snapshot
from once import on_one_recorder
from test_dryrun import STEPS
from test_see import wide


def asks() -> tuple[Any, tuple[Any, ...]]:
    """A step that reads the content of an activation, so that a real one is recorded."""
    model = wide(3)

    def step(x: Tensor) -> Tensor:
        out = model(x).square().mean()
        return out if out.item() < 1e9 else -out

    return step, (torch.randn(64, 32),)


def studied(name: str) -> Study:
    function, args = {**STEPS, "asks": asks}[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DryRunWarning)
        return study(function, args, halve=False)


def planned(subject: Study, share: float | None) -> Plan:
    try:
        return subject.plan(share)
    except lowtide.BudgetError as error:
        return subject.plan(error.minimum)


def went_through(made: dict[str, Any]) -> tuple[int, dict[int, int], dict[int, int]]:
    """The peak of the events, the bytes at the end of each clock tick, and the blocks left at the
    end (address, size). Checks that no blocks overlap and that only live blocks are freed."""
    [segment], [events] = made["segments"], made["device_traces"]
    first, last = segment["address"], segment["address"] + segment["total_size"]
    live: dict[int, int] = {}
    total = peak = 0
    levels: dict[int, int] = {}
    asked = None
    for event in events[1:]:
        address, size = event["addr"], event["size"]
        assert size > 0
        if event["action"] == "alloc":
            assert first <= address
            assert address + size <= last
            assert all(a + n <= address or address + size <= a for a, n in live.items())
            live[address] = size
            total += size
        elif event["action"] == "free_requested":
            assert live[address] == size
            asked = address
        else:
            assert event["action"] == "free_completed"
            assert address == asked
            total -= live.pop(address)
        peak = max(peak, total)
        levels[event["time_us"]] = total
    return peak, levels, live


@on_one_recorder
@pytest.mark.parametrize("share", [None, 0.7])
@pytest.mark.parametrize("name", [*STEPS, "asks"])
def test_the_events_are_the_timeline_to_the_byte(name: str, share: float | None) -> None:
    subject = studied(name)
    plan = planned(subject, share)
    line = subject.timeline(plan)
    made = snapshot(subject, plan)
    peak, levels, left = went_through(made)
    assert peak == line.peak == plan.peak
    level = 0
    for place, moment in enumerate(line.moments):
        level = levels.get(place * 1000, level)  # a moment that changes nothing has no event
        assert level == moment.total
    kinds = Counter(e.get("category") for e in made["device_traces"][0])
    assert bool(kinds["recomputed"]) == bool(plan.overhead)
    if name != "asks":
        assert kinds["temporary"] > 0
    gradients = sum(nbytes for nbytes, _, _ in subject.ledger.gradients)
    assert sum(left.values()) == gradients > 0


def rotary() -> tuple[Any, tuple[Any, ...]]:
    """Rotated queries and keys: sums that are kept, of products that are not."""
    layers = nn.ModuleList(nn.Linear(32, 64) for _ in range(4))
    cosine, sine = torch.rand(2, 16, 32)

    def turned(x: Tensor) -> Tensor:
        return x * cosine + torch.cat((-x[..., 16:], x[..., :16]), -1) * sine

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            query, key = layer(x).chunk(2, -1)
            x = x + F.scaled_dot_product_attention(turned(query), turned(key), x)
        return x.square().mean()

    return step, (torch.randn(4, 2, 16, 32),)


@pytest.mark.parametrize("share", [None, 0.6])
@pytest.mark.parametrize("make", [rotary, STEPS["attention"]])
def test_a_block_that_was_freed_does_not_come_back(make: Any, share: float | None) -> None:
    function, args = make()
    subject = study(function, args, halve=False)
    retention = planned(subject, share).retention
    allocated = [
        life
        for _, begins, life in _changes(Reader(subject.step, subject.ledger, retention))
        if begins
    ]
    assert len(allocated) == len(set(allocated)) > 50


def test_the_end_is_what_the_segment_holds() -> None:
    subject = studied("attention")
    made = snapshot(subject, subject.plain)
    [segment] = made["segments"]
    _, _, left = went_through(made)
    blocks = segment["blocks"]
    place = segment["address"]
    for block in blocks:
        assert block["address"] == place
        place += block["size"]
    assert place == segment["address"] + segment["total_size"]
    held = {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
    assert held == left
    assert segment["allocated_size"] == sum(left.values())
    names = {f["name"] for b in blocks for f in b["frames"] if "gradient of" in f["name"]}
    assert "float32[192, 64] gradient of 0.qkv.weight" in names


def test_frames_name_what_was_made_operator_line_and_module() -> None:
    model = wide(2)
    here = test_frames_name_what_was_made_operator_line_and_module.__code__.co_firstlineno

    def step(x: Tensor) -> Tensor:
        return model(x.exp()).square().mean()

    subject = study(step, (torch.randn(16, 32, requires_grad=True),), halve=False)
    made = snapshot(subject, subject.plain)
    frames = [e["frames"] for e in made["device_traces"][0] if e["action"] == "alloc"]
    [exp] = [f for f in frames if f[1]["name"] == "aten::exp"]
    assert [f["name"] for f in exp] == ["float32[16, 32]", "aten::exp", "(outside of modules)"]
    assert exp[1]["filename"].endswith("test_snapshot.py")
    assert exp[1]["line"] == here + 5
    assert ["aten::gelu", "0.1"] in [[f["name"] for f in stack[1:]] for stack in frames]


# The fields that MemoryViz.js reads, and their types.
_EVENT = {"action": str, "addr": int, "size": int, "stream": int, "frames": list, "time_us": int}
_SEGMENT = {"device": int, "address": int, "total_size": int, "stream": int, "blocks": list}
_BLOCK = {"size": int, "requested_size": int, "state": str, "frames": list}
_FRAME = {"filename": str, "line": int, "name": str}
_SIZES = {"allocated_size": int, "active_size": int, "segment_type": str}


def has(record: dict[str, Any], fields: dict[str, type]) -> bool:
    return all(type(record[name]) is kind for name, kind in fields.items())


def test_it_has_every_field_that_the_viewer_reads() -> None:
    subject = studied("convolutions")
    made = snapshot(subject, planned(subject, 0.7))
    [segment], [events] = made["segments"], made["device_traces"]
    assert has(segment, {**_SEGMENT, **_SIZES})
    assert all(has(block, _BLOCK) for block in segment["blocks"])
    assert {b["state"] for b in segment["blocks"]} <= {"active_allocated", "inactive"}
    assert all(has(event, _EVENT) for event in events)
    assert all(has(frame, _FRAME) for event in events for frame in event["frames"])
    clocks = [event["time_us"] for event in events]
    assert clocks == sorted(clocks)
    # The viewer fails if this category is missing.
    assert "unknown" in {event.get("category") for event in events}
    assert all(("category" in e) == e["action"].endswith("alloc") for e in events)
    # Its pickle reader knows only these opcodes.
    codes = {code.name for code, _, _ in pickletools.genops(pickle.dumps(made, PICKLE_PROTOCOL))}
    assert codes <= {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "EMPTY_DICT",
        "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS", "TUPLE2", "BININT", "BININT1",
        "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE",
    }  # fmt: skip


def test_torch_accepts_it(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    function, args = STEPS["attention"]()
    memory_snapshot(path, function, *args, limit=0.8)
    made = pickle.loads(path.read_bytes())
    [segment] = made["segments"]
    stats = _memory_viz.segsum(made)
    assert "segments: 1\n" in stats
    assert f"total_reserved: {_memory_viz._format_size(segment['total_size'])}" in stats
    said = _memory_viz.trace(made)
    assert f"{len(made['device_traces'][0])} entries" in said
    assert "MEM[" not in said  # every block is inside the segment
    for flames in (_memory_viz.memory, _memory_viz.segments):
        assert "0.qkv;" in flames(made, format_flamegraph=str)
    assert "snapshot.pickle" in _memory_viz.trace_plot(made)
    rest = _memory_viz.filter_alloc_free_pairs(made)["device_traces"][0]
    assert sum(e["size"] for e in rest if e["action"] == "alloc") == segment["allocated_size"]


def test_a_limit_makes_it_the_planned_step(tmp_path: Path) -> None:
    function, args = STEPS["attention"]()
    for limit in (None, 0.8):
        path = tmp_path / f"{limit}.pickle"
        memory_snapshot(path, function, *args, limit=limit)
        peak, _, _ = went_through(pickle.loads(path.read_bytes()))
        assert peak == lowtide.plan(function, *args, limit=limit).peak


def test_a_step_without_memory_is_an_empty_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    memory_snapshot(path, lambda x: x, torch.ones(2))
    made = pickle.loads(path.read_bytes())
    assert made == {"segments": [], "device_traces": [[]]}
    assert "segments: 0" in _memory_viz.segsum(made)


def test_what_is_wrong_is_said_with_the_way_out(tmp_path: Path) -> None:
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    path = tmp_path / "there.pickle"
    path.write_text("precious")
    with pytest.raises(UsageError, match=r"there.pickle exists and is not overwritten. Name an"):
        memory_snapshot(path, model, batch)
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match=r"cannot write .*: No such file or directory. Name an"):
        memory_snapshot(tmp_path / "no" / "x.pickle", model, batch)
    with pytest.raises(lowtide.BudgetError, match="The smallest"):
        memory_snapshot(tmp_path / "x.pickle", model, batch, limit=1)
    assert not (tmp_path / "x.pickle").exists()


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ["torch.nn:Linear", "--shape", "8x16", "--set", "in_features=16"]
    line = ["snapshot", *shape, "--set", "out_features=4", "--json"]
    assert cli.main(line) == 0
    printed = json.loads(capsys.readouterr().out)
    written = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert printed == json.loads(json.dumps(written))
    assert written["device_traces"][0]
