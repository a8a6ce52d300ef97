"""Steps without a plan that are below their limit go unwatched, and are watched from the first
call on that may be too much for it (rule 13). The recorder in Python watches every such step."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from by_hand import same
from dags import program
from fuzz.alone import all_alone
from lowtide.learning.effort import Effort
from lowtide.loop import Loop
from lowtide.running.decide import StepDecisions

Step = Callable[[], Tensor]
KIB, MIB = 1 << 10, 1 << 20


pytestmark = pytest.mark.skipif(
    "lowtide.engine.name() != 'compiled'", reason="the recorder in Python watches every step"
)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[StepDecisions]:
    """The steps that were finished, in order."""
    steps: list[StepDecisions] = []
    finish = Loop._finish

    def noted(loop: Loop, decisions: StepDecisions) -> None:
        if decisions.ended:
            decisions.went_alone = decisions.headroom is not None  # type: ignore[attr-defined]
            ran = [] if decisions.headroom is None else decisions.headroom.seen(0)
            forward = max((live + need for *_, live, need, _ in ran), default=0)
            decisions.forward_peak = forward  # type: ignore[attr-defined]
            steps.append(decisions)
        finish(loop, decisions)

    monkeypatch.setattr(Loop, "_finish", noted)
    return steps


class Packed(nn.Module):
    """No batch has the operations of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pack = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(pack)[0], True)
        return self.head(out).square().mean()


def packed(limit: int | None, steps: int) -> list[Tensor]:
    """All losses, gradients and random states of a training on sequences of ever other lengths."""
    torch.manual_seed(0)
    net, draw = Packed(), random.Random(0)
    found: list[Tensor] = []
    budget = None if limit is None else lowtide.budget(limit)
    for _ in range(steps):
        lengths = torch.tensor([draw.randint(2, 14) for _ in range(4)])
        x = torch.randn(4, int(lengths.max()), 8)
        net.zero_grad()
        with budget or nullcontext():
            loss = net(x, lengths)
        loss.backward()
        found += [loss.detach(), torch.get_rng_state()]
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


# ---------------------------------------------------------------------- who goes alone


def test_steps_that_never_recur_are_left_alone(finished: list[StepDecisions]) -> None:
    assert same(packed(None, 50), packed(256 * MIB, 50))
    alone = [step for step in finished[-20:] if step.went_alone]  # type: ignore[attr-defined]
    assert len(alone) >= 15
    for step in alone:
        assert step.observer is None
        assert step.tally.replayed_operations == 0
        assert step.operations > 50  # they were recorded all the same


def test_near_the_limit_every_step_is_watched(finished: list[StepDecisions]) -> None:
    most = max(lowtide.measure(lambda: packed(None, 1), device="cpu").peak_bytes for _ in range(2))
    packed(most * 5 // 4, 30)
    assert not any(step.went_alone for step in finished)  # type: ignore[attr-defined]


def test_steps_that_come_again_get_plans(finished: list[StepDecisions]) -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)))
    budget, draw, planned = lowtide.budget(256 * MIB), random.Random(1), []
    for _ in range(250):
        x = torch.randn(4, 16)
        with budget:
            for block in list(net)[: draw.choice([3, 5, 6, 8, 9, 11])]:
                x = block(x)
            loss = x.sum()
        loss.backward()
        planned.append(budget.report().planned)
    # Those that are not were taken for the step before, and idle at first.
    assert sum(planned[-100:]) > 70


def test_effort_watches_steps_that_mostly_come_again() -> None:
    effort = Effort()
    assert not effort.leaves_alone()  # its first steps are watched
    for _ in range(8):
        effort.first([("aten::mm", (4,), (-1, -1), 4)], 1.0)
    for number in range(100):
        effort.first([("aten::mm", (number,), (-1, -1), 4)], 1.0)
    assert effort.leaves_alone()
    for number in range(50):
        effort.went_alone([("aten::sin", (number,), (-1,), 4)], in_vain=False)
        assert effort.leaves_alone()
    for _ in range(30):
        effort.went_alone([("aten::cos", (4,), (-1,), 4)], in_vain=False)
    assert not effort.leaves_alone()


def test_effort_watches_for_longer_each_time_a_step_came_near_its_limit() -> None:
    waits = []
    effort = Effort()
    for _ in range(4):
        effort.went_alone([], in_vain=True)
        steps = 0
        while effort._to_watch:
            effort.begins(steps)
            steps += 1
        waits.append(steps)
    assert waits == [2, 4, 8, 16]


