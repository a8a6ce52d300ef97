"""Rule 13 where each batch has a size of its own: plans serve smaller steps of the same operations.

Rules of docs/semantics.md are cited by number. A step counts as covered if it followed the plan of
a larger one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
import one_step
from by_hand import same
from lowtide import _compat
from lowtide.kernels.unfolding import runs_itself
from lowtide.learning.effort import LESSONS
from lowtide.learning.known_plans import _KEPT, KnownPlans
from lowtide.learning.learned import Learned
from lowtide.running.prepared import Prepared, covers, outgrown_by, signatures_of
from once import on_one_recorder
from one_step import gradients, rows

# What steps of many kinds are planned as, whoever records them.
pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]


class Attention(nn.Module):
    """Memory that grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 100)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.table(x)))
        return out


class Pair(nn.Module):
    """Two inputs of independent sizes: the first does not tell how large the rest is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(*(tower() for _ in range(3)))
        self.right = nn.Sequential(*(tower() for _ in range(3)))

    def forward(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        left, right = rows
        out: Tensor = self.left(left).mean(0) + self.right(right).mean(0)
        return out


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))


def tokens(length: int) -> Tensor:
    return torch.randint(100, (8, length), generator=torch.Generator().manual_seed(length))


peak_of = functools.partial(one_step.peak_of, seed=7)


def train(model: nn.Module, limit: lowtide.Budget, batches: Iterable[Any]) -> list[str]:
    """What each step did; checks its limit, and its gradients against those of the plain step."""
    twin, ways = copy.deepcopy(model), []
    for number, x in enumerate(batches):
        peak_of(twin, x)
        peak = peak_of(model, x, limit)
        decisions = limit._loop._active[-1]
        ways.append(
            "none" if decisions.prepared is None else "covered" if decisions.covered else "planned"
        )
        assert isinstance(limit.limit, float) or peak <= limit.limit, f"step {number}"
        assert same(gradients(model), gradients(twin))
    return ways


def sizes(low: int, high: int, count: int) -> list[int]:
    choose = random.Random(0)
    return [choose.randrange(low, high) for _ in range(count)]


# --- smaller steps ------------------------------------------------------------------------------


def test_steps_of_ever_new_lengths_are_planned() -> None:
    model, lengths = Attention(), sizes(40, 140, 30)
    limit = lowtide.budget(int(0.5 * peak_of(model, tokens(140))))
    ways = train(model, limit, map(tokens, lengths))
    assert len(set(lengths)) > 20
    assert ways[:10].count("none") <= 5
    assert ways[10:].count("none") <= 1
    assert ways.count("covered") > 20


def test_a_smaller_step_replays_what_the_plan_says(replayed: Callable[[], int]) -> None:
    model = Attention()
    share = int(0.5 * peak_of(model, tokens(120)))
    limit = lowtide.budget(share)
    for _ in range(4):
        peak_of(model, tokens(120), limit)
    before = replayed()
    peak_of(model, tokens(120), limit)
    planned = replayed() - before
    assert planned
    peak_of(model, tokens(115), limit)
    assert replayed() == before + 2 * planned
    report = limit.report()
    assert report.planned
    assert report.replayed_operations == planned
    assert not report.measured_alike  # that was of the larger one


def test_a_first_operation_of_one_size_does_not_hide_the_others() -> None:
    """The step changes to another plan where the sizes begin to differ; until there both agree."""
    model = Pair()
    batches = [(rows(400), rows(count)) for count in (600, 600, 600, 500, 590, 450, 580, 300)]
    limit = lowtide.budget(int(0.7 * peak_of(model, batches[0])))
    assert train(model, limit, batches) == ["none", "planned", "planned", *["covered"] * 5]


def test_steps_of_which_an_operation_makes_another_number_of_results() -> None:
    layer, limit, x = nn.Linear(32, 32), lowtide.budget("10 MB"), torch.randn(64, 32)
    for pieces in (2, 2, 2, 4, 4, 8):
        with limit:
            loss = torch.split_copy(layer(x).tanh(), 64 // pieces)[0].sum()
        loss.backward()
    assert limit.report().steps == 6


def test_neither_of_two_inputs_is_larger() -> None:
    choose = random.Random(3)
    model = Pair()
    batches = [
        (rows(choose.randrange(50, 600)), rows(choose.randrange(50, 600))) for _ in range(40)
    ]
    limit = lowtide.budget(int(0.6 * peak_of(model, (rows(600), rows(600)))))
    ways = train(model, limit, batches)
    assert ways[20:].count("none") <= 3


def test_a_fraction_is_one_of_the_largest_step_that_was_measured() -> None:
    """Not of what a plan for still larger steps would take."""
    model = nn.Sequential(*(tower() for _ in range(6)))
    limit = lowtide.budget(0.6)
    train(model, limit, map(rows, (400, 404, 408, 412, 416)))
    decisions = limit._loop._active[-1]
    assert decisions.covered
    assert decisions.prepared is not None
    assert decisions.prepared.allocates > 1.1 * sum(sum(made) for _, made, *_ in decisions.seen)
    plain = peak_of(model, rows(404))
    granted = limit.report().limit
    assert granted is not None
    assert abs(granted - 0.6 * plain) < 0.01 * plain


class Heavy(nn.Module):
    """A tower, and a parameter whose gradient is left in memory by the first backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(600, 800)
        layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
        self.tower = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.tower(x).square().mean() + self.large.weight.mean()
        return loss


