"""Rule 13: the memory of custom operators, which are not recorded (rule 5).

What the body of one takes while it runs is measured, also in the first step, whatever follows the
call: a draw, an operation that something is dropped for, or nothing. Before that it is a guess,
which makes room but refuses nothing. What it returned is in memory for as long as a replay may read
it: see `autograd_custom_operators` in `test_other_plans.py`. Products with a sparse matrix are kept
as well, and the matrix counts as what it consists of.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide.learning.learned import Learned
from lowtide.learning.planning import Planning
from once import on_one_recorder
from one_step import gradients, peak_of

pytestmark = on_one_recorder

_LIBRARY = "lowtide_tests_unrecorded_calls"


@torch.library.custom_op(f"{_LIBRARY}::wide_inside", mutates_args=())
def _wide_inside(x: Tensor) -> Tensor:
    return x.repeat(1, 40).view(len(x), 40, -1).mean(1)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient.clone()


_wide_inside.register_autograd(_backward, setup_context=lambda ctx, inputs, output: None)


def _save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


@torch.library.custom_op(f"{_LIBRARY}::on_a_named_device", mutates_args=())
def _on_a_named_device(x: Tensor, *, device: str) -> Tensor:
    return x.sin().to(device)


@torch.library.custom_op(f"{_LIBRARY}::formula", mutates_args=())
def _formula(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _formula_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    slope = 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)
    return slope * gradient


@torch.library.custom_op(f"{_LIBRARY}::gate", mutates_args=())
def _gate(a: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(a) * b


def _gate_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    s = torch.sigmoid(a)
    return gradient * b * s * (1 - s), gradient * s


@torch.library.custom_op(f"{_LIBRARY}::fused", mutates_args=())
def _fused(x: Tensor) -> Tensor:
    return torch.relu(x)


def _fused_backward(ctx: Any, gradient: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.threshold_backward(gradient, *ctx.saved_tensors, 0)
    return result


@torch.library.custom_op(f"{_LIBRARY}::loss", mutates_args=())
def _loss(x: Tensor) -> Tensor:
    return (x * x).exp().log1p().mean()


def _loss_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        loss = (x * x).exp().log1p().mean()
    return torch.autograd.grad(loss, x, gradient)[0]


_formula.register_autograd(_formula_backward, setup_context=_save_inputs)
_gate.register_autograd(_gate_backward, setup_context=_save_inputs)
_fused.register_autograd(_fused_backward, setup_context=_save_inputs)
_loss.register_autograd(_loss_backward, setup_context=_save_inputs)


class _Layers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.wide = nn.ModuleList(nn.Linear(32, 256) for _ in range(4))
        self.thin = nn.ModuleList(nn.Linear(256, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for wide, thin in zip(self.wide, self.thin, strict=True):
            x = x + thin(self.inner(wide(x)))
        if self.how == "loss":
            return _loss(x.repeat(1, 8))
        return _formula(x.repeat(1, 8)).sum() if self.how == "last" else x.square().mean()

    def inner(self, x: Tensor) -> Tensor:
        if self.how == "formula":
            return _formula(x)
        if self.how == "gate":
            return _gate(x, torch.tanh(x))
        return _fused(x) if self.how == "fused" else torch.nn.functional.gelu(x)


class _Net(nn.Module):
    def __init__(self, then: str) -> None:
        super().__init__()
        self.then = then
        self.wide = nn.ModuleList(nn.Linear(32, 128) for _ in range(6))
        self.thin = nn.ModuleList(nn.Linear(128, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index, (wide, thin) in enumerate(zip(self.wide, self.thin, strict=True)):
            x = x + thin(torch.nn.functional.gelu(wide(x)))
            if index == 3 and self.then != "nothing":
                x = _wide_inside(x)
                if self.then == "a draw":
                    x = torch.nn.functional.dropout(x, 0.1)
        return _wide_inside(x).sum() if self.then == "nothing" else x.square().mean()


def test_an_operator_of_a_library_may_have_an_argument_of_the_name_device() -> None:
    """That is text, and says nothing about where its result will be."""
    x = torch.rand(64, 64, requires_grad=True)
    budget = lowtide.budget("100 KB")
    for _ in range(3):
        with budget:
            y = x.sin().exp()
            seen = _on_a_named_device(y.detach(), device="cpu")
            loss = (y * seen.sum()).sin().sum()
        loss.backward()


@pytest.mark.parametrize("share", [0.9, 0.7])
@pytest.mark.parametrize("then", ["an operation", "a draw", "nothing"])
def test_what_a_custom_operator_takes_inside_is_known_after_one_step(
    then: str, share: float
) -> None:
    model, x = _Net(then), torch.randn(1024, 32, requires_grad=True)
    limit = int(share * peak_of(model, x, None))
    budget = lowtide.budget(limit)
    peak_of(model, x, budget)  # what its body takes is not known yet
    assert all(peak_of(model, x, budget) <= limit for _ in range(4))


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ("formula", 0.9),
        ("gate", 0.9),
        ("gate", 0.8),
        ("fused", 0.7),
        ("loss", 0.9),
        ("loss", 0.6),
        ("last", 0.9),
        ("last", 0.6),
    ],
)
def test_the_first_step_has_room_for_custom_operators(how: str, share: float) -> None:
    torch.manual_seed(0)
    model, x = _Layers(how), torch.randn(1024, 32, requires_grad=True)
    limit = int(share * peak_of(model, x, None))
    wanted = gradients(model, x)
    budget = lowtide.budget(limit)
    for _ in range(3):
        assert peak_of(model, x, budget) <= limit
        found = gradients(model, x)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kept", [False, True])
def test_what_the_program_has_as_well_is_not_the_records_alone(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan frees it, so none may count on that."""
    learned: list[Learned] = []
    note = Planning._note

    def noting(planning: Planning, found: Learned, *rest: Any) -> None:
        learned.append(found)
        note(planning, found, *rest)

    monkeypatch.setattr(Planning, "_note", noting)
    layer, mine, budget = nn.Linear(32, 32), list[Tensor](), lowtide.budget(1 << 40)
    for _ in range(2):
        mine.clear()
        with budget:
            made = _formula(layer(torch.randn(64, 32)))
            loss = torch.sin(made).square().mean()
            if kept:
                mine.append(made)
            del made
        loss.backward()
        del loss
    budget.report()
    graph = learned[-1].graph
    assert [graph.values[value].nbytes for value in graph.owned] == ([] if kept else [64 * 32 * 4])


