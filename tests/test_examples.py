"""The examples find the same bits, with the arguments that a user may give them.

They run in the process of the tests, which has imported their libraries: a process of its own for
each would spend most of its time importing. (As programs of their own: `test_torchrun.py`.)
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lowtide import _compat
from once import on_one_recorder

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    on_one_recorder,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),  # those of the libraries do not end a user's program
]

Run = Callable[..., str]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Run]:
    """A function that runs an example with these arguments and returns what it printed; if it is to
    be quiet, nothing on stderr."""

    def ran(name: str, *arguments: str, quiet: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(ROOT / "examples")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        printed = capsys.readouterr()
        assert not ended.value.code, printed
        assert not (quiet and printed.err)
        return printed.out

    deterministic = torch.are_deterministic_algorithms_enabled()
    forget_the_accelerator()
    yield ran
    forget_the_accelerator()
    torch.use_deterministic_algorithms(deterministic)


def forget_the_accelerator() -> None:
    """accelerate lets a process have one kind of precision only."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def test_segment_brain(run: Run, tmp_path: Path) -> None:
    for library in ("monai", "nilearn", "matplotlib"):
        pytest.importorskip(library)
    picture = tmp_path / "brain.png"
    short = ("--steps", "2", "--size", "40", "--limit", "0.6")
    printed = run("segment_brain.py", *short, "--output", str(picture), quiet=True)
    assert "all 2 losses identical:          yes" in printed
    assert "all final parameters identical: yes" in printed
    assert "peak within the budget:         yes" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_llama(run: Run) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    printed = run("train_llama.py", "--steps", "3", "--layers", "2", "--limit", "0.6", "--lora")
    assert "all 3 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


def test_fit_lightning(run: Run) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    printed = run("fit_lightning.py", "--batches", "3", "--epochs", "1")
    assert "all 3 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


def test_supervised_trainer(run: Run) -> None:
    for library in ("monai", "ignite", "nilearn"):
        pytest.importorskip(library)
    printed = run("supervised_trainer.py", "--epochs", "2")
    assert "all 6 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loop_accelerate(run: Run, precision: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("sklearn")
    printed = run("loop_accelerate.py", "--steps", "4", "--precision", precision)
    assert "all 4 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


@pytest.mark.skipif(not _compat.torch_has((2, 13)), reason="refused on this torch")
def test_compile_budget(run: Run) -> None:
    pytest.importorskip("sklearn")
    # Inductor's own compilation takes a minute; its code is what `test_inductor.py` is about.
    short = ("--steps", "2", "--depth", "3", "--compiler", "aot_eager")
    printed = run("compile_budget.py", *short, "--limit", "0.6")
    assert "all 2 losses identical:          yes" in printed
    assert "all final weights identical:   yes" in printed
    assert "peak within the limit:         yes" in printed


def test_levels_vit(run: Run) -> None:
    pytest.importorskip("vision_architectures")
    pytest.importorskip("nilearn")
    printed = run("levels_vit.py", "--depth", "2", "--size", "16")
    assert "losses and gradients identical at every level: yes" in printed
    assert "a level takes less than the plain step:        yes" in printed
