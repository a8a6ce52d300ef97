"""A graph that dies before any backward: its memory counts in the plain step, but not in a plan.

A generator whose output is detached, or a teacher without `no_grad`, saves tensors for a backward
that never comes.
"""

import contextlib
import functools

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.planner import Graph
from one_step import peak_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::lowtide.DryRunWarning"),
]


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 16),
    )


class _Pair(nn.Module):
    """A network whose graph dies, and one that trains on its output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.made, self.judged, self.how = _mlp(192), _mlp(64), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.made(x)
        if self.how == "thrown away":
            y = x
        elif self.how == "attacked":
            y = (y.detach() * 2).requires_grad_() * 0.5
        elif self.how == "scaled":
            y = (y * 2).detach()
        elif self.how == "asked":
            y = y.detach()
            if y.sum().item() > 1e9:
                return y.sum()
        else:
            y = y.detach()
        return self.judged(y).square().mean()


HOWS = ("detached", "thrown away", "attacked", "scaled", "asked")


def _built(how: str) -> tuple[_Pair, Tensor]:
    torch.manual_seed(0)
    return _Pair(how), torch.randn(512, 16)


def _gradients(model: _Pair) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _same(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("how", HOWS)
def test_plain_peak_counts_what_dies(how: str) -> None:
    model, x = _built(how)
    measured = peak_of(model, x, None)
    model.zero_grad()
    plan = lowtide.plan(model, x)
    assert plan.source == ("recorded" if how == "asked" else "fake")
    assert plan.plain_peak == pytest.approx(measured, rel=0.02)
    assert plan.peak == plan.plain_peak
    assert plan.minimum_peak < 0.5 * plan.plain_peak
    assert Graph.from_json(plan.step.graph.to_json()) == plan.step.graph


def test_explained_is_the_plain_step() -> None:
    model, x = _built("detached")
    measured = peak_of(model, x, None)
    model.zero_grad()
    told = lowtide.explain(model, x)
    assert told.plain.peak == pytest.approx(measured, rel=0.02)
    assert sum(item.nbytes for item in told.plain.items) == told.plain.peak
    assert lowtide.curve(model, x).plain_peak == told.plain.peak


@pytest.mark.parametrize("how", HOWS)
def test_a_plan_holds_nothing_of_it(how: str) -> None:
    model, x = _built(how)
    plan = lowtide.plan(model, x, limit=0.5)
    assert plan.limit is not None
    limit = lowtide.budget(plan)
    peaks = [peak_of(model, x, limit) for _ in range(2)]
    assert max(peaks) <= plan.limit
    assert peaks[0] == pytest.approx(plan.peak, rel=0.02)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("share", [0.6, "bytes"])
def test_the_first_step_knows_that_no_backward_comes(how: str, share: float | str) -> None:
    model, x = _built(how)
    plain = peak_of(model, x, None)
    wanted = _gradients(model)
    limit = int(0.6 * plain)
    budget = lowtide.budget(limit if share == "bytes" else 0.6)
    for step in range(3):
        peak = peak_of(model, x, budget)
        assert peak <= limit or (step == 0 and share != "bytes")
        assert _same(wanted, _gradients(model))
    assert budget.report().plain_peak == pytest.approx(plain, rel=0.02)


def test_a_graph_half_of_which_dies() -> None:
    """Of what two branches read, only what the dead branch alone saved is released."""
    torch.manual_seed(0)
    trunk, dead, live = _mlp(128), _mlp(192), _mlp(64)
    x = torch.randn(512, 16)
    step = functools.partial(_branches, trunk, dead, live)

    def run(limit: lowtide.Budget | None) -> int:
        for module in (trunk, dead, live):
            module.zero_grad()

        def go() -> None:
            with limit or contextlib.nullcontext():
                loss = step(x)
            loss.backward()

        return lowtide.measure(go, device="cpu").peak_bytes

    plain = run(None)
    wanted = [p.grad.clone() for p in trunk.parameters() if p.grad is not None]
    assert len(wanted) == len(list(trunk.parameters()))
    for module in (trunk, dead, live):
        module.zero_grad()
    assert lowtide.plan(step, x).plain_peak == pytest.approx(plain, rel=0.02)
    budget = lowtide.budget(int(0.7 * plain))
    for _ in range(3):
        assert run(budget) <= int(0.7 * plain)
        found = [p.grad for p in trunk.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def _branches(trunk: nn.Module, dead: nn.Module, live: nn.Module, x: Tensor) -> Tensor:
    h = trunk(x)
    noticed = dead(h).detach().abs().mean()
    loss: Tensor = live(h).square().mean() * (1 + noticed)
    return loss


class _Adaptive(nn.Module):
    """Looks at its activations, and goes on to use them."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.blocks, self.looks = nn.ModuleList(_mlp(96) for _ in range(6)), looks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            if self.looks and (x.norm().item() > 1e9 or not (x.abs() > 0.05).any()):
                break
        return x.square().mean()


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_what_was_looked_at_is_planned_like_the_rest(share: float) -> None:
    """A graph that died saved it first; it belongs to the step all the same."""
    reports = []
    for looks in (False, True):
        torch.manual_seed(0)
        model, x = _Adaptive(looks), torch.randn(1024, 16)
        plain = peak_of(model, x, None)
        wanted = _gradients(model)
        budget = lowtide.budget(int(share * plain))
        for number in range(3):
            assert peak_of(model, x, budget) <= share * plain
            assert _same(wanted, _gradients(model))
            assert budget.report().planned == (number > 0)
        reports.append(budget.report())
    assert reports[1].recomputed_bytes == pytest.approx(reports[0].recomputed_bytes, rel=0.1)


@pytest.mark.parametrize("kind", ["frozen", "teacher", "twice"])
def test_what_ran_without_grad_has_no_backward(kind: str) -> None:
    """A first step does not take it for that of a large frozen part, whose parameters require grad,
    and so is not refused at the peak that the plain step has."""
    large, small = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), nn.Linear(256, 256)
    x = torch.randn(64, 256)

    def step() -> Tensor:
        with torch.no_grad():
            y = large(x)
            z = large(y) if kind == "twice" else y
        made = small(x if kind == "teacher" else y).tanh()
        return (made - z).square().mean()

    peak = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    small.zero_grad()
    budget = lowtide.budget(peak)
    with budget:
        loss = step()
    loss.backward()  # not refused
    assert budget.report().plain_peak == peak