def _compressed(weights: Tensor) -> Tensor:
    rows = torch.arange(0, len(weights) + 1, 6)
    columns = torch.arange(len(weights)) * 7 % _NODES
    return torch.sparse_csr_tensor(rows, columns, weights.detach(), (_NODES, _NODES))


def _listed(weights: Tensor) -> Tensor:
    places = torch.stack([torch.arange(len(weights)) // 6, torch.arange(len(weights)) * 7 % _NODES])
    return torch.sparse_coo_tensor(places, weights, (_NODES, _NODES), is_coalesced=True)


_NODES = 500  # as a dense matrix, the graph would take a megabyte


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "read",
    [
        lambda w, x: _compressed(w) @ (x * w[0]),
        lambda w, x: torch.sparse.mm(_compressed(w), x * w[0]),
        lambda w, x: torch.addmm(x, _compressed(w), x * w[0]),
        lambda w, x: _compressed(w) @ (x * w[0])[:, 0],
        lambda w, x: torch.sparse.sum(_listed(w.exp()), 1).to_dense(),
        lambda w, x: _listed(w.exp()).coalesce().values().sin(),
    ],
    ids=["product", "sparse.mm", "addmm", "vector", "sum", "values"],
)
def test_a_sparse_matrix_takes_no_memory_for_the_places_that_are_empty(
    read: Callable[[Tensor, Tensor], Tensor],
) -> None:
    weights, x = torch.rand(6 * _NODES, requires_grad=True), torch.randn(_NODES, 16)
    plain = lowtide.measure(lambda: read(weights, x).sum().backward()).peak_bytes
    expected, weights.grad = weights.grad, None
    budget = lowtide.budget(plain + plain // 10)
    with budget:
        loss = read(weights, x).sum()
    loss.backward()
    assert budget.report().measured_peak == plain
    assert expected is not None
    assert weights.grad is not None
    assert torch.equal(expected, weights.grad)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("share", [0.8, 0.72])
def test_nodes_that_run_before_anything_recorded_is_asked_for_have_room(share: float) -> None:
    """The loss squares the product with a sparse matrix, which is not recorded: its backward
    takes three times as much, while a step that follows a plan still has what its forward left
    for replays."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    places, weights = torch.randint(300, (2, 1500)), torch.rand(1500, requires_grad=True)
    x = torch.randn(300, 64)

    def run(limit: lowtide.Budget | None) -> int:
        def step() -> None:
            with limit or contextlib.nullcontext():
                graph, y = torch.sparse_coo_tensor(places, weights.sigmoid(), (300, 300)), x
                for layer in layers:
                    y = torch.sparse.mm(graph, layer(y)).relu() + y
                loss = torch.sparse.mm(graph, y).square().mean()
                del y
            loss.backward()

        return lowtide.measure(step, device="cpu").peak_bytes

    run(None)  # the gradients are there from now on
    budget = lowtide.budget(int(share * run(None)))
    run(budget)  # what no recorder sees is not known yet
    for _ in range(2):
        taken = run(budget)
        report = budget.report()
        assert report.planned
        assert report.limit is not None
        assert taken <= report.limit


@torch.library.custom_op(f"{_LIBRARY}::now_and_then", mutates_args=())
def _now_and_then(x: Tensor, times: int) -> Tensor:
    return x.repeat(1, times).sum().reshape(1)


class _Logs(nn.Module):
    """Takes memory that no recorder sees, in some of its steps only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.wide = nn.ModuleList(nn.Linear(32, 128) for _ in range(6))
        self.thin = nn.ModuleList(nn.Linear(128, 32) for _ in range(6))

    def forward(self, x: Tensor, times: int) -> Tensor:
        for index, (wide, thin) in enumerate(zip(self.wide, self.thin, strict=True)):
            x = x + thin(torch.nn.functional.gelu(wide(x)))
            if index == 3 and times:
                x = self.logged(x, times)
        return x.square().mean()

    def logged(self, x: Tensor, times: int) -> Tensor:
        if self.how == "used":
            return x + _now_and_then(x.detach(), times)
        if self.how == "unused":
            _now_and_then(x.detach(), times)
        else:
            with torch.inference_mode():
                x.repeat(1, times).sum()
        return x


def _now_and_then_steps(
    how: str, every: int, times: int, share: float
) -> tuple[int, list[int | None]]:
    """The limit, and the peaks of 24 steps of which each so many-th one logs; None: refused. Their
    gradients have the plain step's bits."""
    torch.manual_seed(0)
    model, x = _Logs(how), torch.randn(256, 32, requires_grad=True)

    def step(logs: bool, context: contextlib.AbstractContextManager[object]) -> int:
        model.zero_grad()
        x.grad = None

        def go() -> None:
            with context:
                loss = model(x, times if logs else 0)
            loss.backward()

        return lowtide.measure(go, device="cpu").peak_bytes

    step(False, contextlib.nullcontext())
    plain = {}
    peaks = []
    for logs in (False, True):
        peaks.append(step(logs, contextlib.nullcontext()))
        plain[logs] = gradients(model, x)
    limit = int(share * max(peaks))
    budget = lowtide.budget(limit)
    found: list[int | None] = []
    for number in range(24):
        logs = number % every == every - 1
        try:
            found.append(step(logs, budget))
        except lowtide.BudgetError:
            found.append(None)
            continue
        assert same(gradients(model, x), plain[logs])
    return limit, found


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("how", ["used", "unused", "inference"])
def test_what_only_some_steps_take_unseen_is_known_once_it_was_measured(
    how: str, every: int
) -> None:
    """Such a step has begun as another one: the plan of that one has room for it. The second one
    that comes is awaited, and measured."""
    limit, peaks = _now_and_then_steps(how, every, 24, 0.5)
    assert all(peak is not None and peak <= limit for peak in peaks[2 * every :])


@pytest.mark.parametrize("how", ["used", "unused"])
def test_steps_are_not_refused_for_what_others_take_unseen(how: str) -> None:
    limit, peaks = _now_and_then_steps(how, 3, 40, 0.5)
    assert all(peak is None for peak in peaks[8::3])
    others = [peak for number, peak in enumerate(peaks[7:], 7) if number % 3 != 2]
    assert all(peak is not None and peak <= limit for peak in others)
