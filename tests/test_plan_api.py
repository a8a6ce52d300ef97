"""`lowtide.plan` and what it returns: costs, files, refusals, and budgets that run a plan."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from apart import ran_apart
from by_hand import same
from lowtide import BudgetError, DryRunWarning, Plan, UsageError, engine
from lowtide.dryrun.run import Dry, dry_run
from lowtide.frontier import curve_of
from lowtide.memory import margins
from lowtide.observing.observer import Observer
from lowtide.observing.seen import Seen
from lowtide.planner import Event, Graph, OpNode, ValueNode, minimum, simulate
from lowtide.plans import plan_step
from lowtide.plantext import format_plan
from once import on_one_recorder

pytestmark = on_one_recorder

Step = Callable[[], Tensor]


def network(blocks: int = 4, width: int = 64, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(2 * width, width),
            )
            for _ in range(blocks)
        )
    )


def loss_on(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def batch(rows: int = 256) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def halfway(step: Callable[..., Any], *args: Any) -> int:
    plain = lowtide.plan(step, *args)
    return (plain.plain_peak + plain.minimum_peak) // 2


@pytest.fixture(scope="module")
def planned() -> Plan:
    step = loss_on(network())
    return lowtide.plan(step, batch(), limit=halfway(step, batch()))


# ---------------------------------------------------------------------------- what it says


def test_a_plan_without_a_limit_recomputes_nothing() -> None:
    plain = lowtide.plan(loss_on(network()), batch())
    assert plain.status == "plain"
    assert plain.limit is None
    assert plain.peak == plain.plain_peak
    assert plain.overhead == plain.gap == 0
    assert {op.choice for op in plain.operations} == {"keep", "release"}


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]


def test_a_loss_is_found_in_a_dataclass() -> None:
    model = network()

    def step(x: Tensor) -> Output:
        y = model(x)
        return Output(y.detach(), [y.square().mean()])

    assert lowtide.plan(step, batch()).peak == lowtide.plan(loss_on(model), batch()).peak


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("look", [lowtide.plan, lowtide.curve, lowtide.explain])
def test_a_step_that_returns_no_loss_is_told(look: Callable[..., Any], real: bool) -> None:
    """What the answer says is about the forward alone, which a plan brings far down for nothing."""
    model = network()

    def step(x: Tensor) -> float | None:
        loss = model(x).square().mean()
        return loss.item() if real else None

    with pytest.warns(DryRunWarning) as told:
        look(step, batch())
    assert "Return the loss itself" in str(told[-1].message)
    assert [each.filename for each in told] == [__file__] * len(told)
    assert len(told) == 1 + real


def test_a_forward_that_saves_nothing_needs_no_loss() -> None:
    model = network().requires_grad_(False)
    assert lowtide.plan(model, batch()).peak


def test_a_plan_under_a_limit(planned: Plan) -> None:
    assert planned.status == "fits"
    assert planned.source == "fake"
    assert planned.limit is not None
    assert planned.minimum_peak <= planned.peak <= planned.limit < planned.plain_peak
    assert planned.lower_bound is not None
    assert 0 < planned.lower_bound <= planned.overhead < 1
    assert planned.gap == pytest.approx(planned.overhead - planned.lower_bound)


def test_decisions_by_operation_and_by_module(planned: Plan) -> None:
    ops = planned.operations
    assert len(ops) == len(planned.step.graph.ops)
    redone = [op for op in ops if op.choice == "recompute"]
    assert redone
    assert all(op.replays for op in redone)
    assert {op.module for op in redone} <= {f"{i}.{j}" for i in range(4) for j in range(4)}
    assert sum(m.recomputed_bytes for m in planned.modules) == sum(op.nbytes for op in redone)
    assert sum(m.replayed_operations for m in planned.modules) == sum(op.replays for op in ops)


def test_a_plan_prints(planned: Plan) -> None:
    text = str(planned)
    for part in (
        "limit",
        "plain (",
        "more time; no plan",
        "recomputed",
        "modelled",
        "total",
        "operations, nothing was run",
    ):
        assert part in text
    assert "no plan under" not in str(replace(planned, bound=None))
    assert planned.step.graph.fingerprint[:12] in repr(planned)


def test_modules_that_repeat_share_a_row_of_a_plan() -> None:
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(14)]
    found = lowtide.plan(nn.Sequential(*blocks), torch.ones(256, 32), limit=0.6)
    assert len(found.modules) == 42
    *rows, _, total = str(found).partition("-  -")[2].splitlines()[1:]
    assert len(rows) <= 6  # Linear and GELU, each kept, recomputed, or some of both
    assert "not shown" not in str(found)
    for row in rows:
        assert row.split()[-1].rpartition(".")[2] in ("0", "1", "2", "0,2"), row
    replays = [int(line.split()[4]) for line in (*rows, total)]
    assert sum(replays[:-1]) == replays[-1] == sum(m.replayed_operations for m in found.modules)
    # What is kept is shown even where there are few rows.
    assert not format_plan(found, 1).splitlines()[-4].strip().startswith("0 B")


def test_a_plan_of_one_operation_prints() -> None:
    assert "1 operation, nothing" in str(lowtide.plan(lambda x: x * 2, torch.ones(2)))


def test_a_plan_without_a_limit_is_a_limit_of_its_peak() -> None:
    plan = lowtide.plan(loss_on(network()), batch())
    assert plan.limit is None
    assert lowtide.budget(plan).report().limit == plan.peak


def test_a_fraction_is_of_the_plain_peak() -> None:
    step = loss_on(network())
    share = 0.9
    assert lowtide.plan(step, batch(), limit=share).limit == int(
        share * lowtide.plan(step, batch()).plain_peak
    )


@pytest.mark.parametrize("source", ["fake", "recorded"])
def test_more_room_never_means_a_smaller_plan(source: str) -> None:
    """Where the whole margin can just be left free, a plan may take no less than a byte below."""
    free = margins.PREDICTED[source]
    for least in (1, 100, 12345, 10**9):
        limits = sorted(
            {int(least * (1 + part / 5000)) + by for part in range(300) for by in (0, 1)}
        )
        rooms = [margins.room_near(limit, free, least) for limit in limits]
        assert rooms == sorted(rooms)
        assert all(least <= room <= limit for room, limit in zip(rooms, limits, strict=True))
        far = 2 * least + 100
        assert margins.room_near(far, free, least) == far - int(free * far)


def test_a_byte_more_is_not_a_dearer_plan() -> None:
    widths = 64, 300, 40, 200, 50, 100, 60
    layers = [(nn.Linear(*pair), nn.GELU(), nn.Dropout(0.1)) for pair in itertools.pairwise(widths)]
    model = nn.Sequential(*itertools.chain(*layers))
    step = dry_run(loss_on(model), (batch(),), {})
    edge = int(minimum(step.graph).peak / (1 - margins.PREDICTED["fake"]))
    below, above = plan_step(step, edge - 2), plan_step(step, edge + 2)
    assert below.overhead > 0
    assert above.overhead <= below.overhead


def test_a_limit_below_the_minimum_names_it() -> None:
    step = loss_on(network())
    least = lowtide.plan(step, batch()).minimum_peak
    with pytest.raises(BudgetError, match="its peak is in the backward") as caught:
        lowtide.plan(step, batch(), limit=1000)
    assert caught.value.limit == 1000
    assert caught.value.minimum == least
    assert lowtide.plan(step, batch(), limit=least).peak <= least


def test_a_limit_that_nothing_lowers_the_peak_to_names_the_plain_one() -> None:
    net, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
    plain = lowtide.plan(net, x).plain_peak
    with pytest.raises(BudgetError, match="No recomputation lowers this peak") as caught:
        lowtide.plan(net, x, limit=1)
    assert caught.value.minimum == plain
    assert lowtide.plan(net, x, limit=plain).peak == plain


def test_the_model_itself_is_told_from_what_is_outside_of_it() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).tanh()

    net = Net()
    planned = lowtide.plan(lambda x: net(x).exp().sum(), torch.ones(4, 8))
    placed = {op.name: op.module for op in planned.operations}
    assert placed["aten::addmm"] == "layer"
    assert placed["aten::tanh"] == "(model)"
    assert placed["aten::exp"] == ""
    held = lowtide.saved_tensors(lambda x: net(x).exp().sum(), torch.ones(4, 8))
    assert {row.operator: row.module for row in held.rows}["aten::tanh"] == "(model)"


def test_keyword_arguments_reach_the_step() -> None:
    def step(x: Tensor, *, scale: float) -> Tensor:
        return (torch.nn.functional.gelu(x) * scale).sum()

    x = torch.ones(64, 64, requires_grad=True)
    assert lowtide.plan(step, x, scale=2.0).step.graph.ops
    for verb in (lowtide.plan, lowtide.curve, lowtide.explain, lowtide.saved_tensors):
        with pytest.raises(UsageError, match=r"the step must be a callable .*; got int\."):
            verb(3)
    with pytest.raises(UsageError, match="cannot read the limit"):
        lowtide.plan(step, x, scale=2.0, limit="much")


@pytest.mark.filterwarnings("ignore::lowtide.DryRunWarning")
@pytest.mark.parametrize("source", ["fake", "recorded"])
def test_a_plan_can_be_pickled_and_copied_after_a_step_has_followed_it(source: str) -> None:
    model = network()
    step = loss_on(model)

    def asking(x: Tensor) -> Tensor:
        return step(x) if step(x).item() else x.sum()

    x = batch()
    function = step if source == "fake" else asking
    plan = lowtide.plan(function, x, limit=halfway(function, x))
    assert plan.source == source
    budget = lowtide.budget(plan)
    for _ in range(2):
        model.zero_grad()
        with budget:
            loss = function(x)
        loss.backward()
    sent = pickle.loads(pickle.dumps(plan))
    for each in (sent, copy.copy(plan), copy.deepcopy(plan)):
        assert str(each) == str(plan)
        assert each.retention == plan.retention
        assert each.modules == plan.modules
    assert sent.minimum_peak == plan.minimum_peak
    again = lowtide.budget(sent)
    model.zero_grad()
    with again:
        loss = function(x)
    loss.backward()
    assert again.report().planned


def test_a_plan_as_it_is_followed_can_be_copied(planned: Plan) -> None:
    prepared = planned.prepared()
    if engine.core() is not None:
        assert prepared.script is prepared.script
    for each in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert each.choices == prepared.choices
        assert each.signatures == prepared.signatures


# ---------------------------------------------------------------------------- odd graphs


def dry(graph: Graph, seconds: float = 1.0) -> Dry:
    modules = tuple("" for _ in graph.ops)
    return Dry(graph, Seen((), frozenset(), {}, {}, 0), modules, seconds, "fake", "nothing")


def test_a_step_that_saves_nothing() -> None:
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    step = lowtide.plan(lambda x: model(x).sum(), torch.ones(64, 4))
    assert not step.step.graph.events
    assert step.peak > 0
    with pytest.raises(BudgetError, match="of the forward"):
        lowtide.plan(lambda x: model(x).sum(), torch.ones(64, 4), limit=16)


def test_a_step_that_does_nothing() -> None:
    step = lowtide.plan(lambda: None, limit=100)
    assert (step.peak, step.overhead, step.operations) == (0, 0.0, ())
    assert len(lowtide.curve(lambda: None)) == 1


def test_operations_without_time_and_steps_without_time() -> None:
    values = tuple(ValueNode(100, producer) for producer in (-1, 0, 1, 2))
    ops = tuple(OpNode("f", 0.0, (i,), (i + 1,), 0, True, 100, 100) for i in range(3))
    events = tuple(Event(v, 50, 50, (v,)) for v in (3, 2, 1))
    graph = Graph(values, ops, events)
    found = plan_step(dry(graph, 0.0), minimum(graph).peak)
    assert found.overhead == 0.0
    assert found.peak == simulate(graph, found.retention.retain).peak


# ---------------------------------------------------------------------------- files


def test_a_plan_is_read_back_as_it_was(planned: Plan, tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    planned.save(path)
    found = lowtide.load_plan(path)
    assert found.step.graph == planned.step.graph
    assert found.retention == planned.retention
    assert (found.peak, found.overhead, found.limit) == (
        planned.peak,
        planned.overhead,
        planned.limit,
    )
    assert found.lower_bound == planned.lower_bound
    assert found.operations == planned.operations
    assert found.step.seen.ops == tuple(
        replace(log, begin=None, mark=0) for log in planned.step.seen.ops
    )
    assert str(found) == str(planned)
    again = tmp_path / "again.plan"
    found.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_what_a_budget_compares_a_step_with_is_read_back(tmp_path: Path) -> None:
    """What is written in place, and what backward asks for."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
    found = lowtide.plan(loss_on(model), batch(), limit=0.9)
    found.save(tmp_path / "plan")
    seen, read = found.step.seen, lowtide.load_plan(tmp_path / "plan").step.seen
    assert any(log.overwrites for log in seen.ops)
    assert seen.saved
    assert [log.overwrites for log in read.ops] == [log.overwrites for log in seen.ops]
    assert read.saved == seen.saved