def test_a_fraction_where_an_earlier_step_has_left_memory() -> None:
    """That memory is part of the largest measured peak, but not of this step's."""
    model = Heavy()
    twin, limit, largest = copy.deepcopy(model), lowtide.budget(0.7), 0

    def step(model: nn.Module, counts: tuple[int, ...], within: Any) -> int:
        def run() -> None:
            with within:
                for count in counts:
                    model(torch.ones(count, 64)).backward()

        model.zero_grad()
        return lowtide.measure(run, device="cpu").peak_bytes

    later = (*[1000] * 10, *[1020] * 4, *[1005] * 6, *[1010] * 6)
    for counts in [(1000,), *((200, count) for count in later)]:
        largest = max(largest, step(twin, counts, contextlib.nullcontext()))
        peak = step(model, counts, limit)
        granted = limit.report().limit
        assert granted is not None
        assert len(counts) == 1 or peak <= 0.7 * largest  # the very first step has no limit yet
        assert granted <= 0.701 * largest


def test_a_plan_from_fake_tensors_serves_smaller_steps() -> None:
    model = nn.Sequential(*(tower() for _ in range(6)))
    plan = lowtide.plan(lambda x: model(x).square().mean(), rows(500), limit=0.6)
    limit = lowtide.budget(plan)
    ways = train(model, limit, map(rows, (480, 500, 300)))
    assert ways == ["covered", "planned", "covered"]


# --- what does not count as smaller -------------------------------------------------------------


def test_other_operations_are_no_smaller_step() -> None:
    """The same number of operations on fewer bytes, but one of them is different."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(tower() for _ in range(4)))
            self.activation: Callable[[Tensor], Tensor] = torch.tanh

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(self.activation(x))
            return out

    torch.manual_seed(0)
    model = Gated()
    limit = lowtide.budget(int(0.7 * peak_of(model, rows(400))))
    twin = copy.deepcopy(model)
    for count, activation in ((400, torch.tanh), (400, torch.tanh), (390, torch.sin)):
        model.activation = twin.activation = activation
        ways = train(model, limit, [rows(count)])
    assert ways == ["none"]


def test_a_smaller_convolution_that_takes_another_kernel() -> None:
    """A single image is unfolded, which takes more memory than several that are not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), nn.GELU()) for _ in range(4))
    )
    several, single = torch.randn(2, 8, 16, 16, 8), torch.randn(1, 8, 16, 16, 8)
    assert not runs_itself((several, model[0][0].weight, None, [1], [1], [1], False), "cpu")
    assert runs_itself((single, model[0][0].weight, None, [1], [1], [1], False), "cpu")
    assert peak_of(model, single) > 1.2 * peak_of(model, several)
    limit = lowtide.budget(int(1.2 * peak_of(model, single)))
    assert train(model, limit, [several] * 3) == ["none", "planned", "planned"]
    assert train(model, limit, [single]) == ["none"]
    assert train(model, limit, [several[:, :, :12], single, single]) == [
        "covered",
        "planned",
        "planned",
    ]


