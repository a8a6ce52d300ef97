"""The examples run as a user runs them, and find the same bits. (The demo: `test_packaging.py`.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import _compat
from once import on_one_recorder

ROOT = Path(__file__).resolve().parents[1]

pytestmark = on_one_recorder


def run(name: str, *arguments: str) -> str:
    """What an example printed, having ended well."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_llama() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    printed = run("train_llama.py", "--steps", "3", "--layers", "2", "--limit", "0.6", "--lora")
    assert "all 3 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


def test_fit_lightning() -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    printed = run("fit_lightning.py", "--batches", "3", "--epochs", "1")
    assert "all 3 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


def test_supervised_trainer() -> None:
    for library in ("monai", "ignite", "nilearn"):
        pytest.importorskip(library)
    printed = run("supervised_trainer.py", "--epochs", "2")
    assert "all 6 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loop_accelerate(precision: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("sklearn")
    printed = run("loop_accelerate.py", "--steps", "4", "--precision", precision)
    assert "all 4 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


@pytest.mark.skipif(not _compat.torch_has((2, 13)), reason="refused on this torch")
def test_compile_budget() -> None:
    pytest.importorskip("sklearn")
    # Inductor's own compilation takes a minute; its code is what `test_inductor.py` is about.
    short = ("--steps", "2", "--depth", "3", "--compiler", "aot_eager")
    printed = run("compile_budget.py", *short, "--limit", "0.6")
    assert "all 2 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


def test_levels_vit() -> None:
    pytest.importorskip("vision_architectures")
    pytest.importorskip("nilearn")
    printed = run("levels_vit.py", "--depth", "2", "--size", "16")
    assert "losses and gradients identical at every level: yes" in printed
    assert "a level takes less than the plain step:        yes" in printed