def test_equal_plans_are_one_key(planned: Plan) -> None:
    plain = lowtide.plan(loss_on(network()), batch())
    assert {planned: 1, copy.deepcopy(planned): 2, plain: 3} == {planned: 2, plain: 3}


def test_the_same_step_gives_the_same_file(planned: Plan, tmp_path: Path) -> None:
    code = (
        "import sys, lowtide; from test_plan_api import *;"
        "step = loss_on(network());"
        "lowtide.plan(step, batch(), limit=halfway(step, batch())).save(sys.argv[1])"
    )
    here, there = tmp_path / "here", tmp_path / "there"
    planned.save(here)
    ran_apart(code, str(there), PYTHONHASHSEED="1")  # here the seed is another one
    assert here.read_bytes() == there.read_bytes()


def change(data: dict[str, Any], key: str, value: object) -> None:
    data[key] = value


def change_first(numbers: list[int], value: int) -> None:
    numbers[0] = value


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another format": (lambda d: change(d, "format", "lowtide.graph"), "its format is"),
    "another version": (lambda d: change(d, "version", 99), "has version 99"),
    "another graph": (lambda d: change(d, "fingerprint", "0" * 32), "it is for graph '000"),
    "a value more": (lambda d: d["retain"].append(0), "'retain' must be a list of"),
    "no number": (lambda d: change(d, "retain", ["x"] * len(d["retain"])), "cannot say 'x'"),
    "no graph": (lambda d: d.pop("graph"), "format is 'NoneType'|not a lowtide.graph"),
    "an op too few": (lambda d: d["graph"]["ops"].pop(), "producer|does not list"),
    "another size": (lambda d: d["graph"]["values"].__setitem__(0, [1, 0, False, -1]), "for graph"),
    "modules": (lambda d: change(d, "modules", [10**9] * len(d["modules"])), "points outside"),
    "names": (lambda d: change(d, "module_names", [1]), "must be a list of text"),
    "seconds": (lambda d: change(d, "seconds", -1), "cannot take -1 seconds"),
    "limit": (lambda d: change(d, "limit", "6 GiB"), "'limit' cannot be '6 GiB'"),
    "bound": (lambda d: change(d, "bound", [0]), "'bound' cannot be"),
    "status": (lambda d: change(d, "status", "good"), "status cannot be 'good'"),
    "source": (lambda d: change(d, "source", "a dream"), "a dream"),
    "seen": (lambda d: d["live"].pop(), "'live' must be a list of"),
    "parameters": (lambda d: change(d, "parameters", [[1]]), "pairs of numbers"),
    "more than 64 bits": (lambda d: change(d["graph"], "turn", 10**30), "whole number"),
    "a time without end": (lambda d: change(d, "seconds", 10**400), "cannot take 1000"),
    "a bound without end": (lambda d: change(d, "bound", 10**400), "'bound' cannot be 1000"),
    "a limit without end": (lambda d: change(d, "limit", 10**400), "'limit' cannot be 1000"),
    "an endless op": (lambda d: d["graph"]["ops"][0].__setitem__(1, 10**400), "a number belongs"),
    "another number": (lambda d: change_first(d["live"], d["live"][0] + 1), "its digest is"),
    "another decision": (lambda d: change(d, "retain", d["retain"][::-1]), "its digest is|drops"),
    "another limit": (lambda d: change(d, "limit", d["limit"] + 1), "its digest is"),
    "another time of an op": (lambda d: d["graph"]["ops"][0].__setitem__(1, 9.5), "its digest is"),
    "asked": (lambda d: change(d, "asked", [-1]), "'asked' must be a list of whole numbers"),
    "no digest": (lambda d: d.pop("digest"), "its digest is None"),
    "much text": (
        lambda d: change(d, "status", "x" * 10**5),
        "status cannot be 'xxxxxxxxxxxx\\.\\.\\.",
    ),
    "more bytes than there are": (lambda d: change_first(d["live"], 10**30), "'live' must be"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused(what: str, planned: Plan, tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    planned.save(path)
    data = json.loads(path.read_text())
    damage, text = DAMAGE[what]
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=rf"step\.plan: .*({text})") as caught:
        lowtide.load_plan(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04\x95", b"import os", b"[1]"])
def test_a_file_that_is_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"step\.plan"):
        lowtide.load_plan(path)
    with pytest.raises(FileNotFoundError):
        lowtide.load_plan(tmp_path / "missing.plan")


# ---------------------------------------------------------------------------- running one


def run(model: nn.Module, x: Tensor, around: lowtide.Budget | None) -> tuple[int, list[Tensor]]:
    """Peak and gradients of one step."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(5)
    step = loss_on(model)

    def once() -> None:
        if around is None:
            loss = step(x)
        else:
            with around:
                loss = step(x)
        loss.backward()

    peak = lowtide.measure(once, device="cpu").peak_bytes
    return peak, [p.grad for p in model.parameters() if p.grad is not None]


def test_a_budget_follows_a_plan_from_the_first_step_on(tmp_path: Path) -> None:
    model, x = network(6, dropout=0.1), batch(512)
    _, plain = run(model, x, None)
    for parameter in model.parameters():
        parameter.grad = None
    found = lowtide.plan(loss_on(model), x, limit=halfway(loss_on(model), x))
    found.save(tmp_path / "plan")
    budget = lowtide.budget(lowtide.load_plan(tmp_path / "plan"))
    for _ in range(3):
        peak, gradients = run(model, x, budget)
        assert found.limit is not None
        assert peak <= found.limit
        assert same(gradients, plain)
        report = budget.report()
        assert report.planned
        assert report.replayed_operations > 0
    assert run(model, x, lowtide.budget(found))[0] == pytest.approx(found.peak, rel=0.02)


def another_step(text: str) -> AbstractContextManager[Any]:
    """That the budget's first step is not the planned one; said when its backward has run."""
    return pytest.warns(lowtide.PlanWarning, match=f"first step of this budget is not.*{text}")


def test_a_step_of_another_graph_is_planned_anew() -> None:
    small, large = network(4), network(8)
    found = lowtide.plan(loss_on(small), batch(), limit=halfway(loss_on(small), batch()))
    _, plain = run(large, batch(), None)
    for parameter in large.parameters():
        parameter.grad = None
    limit = halfway(loss_on(large), batch())
    budget = lowtide.budget(replace(found, limit=limit))
    left = []
    for step in range(3):
        peak, gradients = run(large, batch(), budget)
        assert peak <= limit
        assert same(gradients, plain)
        with another_step("is aten::addmm, and aten::pow in") if not step else nullcontext():
            left.append(budget.report().left_plan_at)
        if left[-1] is not None:
            said = f"1, the last one unplanned: it left its plan at operation {left[-1]}"
            assert said in str(budget.report())
    assert left[0] is not None
    assert left[1:] == [None, None]
    assert len(found.step.graph.ops) - 2 <= left[0] <= len(found.step.graph.ops)


def layers(width: int, count: int) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(64, width), nn.Tanh())
    for _ in range(count - 1):
        net.extend([nn.Linear(width, width), nn.Tanh()])
    return net


