"""The script for a real device (`tests/device`) runs, passes here, and notices what is wrong."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from device import check_device, checks, libraries, longer, nets, place
from device.place import Place, Skipped
from lowtide import engine
from once import on_one_recorder

pytestmark = [
    pytest.mark.filterwarnings("default"),  # as where the script runs
    on_one_recorder,  # it runs both by itself, and most of it is no recorder's
]
FOR_CUDA = {"memory snapshot of a planned step", "capture of a CUDA graph", *libraries.all_checks()}
FOR_CUDA |= {name for name in longer.all_checks() if "FSDP2" in name}
FOR_CUDA |= {
    name
    for name in checks.all_checks()
    if any(
        kind in name for kind in ("LSTM", "_ATTENTION", "MATH", "Triton")
    )  # cuDNN, choices of a kernel, and kernels of one's own
}


def here() -> Place:
    found = place.find(quick=True, minutes=5)
    assert found is not None
    return found


@pytest.mark.beside
def test_everything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All checks on the recorder under test, and every benchmark, at tiny sizes."""
    output, block = tmp_path / "results.json", tmp_path / "results.md"
    given = ["--quick", "--recorders", engine.name()]
    code = check_device.main([*given, "--output", str(output), "--markdown", str(block)])
    said = capsys.readouterr().out
    assert code == 0, said
    found = json.loads(output.read_text())
    assert {one["name"] for one in found["checks"]} > set(check_device.every_check())
    assert Counter(one["verdict"] for one in found["checks"])["FAILED"] == 0
    skipped = {one["name"]: one["says"] for one in found["checks"] if one["verdict"] == "skipped"}
    assert skipped.keys() == FOR_CUDA
    assert all(reason.endswith("is for cuda, this is emulated") for reason in skipped.values())
    assert set(found["skipped"]) <= {"steps: unet"}  # where there is no MONAI
    assert [bench["table"] for bench in found["benchmarks"]][:3] == ["tiny", "steps", "steps"]
    assert found["benchmarks"][-1]["table"] == "allocator"
    text = block.read_text()
    assert text.startswith(f"### emulated device, {found['date']}\n")
    assert "Tiny sizes (`--quick`)" in text
    for bench in found["benchmarks"]:
        assert f"**{bench['of']}" in text
    for row in found["benchmarks"][1]["rows"].values():
        assert "refused" in row or row["first quartile"] <= row["median"] <= row["third quartile"]


def test_what_there_is_no_time_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_device.main(["--quick", "--minutes", "0", "--only", "steps: gpt"]) == 0
    assert "skipped benchmark steps: gpt: no time was left" in capsys.readouterr().out


def test_a_check_that_fails_is_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(where: Place) -> str:
        raise AssertionError("3 of 4 tensors differ")

    monkeypatch.setattr(checks, "all_checks", lambda: {"a check": wrong})
    block = tmp_path / "results.md"
    given = ["--quick", "--recorders", "python", "--only", "a check", "--markdown", str(block)]
    assert check_device.main(given) == 1
    assert "failed: python recorder, a check: 3 of 4 tensors differ" in capsys.readouterr().out
    assert "- **Failed**, python recorder: a check: 3 of 4 tensors differ" in block.read_text()


def other_noise(function: Any, x: Tensor) -> Any:
    return torch_checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowtide, "checkpoint", other_noise)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ tensors differ"):
        checks.bits(here(), "transformer", "checkpoint", "fp32")


def test_a_check_in_which_nothing_was_recomputed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowtide, "checkpoint", lambda function, x: function(x))
    with pytest.raises(AssertionError, match="nothing was recomputed"):
        checks.bits(here(), "transformer", "checkpoint", "fp32")
    monkeypatch.setattr(checks, "SHARES", (3.0,))
    with pytest.raises(AssertionError, match="no step ran out of memory"):
        checks.out_of_memory(here(), "checkpoint")


def test_waiting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lowtide.checkpoint

    def waits(function: Any, x: Tensor) -> Any:
        x.sum().item()
        return original(function, x)

    monkeypatch.setattr(lowtide, "checkpoint", waits)
    with pytest.raises(AssertionError, match="a region waits 4 times, the plain step 0"):
        checks.no_waiting(here(), "attention")


def test_a_limit_that_is_not_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowtide, "budget", lambda limit: Unlimited(limit))
    with pytest.raises(AssertionError, match=r"limit [\d.]+ MiB, measured"):
        checks.limits(here(), "conv net", 0.8)


class Unlimited:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


# --- what other devices offer, by fakes ---------------------------------------------------------


class Fake(Place):
    """A place whose module is made up, as for CUDA."""

    made_up: Any

    @property
    def module(self) -> Any:
        return self.made_up


def fake(monkeypatch: pytest.MonkeyPatch, **module: Any) -> Fake:
    monkeypatch.setattr(place, "emulated", lambda: None)
    found = Fake(torch.device("emulated:0"), True, time.monotonic() + 60)
    object.__setattr__(found, "made_up", SimpleNamespace(**module))
    return found


def test_waiting_raises_in_the_debug_mode_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    event = SimpleNamespace(synchronize=lambda: None)
    where = fake(
        monkeypatch, set_sync_debug_mode=modes.append, synchronize=lambda: None, Event=event
    )
    assert place.waits(where, lambda: modes.append("step")) == 0
    assert modes == ["error", "step", "default"]
    with pytest.raises(AssertionError, match="the host waits for the device"):
        place.waits(where, lambda: torch.accelerator.synchronize())
    with pytest.raises(AssertionError, match="the host waits for the device"):
        place.waits(where, lambda: where.module.synchronize())
    with pytest.raises(AssertionError, match="the host waits for the device"):
        place.waits(where, lambda: event.synchronize())
    assert modes[-1] == "default"
    torch.accelerator.synchronize()


def test_without_a_debug_mode_or_a_bound_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    where = fake(monkeypatch)
    with pytest.raises(Skipped, match="no debug mode for the synchronisation of emulated"):
        place.waits(where, lambda: None)
    with pytest.raises(Skipped, match="no way to bound the memory"), place.capacity(where, 1):
        pass


def test_memory_is_bounded_by_a_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    where = fake(
        monkeypatch, set_per_process_memory_fraction=lambda share, device: fractions.append(share)
    )
    reserved = torch.accelerator.memory_reserved()
    with place.capacity(where, where.memory() // 4):
        pass
    assert fractions == [pytest.approx(0.25 + reserved / where.memory(), abs=1e-3), 1.0]


def test_where_kernels_ran_is_read_from_a_trace() -> None:
    forward = "void vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda(...)::{lambda}>"
    events = [
        {"name": forward, "args": {"stream": 20}},
        {"name": forward, "args": {"stream": 20}},
        {"name": forward.replace("tanh_", "tanh_backward_"), "args": {"stream": 7}},
        {"name": "sigmoid_kernel_cuda", "args": {"stream": 7}},
    ]
    assert checks.tanh_by_stream(events) == {20: 2}


def test_the_same_bytes_are_the_same() -> None:
    one = [torch.tensor([float("nan"), 0.0]), torch.ones(2, 3).t()]
    assert nets.same(one, [tensor.clone() for tensor in one])
    assert not nets.same(one, [torch.tensor([float("nan"), -0.0]), one[1]])
    assert not nets.same(one, one[:1])


def test_the_device_is_left_as_it_was(core: ModuleType) -> None:
    where = here()
    with place.capacity(where, 4096), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 20, device=where.device)
    torch.empty(1 << 20, device=where.device)
    before = torch.are_deterministic_algorithms_enabled()
    with check_device.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() is before
