"""CUDA without a GPU: what can be tested without a device (rules 3 and 13).

How an accelerator differs from the CPU is tested on an emulated one, `tests/accelerator`; real ones
are checked by tests/device/check_device.py, on a machine that has one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide import _compat
from lowtide.memory import marks
from once import on_one_recorder


def test_random_state_of_cuda_is_read_without_a_device() -> None:
    """Without a device, no CUDA generator is requested (rule 3)."""
    assert _compat.default_generator(torch.device("cpu")) is torch.default_generator
    assert _compat.default_generator(torch.device("meta")) is None
    if not torch.cuda.is_available():
        assert _compat.default_generator(torch.device("cuda", 0)) is None
    with pytest.raises(LookupError, match="hpu"):
        _compat.default_generator(torch.device("hpu", 0))


def test_without_an_accelerator_the_cpu_is_counted() -> None:
    if _compat.accelerator_in_use():
        pytest.skip("this process uses one")
    measured = marks.start_marks(torch.device("cpu"))
    assert isinstance(measured, marks.OwnEvents | marks.SharedEvents)
    arrived: list[object] = []
    measured.stop(arrived.append)
    assert len(arrived) == 1


@on_one_recorder
def test_the_script_for_a_real_device_says_so_without_one() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device: run tests/device/check_device.py")
    script = Path(__file__).parent / "device" / "check_device.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "needs an accelerator" in done.stdout