def test_one_byte_more_is_too_much() -> None:
    planned = ("aten::mul", (64, 8), (-1, 3), 32)
    assert covers(planned, planned)
    assert covers(planned, ("aten::mul", (64, 0), (-1, 3), 32))
    assert covers(planned, ("aten::mul", (64, 8), (-1, 3), 0))
    assert not covers(planned, ("aten::mul", (65, 8), (-1, 3), 32))
    assert not covers(planned, ("aten::mul", (64, 8), (-1, 3), 33))
    assert not covers(planned, ("aten::mul", (64,), (-1, 3), 32))
    assert not covers(planned, ("aten::mul", (64, 8), (-1, 2), 32))
    assert not covers(planned, ("aten::add", (64, 8), (-1, 3), 32))


class Shared(nn.Module):
    """One weight for each of many rows: its gradient is made row by row before it is summed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Parameter(torch.randn(64, 64) / 8)
        self.tail = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(torch.bmm(x, self.mix.expand(len(x), -1, -1)))
        return out


class Tables(nn.Module):
    """Tables of different sizes, one a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList([nn.Embedding(100, 64), nn.Embedding(8000, 64)])
        self.tail = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

    def forward(self, which: int) -> Tensor:
        table = self.tables[which]
        out: Tensor = self.tail(table(torch.arange(4000) % table.num_embeddings))
        return out


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (Shared, torch.randn(16, 256, 64), torch.randn(512, 8, 64)),
        (Tables, 0, 1),
    ],
)
def test_steps_of_which_only_the_gradients_differ(
    make: Callable[[], nn.Module], first: Any, second: Any
) -> None:
    """Operations make equally many bytes in both steps, but their backwards do not."""
    model = make()
    plain = peak_of(model, first)
    assert abs(peak_of(model, second) - plain) < 1000  # the peak is where backward begins
    limit = lowtide.budget(int(0.55 * plain))
    ways = train(model, limit, [first] * 3 + [second] * 3 + [first] * 2 + [second])
    assert ways == ["none", "planned", "planned", "none", "planned", "planned"] + ["planned"] * 3


def test_a_step_that_leaves_the_plan_of_a_larger_one_is_known_by_its_own_bytes() -> None:
    """Otherwise it would be planned, and refused, as the larger one."""
    model, head = nn.Sequential(*(tower() for _ in range(4))), nn.Linear(32, 3000)
    large, small = rows(500), rows(430)

    def run(x: Tensor, limit: lowtide.Budget | None, other: bool) -> int:
        def step() -> None:
            if limit is None:
                (head(model(x)) if other else model(x)).square().mean().backward()
                return
            with limit:
                loss = (head(model(x)) if other else model(x)).square().mean()
            loss.backward()

        model.zero_grad()
        head.zero_grad()
        return lowtide.measure(step, device="cpu").peak_bytes

    share = int(0.95 * run(small, None, True))
    limit = lowtide.budget(share)
    for _ in range(3):
        run(large, limit, False)
    assert run(small, limit, True) <= share
    decisions = limit._loop._active[-1]
    assert decisions.switched
    made = sum(sum(made) for _, made, *_ in decisions.seen)
    limit.report()  # what was learned from it
    [learned] = [
        known for known in limit._loop._plans if len(known.signatures) == len(decisions.seen)
    ]
    assert sum(sum(made) for _, made, *_ in learned.signatures) == made


# --- what is measured and planned ---------------------------------------------------------------


def test_a_much_smaller_step_gets_a_plan_of_its_own() -> None:
    """The larger one's plan recomputes more than is needed."""
    model = nn.Sequential(*(tower() for _ in range(6)))
    limit = lowtide.budget(int(0.6 * peak_of(model, rows(600))))
    train(model, limit, map(rows, [600] * 4))
    [largest] = limit._loop._plans
    ways = train(model, limit, map(rows, (420, 410, 415, 405)))
    assert ways == ["covered"] * 4
    assert len(list(limit._loop._plans)) == 2
    followed = limit._loop._active[-1].prepared
    assert followed is not None
    assert followed.allocates < 0.8 * largest.allocates
    assert followed.bytes()[1] < 0.5 * largest.bytes()[1]
    assert followed.peak <= limit.limit


def test_a_step_that_comes_again_gets_a_plan_of_its_own() -> None:
    """Even if the larger one's plan costs little more: it would do so for the rest of training."""
    model = nn.Sequential(*(tower() for _ in range(6)))
    limit = lowtide.budget(int(0.6 * peak_of(model, rows(600))))
    train(model, limit, map(rows, [600] * 4))
    ways = train(model, limit, map(rows, [580] * 8))
    assert ways == ["covered"] * 3 + ["planned"] * 5
    assert [prepared.measured for prepared in limit._loop._plans] == [True, True]
    assert limit.report().measured_alike