@pytest.mark.parametrize(
    ("width", "count", "text"),
    [
        (64, 4, "operation 0 of its forward, aten::addmm, makes 128.0 KiB, and 64.0 KiB in the"),
        (32, 60, "operation 8 of its forward is aten::addmm, and aten::pow in the plan"),
    ],
    ids=["wider", "deeper"],
)
def test_a_refusal_says_that_the_plan_was_made_for_another_step(
    width: int, count: int, text: str
) -> None:
    """Of a plan from a file that had gone stale, only the refusal of its limit was seen."""
    model, x = layers(32, 4), batch(512)
    least = lowtide.plan(loss_on(model), x).minimum_peak
    budget = lowtide.budget(lowtide.plan(loss_on(model), x, limit=least))
    with pytest.raises(BudgetError) as refused:
        run(layers(width, count), x, budget)
    assert any(text in note for note in refused.value.__notes__)


def test_a_first_step_that_shows_that_none_fits_says_it_in_the_refusal_of_the_next() -> None:
    """The warning said that the first step had been kept inside the limit, which it was not."""
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh())))
    with lowtide.fit(model, lowtide.plan(model, torch.ones(512, 32), limit=0.9)):
        model(torch.ones(600, 32)).repeat(1, 9).sin().exp().sum().backward()
        with pytest.raises(BudgetError) as refused:
            model(torch.ones(600, 32))
    assert any("makes 75.0 KiB, and 64.0 KiB in" in note for note in refused.value.__notes__)


