"""The benchmark suite runs as documented, and its file contains the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from once import on_one_recorder

ROOT = Path(__file__).parents[1]

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def suite() -> Any:
    """`benchmarks.suite`, imported from the root as by `python -m`."""
    for library in ("transformers", "matplotlib"):
        pytest.importorskip(library)
    sys.path.insert(0, str(ROOT))
    try:
        import benchmarks.suite.__main__ as main

        yield main
    finally:
        sys.path.remove(str(ROOT))


@pytest.fixture
def found(suite: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The rows of one tiny network, by method, and the rest of the file."""
    suite.main(["--quick", "--models", "gpt2", "--rounds", "2", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "## lowtide at each peer's peak" in printed
    picture = (tmp_path / "gpt2.svg").read_text(encoding="utf-8")
    assert "lowtide" in picture
    assert "torch per block" in picture
    data = json.loads((tmp_path / "suite.json").read_text(encoding="utf-8"))
    return {**data, "rows": {row["method"]: row for row in data["models"]["gpt2"]["rows"]}}


def test_peaks_bits_and_verdicts_are_right(suite: Any, found: dict[str, Any]) -> None:
    rows = found["rows"]
    case = suite.CASES["gpt2"]("tiny")
    model, batch = case.make(), case.batch()
    for _ in range(2):
        model.zero_grad()
        plain = lowtide.measure(lambda: case.loss(model, batch).backward(), device="cpu")
    assert rows["plain"]["peak"] == pytest.approx(plain.peak_bytes, rel=0.001)
    for name in ("torch per block", "torch selective", "Hugging Face", "checkpoint_sequential"):
        assert rows[name]["bits"] == "same", name
        assert rows[name]["peak"] < 0.7 * rows["plain"]["peak"], name
        assert rows[name]["seconds"] > 0
    ours = [row for row in rows.values() if row["family"] == "lowtide" and row["seconds"]]
    assert len(ours) > 2
    for row in ours:
        assert row["bits"] == "same"
        assert len(row["peaks"]) == 3
        assert max(row["peaks"]) <= row["limit"]
    duels = {duel["peer"]: duel for duel in found["models"]["gpt2"]["duels"]}
    assert duels["torch per block"]["peak"] == rows["torch per block"]["peak"]
    assert duels["torch per block"]["ours"] is not None


def test_a_method_that_fails_is_a_row(suite: Any) -> None:
    from benchmarks.suite.contest import Contest, Row
    from benchmarks.suite.methods import Ready, twin

    def broken(case: Any, plain: Any) -> Any:
        def wrap(forward: Any) -> Any:
            def fail(batch: Any) -> Any:
                raise ValueError("no such thing\nat all")

            return fail

        return Ready(twin(plain), wrap=wrap)

    def wrong(case: Any, plain: Any) -> Any:
        return Ready(twin(plain), wrap=lambda forward: lambda batch: 2 * forward(batch))

    contest = Contest(suite.CASES["gpt2"]("tiny"), torch.device("cpu"))
    contest.enter(Row("plain", "plain"), lambda case, plain: Ready(twin(plain)))
    assert contest.enter(Row("broken", "peer"), broken).error == "ValueError: no such thing"
    assert "broken" not in contest.runs
    bits = contest.enter(Row("wrong", "peer"), wrong).bits
    assert bits.endswith("tensors differ")