# ---------------------------------------------------------------------- what a step takes at most


def recurrent() -> Step:
    cell, xs = nn.LSTMCell(32, 96), torch.randn(24, 8, 32)

    def step() -> Tensor:
        state = None
        for x in xs:
            state = cell(x, state)
        return state[0].sum()

    return step


def tied_and_transposed_first() -> Step:
    """Views of a weight that were all made before the first is read: a gradient waits for each."""
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(4, 64)

    def step() -> Tensor:
        views = [w.t() for _ in range(12)]
        out = x
        for view in views:
            out = (out @ view).tanh()
        return out.sum()

    return step


def parts_of_an_expanded() -> Step:
    """The gradient of each part is as large as what it is a part of."""
    x = torch.randn(64, 64, requires_grad=True)

    def step() -> Tensor:
        wide = (x * 2).expand(10, 64, 64)
        return sum((wide[k].sin().sum() for k in range(10)), torch.zeros(()))

    return step


def pieces() -> Step:
    x = torch.randn(4096, requires_grad=True)
    return lambda: sum((p.exp().sum() for p in (x * 3).split(64)), torch.zeros(()))


def branches() -> Step:
    """Every branch's gradient waits until the oldest was added."""
    x = torch.randn(64, 256, requires_grad=True)

    def step() -> Tensor:
        h = x.exp()
        outs = [h * k for k in range(10)]
        return torch.cat([torch.cat(outs[k:]).sum(0, keepdim=True) for k in range(10)]).sum()

    return step


def outer() -> Step:
    a, b = torch.randn(300, requires_grad=True), torch.randn(200, requires_grad=True)
    return lambda: (a[:, None] * b[None]).sigmoid().mul(a[:, None]).sum()


def attention() -> Step:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    x = torch.randn(4, 24, 32)
    return lambda: layer(x).square().mean()


def convolutions() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.ConvTranspose2d(32, 4, 4, 2),
    )  # fmt: skip
    x = torch.randn(2, 3, 40, 40)
    return lambda: net(x).square().mean()


def classified() -> Step:
    table, head = nn.Embedding(500, 32), nn.Linear(32, 500)
    words = torch.randint(500, (8, 16))
    return lambda: F.cross_entropy(head(table(words)).flatten(0, 1), words.flatten())


def gathered() -> Step:
    x = torch.randn(200, 32, requires_grad=True)
    edges = torch.randint(200, (2, 900))

    def step() -> Tensor:
        out = torch.zeros(200, 32).index_add(0, edges[1], x[edges[0]].tanh())
        return torch.cdist(out, x).softmax(-1).max(-1).values.sum()

    return step


def decompositions() -> Step:
    x = torch.randn(24, 24, requires_grad=True)

    def step() -> Tensor:
        values = torch.linalg.svd(x + x.t() + torch.eye(24)).S
        return values.sum() + torch.linalg.solve(x @ x.t() + torch.eye(24), x).cumprod(0).sum()

    return step


def mixed() -> Step:
    net, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(32, 64)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().mean()

    return step


def penalized() -> Step:
    net, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(16, 32)

    def step() -> Tensor:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(given).sum(), given, create_graph=True)
        return slope.norm(dim=1).sub(1).square().mean()

    return step


def in_place() -> Step:
    x = torch.randn(64, 128, requires_grad=True)

    def step() -> Tensor:
        y = x * 2
        y[:, ::2] = x[:, ::2].sin()
        y.add_(1).relu_()
        return (y[:32] * y[32:]).sum()

    return step


def with_metrics() -> Step:
    head = nn.Linear(32, 10)
    x, target = torch.randn(64, 32), torch.randint(10, (64,))

    def step() -> Tensor:
        scores = head(x)
        with torch.no_grad():
            assert 0 <= (scores.argmax(1) == target).float().mean() <= 1
        return F.cross_entropy(scores, target)

    return step


def kept_by_parts() -> Step:
    """A small part of the gradient of each `cat` waits for its node, and keeps all of it."""
    x = torch.randn(64, 256, requires_grad=True)

    def step() -> Tensor:
        out, parts = x * 2, [x[:1] * k for k in range(30)]
        for part in parts:
            out = torch.cat([part, out])[1:] * 2
        return out.sin().sum()

    return step