def twice(x: Tensor) -> Tensor:
    return (x.sin() * x.cos()).sum()


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x: x.sin() * x.cos(), "its forward ends after 3 operations, and the plan's has 4"),
        (lambda x: (x.sin() * x.tan()).sum(), "1 of its forward is aten::tan, and aten::cos in"),
        (lambda x: (x.sin().cos() * 2).sum(), "aten::cos, reads other results"),
    ],
    ids=["shorter", "another", "reads"],
)
def test_a_warning_of_another_step_names_the_difference(
    step: Callable[[Tensor], Tensor], text: str
) -> None:
    x = torch.ones(1024, requires_grad=True)
    budget = lowtide.budget(lowtide.plan(twice, x, limit="1 GiB"))
    with budget:
        out = step(x)
    out.sum().backward()
    with another_step(text):
        budget.report()


def test_a_refusal_of_an_operation_says_where_the_step_has_left_its_plan() -> None:
    x = torch.ones(1024, requires_grad=True)
    with pytest.raises(BudgetError) as refused, lowtide.budget(lowtide.plan(twice, x)):
        x.repeat(999).sin()
    assert any("is aten::repeat, and aten::sin in" in note for note in refused.value.__notes__)


def test_what_comes_after_the_planned_loss_is_no_other_step() -> None:
    x = torch.ones(1024, requires_grad=True)
    budget = lowtide.budget(lowtide.plan(twice, x, limit="1 GiB"))
    with budget:
        loss = twice(x)
        (loss.detach() * 2).exp()
    loss.backward()
    assert budget.report().steps == 1  # warnings are errors here


