"""What is measured under one plan tells what another one takes (rule 13).

Plans depend on the times that were measured, and a machine has times of its own. Here they are
drawn at random, so that plans are followed that no machine at hand would make. With the compiled
recorder only: what the other one takes to draw again (rule 3) is more than these nets take. With
LOWTIDE_FULL=1 in the environment every net of the catalogue is tried.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from by_hand import same
from lowtide.learning.effort import LESSONS
from lowtide.learning.learned import Learned
from lowtide.learning.planning import Planning
from lowtide.planner import HOLD, Graph, keep_all, minimum, plain_peak, simulate, solve
from lowtide.running.prepared import Prepared
from once import FULL, on_one_recorder
from zoo import CASES, one_of_many

pytestmark = [on_one_recorder, pytest.mark.usefixtures("one_thread")]

# Others have generators and states of their own, which are not put back here.
SAME_BITS = {
    "torch_gru",
    "torch_lstm_packed",
    "torch_transformer",
    "torch_normalizations",
    "torch_convolutions_penalty",
    "torch_ctc",
    "random_samplers",
    "state_gan_batch_norm",
    "aliasing_splits",
    "aliasing_in_place_chain_penalty",
    "indexing_scatters",
    "monai_unet_2d",
    "monai_dense_net",
    "hf_gpt2_sdpa",
    "hf_mixtral",
}
# Each step is another one, or has several backwards, or leaves a sparse gradient.
NO_STEP_LIKE_THE_LAST = {
    "random_stochastic_depth",
    "state_key_value_cache",
    "autograd_partial_backward",
    "autograd_two_backwards",
    "torch_embeddings",
}
NETS = sorted(
    name
    for name, case in CASES.items()
    if name not in NO_STEP_LIKE_THE_LAST and (FULL or not one_of_many(case))
)


def drawn(learned: Learned, rng: random.Random) -> Prepared:
    """A plan for a random limit, made as if each operation took another time.

    Low limits are drawn most: there the peak is within replays.
    """
    graph = learned.graph
    ops = [replace(op, seconds=op.seconds * math.exp(rng.gauss(0, 2))) for op in graph.ops]
    least, most = minimum(graph).peak, plain_peak(graph)
    limit = least + int(rng.random() ** 3 * (most - least))
    solution = solve(replace(graph, ops=tuple(ops)), limit)
    return replace(learned.prepared(solution.plan, solution.peak), lessons=LESSONS - 1)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Learned]:
    """What is learned from step to step, of which no plan is made."""
    lessons: list[Learned] = []
    note: Callable[..., None] = Planning._note

    def noting(planning: Planning, learned: Learned, *args: Any) -> None:
        lessons.append(learned)
        note(planning, learned, *args)

    monkeypatch.setattr(Planning, "_note", noting)
    monkeypatch.setattr(Planning, "_plan_better", lambda *_, **__: None)
    return lessons


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")
@pytest.mark.parametrize("name", NETS)
def test_each_plan_takes_what_was_learned_under_another(name: str, found: list[Learned]) -> None:
    case, rng = CASES[name], random.Random(name)
    torch.manual_seed(0)
    model, batch = case.build(), case.batch()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    budget = lowtide.budget(1 << 40)
    loop = budget._loop

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        model.load_state_dict(state)
        model.zero_grad()
        with budget:
            loss = case.loss(model, batch)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, gradients = step(), list[Tensor]()
    lowtide.measure(step, device="cpu")
    budget.report()
    for _ in range(3):
        plan = drawn(found[-1], rng)
        loop._plans._change([plan])
        gradients.clear()
        peak = lowtide.measure(lambda: gradients.extend(step()), device="cpu").peak_bytes
        budget.report()
        assert loop._reported.last is not None
        assert loop._reported.last.followed is not None
        assert loop._reported.last.followed.plan is plan.plan
        assert 0.98 * plan.peak - 64 <= peak <= 1.005 * plan.peak + 64
        assert found[-1].plain_peak == pytest.approx(found[0].plain_peak, rel=0.005)
        assert name not in SAME_BITS or same(gradients, plain)


def test_what_the_releases_free_is_not_counted_after_them(found: list[Learned]) -> None:
    """The gradient of a slice is as large as the whole, and is made when nothing is saved any more:
    what was held, or from what it was replayed, makes no difference to it."""
    base, weight = torch.randn(1 << 14), torch.randn(1 << 16, requires_grad=True)
    budget = lowtide.budget(1 << 40)

    def step() -> None:
        weight.grad = None
        with budget:
            loss = (weight[: 1 << 14] * base.sin().cos()).sum()
        loss.backward()

    step()
    lowtide.measure(step, device="cpu")
    budget.report()
    held = keep_all(found[-1].graph)
    sine, cosine = (_made(found[-1].graph, name) for name in ("aten::sin", "aten::cos"))
    for replayed, decisions in (0, {}), (1, {sine: HOLD, cosine: 0}), (0, {}), (2, {cosine: 0}):
        retain = [decisions.get(value, choice) for value, choice in enumerate(held.retain)]
        plan = replace(held, retain=tuple(retain))
        peak = simulate(found[-1].graph, plan.retain).peak
        budget._loop._plans._change([found[-1].prepared(plan, peak)])
        assert lowtide.measure(step, device="cpu").peak_bytes == peak
        budget.report()
        assert simulate(found[-1].graph, plan.retain).replayed_ops == replayed


def _made(graph: Graph, name: str) -> int:
    """The result of the operation with this name."""
    return next(op.outputs[0] for op in graph.ops if op.name == name)