def retained() -> Step:
    """Each gradient is there to the end."""
    x = torch.randn(64, 256, requires_grad=True)
    made: list[Tensor] = []

    def step() -> Tensor:
        made[:] = [x * 2]
        for _ in range(30):
            made[-1].retain_grad()
            made.append(made[-1] * 2)
        return made[-1].sin().sum()

    return step


PROGRAMS: list[Callable[[], Step]] = [
    recurrent, tied_and_transposed_first, parts_of_an_expanded, pieces, branches, outer, attention,
    convolutions, classified, gathered, decompositions, mixed, penalized, in_place, with_metrics,
    kept_by_parts, retained,
]  # fmt: skip


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)
def test_a_step_takes_at_most_what_was_added_up(
    build: Callable[[], Step], finished: list[StepDecisions]
) -> None:
    torch.manual_seed(0)
    step, budget = build(), lowtide.budget(1 << 30)
    plain = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    build_again = build()  # so that all gradients are allocated anew

    def run() -> None:
        with budget:
            loss = build_again()
        loss.backward()

    with all_alone():
        measured = lowtide.measure(run, device="cpu").peak_bytes
        budget.report()
    (done,) = finished
    assert done.went_alone  # type: ignore[attr-defined]
    assert done.planned_peak is not None
    assert max(measured, plain) <= done.planned_peak


def test_gradients_are_not_added_up_that_are_never_there_at_once(
    finished: list[StepDecisions],
) -> None:
    """Each is gone when its node has run: their sum is several times the peak of such a step."""
    step, budget = recurrent(), lowtide.budget(1 << 30)
    plain = lowtide.measure(lambda: step().backward(), device="cpu").peak_bytes
    with all_alone():
        with budget:
            loss = step()
        loss.backward()
        budget.report()
    assert plain <= finished[0].planned_peak <= 1.4 * plain


def test_what_a_plan_takes_is_not_added_for_its_first_operations(
    finished: list[StepDecisions],
) -> None:
    """A step that leaves its plan early has little of that in its backward."""
    net, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(30)), torch.randn(256, 64)

    def step(function: Callable[[Tensor], Tensor]) -> Tensor:
        out = torch.tanh(net[0](x))
        for layer in list(net)[1:]:
            out = function(layer(out))
        return out.square().mean()

    plain = lowtide.measure(lambda: step(torch.tanh).backward(), device="cpu").peak_bytes
    budget = lowtide.budget(int(1.8 * plain))

    def run(function: Callable[[Tensor], Tensor]) -> None:
        net.zero_grad()
        with budget:
            loss = step(function)
        loss.backward()

    for _ in range(4):
        run(torch.tanh)
    with all_alone():
        run(torch.sigmoid)
        budget.report()
    assert finished[-1].tally.diverged_at == 3
    assert finished[-1].went_alone  # type: ignore[attr-defined]


def test_gradients_that_are_asked_for_stay(finished: list[StepDecisions]) -> None:
    x, budget = torch.randn(64, 256, requires_grad=True), lowtide.budget(1 << 30)

    def run() -> None:
        with budget:
            made = [x * 2]
            for _ in range(30):
                made.append(made[-1] * 2)
            loss = made[-1].sin().sum()
        torch.autograd.grad(loss, made)

    with all_alone():
        measured = lowtide.measure(run, device="cpu").peak_bytes
        budget.report()
    assert measured > 30 * x.nbytes
    assert measured <= finished[0].planned_peak