def test_only_of_its_first_step_is_said_that_it_is_another_one() -> None:
    x = torch.ones(1024, requires_grad=True)
    budget = lowtide.budget(lowtide.plan(twice, x, limit="1 GiB"))
    for place, step in enumerate((torch.exp, twice, torch.tanh, twice, torch.sigmoid)):
        with budget:
            loss = step(x).sum()
        loss.backward()
        with another_step("is aten::exp") if not place else nullcontext():
            budget.report()


def test_a_smaller_first_step_with_another_kernel_is_no_other_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    budget = lowtide.budget(lowtide.plan(loss_on(model), torch.ones(16, 3, 32, 32), limit="1 GiB"))
    for size in (8, 16):
        run(model, torch.ones(size, 3, 32, 32), budget)
    assert budget.report().planned  # warnings are errors here


def test_a_warning_of_another_step_that_is_an_error_leaves_the_loop_as_it_was() -> None:
    small, large, x = network(4), network(8), batch()
    limit = halfway(loss_on(large), x)
    budget = lowtide.budget(replace(lowtide.plan(loss_on(small), x, limit=0.9), limit=limit))
    run(large, x, budget)
    with pytest.raises(lowtide.PlanWarning):
        budget.report()
    run(large, x, budget)
    assert budget.report().planned  # from what the first step has taught


