"""The command line: what it prints, what it writes, and what it says when something is wrong."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import subprocess
import sys
import tomllib
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import step
from lowtide.cli import _one_line, main, parser
from lowtide.cli.arguments import of_default_limit
from lowtide.cli.plot import Mark, plot
from lowtide.cli.progress import Progress
from lowtide.cli.target import load
from lowtide.errors import DryRunWarning, UsageError
from lowtide.export.trials import fits, free_memory, try_steps
from once import on_one_recorder
from test_packaging import PACKAGE, ROOT

pytestmark = on_one_recorder

VERBS = (
    *("saved", "explain", "plan", "curve", "batch"),
    *("run", "verify", "report", "trace", "snapshot"),
)

PROGRAM = """
import torch
from torch import nn

def blocks(count=6, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*[
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(count)
    ])

def build(count=6):
    return blocks(count), torch.randn(256, 64)

def keywords():
    return blocks(), {"input": torch.randn(256, 64)}

def step():
    model, batch = build()
    return lambda: model(batch).square().mean()

def compiled():
    return torch.compile(blocks(), backend="eager"), torch.randn(256, 64)

def pair():
    model = blocks()
    batch = torch.ones(256, 64), torch.zeros(256, 64)
    return (lambda x, y: (model(x) - y).square().mean()), batch

def broken():
    raise RuntimeError("no data today")

def interrupted():
    raise KeyboardInterrupt

class Never(nn.Module):
    def __init__(self):
        raise RuntimeError("built")

class Large(nn.Linear):
    def __init__(self):
        super().__init__(1_000_000, 1_000_000, bias=False)

def nothing():
    return 3

def alone():
    return blocks()

def asks():
    model, batch = build()
    def step():
        loss = model(batch).square().mean()
        return loss if loss.item() < 1e9 else -loss
    return step

def itself(times=1):
    model, batch = build()
    def step():
        for _ in range(times):
            loss = model(batch).square().mean()
            loss.backward()
        return loss
    return step

def mismatched():
    return nn.Linear(4, 4), torch.randn(2, 5)

def later():
    model, batch = build()
    calls = []
    def step():
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("no third\\nbatch")
        return model(batch).square().mean()
    return step

def labelled():
    return blocks(), (torch.randn(256, 64), torch.zeros(256))

def misnamed():
    return blocks(), {"x": torch.randn(256, 64)}

def hooked():
    model = blocks()
    model.register_forward_pre_hook(lambda module, args: args[:1])
    return model, (torch.randn(256, 64), torch.zeros(256))

def frozen():
    return blocks().requires_grad_(False), torch.randn(256, 64)

def leaves():
    raise SystemExit(4)

instance = blocks()
number = 3
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "program", raising=False)
    return "program.py"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------------------- verbs


def test_saved_adds_up(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "saved", f"{program}:build", "--rows", "1")
    found = [int(n.replace(",", "")) for n in re.findall(r"^ *([\d,]+)  ", text, re.MULTILINE)]
    assert len(found) == 3  # one row, the others, the total
    assert sum(found[:-1]) == found[-1]
    data = json.loads(printed(capsys, "saved", f"{program}:build", "--json"))
    assert data["activation_bytes"] == found[-1]
    assert "operator" not in printed(capsys, "saved", f"{program}:build", "--by", "module")


