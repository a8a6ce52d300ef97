"""Every model of the catalogue takes the same steps under lowtide as without it, bit for bit.

Holds semantics rules 1 (same bits), 2 (once), 3 (random state), 6 (aliasing), 7 (requires_grad)
and 9 (nesting) on whole training steps: three of them, with momentum, so that a state that drifts
in the first one shows in the next. The last part tests that the harness detects what it should.

With LOWTIDE_FULL=1 in the environment the slow models run too, and every model at every limit.
May import: the public API of lowtide, at run time, so that a broken engine does not hide the tests
of the harness. Rejected: one test per model that tries every way in turn; the first failure would
hide the others.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from harness import Compute, Entry, Method, Trace, assert_same, plain, run_steps
from once import FIRST_OF_TWO, FULL, on_one_recorder
from ways import budgeted, whole_step_checkpoint, within
from zoo import BY_MODULE, CASES, LIBRARIES, one_of_many
from zoo.case import Batch, Case

pytestmark = [
    # torch gives these once per process, for whichever model runs first.
    pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.full_search if FULL else pytest.mark.any_plan,
]


def chosen(keep: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Parametrizes over the cases that run here."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=name, marks=[pytest.mark.slow] if "slow" in case.tags else [])
            for name, case in CASES.items()
            if FULL or ("slow" not in case.tags and keep(case))
        ],
    )


own_cases = chosen(lambda case: not case.name.startswith(LIBRARIES))
# Plans are the same on both recorders, up to annealing. Cases that do not stand for their kinds: on
# the first of two, all are recorded and replayed (as a whole step), and our own are planned for
# most of the peak; on the other one, all are planned for half of it, and our own replayed.
planned_cases = chosen(lambda case: not FIRST_OF_TWO or case.name in BY_MODULE)
mostly_kept_cases = chosen(
    lambda case: not one_of_many(case) and (FIRST_OF_TWO or case.name in BY_MODULE)
)
replayed_cases = chosen(lambda case: FIRST_OF_TWO or not one_of_many(case))
by_module = pytest.mark.parametrize("name", BY_MODULE)


def nested_checkpoints(model: nn.Module, compute: Compute) -> Compute:
    """Nested regions: the model, its children, and every layer of a list of layers."""
    import lowtide

    def chosen(name: str, module: nn.Module) -> bool:
        parent = model.get_submodule(name.rpartition(".")[0])
        called = not isinstance(module, nn.ModuleList)
        return called and (parent is model or isinstance(parent, nn.ModuleList))

    lowtide.checkpoint_modules(model, chosen)
    return compute


def fitted(limit: float | int) -> Method:
    def method(model: nn.Module, compute: Compute) -> Compute:
        import lowtide

        lowtide.fit(model, limit)
        return compute

    return method


@functools.cache
def plain_trace(name: str) -> Trace:
    return run_steps(CASES[name])


@on_one_recorder
@own_cases
def test_the_plain_step_is_deterministic_and_trains(case: Case) -> None:
    trace = plain_trace(case.name)
    assert_same(trace, run_steps(case))
    losses = [float(trace[f"step {number}: loss"]) for number in (1, 2, 3)]
    assert all(math.isfinite(loss) for loss in losses), losses
    assert len(set(losses)) == 3, f"the loss does not move: {losses}"
    gradients = [
        entry.value
        for entry in trace.entries
        if ": gradient" in entry.name and isinstance(entry.value, Tensor)
    ]
    moved = sum(bool(torch.any(gradient.to_dense() != 0)) for gradient in gradients)
    assert moved > len(gradients) / 2, f"{moved} of {len(gradients)} gradients are not zero"


@replayed_cases
def test_checkpoint_of_the_whole_step_gives_the_same_bits(case: Case) -> None:
    assert_same(plain_trace(case.name), run_steps(case, whole_step_checkpoint))


@planned_cases
def test_half_the_peak_gives_the_same_bits(case: Case) -> None:
    assert_same(plain_trace(case.name), within(case, budgeted, 0.5))


@mostly_kept_cases
def test_most_of_the_peak_gives_the_same_bits(case: Case) -> None:
    assert_same(plain_trace(case.name), within(case, budgeted, 0.9))


@by_module
def test_nested_checkpoints_of_modules_give_the_same_bits(name: str) -> None:
    assert_same(plain_trace(name), run_steps(CASES[name], nested_checkpoints))


@on_one_recorder  # a fitted model opens the same budget, which both recorders have above
@by_module
def test_a_fitted_model_gives_the_same_bits(name: str) -> None:
    assert_same(plain_trace(name), within(CASES[name], fitted, 0.7))


# The harness itself.


def with_torch_checkpoint(**settings: Any) -> Method:
    def method(model: nn.Module, compute: Compute) -> Compute:
        def run(batch: Batch) -> Tensor:
            loss: Tensor = torch_checkpoint(compute, batch, use_reentrant=False, **settings)
            return loss

        return run

    return method


def traced(**values: object) -> Trace:
    return Trace("by hand", tuple(Entry(name, value) for name, value in values.items()))


def test_the_harness_sees_statistics_that_move_twice() -> None:
    trace = run_steps(CASES["torch_mlp_batch_norm"], with_torch_checkpoint())
    with pytest.raises(AssertionError, match=r"step 1: buffer 1\.running_mean differs: 12 of 12"):
        assert_same(plain_trace("torch_mlp_batch_norm"), trace)


def test_the_harness_sees_user_code_that_runs_twice() -> None:
    trace = run_steps(CASES["aliasing_transposed_input"], with_torch_checkpoint())
    with pytest.raises(AssertionError, match="step 1: calls of forward differs: 1 in the plain"):
        assert_same(plain_trace("aliasing_transposed_input"), trace)


def test_the_harness_sees_random_state_that_is_not_restored() -> None:
    trace = run_steps(
        CASES["random_feature_dropouts"], with_torch_checkpoint(preserve_rng_state=False)
    )
    with pytest.raises(AssertionError, match=r"step 1: gradient 0\.weight differs"):
        assert_same(plain_trace("random_feature_dropouts"), trace)


def test_the_harness_sees_draws_from_a_generator_of_the_model() -> None:
    def method(model: Any, compute: Compute) -> Compute:
        def run(batch: Batch) -> Tensor:
            loss = compute(batch)
            torch.rand((), generator=model.generator)
            return loss

        return run

    trace = run_steps(CASES["random_own_generator"], method)
    with pytest.raises(AssertionError, match=r"step 1: generator \.generator differs"):
        assert_same(plain_trace("random_own_generator"), trace)


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "1 of 2 elements, the first at flat"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype torch.float32 against"),
        (torch.zeros(2, 1), torch.zeros(2), "shape torch.Size"),
        (torch.zeros(3, 2), torch.zeros(2, 3).t(), r"strides \(2, 1\) against \(1, 3\)"),
        (None, torch.zeros(2), "NoneType in the plain run, Tensor in the other"),
        (torch.ones(2).to_sparse(), torch.zeros(2).to_sparse(), "shape torch.Size"),
        (1, 2, "1 in the plain run, 2 in the other"),
    ],
)
def test_the_harness_names_the_difference(one: object, two: object, message: str) -> None:
    with pytest.raises(AssertionError, match=f"by hand: loss differs: {message}"):
        assert_same(traced(loss=one), traced(loss=two))


def test_the_harness_takes_equal_bits_for_equal() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0])
    assert_same(
        traced(loss=values, empty=values[:0]), traced(loss=values.clone(), empty=values[3:])
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [(traced(loss=1, more=2), "1 observations"), (traced(grad=1), "observed 'loss' where")],
)
def test_the_harness_sees_a_missing_observation(other: Trace, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same(traced(loss=1), other)


def test_the_harness_leaves_the_process_as_it_was() -> None:
    before = (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    run_steps(CASES["random_numpy_mask"], plain)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())