def test_a_plan_of_frozen_parameters_is_another_steps() -> None:
    model, x = layers(32, 4), batch(512)
    model[0].requires_grad_(requires_grad=False)
    budget = lowtide.budget(lowtide.plan(loss_on(model), x, limit=0.9))
    model[0].requires_grad_(requires_grad=True)
    run(model, x, budget)
    with another_step("needs gradients of 8.1 KiB, and of 0 B in the plan"):
        budget.report()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_loaded_plan_of_parameters_that_are_frozen_now(share: float, tmp_path: Path) -> None:
    """The file does not know the parameters, and the operations are the same: fewer are saved."""
    model, x = network(6), batch()
    step = loss_on(model)
    plain = lowtide.plan(step, x)
    least = plain.minimum_peak
    found = lowtide.plan(step, x, limit=int(least + share * (plain.plain_peak - least)))
    found.save(tmp_path / "plan")
    for block in model:
        block[0].requires_grad_(requires_grad=False)
    _, gradients = run(model, x, None)
    budget = lowtide.budget(lowtide.load_plan(tmp_path / "plan"))
    for _ in range(3):
        peak, now = run(model, x, budget)
        assert peak <= budget.limit
        assert same(now, gradients)


def test_a_loaded_plan_survives_a_step_that_parts_from_it_halfway(tmp_path: Path) -> None:
    model, x = network(6), batch()
    found = lowtide.plan(loss_on(model), x, limit=halfway(loss_on(model), x))
    found.save(tmp_path / "plan")
    longer = nn.Sequential(*model[:4], nn.Tanh(), *model[4:])
    _, plain = run(longer, x, None)
    budget = lowtide.budget(lowtide.load_plan(tmp_path / "plan"))
    for step in range(3):
        with another_step("tanh, and aten::addmm") if step == 1 else nullcontext():
            _, gradients = run(longer, x, budget)
        assert same(gradients, plain)