def test_steps_that_grow_are_outgrown_by_few_of_them() -> None:
    model = nn.Sequential(*(tower() for _ in range(6)))
    limit = lowtide.budget(int(0.6 * peak_of(model, rows(460))))
    ways = train(model, limit, map(rows, range(300, 440, 4)))
    assert ways.count("none") <= 5


def test_steps_that_grow_fast_are_outgrown_too() -> None:
    """They grow by eight rows each from a tiny step, so at first by a large factor."""
    model = nn.Sequential(*(tower() for _ in range(6)))
    limit = lowtide.budget(int(0.6 * peak_of(model, rows(234))))
    ways = []
    for count in range(2, 242, 8):
        ways += train(model, limit, [rows(count)])
        limit._loop._beside.wait()
    assert ways.count("covered") >= 15
    assert not any(known.grown and not known.measured for known in limit._loop._plans)


def test_what_gradients_a_call_wants() -> None:
    table = torch.randn(8, 4, requires_grad=True)
    assert _compat.wanted_bytes(table) == 128
    assert _compat.wanted_bytes(table[:2]) == 128  # the gradient of a slice is made whole
    assert _compat.wanted_bytes(table[:1].expand(64, 4)) == 1024
    assert _compat.wanted_bytes(table.detach()) == 0
    assert _compat.wanted_bytes(torch.randn(8, 4)) == 0
    assert _compat.wanted_bytes(table.to_sparse()) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the first nested tensor
        nested = torch.nested.as_nested_tensor([table, table[:2]])
    assert _compat.wanted_bytes(nested) == 0


def test_by_how_much_a_step_is_larger() -> None:
    planned = [("aten::mul", (64, 8), (-1,), 32), ("aten::sum", (4,), (0,), 0)]
    assert outgrown_by(planned, planned) == 1
    assert outgrown_by(planned, [("aten::mul", (32, 8), (-1,), 0), planned[1]]) == 1
    assert outgrown_by(planned, [("aten::mul", (80, 8), (-1,), 32), planned[1]]) == 1.25
    assert outgrown_by(planned, [("aten::mul", (80, 8), (-1,), 48), planned[1]]) == 1.5
    assert outgrown_by(planned, [planned[0], ("aten::sum", (4,), (0,), 1)]) == math.inf


def test_a_plan_that_did_not_hold_for_a_smaller_step_goes() -> None:
    """A kernel whose memory grows as its inputs shrink is not known before it is measured."""
    model = nn.Sequential(*(tower() for _ in range(6)))
    limit = lowtide.budget(int(0.6 * peak_of(model, rows(600))))
    train(model, limit, map(rows, [600] * 3))
    [larger] = limit._loop._plans
    peak_of(model, rows(590), limit)
    decisions = limit._loop._active[-1]
    assert decisions.covered
    observer = lowtide.observing.observer.Observer(None)
    observer.timeline = lowtide.memory.timeline.Timeline([0], [limit.limit + 1], [0])
    assert limit._loop._resizing.outdone(larger, decisions, observer)
    assert not list(limit._loop._plans)


def prepared_for(count: int) -> Prepared:
    model = nn.Sequential(tower())
    plan = lowtide.plan(lambda x: model(x).square().mean(), rows(count))
    return plan.prepared()


def test_the_largest_plan_is_not_what_is_forgotten() -> None:
    plans = KnownPlans()
    largest = prepared_for(100)
    plans.add(largest)
    for count in range(_KEPT + 5):
        plans.add(prepared_for(50 + count))
    assert len(list(plans)) == _KEPT
    assert any(known is largest for known in plans)


def test_room_for_growth() -> None:
    learned = Learned.of(prepared_for(100))
    larger = learned.larger()
    assert larger.lessons == LESSONS
    assert larger.plain_peak > 1.14 * learned.plain_peak
    assert [len(log.sizes) for log in larger.seen.ops] == [
        len(log.sizes) for log in learned.seen.ops
    ]
    planned, seen = signatures_of(larger.seen.ops), signatures_of(learned.seen.ops)
    assert all(map(covers, planned, seen))
    assert not any(map(covers, seen, planned))