ROWS, IMAGE, CUBE = (8, 6), (2, 4, 6, 6), (2, 4, 4, 4, 4)
NEW: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "Mm": (ROWS, lambda x: x @ x.detach().t()),
    "Addmm": (ROWS, lambda x: torch.addmm(torch.ones(8), x, torch.ones(6, 8))),
    "Bmm": (CUBE[:3], lambda x: x.bmm(x.detach().mT)),
    "Baddbmm": (CUBE[:3], lambda x: torch.ones(2, 4, 4).baddbmm(x, x.detach().mT)),
    "Convolution": (IMAGE, lambda x: F.conv2d(x, torch.ones(3, 4, 2, 2))),
    "Mul": (ROWS, lambda x: x * 1), "Div": (ROWS, lambda x: x / 1), "Exp": (ROWS, torch.exp),
    "Log": (ROWS, torch.log), "Pow": (ROWS, lambda x: x**1), "Sqrt": (ROWS, torch.sqrt),
    "Rsqrt": (ROWS, torch.rsqrt), "Sin": (ROWS, torch.sin), "Cos": (ROWS, torch.cos),
    "Tanh": (ROWS, torch.tanh), "Sigmoid": (ROWS, torch.sigmoid), "Relu": (ROWS, torch.relu),
    "LeakyRelu": (ROWS, F.leaky_relu), "Elu": (ROWS, F.elu), "Gelu": (ROWS, F.gelu),
    "Silu": (ROWS, F.silu), "Softplus": (ROWS, F.softplus),
    "Softmax": (ROWS, lambda x: x.softmax(-1)), "LogSoftmax": (ROWS, lambda x: x.log_softmax(0)),
    "NativeDropout": (ROWS, lambda x: torch.native_dropout(x, 0.0, True)[0]),
    "NativeLayerNorm": (ROWS, lambda x: F.layer_norm(x, (6,))),
    "NativeGroupNorm": (IMAGE, lambda x: F.group_norm(x, 2)),
    "NativeBatchNorm": (IMAGE, lambda x: F.batch_norm(x, None, None, training=True)),
    "MaxPool2DWithIndices": (IMAGE, lambda x: F.max_pool2d(x, 1)),
    "MaxPool3DWithIndices": (CUBE, lambda x: F.max_pool3d(x, 1)),
    "AvgPool2D": (IMAGE, lambda x: F.avg_pool2d(x, 1)),
    "AvgPool3D": (CUBE, lambda x: F.avg_pool3d(x, 1)),
    "AdaptiveAvgPool2D": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, 6)),
    "AdaptiveAvgPool3D": (CUBE, lambda x: F.adaptive_avg_pool3d(x, 4)),
    "UpsampleNearest2D": (IMAGE, lambda x: F.interpolate(x, size=6)),
    "UpsampleBilinear2D": (IMAGE, lambda x: F.interpolate(x, size=6, mode="bilinear")),
    "UpsampleNearest3D": (CUBE, lambda x: F.interpolate(x, size=4)),
    "UpsampleTrilinear3D": (CUBE, lambda x: F.interpolate(x, size=4, mode="trilinear")),
    "Embedding": (ROWS, lambda x: F.embedding(torch.arange(8), x)),
    "Index": (ROWS, lambda x: x[torch.arange(8)]),
    "IndexSelect": (ROWS, lambda x: x.index_select(0, torch.arange(8))),
    "Gather": (ROWS, lambda x: x.gather(0, torch.arange(8)[:, None].expand(8, 6))),
    "NllLoss": (ROWS, lambda x: F.nll_loss(x, torch.ones(8).long(), reduction="none")),
    "MseLoss": (ROWS, lambda x: F.mse_loss(x, torch.ones(ROWS), reduction="none")),
}  # fmt: skip
ELSEWHERE = {"CudnnBatchNorm", "ThnnFusedLstmCell", "ThnnFusedGruCell"}
"""Kernels of one on a GPU."""