def test_steps_of_a_plan_that_was_given_are_soon_no_longer_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its leaves are those of the step itself, so the measured plan takes its place."""
    model, x = network(6), batch()
    budget = lowtide.budget(lowtide.plan(loss_on(model), x, limit=halfway(loss_on(model), x)))
    observers: list[Observer] = []

    def watching(*args: Any) -> Observer:
        observers.append(Observer(*args))
        return observers[-1]

    monkeypatch.setattr(sys.modules["lowtide.loop"], "Observer", watching)
    watched = []
    for _ in range(8):
        run(model, x, budget)
        assert budget.report().planned
        watched.append(len(observers))
    assert len(list(budget._loop._plans)) == 1
    assert 2 <= watched[3] == watched[-1]


def test_a_plan_without_a_limit_can_be_run() -> None:
    model = network()
    budget = lowtide.budget(lowtide.plan(loss_on(model), batch()))
    run(model, batch(), budget)
    assert budget.report().replayed_operations == 0


# ---------------------------------------------------------------------------- the frontier


def test_a_curve_runs_from_the_plain_step_to_the_minimum() -> None:
    points = lowtide.curve(loss_on(network(8)), batch(512))
    peaks = [point.peak for point in points]
    costs = [point.overhead for point in points]
    assert len(points) > 3
    assert peaks[0] == points.plain_peak
    assert points[-1].limit == points.minimum_peak == points[0].minimum_peak
    assert 0.99 * points.minimum_peak < peaks[-1] < points.minimum_peak  # just below it
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert all(a > b for a, b in itertools.pairwise(peaks))
    lines = str(points).splitlines()
    assert len(lines) == len(points) + 2  # titles and a rule
    assert "overhead" in lines[0]
    assert list(points[1:3]) == [points[1], points[2]]


def test_times_of_a_device_that_is_not_here() -> None:
    step, images = loss_on(network(8)), batch(512)
    for points in (lowtide.curve(step, images, on="H100"), [lowtide.plan(step, images, on="h100")]):
        assert "H100" in points[0].step.device
    for wrong in ("H1000", torch.device("cpu")):
        with pytest.raises(UsageError, match=r"a device named .*: name a GPU, one of .*H100"):
            lowtide.curve(step, images, on=wrong)  # type: ignore[arg-type]


def test_a_curve_of_a_step_that_cannot_be_made_smaller() -> None:
    graph = Graph((ValueNode(10, 0),), (OpNode("f", 1.0, (), (0,), 0, True, 10, 10),), ())
    assert len(curve_of(dry(graph))) == 1
    assert len(lowtide.curve(F.relu, torch.ones(4))) == 1


TWICE = """
import torch, lowtide

