"""Steps that fit by far are not recorded, and are recorded from the first call on that is another
one than in the steps before (rule 13). The recorder in Python records every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import counted
from lowtide import engine
from lowtide.learning.idling import Idling

Change = Callable[[nn.Module], None]
STEPS = 30


class Net(nn.Module):
    """Norms with statistics, dropout, and a branch that a step may take."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU())
        self.more = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, width), nn.Tanh())
        self.branch = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.branch:
            for layer in self.more:
                x = torch.sin(layer(x)) * x
        return self.last(x)


def trained(limit: str | int | None, change: Change | None = None) -> tuple[list[Tensor], object]:
    """Losses, gradients and buffers of a training with a change at some of its steps, and the
    budget's report."""
    torch.manual_seed(0)
    model, found = Net(), []
    budget = None if limit is None else lowtide.budget(limit)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        model.branch = False
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        rows = 64
        if change is not None and step in (12, 13, 25):
            rows = change(model) or 64  # type: ignore[func-returns-value]
        x = torch.randn(rows, 32)
        if budget is None:
            loss = model(x).square().mean()
        else:
            with budget:
                loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach().clone()]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [b.clone() for b in model.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    return found, None if budget is None else budget.report()


def take_the_branch(model: nn.Module) -> None:
    model.branch = True  # type: ignore[assignment]


def other_rows(model: nn.Module) -> int:
    return 96


def freeze(model: nn.Module) -> None:
    model.first.requires_grad_(False)  # type: ignore[operator]


def another_last_layer(model: nn.Module) -> None:
    model.last[2] = nn.ReLU()  # type: ignore[index,operator]


@pytest.mark.parametrize(
    "change",
    [None, take_the_branch, other_rows, freeze, another_last_layer],
    ids=lambda change: getattr(change, "__name__", "nothing"),
)
def test_the_same_bits_whatever_changes(change: Change | None) -> None:
    plain, _ = trained(None, change)
    found, report = trained("1 GB", change)
    assert len(plain) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    idle = report.idle_steps  # type: ignore[attr-defined]
    assert idle >= (5 if engine.core() is not None else 0)
    assert idle == 0 if engine.core() is None else idle < STEPS


compiled = pytest.mark.skipif(
    "engine.name() != 'compiled'", reason="the recorder in Python records every step"
)


def steps_of(budget: lowtide.Budget, step: Callable[[], None], count: int) -> list[bool]:
    """Whether each of so many steps was idle."""
    found, before = [], budget.report().idle_steps
    for _ in range(count):
        step()
        now = budget.report().idle_steps
        found.append(now > before)
        before = now
    return found


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step, whether its recorder began idle, also if it was woken: then the step counts as
    recorded, but what came before is not on its tape."""
    found: list[bool] = []
    begins = Idling.begins

    def noted(self: Idling, *given: Any) -> bool:
        found.append(begins(self, *given))
        return found[-1]

    monkeypatch.setattr(Idling, "begins", noted)
    return found


def simple(
    limit: object, *, model: nn.Module | None = None
) -> tuple[lowtide.Budget, Callable[[], None]]:
    net, budget = model or Net(), lowtide.budget(limit)  # type: ignore[arg-type]

    def step() -> None:
        with budget:
            loss = net(torch.randn(64, 32)).square().mean()
        loss.backward()
        net.zero_grad()

    return budget, step


@compiled
def test_an_idle_step_leaves_no_records() -> None:
    net = Net()
    budget, step = simple("1 GB", model=net)
    idle = steps_of(budget, step, 12)
    assert idle[:6] == [False] * 6
    assert all(idle[8:])
    core = engine.core()
    before = core.count_records()
    with budget:
        loss = net(torch.randn(64, 32)).square().mean()
        assert core.count_records() == before
    loss.backward()
    assert budget.report().recorded_operations > 5  # of the last recorded one


@compiled
def test_one_of_sixteen_is_recorded() -> None:
    budget, step = simple("1 GB")
    steps_of(budget, step, 12)
    idle = steps_of(budget, step, 64)
    assert 3 <= idle.count(False) <= 6


@compiled
@pytest.mark.parametrize("times", [1.5, 3])
def test_a_step_that_takes_more_than_half_is_recorded(times: float) -> None:
    model = Net()
    plain = lowtide.plan(lambda x: model(x).square().mean(), torch.randn(64, 32)).plain_peak
    budget, step = simple(int(times * plain), model=model)
    assert any(steps_of(budget, step, 20)) == (times > 2)


@compiled
def test_regions_and_names_are_recorded(begun: list[bool]) -> None:
    net, budget = Net(), lowtide.budget("1 GB")

    def step() -> None:
        with budget:
            x = lowtide.checkpoint(net.first, torch.randn(64, 32))
            loss = net.last(x).square().mean()
        loss.backward()

    steps_of(budget, step, 20)

    def named() -> None:
        with budget:
            x = lowtide.name(net.first(torch.randn(64, 32)), "first")
            loss = net.last(x).square().mean()
        loss.backward()

    steps_of(budget, named, 20)
    assert len(begun) == 40
    assert not any(begun)


@compiled
def test_a_larger_step_keeps_the_limit_from_where_it_differs() -> None:
    """A branch that is ten times the usual step: it is found in the middle of an idle step, and
    recorded from there on, so that its limit holds."""
    model = Net(width=64)

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    x = torch.randn(512, 64)
    small = lowtide.measure(lambda: loss_of(x).backward()).peak_bytes
    model.zero_grad()
    model.branch = True
    large = lowtide.measure(lambda: loss_of(x).backward()).peak_bytes
    limit = int(2.3 * small)
    assert large > 1.3 * limit
    budget = lowtide.budget(limit)

    def step() -> None:
        with budget:
            loss = loss_of(x)
        loss.backward()

    model.branch = False
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert steps_of(budget, step, 12)[-1]
    model.branch = True
    with counted() as replayed:
        peak = lowtide.measure(step).peak_bytes
    assert replayed.operations > 0
    assert peak <= limit
    model.branch = False
    assert not any(steps_of(budget, step, 5))  # it is careful afterwards


@compiled
def test_backward_and_optimizer_inside() -> None:
    net, budget = Net(), lowtide.budget("1 GB")
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        with budget:
            loss = net(torch.randn(64, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert steps_of(budget, step, 20)[-8:].count(True) >= 7


@compiled
def test_two_steps_in_one_context_are_recorded(begun: list[bool]) -> None:
    net, budget = Net(), lowtide.budget("1 GB")

    def step() -> None:
        with budget:
            for _ in range(2):
                net(torch.randn(64, 32)).square().mean().backward()
                net.zero_grad()

    steps_of(budget, step, 24)
    assert len(begun) == 24
    assert not any(begun)


@compiled
def test_an_error_in_an_idle_step_changes_nothing() -> None:
    net = Net()
    budget, step = simple("1 GB", model=net)
    assert steps_of(budget, step, 10)[-1]
    with pytest.raises(RuntimeError, match="shape"), budget:
        net.last(net.first(torch.randn(64, 32))).reshape(3)
    assert all(steps_of(budget, step, 3))


@compiled
def test_torchs_own_checkpoint_inside() -> None:
    from torch.utils.checkpoint import checkpoint

    net, budget = Net(), lowtide.budget("1 GB")

    def step() -> None:
        with budget:
            x = checkpoint(net.first, torch.randn(64, 32), use_reentrant=False)
            loss = net.last(x).square().mean()
            loss.backward()

    steps_of(budget, step, 24)
    torch.manual_seed(3)
    net.zero_grad()
    step()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    torch.manual_seed(3)
    plain = torch.autograd.grad(
        net.last(net.first(torch.randn(64, 32))).square().mean(),
        [p for p in net.parameters() if p.grad is not None],
    )
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@compiled
def test_a_fitted_model_idles() -> None:
    net = Net()
    fitted = lowtide.fit(net, "1 GB")

    def step() -> None:
        net(torch.randn(64, 32)).square().mean().backward()
        net.zero_grad()

    for _ in range(20):
        step()
    assert fitted.report().idle_steps >= 5


@compiled
def test_the_report_says_so() -> None:
    budget, step = simple("1 GB")
    steps_of(budget, step, 10)
    idle = budget.report().idle_steps
    assert f"10 ({idle} not recorded), the last one" in str(budget.report())


Read = Callable[[Net], Tensor]
Write = Callable[[Tensor], object]


def trained_beside(limit: str | None, read: Read, write: Write | None) -> list[Tensor]:
    """Gradients of a region that reads a tensor of a net, or one of its own, which autograd has not
    saved. A step under the budget changes it before the region's backward."""
    torch.manual_seed(0)
    net, layer, found = Net(), nn.Linear(32, 32), []
    budget = nullcontext() if limit is None else lowtide.budget(limit)
    changing = read(net)

    def region(x: Tensor) -> Tensor:
        return torch.sin(layer(x) + (changing + 1)).exp()

    for _ in range(STEPS):
        x = torch.randn(64, 32)
        y = region(x) if limit is None else lowtide.checkpoint(region, x)
        with budget:
            loss = net(x).square().mean()
            if write is not None:
                with torch.no_grad():
                    write(changing)
        (loss + y.mean()).backward()
        found += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        layer.zero_grad()
        net.zero_grad()
    return found


@compiled
@pytest.mark.parametrize(
    ("read", "write"),
    [
        (lambda net: torch.ones(32), lambda it: it.add_(0.1)),
        (lambda net: torch.ones(32), lambda it: it.data.add_(0.1)),
        (lambda net: net.first[1].running_mean, None),
        (lambda net: net.first[1].running_var, None),
    ],
    ids=["in place", "data", "running mean", "running variance"],
)
def test_what_another_tape_reads_is_copied_before_an_idle_step_writes_it(
    read: Read, write: Write | None
) -> None:
    """Rule 4: any recorder that is open announces a write. Batch norm writes its statistics."""
    plain, found = trained_beside(None, read, write), trained_beside("1 GB", read, write)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


@compiled
def test_sparse_tensors_after_the_last_call_are_let_alone() -> None:
    """They do not say how many bytes they have."""
    net, x, eye = Net(), torch.randn(64, 32), torch.eye(32).to_sparse()
    budget = lowtide.budget("1 GB")

    def step() -> None:
        with budget:
            loss = net(x).square().mean()
            if budget.report().idle_steps > 2:
                with torch.no_grad():
                    assert (eye * 2).coalesce().values().sum() == 64
        loss.backward()
        net.zero_grad()

    assert any(steps_of(budget, step, 14))


@compiled
def test_what_another_tape_reads_does_not_keep_other_nets_from_idling() -> None:
    """A net with running statistics, beside a step of another one whose backward is to come."""
    net, x = Net(), torch.randn(64, 32)
    with lowtide.budget("1 GB"):
        kept = Net()(x).square().mean()
    budget = lowtide.budget("1 GB")

    def step() -> None:
        with budget:
            loss = net(x).square().mean()
        loss.backward()
        net.zero_grad()

    assert any(steps_of(budget, step, 40))
    kept.backward()


@compiled
def test_calls_after_the_last_one_are_not_let_pass_whatever_they_take() -> None:
    """An evaluation without grad at the end of a forward, which some steps have: beside it, what
    was kept may have to be dropped, or the step is refused."""
    net, x = Net(), torch.randn(64, 32)
    budget, large = lowtide.budget("1 MB"), [False]

    def step() -> None:
        with budget:
            loss = net(x).square().mean()
            if large[0]:
                with torch.no_grad():
                    found = [torch.cat([x] * 50) for _ in range(2)]
                    del found
        loss.backward()
        net.zero_grad()

    assert steps_of(budget, step, 12)[-1]
    large[0] = True
    assert not any(steps_of(budget, step, 1))


@compiled
@pytest.mark.parametrize(("rows", "fits"), [(40, True), (400, False)], ids=["fits", "refused"])
def test_what_exceeds_the_limit_by_itself_is_refused_also_late(rows: int, fits: bool) -> None:
    """An evaluation at the end of an idle step: what was not recorded may be of any size, but what
    cannot be dropped and is larger than the limit cannot fit beside it."""
    net, x, evaluated = Net(), torch.randn(64, 32), torch.randn(64 * rows, 32)
    budget, late = lowtide.budget("1 MB"), [False]

    def step() -> None:
        with budget:
            loss = net(x).square().mean()
            if late[0]:
                with torch.no_grad():
                    evaluated.sin().sum()
        loss.backward()
        net.zero_grad()

    assert steps_of(budget, step, 12)[-1]
    late[0] = True
    if fits:
        assert not any(steps_of(budget, step, 2))
        return
    for _ in range(2):  # in an idle step and in a recorded one
        with pytest.raises(lowtide.BudgetError, match=r"At operation \d\d .*sin"):
            step()
    late[0] = False
    step()


@compiled
def test_the_same_calls_on_other_results_are_another_step() -> None:
    """Of a chain, autograd saves each link; of as many calls on one tensor, only that one."""
    net, x = Net(), torch.randn(64, 32)
    budget, chained = lowtide.budget("1 GB"), [False]

    def step() -> None:
        with budget:
            first = found = net.first(x)
            for _ in range(8):
                found = torch.sin(found if chained[0] else first)
            loss = found.square().mean()
        loss.backward()
        net.zero_grad()

    assert steps_of(budget, step, 12)[-1]
    chained[0] = True
    assert not any(steps_of(budget, step, 1))


@compiled
def test_a_step_whose_plain_peak_is_above_half_of_the_limit_is_recorded() -> None:
    """A recording drops what autograd saves for a graph that no backward ever goes through. Without
    one it stays for as long as that graph lives."""
    net, x = Net(), torch.randn(512, 32)

    def step_under(limit: int | str) -> tuple[lowtide.Budget, Callable[[], None]]:
        budget = lowtide.budget(limit)

        def step() -> None:
            with budget:
                found = x
                for layer in (*net.more, *net.more):
                    found = torch.sin(layer(found))
                del found
                loss = net(x).square().mean()
            loss.backward()
            net.zero_grad()

        return budget, step

    budget, step = step_under("1 GB")
    steps_of(budget, step, 6)
    report = budget.report()
    assert report.planned_peak is not None
    assert report.plain_peak is not None
    limit = int(2.1 * report.planned_peak)
    assert report.plain_peak > limit
    budget, step = step_under(limit)
    steps_of(budget, step, 6)
    assert all(lowtide.measure(step).peak_bytes <= limit for _ in range(12))
    assert budget.report().idle_steps == 0


@compiled
@pytest.mark.parametrize("where", ["at the end", "in the middle", "at the beginning"])
def test_steps_that_differ_by_little_do_not_end_idling(where: str) -> None:
    """One step of each epoch has a call more: a metric is set back, DDP sends buffers."""
    net, budget, count, zero = Net(), lowtide.budget("1 GB"), [0], torch.zeros(4)

    def step() -> None:
        odd, count[0] = count[0] % 20 == 19, count[0] + 1
        x = torch.randn(64, 32)
        with budget:
            if odd and where == "at the beginning":
                zero.clone()
            x = net.first(x)
            if odd and where == "in the middle":
                zero.clone()
            loss = net.last(x).square().mean()
            if odd and where == "at the end":
                x.detach().sum(0)
            loss.backward()
        net.zero_grad()

    steps_of(budget, step, 200)
    idle = steps_of(budget, step, 100)
    assert idle.count(True) >= 60


@compiled
def test_steps_that_take_much_more_after_a_late_call_are_soon_recorded(
    begun: list[bool],
) -> None:
    net, count = Net(), [0]
    x = torch.randn(64, 32)
    budget = lowtide.budget(8 * lowtide.plan(lambda x: net(x).square().mean(), x).plain_peak)

    def step() -> None:
        odd, count[0] = count[0] % 20 == 19, count[0] + 1
        with budget:
            y = net(x)
            loss = y.square().mean()
            if odd:
                for _ in range(20):
                    y = torch.sin(y) * y
                loss = loss + y.mean()
        loss.backward()
        net.zero_grad()

    steps_of(budget, step, 200)
    assert not any(begun[100:])


@compiled
def test_a_woken_step_leaves_the_report_as_it_was() -> None:
    net, budget, more = Net(), lowtide.budget("1 GB"), [False]

    def step() -> None:
        with budget:
            loss = net(torch.randn(64, 32)).square().mean()
            if more[0]:
                loss = loss + 1  # saves nothing
        loss.backward()
        net.zero_grad()

    assert steps_of(budget, step, 12)[-1]
    before = budget.report()
    more[0] = True
    assert not any(steps_of(budget, step, 1))
    after = budget.report()
    assert after.limit == before.limit
    assert (after.planned_peak, after.plain_peak) == (before.planned_peak, before.plain_peak)


def test_a_step_in_which_saved_tensors_may_be_written_does_not_idle() -> None:
    """The recording hides the hooks around it, and what is not recorded is not copied."""
    torch.manual_seed(0)
    model, budget = nn.Linear(32, 32), lowtide.budget("1 GB")
    x = torch.randn(64, 32)

    def gradient(limit: Any) -> Tensor:
        model.zero_grad()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            with limit:
                y = model(x).sigmoid()
                out = y * y
                y.mul_(2)  # which the backward of the product still needs
                loss = (out + y).mean()
            loss.backward()
        assert model.weight.grad is not None
        return model.weight.grad

    expected = gradient(nullcontext())
    for _ in range(12):
        assert torch.equal(gradient(budget), expected)
    assert budget.report().idle_steps == 0