def test_what_is_taken_to_make_new_gradients_does() -> None:
    """A view of the gradient that it gets would keep that in memory for as long as itself."""
    header = Path(lowtide.__path__[0], "compiled", "gradients.h").read_text()
    (listed,) = re.findall(r"string_view> names = {(.*?)};", header, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', listed)) == {*NEW, *ELSEWHERE}
    for name, (shape, function) in NEW.items():
        x = torch.rand(shape).add(0.1).requires_grad_()
        out = function(x)
        assert out.grad_fn is not None
        assert out.grad_fn.name().rpartition("Backward")[0] == name
        given = torch.rand_like(out)
        out.grad_fn.register_hook(
            lambda made, _, name=name, given=given: check_new(name, made, given)
        )
        out.backward(given)


def check_new(name: str, made: tuple[Tensor | None, ...], given: Tensor) -> None:
    memory = given.untyped_storage().data_ptr()
    assert all(one is None or one.untyped_storage().data_ptr() != memory for one in made), name


def within_what_was_added_up(step: Step, budget: lowtide.Budget, finished: list[Any]) -> int:
    """Whether an unwatched step of this program took at most that; 0 if its backward has asked for
    nothing, or it follows a plan to the end."""

    def run() -> None:
        with budget:
            loss = step()
        loss.backward()

    budget.report()
    finished.clear()
    with all_alone():
        measured = lowtide.measure(run, device="cpu").peak_bytes
        budget.report()
    if not finished or not finished[0].went_alone:
        return 0
    (done,) = finished
    assert measured <= max(done.planned_peak, done.forward_peak)
    return 1


def test_random_programs_take_at_most_what_was_added_up(finished: list[StepDecisions]) -> None:
    compared = 0
    for seed in range(80):
        compared += within_what_was_added_up(program(seed), lowtide.budget(1 << 30), finished)
    assert compared > 60


def test_random_programs_that_leave_a_plan_take_at_most_what_was_added_up(
    finished: list[StepDecisions],
) -> None:
    compared = 0
    for seed in range(90, 145):
        step, budget = program(seed), lowtide.budget(1 << 30)
        for _ in range(2):
            with budget:
                loss = step()
            loss.backward()
        compared += within_what_was_added_up(partial(step, other=True), budget, finished)
    assert compared > 25


def test_a_long_graph_from_before_is_not_followed_to_its_end(finished: list[StepDecisions]) -> None:
    """On a thread with a small stack, where following it by recursion would overflow that."""
    start, budget = torch.ones(4, requires_grad=True), lowtide.budget(1 << 30)

    def run() -> None:
        out = start
        for _ in range(30_000):
            out = out + 1
        with budget:
            loss = torch.cat([out, out.exp()]).sin().sum()
        loss.backward()
        budget.report()

    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=run)
        with all_alone():
            thread.start()
            thread.join()
    finally:
        threading.stack_size(before)
    assert finished[0].went_alone  # type: ignore[attr-defined]
    assert start.grad is not None


class Doubled(torch.autograd.Function):
    """Its backward may take anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Seen(torch.autograd.Function):
    """Its forward makes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def in_the_middle(x: Tensor) -> Tensor:
    return (Seen.apply(x.sin()) * x).sum()


def at_the_end(x: Tensor) -> Tensor:
    return Doubled.apply(x.sin().sum())


