"""What the command line says around its answer, and where: stdout has the answer alone."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide import files
from lowtide.cli import main
from lowtide.cli.run import format_trials
from lowtide.cli.target import load
from lowtide.export.document import Trial
from once import on_one_recorder

pytestmark = on_one_recorder

TALKS = """
import torch
from torch import nn

print("imported")

def build():
    print("built")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    def step(x):
        print("called")
        return model(x).square().mean()
    return step, torch.randn(256, 64)

def forgets():
    step, batch = build()
    return (lambda x: print(step(x).shape)), batch

def trains():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
    return step, torch.randn(256, 64)
"""


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "talks.py").write_text(TALKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "talks", raising=False)
    return "talks"


@pytest.mark.parametrize("verb", ["saved", "explain", "plan", "run"])
@pytest.mark.parametrize("form", ["talks.py", "talks"])
def test_what_the_program_prints_is_not_in_the_answer(
    talks: str, capsys: pytest.CaptureFixture[str], verb: str, form: str
) -> None:
    limit = [] if verb == "saved" else ["--limit", "100%"]
    assert main([verb, f"{form}:build", "--json", *limit]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert {"imported", "built", "called"} <= set(said.err.split())


@pytest.mark.parametrize("verb", ["saved", "plan", "run", "curve"])
def test_a_loss_that_was_not_returned_is_asked_for(
    talks: str, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main([verb, "talks.py:forgets"]) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lowtide: nothing that the step returns requires grad")
    assert said.endswith("return the loss.")
    limit = ["--limit", "100%"] if verb in ("plan", "run") else []
    assert main([verb, "talks.py:build", *limit]) == 0
    assert "return the loss" not in capsys.readouterr().err


def test_a_step_of_no_operation_is_explained_without_empty_lists(
    talks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("talks.py").write_text("def empty():\n    return lambda: None\n", encoding="utf-8")
    assert main(["explain", "talks.py:empty"]) == 0
    text = capsys.readouterr().out
    assert "The peak is zero." in text
    assert "largest" not in text
    assert "Nothing that was tried" not in text


def test_parameters_that_a_real_step_moved_are_told_in_one_line(
    talks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "talks.py:trains", "--limit", "100%", "--steps", "1"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line != "imported"]
    assert len(said) == 1
    assert said[0].startswith("lowtide: real steps were run, and each changed parameters")


def test_an_error_of_nothing_has_no_minus() -> None:
    assert "+0.0%" in format_trials(None, [Trial("plain", 999_999, 1_000_000, 0.1)])


def test_what_a_configuration_takes_besides_its_own_names_is_left_alone() -> None:
    pytest.importorskip("transformers")
    sizes = ["n_embd=16", "n_head=2", "n_layer=1", "vocab_size=50", "attn_implementation=eager"]
    target = load("transformers:GPT2LMHeadModel", ["2x8"], sizes)
    assert target.function(**target.kwargs).dim() == 0


def test_names_that_the_terminal_cannot_write_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.\u0441\u043b\u043e\u0439 = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        return self.\u0441\u043b\u043e\u0439(x).exp()\n"
        "def build():\n    return Net(), torch.ones(4, 8)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["explain", "foreign.py:build"]) == 0
    assert rb"\u0441\u043b\u043e\u0439" in written.getvalue()


@pytest.mark.parametrize("sizes", [f"{10**9}x{10**9}", f"{10**25}x8", "4x8:quint8"])
def test_an_input_that_cannot_be_made(capsys: pytest.CaptureFixture[str], sizes: str) -> None:
    assert main(["plan", "torch.nn:Tanh", "--shape", sizes]) == 1
    said = capsys.readouterr().err
    assert f"--shape {sizes}" in said
    assert said.count("\n") == 1


def test_a_name_of_a_file_that_is_too_long(talks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{talks}.py:build", "-o", "x" * 300]) == 1
    assert "File name too long. Name another file." in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["plan", "trace", "snapshot", "report"])
def test_a_disk_that_is_full_leaves_the_file_that_was_there(
    talks: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Path("old").write_text("precious", encoding="utf-8")
    before = sorted(os.listdir())
    monkeypatch.setattr(files, "open", Full, raising=False)
    run = ["--no-run"] if verb in ("report", "snapshot") else []
    assert main([verb, f"{talks}.py:build", "-o", "old", "--force", *run]) == 1
    assert "cannot write old: No space left on device." in capsys.readouterr().err
    assert Path("old").read_text(encoding="utf-8") == "precious"
    assert [name for name in sorted(os.listdir()) if name != "__pycache__"] == [
        name for name in before if name != "__pycache__"
    ]


def test_an_error_without_a_text(talks: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("talks.py").write_text("def build():\n    raise ValueError\n", encoding="utf-8")
    assert main(["saved", "talks.py:build"]) == 1
    assert "build raised ValueError. Correct it" in capsys.readouterr().err


@pytest.mark.parametrize("also", [[], ["--json"]])
def test_an_answer_that_cannot_be_written(
    talks: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, also: list[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["saved", f"{talks}.py:build", *also]) == 1
    said = capsys.readouterr().err
    assert "lowtide: cannot write the answer to stdout: No space left on device." in said


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed(
    talks: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    Path("talks.py").write_text(TALKS.replace("print(", "str("), encoding="utf-8")
    monkeypatch.setattr(sys, closed, None)
    assert main(["saved", f"{talks}.py:build", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    if closed == "stderr":
        assert json.loads(said.out)