layer = torch.nn.Linear(16, 16)
x = torch.randn(64, 16)

def loss(x):
    y = layer(x) + 1.0
    return (y * x.to(torch.float64).ne(0) - y.sub(x)).relu().square().mean()

first, second = (lowtide.plan(loss, x).graph for _ in range(2))
assert first == second, [pair for pair in zip(first.ops, second.ops) if pair[0] != pair[1]]
"""


def test_the_first_dry_run_of_a_process_says_what_the_next_ones_do() -> None:
    """What is worked out once per operator must not make calls that are taken for the step's."""
    ran_apart(TWICE)


class Later(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x.sin()


async def eventually(x: Tensor) -> Tensor:
    return x.sin()


@pytest.mark.parametrize("look", [lowtide.plan, lowtide.saved_tensors, lowtide.measure])
@pytest.mark.parametrize("step", [Later(), eventually, partial(eventually)])
def test_a_step_that_computes_nothing_yet_is_refused(look: Callable[..., Any], step: Any) -> None:
    with pytest.raises(lowtide.UsageError, match="which computes nothing before it is run"):
        look(step, torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("key", ["format", "version", "graph"])
def test_a_damaged_file_is_not_repeated_in_its_error(
    planned: Plan, tmp_path: Path, key: str
) -> None:
    path = tmp_path / "step.plan"
    planned.save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    data[key] = "x" * 10_000
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(lowtide.UsageError) as caught:
        lowtide.load_plan(path)
    assert len(str(caught.value)) < 500