class Masked(torch.autograd.Function):
    """Its forward begins with what has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ones(()).mul(3) * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


def after_a_constant(x: Tensor) -> Tensor:
    return Masked.apply(x.sin().sum())


def after_a_view(x: Tensor) -> Tensor:
    return Doubled.apply(x.sin().view(-1)).sum()


@pytest.mark.parametrize("function", [in_the_middle, at_the_end, after_a_view, after_a_constant])
def test_a_step_with_a_custom_function_is_watched_from_there_on(
    function: Callable[[Tensor], Tensor],
    finished: list[StepDecisions],
) -> None:
    x, budget = torch.randn(100, requires_grad=True), lowtide.budget(1 << 30)
    with all_alone():
        with budget:
            loss = function(x)
        loss.backward()
        budget.report()
    (done,) = finished
    assert done.estimated
    assert done.observer is not None
    assert done.operations == len(done.observer.ops)


# ---------------------------------------------------------------------- watched after all


def growing(limit: int | None, deep: int) -> list[Any]:
    """Losses and gradients of one step that is `deep` layers long, and its peak."""
    torch.manual_seed(0)
    width = 64
    blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(40))
    x = torch.randn(256, width)
    budget = None if limit is None else lowtide.budget(limit)

    def step(depth: int) -> Tensor:
        with budget or nullcontext():
            out = x
            for block in list(blocks)[:depth]:
                out = F.dropout(torch.tanh(block(out)), 0.1)
            loss = out.square().mean()
        loss.backward()
        return loss.detach()

    step(4)  # what is measured at first
    blocks.zero_grad()
    with all_alone():
        losses: list[Tensor] = []
        peak = lowtide.measure(lambda: losses.append(step(deep)), device="cpu").peak_bytes
    if budget is not None:
        budget.report()
    return [*losses, *(p.grad for p in blocks.parameters()), torch.get_rng_state(), peak]


@pytest.mark.parametrize("share", [1.25, 1.0, 0.6, 0.45])
def test_a_step_that_comes_near_its_limit_keeps_it(
    share: float, finished: list[StepDecisions]
) -> None:
    *plain, most = growing(None, 40)
    limit = int(share * most)
    *mine, peak = growing(limit, 40)
    assert same(plain, mine)
    assert peak <= limit
    done = finished[-1]
    assert done.estimated
    assert (done.tally.replayed_operations > 0) == (share <= 1)


def test_one_call_that_would_take_more_than_the_limit_is_refused() -> None:
    a = torch.randn(4000, requires_grad=True)
    budget = lowtide.budget(8 * MIB)

    def step() -> None:
        with budget:
            (a.sin()[:, None] * a[None]).sum().backward()

    with all_alone(), pytest.raises(lowtide.BudgetError, match="needs"):
        step()


def test_an_opaque_call_is_watched(finished: list[StepDecisions]) -> None:
    @torch.library.custom_op("lowtide_alone::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(lambda x: torch.empty_like(x))
    doubled.register_autograd(lambda ctx, grad: grad * 2)
    x, budget = torch.randn(100, requires_grad=True), lowtide.budget(1 << 30)
    with all_alone():
        with budget:
            loss = doubled(x.sin()).cos().sum()
        loss.backward()
        budget.report()
    assert finished[0].estimated
    assert torch.equal(x.grad, 2 * x.cos() * -(2 * x.sin()).sin())


def test_a_retained_graph_and_a_second_backward(finished: list[StepDecisions]) -> None:
    x, budget = torch.randn(64, 64, requires_grad=True), lowtide.budget(1 << 30)
    with all_alone():
        with budget:
            loss = x.sin().exp().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        budget.report()
    assert finished[0].went_alone  # type: ignore[attr-defined]
    expected = x.detach().requires_grad_()
    (2 * expected.sin().exp().sum()).backward()
    assert torch.allclose(x.grad, expected.grad)


def test_backwards_inside_the_context(finished: list[StepDecisions]) -> None:
    net, budget = nn.Linear(16, 16), lowtide.budget(1 << 30)
    with all_alone(), budget:
        for _ in range(3):
            net(torch.randn(4, 16)).tanh().sum().backward()
    budget.report()
    assert [step.went_alone for step in finished] == [True] * 3  # type: ignore[attr-defined]


def unfrozen(limit: int | None, parts: int) -> float:
    """The peak of one step that reads `parts` weights, all of which get gradients."""
    torch.manual_seed(0)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(40)]
    x = torch.randn(2, 64)
    budget = None if limit is None else lowtide.budget(limit)

    def step(count: int) -> None:
        with budget or nullcontext():
            out = x
            for weight in weights[:count]:
                out = torch.tanh(out @ weight)
            loss = out.square().mean()
        loss.backward()

    step(4)  # what is measured at first
    for weight in weights:
        weight.grad = None
    with all_alone():
        return lowtide.measure(lambda: step(parts), device="cpu").peak_bytes


def test_a_step_that_cannot_fit_is_refused_though_it_began_unwatched() -> None:
    """Its gradients alone are above the limit: it went on, at twice that."""
    plain = unfrozen(None, 40)
    with pytest.raises(lowtide.BudgetError, match="ran unwatched") as refused:
        unfrozen(int(plain // 2), 40)
    assert unfrozen(refused.value.minimum, 40) <= refused.value.minimum


@pytest.mark.parametrize("share", [1.05, 1.0])
def test_a_step_that_may_fit_is_not_refused_for_what_nobody_watched(share: float) -> None:
    """What its first part takes is only estimated."""
    plain = unfrozen(None, 40)
    assert unfrozen(int(share * plain), 40) <= share * plain


def test_a_gradient_that_is_there_is_not_allocated() -> None:
    """A step that adds to its gradients is not refused for what the first one has allocated."""
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(20)]
    for weight in weights:
        weight.grad = torch.zeros(64, 64)
    budget, x = lowtide.budget(12 * weights[0].nbytes), torch.randn(2, 64)
    with all_alone():
        with budget:
            out = x
            for weight in weights:
                out = torch.tanh(out @ weight)
            loss = out.sum()
        loss.backward()


def test_rows_of_a_table_are_not_taken_for_all_of_it() -> None:
    """A sparse gradient has the rows that were looked up."""
    table = nn.Embedding(4000, 16, sparse=True)
    budget = lowtide.budget(table.weight.nbytes // 2)
    with all_alone():
        with budget:
            loss = table(torch.arange(8)).tanh().sum()
        loss.backward()
    assert table.weight.grad.is_sparse