def test_plan_writes_what_it_shows(
    program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    data = json.loads(
        printed(capsys, "plan", f"{program}:build", "--limit", "50%", "-o", str(path), "--json")
    )
    plan = lowtide.load_plan(path)
    assert (plan.peak, plan.limit) == (data["peak"], data["limit"])
    assert plan.overhead == pytest.approx(data["overhead"])
    assert sum(m["recomputed_bytes"] for m in data["modules"]) > 0
    text = printed(capsys, "plan", f"{program}:build", "--limit", "50%", "--rows", "12")
    assert text == f"{plan}\n"  # as in Python
    text = printed(capsys, "plan", f"{program}:build", "--limit", "50%", "--rows", "1")
    assert re.search(r"\(\d+ modules not shown\)$", text, re.M)
    assert re.search(r"^predicted peak +[\d.]+ \w+ of [\d.]+ \w+ plain \(\d+%\)$", text, re.M)


@pytest.mark.parametrize("limit", ["0.5", "50%", "2 MB", "2000000"])
def test_a_limit_is_what_it_is_in_python(
    program: str, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    data = json.loads(printed(capsys, "plan", f"{program}:build", "--limit", limit, "--json"))
    half = limit in ("0.5", "50%")
    assert data["limit"] == (int(data["plain_peak"] * 0.5) if half else 2_000_000)


def test_a_device_is_known_in_small_letters_too(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here, large, small = (
        json.loads(printed(capsys, "plan", f"{program}:build", "--limit", "1.0", *on, "--json"))
        for on in ((), ("--on", "H100"), ("--on", "h100"))
    )
    assert large == small != here


def test_curve_has_every_point_in_its_table(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(printed(capsys, "curve", f"{program}:build", "--json"))
    text = printed(capsys, "curve", f"{program}:build")
    for point in data["curve"][1:]:
        assert f"lowtide.budget({point['limit']})" in text
    assert data["curve"][0]["peak"] == data["plain_peak"]
    assert min(p["limit"] for p in data["curve"][1:]) == data["minimum_peak"]
    names = {option["name"] for option in data["options"]}
    assert names >= {"per block", "square root of n", "level 2"}
    for option in data["options"]:
        assert f"{option['name']}: {option['how']}" in text


def test_run_compares_predicted_with_measured(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(
        printed(capsys, "run", f"{program}:pair", "--limit", "60%", "--steps", "2", "--json")
    )
    assert [trial["label"] for trial in data["trials"]] == ["plain", "planned", "planned"]
    plain, *planned = data["trials"]
    assert plain["predicted"] == pytest.approx(plain["measured"], rel=0.02)
    assert all(trial["measured"] <= data["plan"]["limit"] for trial in planned)
    text = printed(capsys, "run", f"{program}:pair", "--limit", "60%", "--steps", "1", "--no-plain")
    assert re.search(r"planned +held$", text, re.M)
    assert "plain" not in text


def test_a_run_that_is_refused_shows_what_the_plain_step_took(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", f"{program}:pair", "--limit", "1%"]
    assert main(line) == 1
    text, said = capsys.readouterr()
    assert [row.split()[-1] for row in text.splitlines() if "%" in row] == ["plain"]
    assert re.fullmatch(r"lowtide: the step does not fit in .* Use [^\n]*\n", said)
    assert main([*line, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    (plain,) = data["trials"]
    assert data["plan"] is None
    assert plain["predicted"] == pytest.approx(plain["measured"], rel=0.02)
    assert main([*line, "--no-plain"]) == 1
    text, said = capsys.readouterr()
    assert not text
    assert "does not fit" in said


@pytest.mark.parametrize(("times", "limit"), [(1, "50%"), (2, "9 MB")])
def test_a_step_that_runs_backward_itself_is_run_as_it_is(
    program: str, capsys: pytest.CaptureFixture[str], times: int, limit: str
) -> None:
    line = [f"{program}:itself", "--set", f"times={times}", "--limit", limit, "--json"]
    ran = json.loads(printed(capsys, "run", *line))
    shown = json.loads(printed(capsys, "report", *line))
    labels = [trial["label"] for trial in ran["trials"]]
    first = "planned" if times == 1 else "unplanned"  # of two backwards, only the first is planned
    assert labels == ["plain", first, "planned", "planned"]
    assert len(shown["trials"]) == 3
    plain, *planned = ran["trials"]
    assert plain["measured"] == plain["predicted"] == ran["plan"]["plain_peak"]
    assert max(trial["measured"] for trial in planned) <= ran["plan"]["limit"]


def test_a_model_that_returns_no_loss_follows_its_plan_from_the_first_step(program: str) -> None:
    target = load(f"{program}:build")
    plan = lowtide.plan(target.function, *target.args, limit=0.5, **target.kwargs)
    tried = try_steps(
        target.function, target.args, target.kwargs, plan, plan.plain_peak, steps=1, plain=False
    )
    (trial,) = tried.trials
    assert (trial.label, trial.predicted) == ("planned", plan.peak)
    assert trial.measured == pytest.approx(plan.peak, rel=0.02)


def test_explain_and_trace(
    program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = printed(capsys, "explain", f"{program}:build", "--limit", "0.5")
    assert "To halve the memory: " in text
    data = json.loads(printed(capsys, "explain", f"{program}:build", "--limit", "0.5", "--json"))
    assert data["sentences"][0] == text.splitlines()[0]
    path = tmp_path / "trace.json"
    assert main(["trace", f"{program}:build", "-o", str(path)]) == 0
    trace = json.loads(path.read_text())
    highest = max(sum(e["args"].values()) for e in trace["traceEvents"] if e["ph"] == "C")
    assert highest == data["plain"]["peak"]


LINEAR = ("torch.nn:Linear", "--shape", "2x8", "--set", "in_features=8", "--set", "out_features=8")


@pytest.mark.parametrize("verb", ["plan", "trace", "run"])
def test_where_half_cannot_be_kept_and_nobody_asked_for_it_the_least_is_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    """Of one Linear nothing can be recomputed."""
    where = ("-o", str(tmp_path / "trace.json")) if verb == "trace" else ()
    assert main([verb, *LINEAR, *where]) == 0
    said = capsys.readouterr()
    (line,) = (line for line in said.err.splitlines() if "the default limit, 50% of" in line)
    assert line.startswith("lowtide: ")
    assert line.endswith(". --limit names another.")
    if verb == "plan":
        plain = lowtide.plan(torch.nn.Linear(8, 8), torch.randn(2, 8)).plain_peak
        assert f" {plain} bytes" in line
        assert f"limit           {plain} B" in said.out
    force = ("--force",) if where else ()
    assert main([verb, *LINEAR, *where, *force, "--limit", "50%"]) == 1


def test_of_a_default_that_can_be_kept_nothing_is_said(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{program}:build"]) == 0
    assert "default" not in capsys.readouterr().err


def test_a_refused_default_is_called_a_default() -> None:
    """As where a real step leaves its plan: whoever named no limit is told which was refused."""
    arguments = parser().parse_args(["run", *LINEAR])
    assert "is the default, 50% of the plain peak: --limit" in of_default_limit(arguments)
    arguments = parser().parse_args(["run", *LINEAR, "--limit", "50%"])
    assert not of_default_limit(arguments)


@pytest.mark.parametrize("verb", ["plan", "trace", "snapshot"])
def test_a_limit_that_is_refused_writes_nothing(
    program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    path = tmp_path / "written"
    assert main([verb, f"{program}:build", "--limit", "1%", "-o", str(path)]) == 1
    assert "does not fit" in capsys.readouterr().err
    assert not path.exists()


def test_the_page_of_a_limit_that_is_refused_shows_one_with_room(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("report", f"{program}:build", "--limit", "1%", "--no-run", "--json")
    data = json.loads(printed(capsys, *arguments))
    least = min(point["limit"] for point in data["curve"][1:])
    assert data["plan"]["limit"] == int(least * 1.025) > data["refused"]["minimum"]
    assert data["plan"]["peak"] <= data["plan"]["limit"]


def test_targets_of_every_form_give_the_same_step(program: str) -> None:
    peaks = []
    for name in ("build", "keywords", "step"):
        target = load(f"{program}:{name}")
        peaks.append(lowtide.plan(target.function, *target.args, **target.kwargs).peak)
    assert peaks[0] == peaks[1]
    assert peaks[2] > 0
    target = load("program:build", (), ("count=2",))
    assert lowtide.plan(target.function, *target.args).peak < peaks[0]


def test_classes_work_by_name_with_a_shape(program: str) -> None:
    target = load("torch.nn:Linear", ["8x16"], ["in_features=16", "out_features=4"])
    assert target.args[0].shape == (8, 16)
    assert target.function(*target.args).shape == (8, 4)
    for name in ("alone", "instance"):
        target = load(f"program:{name}", ["8x64"])
        assert target.function(*target.args).shape == (8, 64)


def test_a_language_model_by_name_gets_tokens_and_labels() -> None:
    pytest.importorskip("transformers")
    sizes = ("hidden_size=16", "intermediate_size=32", "num_hidden_layers=1", "vocab_size=50")
    heads = ("num_attention_heads=2", "num_key_value_heads=2")
    target = load("transformers:LlamaForCausalLM", ["2x8"], [*sizes, *heads])
    assert set(target.kwargs) == {"input_ids", "labels"}
    assert target.function(**target.kwargs).dim() == 0
    target = load("transformers:LlamaForSequenceClassification", ["2x8"],
                  [*sizes, *heads, "pad_token_id=0"])  # fmt: skip
    assert set(target.kwargs) == {"input_ids"}  # its labels are one for each row
    assert target.function(**target.kwargs).logits.shape == (2, 2)


def test_a_step_that_leaves_its_plan_and_is_refused_ends_the_trials(program: str) -> None:
    """The plan is for another step, and this one cannot be kept within its limit."""
    small, large = load("program:build", (), ("count=2",)), load("program:build", (), ("count=9",))
    plan = lowtide.plan(small.function, *small.args, limit=0.9)
    tried = try_steps(large.function, large.args, {}, plan, 1, steps=2)
    assert [trial.label for trial in tried.trials] == ["plain"]
    assert isinstance(tried.refused, lowtide.BudgetError)
    assert all(p.grad is None for p in large.function.args[0].parameters())


@pytest.mark.parametrize("has", ["regions", "budget", "wrapper"])
def test_the_plain_step_of_a_model_that_has_regions_or_a_budget_is_plain(
    program: str, has: str
) -> None:
    target = load(f"{program}:build")
    model = target.function.args[0]
    if has == "regions":
        lowtide.checkpoint_modules(model, "*")
    elif has == "budget":
        lowtide.fit(model, 0.5)
    else:
        for block in model:
            lowtide.ActivationCheckpointWrapper(block)
    plan = lowtide.plan(target.function, *target.args, limit=0.5)
    tried = try_steps(target.function, target.args, {}, plan, plan.plain_peak, steps=1)
    assert [trial.label for trial in tried.trials] == ["plain", "planned"]
    for trial in tried.trials:
        assert trial.measured == pytest.approx(trial.predicted, rel=0.02)
    with_regions = lowtide.measure(lambda: target.function(*target.args).sum().backward())
    assert with_regions.peak_bytes < plan.plain_peak  # they are on again


def test_a_compiled_function_is_said_to_run_eagerly(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_warned", False)  # given once per process
    assert main(["plan", f"{program}:compiled", "--limit", "0.6"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("lowtide: a function compiled with torch.compile was called inside")


class Counted(torch.nn.Module):
    """Its forward moves buffers, draws, counts its calls, and may move a parameter."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.norm, self.calls, self.moves = torch.nn.BatchNorm1d(32), 0, moves
        self.scale = torch.nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.moves:
            self.scale.data.mul_(0.5)
            torch.autograd.graph.increment_version(self.scale)
        out: torch.Tensor = torch.nn.functional.dropout(self.norm(x).sin() * self.scale, 0.5)
        return out * random.random()


@pytest.mark.parametrize("moves", [False, True])
def test_real_steps_leave_everything_as_it_was(moves: bool) -> None:
    model, x = Counted(moves), torch.randn(64, 32)
    gradient = model.norm.weight.grad = torch.ones(32)
    with warnings.catch_warnings():  # of the dry run, which then records a real step
        warnings.simplefilter("ignore")
        plan = lowtide.plan(model, x, limit=0.9)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), model.calls
    told = pytest.warns(DryRunWarning, match=r"1 of them.*leave optimizer.step\(\) out")
    with told if moves else nullcontext():
        assert len(try_steps(model, (x,), {}, plan, plan.plain_peak, steps=1).trials) == 2
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == ({"scale"} if moves else set())
    assert model.norm.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(32))
    assert model.scale.grad is None
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), model.calls)


def test_a_plain_step_is_tried_where_it_fits() -> None:
    here = torch.device("cpu")
    free = free_memory(here)
    assert free is None or (fits(free // 4, here) and not fits(free, here))


# ---------------------------------------------------------------------------- errors

ERRORS = [
    (["explain", "program.py:mismatched"], r"the step of program.py:mismatched raised RuntimeError:"
     r" (addmm: )?mat1 and mat2 shapes cannot be multiplied \(2x5 and 4x4\). Correct it, or add"
     r" --traceback"),
    (["run", "program.py:later", "--limit", "60%"], r"the step of program.py:later raised "
     r"ValueError: no third batch. Correct it, or add"),
    (["saved", "program.py:instance"], r"is a model without a batch. Return \(model, batch\), o"),
    (["saved", "torch.nn:Linear", "--shape", "8x16"], r"missing 2 required positional arguments: .*"
     r"Give its arguments, with --set NAME=VALUE for each, or add --traceback"),
    (["saved", "program"], r"cannot read the target 'program'. Write file.py:function or package"),
    (["saved", "absent.py:build"], r"there is no file 'absent.py' \(looked in "),
    (["saved", "nowhere.at.all:f"], r"there is no module 'nowhere' for the target"),
    (["saved", "program.py:biuld"], r"program has no 'biuld' .* Did you mean build\?"),
    (["saved", "program.py:absent"], r"program has no 'absent' .* It has blocks, build"),
    (["saved", "monai:UNett", "--shape", "1x1x8x8"], r" has no 'UNett' .* Did you mean UNet"),
    (["saved", "transformers:GPT2LMHeadModel", "--shape", "2x8", "--set", "n_layers=2"],
     r"GPT2Config has no 'n_layers', so --set would change nothing. Did you mean n_layer"),
    (["saved", "program.py:broken"], r"raised RuntimeError: no data today. Correct it, or add "),
    (["saved", "program.py:nothing"], r"returned an int. Return \(model, batch\), \(step,"),
    (["saved", "program.py:alone"], r"is a model without a batch. Return \(model, batch"),
    (["saved", "program.py:number"], r"is an int, not a function. Write file.py:function"),
    (["saved", "torch.nn:Linear"], r"is a class: give the shape of its input, for instance --sha"),
    (["saved", "torch.nn:ReLU", "--shape", "2xa"], r"cannot read the shape '2xa': write sizes"),
    (["saved", "program.py:Never", "--shape", "2xx"], r"cannot read the shape '2xx': write sizes"),
    (["saved", "program.py:Large", "--shape", "2x9"], r"as built has 3.64 TiB of parameters,"
     r" but this machine has only .* Make it smaller with --set NAME=VALUE, or build it under "),
    (["saved", "program.py:build", "--set", "4"], r"cannot read --set '4': write name=value"),
    (["saved", "program.py:build", "--rows", "-1"], r"--rows is how many rows to print, 0 for all"),
    (["plan", "program.py:build", "--rows", "-3"], r"is how many rows to print, 0 for all; got"),
    (["plan", "program.py:build", "-o", "."], r"\. is a folder. Name a file to write: -o"),
    (["report", "program.py:build", "-o", "", "--force"], r"\. is a folder. Name a file to wr"),
    (["saved", "program.py:broken", "--by", "x"], r"cannot be summed by 'x': use one or more of"),
    (["plan", "program.py:build", "--limit", "6 Gib!"], r"cannot read the limit '6 Gib!'"),
    (["plan", "program.py:build", "--limit", "150%"], r"above 0% and at most 100%; got '150%'"),
    (["plan", "program.py:build", "--limit", "nan%"], r"above 0% and at most 100%; got 'nan%'"),
    (["plan", "program.py:build", "--limit", "1.5"], r"in \(0, 1\]; got 1.5. Bytes are a whole n"),
    (["plan", "program.py:build", "--limit", "9" * 400 + " GiB"], r"at most 2\*\*63 - 1 bytes; "),
    (["plan", "program.py:build", "--limit", "9" * 400], r"is at most 2\*\*63 - 1 bytes; "),
    (["plan", "program.py:build", "--limit", "1 kB"], r"fit in 1000 B: .* Its pl.* limit\.$"),
    (["plan", "program.py:frozen", "--limit", "60%"], r"No backward asks for anything from this "
     r"step, so there is nothing to recompute: does what it returns require grad\?"),
    (["plan", "program.py:labelled"], r"the model is called as model\(\*batch\), but the forward of"
     r" Sequential does not accept this batch of 2: too many positional arguments. Return \("),
    (["saved", "program.py:misnamed"], r"called as model\(\*\*batch\), .* this batch of 1: missing"
     r" a required argument: 'input'. Return \(step, batch\), where step\(\*\*batch\)"),
    (["saved", "program.py:leaves"], r"program.py:leaves ended the program with status 4: .* Put "
     r'that under if __name__ == "__main__"\.'),
    (["run", "program.py:build", "--steps", "0"], r"--steps is how many steps to run, at "),
    (["report", "program.py:build", "-o", "no/x.html"], r"there is no folder no to write x.htm"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), ERRORS, ids=[text[:24] for _, text in ERRORS])
def test_an_error_is_one_line_with_the_way_out(
    program: str, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("lowtide: ")
    assert re.search(text, said.err), said.err


def test_an_interruption_is_one_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["saved", "program.py:interrupted"]) == 130
    assert capsys.readouterr().err == "lowtide: interrupted.\n"


def test_a_hook_may_decide_what_forward_is_called_with(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "total" in printed(capsys, "saved", "program.py:hooked")


def test_a_script_that_parses_the_command_line_when_imported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', required=True)\nparser.parse_args([])\n"
    )
    assert main(["saved", f"{script}:build"]) == 1
    assert 'Put that under if __name__ == "__main__".' in capsys.readouterr().err


def test_a_long_error_is_cut_in_the_middle() -> None:
    told = _one_line(UsageError("it begins " + 300 * "so " + "and ends with the way out."))
    assert len(told) <= 510
    assert told.startswith("it begins so")
    assert " ... " in told
    assert told.endswith("and ends with the way out.")


def test_a_row_says_what_its_own_step_followed(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that returns no loss leaves its plan where the loss is computed, and is replanned."""
    line = [f"{program}:build", "--limit", "60%", "--steps", "4", "--json"]
    trials = json.loads(printed(capsys, "run", *line))["trials"]
    assert {trial["label"] for trial in trials[2:]} == {"planned"}
    for trial in trials[1:]:
        if trial["label"] == "planned":
            assert trial["predicted"] == pytest.approx(trial["measured"], rel=0.005)


def test_that_a_real_step_was_needed_is_one_line(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["saved", f"{program}:asks"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("lowtide: the step cannot run on fake tensors (")
    assert said.endswith("put back.\n")
    assert said.count("\n") == 1


def test_the_place_of_an_error_is_shown_on_request(program: str) -> None:
    with pytest.raises(lowtide.UsageError) as caught:
        main(["saved", f"{program}:broken", "--traceback"])
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("verb", ["plan", "report", "trace", "snapshot"])
def test_nothing_is_overwritten_without_force(
    program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    path = tmp_path / "there"
    path.write_text("precious")
    arguments = [verb, f"{program}:build", "-o", str(path)]
    assert main(arguments) == 1
    assert "exists and is not overwritten. Name another file with -o, or add --force" in (
        capsys.readouterr().err
    )
    assert path.read_text() == "precious"
    more = ["--no-run"] if verb == "report" else []
    assert main([*arguments, "--force", *more]) == 0
    assert path.read_bytes() != b"precious"


@pytest.mark.parametrize("verb", ["plan", "report", "trace", "snapshot"])
def test_a_place_that_cannot_be_written_is_one_line(
    program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    (tmp_path / "astray").symlink_to(tmp_path / "nowhere" / "x")
    more = ["--no-run"] if verb == "report" else []
    assert main([verb, f"{program}:build", "-o", "astray", *more]) == 1
    said = capsys.readouterr().err
    assert said == "lowtide: cannot write astray: No such file or directory. Name another file.\n"


def test_wrong_usage_is_argparses_own(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["see", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "VERB" in capsys.readouterr().err


def test_it_is_installed_under_its_name_and_runs_as_a_module() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"lowtide": "lowtide.cli:main"}
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert re.search(rf"^    {verb} +\w", done.stdout, re.M), verb


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_it_takes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert f"usage: lowtide {verb}" in told
    # Percent signs in a help text are not taken for a format.
    assert ("0.5 or 50%" in " ".join(told.split())) == (verb not in ("saved", "curve", "batch"))


def test_the_reference_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"| `{verb}` |" in page
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        for option in re.findall(r"^  (?:-\w.*?, )?(--[\w-]+)", capsys.readouterr().out, re.M):
            assert f"`{option}" in page or option == "--help", f"{verb} {option}"


def test_it_says_which_version_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


# ---------------------------------------------------------------------------- terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_silent_where_nobody_looks_and_for_short_work() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(2, stream) as progress:
            progress.stage("working")
        assert stream.getvalue() == ""


def test_progress_says_what_runs_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.cli.progress._PATIENCE", 0.0)
    stream = Terminal()
    with Progress(4, stream) as progress:
        progress.stage("loading")
        progress.stage("planning")
        while "planning" not in stream.getvalue():
            pass
    line = next(part for part in stream.getvalue().split("\r") if "planning" in part)
    assert line.startswith("[######..................] planning 0 s")
    assert stream.getvalue().rpartition("\r")[0].endswith(" ")


def test_points_stand_where_they_belong() -> None:
    lines = plot([Mark(100, 0.0, "o"), Mark(50, 0.4, "A")], width=21, height=5)
    assert lines[0] == "      |          A"
    assert lines[4] == "   0% |                    o"


@pytest.mark.parametrize("overhead", [0.0, 0.01, 0.05, 0.19, 0.21, 0.9, 4.0])
def test_the_labels_beside_points_differ(overhead: float) -> None:
    """Whole percents would repeat where little time is added."""
    labels = [line[:6].strip() for line in plot([Mark(9, 0.0, "o"), Mark(5, overhead, "A")])]
    shown = [label for label in labels if label.endswith("%")]
    assert len(shown) == len(set(shown)) == 5
