"""`lowtide.verify`: that it finds what differs, and nothing else, and leaves no trace."""

from __future__ import annotations

import copy
import itertools
import json
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import unseen
from by_hand import same
from lowtide import engine
from lowtide.cli import main
from lowtide.errors import BudgetError, CompiledWarning, UsageError
from lowtide.step import recorded_by
from lowtide.verifying.observed import Difference, differences, observe
from lowtide.verifying.state import Reached
from lowtide.verifying.verification import ALL, Verification
from once import on_one_recorder

pytestmark = on_one_recorder


class Sometimes(nn.Module):
    """Fills what it has made by a kernel that nobody sees, as an extension of C++ may."""

    def forward(self, x: Tensor) -> Tensor:
        made = x.sin() * 2
        unseen(made, torch.full_like(made, 0.5))
        return made * made.exp()


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(32, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Dropout(0.2),
                      nn.Linear(96, 32))
    ]  # fmt: skip
    return nn.Sequential(*layers, *more)


def batch() -> Tensor:
    return torch.randn(64, 32)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def labels(found: Verification) -> list[str]:
    return [step.trial.label for step in found.steps]


# --- the same -----------------------------------------------------------------------------------


def test_a_step_with_dropout_and_buffers_has_the_same_bits_inside_its_limit() -> None:
    model, x = net(), batch()
    found = lowtide.verify(loss_of, model, x)
    assert found, str(found)
    assert (found.same, found.held, found.differences, found.unrepeatable) == (True, True, (), ())
    assert found.limit == found.plain.measured // 2
    assert found.highest <= found.limit
    assert labels(found)[0] == "unplanned"
    assert labels(found)[-2:] == ["planned", ALL]
    assert all(step.replayed for step in found.steps)
    assert found.compared == {
        "result": 1, "gradient": 24, "parameter": 24, "buffer": 12, "input": 1, "random state": 3,
    }  # fmt: skip
    assert str(found).startswith(
        "The same bits: 1 result, 24 gradients, 24 parameters, 12 buffers, 1 input, 3 random "
        "states, in 4 steps under "
    )
    assert " and in one that recomputes all.\n" in str(found)
    assert repr(found).startswith("<Verification: the same bits, peak ")
    json.dumps(found.to_dict(), allow_nan=False)


def test_afterwards_all_is_as_it_was() -> None:
    model, x = net(), batch()
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss_of(model, x).backward()
    optimizer.step()
    scheduler.step()

    def step() -> Tensor:
        random.random()
        numpy.random.rand()
        optimizer.zero_grad()
        loss = loss_of(model, x) * torch.rand((), generator=generator)
        loss.backward()
        optimizer.step()
        scheduler.step()
        x.add_(1)
        return loss

    def state() -> Any:
        return copy.deepcopy((
            [*model.state_dict().values(), x, *(p.grad for p in model.parameters())],
            [*(t for kept in optimizer.state.values() for t in kept.values())],
            [torch.get_rng_state(), generator.get_state()],
            optimizer.param_groups[0]["lr"], scheduler.state_dict(), random.getstate(),
            numpy.random.get_state()[1].tolist(),
        ))  # fmt: skip

    before = state()
    assert lowtide.verify(step, limit=0.9)
    for one, two in zip(before, state(), strict=True):
        if isinstance(one, list) and isinstance(one[0], Tensor):
            assert same(one, two)
        else:
            assert one == two


def test_what_an_optimizer_keeps_in_float32_for_half_parameters_stays_so() -> None:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    kept = {"step": torch.tensor(3.0), "exp_avg": torch.randn(8, 8), "exp_avg_sq": torch.rand(8, 8)}
    optimizer.state[model.weight] = dict(kept)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.state[model.weight]["exp_avg"].add_(1)

    before = kept["exp_avg"].clone()
    assert lowtide.verify(step, torch.ones(2, 8, dtype=torch.bfloat16), limit="1 MB")
    assert optimizer.state[model.weight]["exp_avg"] is kept["exp_avg"]
    assert kept["exp_avg"].dtype is torch.float32
    assert torch.equal(kept["exp_avg"], before)


@dataclass(slots=True)
class Part:
    model: nn.Module

    def step(self, x: Tensor) -> float:
        loss = loss_of(self.model, x)
        loss.backward()
        return loss.item()


class Trainer:
    """Counts, logs and draws as trainings do, in attributes that no module knows of."""

    def __init__(self) -> None:
        self.model = net()
        self.model.history = torch.zeros(3)
        self.model.lists = [torch.zeros(2)]
        self.number, self.losses, self.last = 0, list[float](), deque[float](maxlen=3)
        self.python, self.numpy = random.Random(1), numpy.random.default_rng(1)

    def step(self, x: Tensor) -> Tensor:
        self.number += 1
        for held in (self.model.history, *self.model.lists):
            held.add_(1)
        drawn = self.python.random() + self.numpy.random() + self.model.history[0]
        loss = loss_of(self.model, x) * drawn * self.number
        self.losses.append(loss.item())
        self.last.append(loss.item())
        self.model[0].weight.register_hook(lambda grad: grad * 2)
        return loss

    def state(self) -> Any:
        return copy.deepcopy((
            self.number, self.losses, self.last, self.model.history.tolist(),
            self.python.getstate(), self.numpy.bit_generator.state,
            self.model[0].weight._backward_hooks,
        ))  # fmt: skip


def test_attributes_of_objects_are_put_back() -> None:
    trainer = Trainer()
    before = trainer.state()[:-1]
    found = lowtide.verify(trainer.step, batch(), limit=0.9, steps=1)
    assert found, str(found)
    assert trainer.state()[:-1] == before
    assert not trainer.state()[-1]  # no hook
    assert found.compared["random state"] == 3 + 2


def test_variables_and_flags_are_put_back() -> None:
    model, number = net(), 1
    x = batch()

    def step() -> Tensor:
        nonlocal number
        number += 1
        x.requires_grad_()
        model[0].weight.requires_grad_(False)
        return loss_of(model, x) * number

    assert lowtide.verify(step, limit=0.9, steps=1)
    assert (number, x.requires_grad, model[0].weight.requires_grad) == (1, False, True)


def test_memory_that_a_step_exchanges_is_put_back() -> None:
    model = net()
    target = copy.deepcopy(model)
    with torch.no_grad():
        target[0].weight.add_(1)
    before = target[0].weight.clone()

    def step(x: Tensor) -> Tensor:
        target[0].weight.data = model[0].weight.data
        return loss_of(model, x) + loss_of(target, x)

    assert lowtide.verify(step, batch(), limit=0.9, steps=1)
    assert torch.equal(target[0].weight, before)
    assert target[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_what_an_optimizer_has_in_its_groups_is_put_back() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu")

    def step(x: Tensor) -> None:
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    rate = optimizer.param_groups[0]["lr"]
    assert lowtide.verify(step, batch(), limit=0.9, steps=1)
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(1e-2)
    assert scaler._scale is None


def test_optimizers_that_hooks_hold_are_put_back() -> None:
    model = net()
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    before = model[0].weight.clone()
    found = lowtide.verify(loss_of, model, batch(), limit="1 MB", steps=1)
    assert found, str(found)
    assert found.compared["optimizer state"] == 3 * 24
    assert torch.equal(model[0].weight, before)
    assert not any(optimizer.state for optimizer in optimizers.values())


def test_what_another_thread_trains_is_left_alone() -> None:
    model, other = net(), nn.Linear(32, 32)
    optimizer = torch.optim.Adam(other.parameters())
    begin, end = threading.Event(), threading.Event()
    inputs, before = batch(), other.weight.clone()

    def train() -> None:
        begin.wait()
        other(inputs).sum().backward()
        optimizer.step()
        end.set()

    def step(x: Tensor) -> Tensor:
        begin.set()
        assert end.wait(10)
        return loss_of(model, x)

    thread = threading.Thread(target=train)
    thread.start()
    assert lowtide.verify(step, batch(), limit=0.9, steps=1)
    thread.join()
    assert optimizer.state
    assert not torch.equal(other.weight, before)


def test_attributes_of_optimizers_are_put_back() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.base = torch.optim.Adam(self.param_groups)
            self.count, self.held = 0, [torch.zeros(1)]

        def step(self, closure: Any = None) -> None:
            self.count += 1
            self.held[0] += 1
            self.base.param_groups[0]["lr"] = 0.1 * self.count * self.held[0].item()
            self.base.step()

    model = net()
    optimizer = Around(model.parameters())

    def step(x: Tensor) -> None:
        loss_of(model, x).backward()
        optimizer.step()

    assert lowtide.verify(step, batch(), limit=0.9, steps=1)
    assert (optimizer.count, optimizer.held, optimizer.base.state) == (0, [torch.zeros(1)], {})


def test_gradients_of_a_model_that_is_found_in_slots_are_compared() -> None:
    found = lowtide.verify(Part(net()).step, batch(), limit=0.9, steps=1)
    assert (bool(found), found.compared["gradient"], found.compared["result"]) == (True, 24, 1)


class OfItsClass:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def step(self, x: Tensor) -> Tensor:
        return loss_of(self.model, x)

    def whole(self, x: Tensor) -> None:
        self.step(x).backward()


def test_leaves_that_nothing_leads_to_are_found_in_the_graph() -> None:
    weight = OfItsClass.model[0].weight
    weight.grad = held = torch.ones_like(weight)
    found = lowtide.verify(OfItsClass().step, batch(), limit="1 MB", steps=1)
    assert found, str(found)
    assert found.compared["gradient"] == 4
    with pytest.raises(UsageError, match="runs a backward for 4 tensors that verify does not find"):
        lowtide.verify(OfItsClass().whole, batch(), steps=1)
    assert weight.grad is held
    assert held.eq(1).all()


def test_a_step_that_returns_what_its_own_grad_has_used_up() -> None:
    model = net()

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        return loss

    found = lowtide.verify(step, batch(), limit=0.9, steps=1)
    assert (bool(found), labels(found), found.compared["gradient"]) == (True, ["unplanned"], 24)


# --- what is run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("apply", [
    lambda model: lowtide.checkpoint_modules(model, "0"),
    lambda model: lowtide.fit(model, 0.7),
])  # fmt: skip
def test_a_step_that_uses_lowtide_is_run_as_it_is(apply: Callable[[nn.Module], Any]) -> None:
    model, x = nn.Sequential(net(), nn.Linear(32, 32)), batch()
    apply(model)
    found = lowtide.verify(loss_of, model, x, steps=2)
    assert found, str(found)
    assert (labels(found), found.limit) == (["as it is"] * 2, None)
    assert found.replayed


def test_a_budget_in_a_step_that_runs_backward_itself() -> None:
    model, x = net(), batch()
    budget = lowtide.budget(0.6)

    def step() -> None:
        with budget:
            loss = loss_of(model, x)
        loss.backward()

    found = lowtide.verify(step, steps=3)
    assert found, str(found)
    assert labels(found) == ["as it is"] * 3
    assert "result" not in found.compared
    assert found.replayed


def test_a_backward_of_the_steps_own_is_not_run_twice() -> None:
    model, x = net(), batch()
    calls = itertools.count()  # which is not put back, as a list is

    def step() -> Tensor:
        loss = loss_of(model, x)
        loss.register_hook(lambda _: [next(calls), None][1])
        loss.backward()
        return loss

    found = lowtide.verify(step, limit=1.0, steps=1)
    assert (found.same, labels(found)) == (True, ["unplanned"])  # no region can be around it
    assert next(calls) == 4  # warming up, plain twice, one step under the limit


def test_a_gradient_penalty_in_the_forward_is_not_the_steps_own_backward() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return out + grad.square().sum()

    found = lowtide.verify(step, batch(), limit="1 MB", steps=1)
    assert found, str(found)
    assert labels(found) == ["unplanned", ALL]
    # the last layer's bias has none of the penalty, but one of the output
    assert found.compared["gradient"] == 4 + 1  # and that of the clone


@pytest.mark.parametrize("limit", ["80%", 0.8])
def test_a_share_is_one_of_the_plain_peak(limit: str | float) -> None:
    found = lowtide.verify(loss_of, net(), batch(), limit=limit, steps=1)
    assert found.limit == int(0.8 * found.plain.measured)
    assert found


def test_a_plan_is_followed_from_the_first_step_on() -> None:
    model, x = net(), batch()
    plan = lowtide.plan(loss_of, model, x, limit=0.7)
    found = lowtide.verify(loss_of, model, x, limit=plan, steps=2)
    assert found, str(found)
    assert labels(found) == ["planned", "planned", ALL]
    assert found.limit == plan.limit
    assert found.steps[0].trial.predicted == plan.peak


def test_a_limit_that_was_given_is_refused_and_half_of_the_plain_peak_is_not() -> None:
    model, x = nn.Linear(64, 64), torch.randn(8, 64)  # nothing of which can be recomputed
    with pytest.raises(BudgetError, match="does not fit"):
        lowtide.verify(loss_of, model, x, limit=0.5)
    found = lowtide.verify(loss_of, model, x)
    assert found.limit is not None
    assert found.limit > found.plain.measured // 2
    assert found


def test_what_torch_compiled_is_compared_with_its_eager_step() -> None:
    torch.compiler.reset()
    model = torch.compile(net(), backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompiledWarning)
        found = lowtide.verify(loss_of, model, batch(), steps=2)
    assert found, str(found)
    assert found.replayed


def test_a_step_without_a_backward_says_so() -> None:
    found = lowtide.verify(nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), steps=1)
    assert "There is no gradient: the step left none, nor a result that requires grad." in str(
        found
    )


# --- different -----------------------------------------------------------------------------------


def test_a_kernel_that_writes_unseen_is_found_and_named() -> None:
    found = lowtide.verify(loss_of, net(Sometimes(), nn.Linear(32, 32)), batch(), steps=1)
    assert not found
    assert (found.same, found.held) == (False, True)
    assert {one.kind for one in found.differences} == {"gradient"}
    assert "0.weight" in {one.name for one in found.differences}
    assert found.origin is not None
    assert (found.origin.operator, found.origin.module) == ("aten::mul", "20")
    assert found.origin.line.startswith("tests/test_verify.py:")
    text = str(found)
    assert text.startswith("DIFFERENT: not everything has the bits of the plain step, in 1 step ")
    assert "gradient 0.weight: 3072 of 3072 elements, by at most " in text
    assert "It begins with a tensor of shape [64, 32] saved in 20 (tests/test_verify.py:" in text
    assert "Something wrote to a tensor unseen (rule 4:" in text
    assert "  and " in text  # more than are listed
    assert repr(found).startswith("<Verification: not the same bits, ")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["same"] is False


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_that_the_step_clears_are_compared_as_its_optimizer_reads_them(
    momentum: float,
) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), Sometimes(), *net()), batch()
    lowtide.checkpoint_modules(model, "1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=momentum)  # warming up

    def step() -> float:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    found = lowtide.verify(step, steps=1)
    assert found.compared["gradient"] == 26
    assert {one.kind for one in found.differences} == {"gradient"} | (
        {"optimizer state"} if momentum else set()
    )
    assert ("optimizer state" in found.compared) is bool(momentum)


def test_attributes_that_a_step_sets_are_compared() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.running, self.parts = net(), torch.zeros(32), [torch.zeros(())]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            self.running = self.running * 0.9 + out.detach().mean(0)
            self.parts = [out.detach().mean()]
            return out.sum()

    model = Running()
    reached = Reached(model, (), {})
    before = observe(reached, None, [])
    with reached.from_here():
        model(batch())
        names = {one.name for one in differences(before, observe(reached, None, []))}
    assert {"running", "parts[0]"} <= names
    assert differences(before, observe(reached, None, [])) == []


def test_a_write_through_an_array_is_found_and_put_back() -> None:
    model, array = net(), numpy.ones((64, 32), numpy.float32)

    def step(array: Any) -> Tensor:
        loss = loss_of(model, torch.from_numpy(array).sin())
        array += 1
        return loss

    found = lowtide.verify(step, array, limit=0.9, steps=1)
    assert found.differences
    assert not found.unrepeatable
    assert (array == 1).all()


def test_a_step_that_does_not_repeat_itself_is_not_called_the_same() -> None:
    model, loader = net(), itertools.cycle([torch.ones(64, 32), torch.zeros(64, 32)])
    found = lowtide.verify(lambda: loss_of(model, next(loader)), steps=1)
    assert not found
    assert found.unrepeatable
    assert not found.differences
    assert str(found).startswith("NOT COMPARABLE: two plain steps differ.")
    assert "Other bits in another plain step, from the same state:\n  result: 1 of 1" in str(found)
    assert "a loader, an iterator, a file." in str(found)


def test_a_state_that_changes_after_the_second_plain_step_is_not_held_against_lowtide() -> None:
    model, x, calls = net(), batch(), itertools.count()
    found = lowtide.verify(lambda: loss_of(model, x) * (1 + next(calls) // 3), limit=0.9, steps=1)
    assert not found
    assert (bool(found.unrepeatable), found.differences) == (True, ())


# --- comparing -----------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor
    states: tuple[Tensor, ...]


def observed(result: Any, **tensors: Tensor) -> Any:
    def step() -> None:
        pass

    return observe(Reached(step, (), tensors), result, [])


def test_results_are_named_by_their_places() -> None:
    one = Output(torch.ones(2), (torch.ones(3), torch.ones(4)))
    two = Output(torch.ones(2), (torch.ones(3), torch.tensor([1.0, 1.0, 3.5, 1.0])))
    assert differences(observed(one), observed(two)) == [
        Difference("result", ".states[1]", 1, 4, 2.5)
    ]
    assert differences(observed({"a": torch.ones(2)}), observed({"a": torch.ones(2)})) == []
    (one_off,) = differences(observed({"a": torch.ones(2)}), observed({"a": torch.zeros(2)}))
    assert str(one_off) == "result ['a']: 2 of 2 elements, by at most 1"


@pytest.mark.parametrize(("one", "two", "count"), [
    (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), 1),
    (torch.tensor(float("nan")), torch.tensor(float("nan")), 0),
    (torch.ones(3), torch.ones(4), 4),
    (torch.ones(3), torch.ones(3, dtype=torch.float64), 3),
    (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 1j, 2),
    (torch.ones(2, dtype=torch.bool), torch.tensor([True, False]), 1),
    (torch.ones(0), torch.ones(0), 0),
    (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse(), 3),
    (torch.ones(2, dtype=torch.complex64) * 1j, (torch.ones(2, dtype=torch.complex64) * -1j).conj(),
     0),
    (torch.ones(2, 3).t(), torch.ones(3, 2), 0),
])  # fmt: skip
def test_bits_are_compared(one: Tensor, two: Tensor, count: int) -> None:
    found = differences(observed(one), observed(two))
    assert [d.differing for d in found] == ([count] if count else [])


@pytest.mark.parametrize(("one", "two"), [
    (0.1, 0.1 + 2e-17), (0.1, 0.1 + 1e-16), (2**70, 2**70 + 1), (True, False), (1j, 2j),
    (numpy.ones(2), numpy.zeros(2)),
])  # fmt: skip
def test_numbers_among_results_are_compared(one: Any, two: Any) -> None:
    equal = bool(numpy.all(one == two))
    assert (differences(observed([one]), observed([two])) == []) is equal


def test_the_place_in_what_a_generator_has_drawn_is_compared() -> None:
    before = observed(None)
    numpy.random.rand()
    random.gauss(0, 1)
    between = observed(None)
    random.gauss(0, 1)
    assert [d.name for d in differences(before, between)] == ["of Python", "of NumPy"]
    (found,) = differences(between, observed(None))
    assert (found.name, found.largest) == ("of Python", None)


def test_a_difference_that_is_infinite_is_valid_json() -> None:
    (found,) = differences(observed(torch.tensor(float("inf"))), observed(torch.ones(())))
    assert (found.differing, found.largest) == (1, None)


def test_a_gradient_that_is_missing_differs() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    (found,) = differences(observed(None, w=weight), observed(None, w=other))
    assert (found.kind, found.differing, found.largest) == ("gradient", 3, None)


def test_nested_tensors_are_compared_by_their_parts() -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    for layout in (torch.jagged, torch.strided):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of strided ones
            one = torch.nested.nested_tensor(rows, layout=layout)
            two = torch.nested.nested_tensor([rows[0], 2 * rows[1]], layout=layout)
        assert not differences(observed(one), observed(one))
        assert differences(observed(one), observed(two))


def test_what_records_a_step_is_replaced_on_its_own_thread_alone() -> None:
    made: list[str] = []

    def make(tape: Any) -> Any:
        made.append(threading.current_thread().name)
        return engine.new_recorder(tape)

    def step() -> None:
        lowtide.checkpoint(torch.sin, torch.ones(2, requires_grad=True)).sum().backward()

    with recorded_by(make):
        step()
        other = threading.Thread(target=step)
        other.start()
        other.join()
    step()
    assert made == [threading.current_thread().name]


# --- errors --------------------------------------------------------------------------------------


def test_what_cannot_be_verified_is_refused() -> None:
    model, x = net(), batch()
    with pytest.raises(UsageError, match="must be a callable"):
        lowtide.verify(x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 1; got 0"):
        lowtide.verify(model, x, steps=0)
    with pytest.raises(UsageError, match=r"\(0, 1\]; got 1\.5"):
        lowtide.verify(model, x, limit=1.5)
    with pytest.raises(UsageError, match="no size yet"):
        lowtide.verify(nn.LazyLinear(3), x)
    with pytest.raises(UsageError, match="tensors without memory"):
        lowtide.verify(nn.Linear(32, 3, device="meta"), x)
    with torch.no_grad(), pytest.raises(UsageError, match="cannot be verified inside"):
        lowtide.verify(model, x)


@pytest.mark.parametrize("own", [False, True])
def test_a_graph_from_before_the_step_is_refused_while_it_is_whole(own: bool) -> None:
    model, first = net(), nn.Linear(32, 32)
    made = first(batch())

    def step() -> Tensor:
        loss = loss_of(model, made)
        if own:
            loss.backward()
        return loss

    with pytest.raises(UsageError, match="made before the step, and can run only once"):
        lowtide.verify(step, steps=1)
    loss_of(model, made).backward()
    assert first.weight.grad is not None


def test_a_limit_around_a_budget_says_what_to_leave_out() -> None:
    model, x = net(), batch()

    def step() -> Tensor:
        with lowtide.budget(0.9):
            return loss_of(model, x)

    with pytest.raises(UsageError, match="inside another budget") as caught:
        lowtide.verify(step, limit=0.9)
    assert "Without a limit" in caught.value.__notes__[0]


def test_an_error_of_the_step_is_its_own_and_all_is_put_back() -> None:
    model, x = net(), batch()
    before = copy.deepcopy(model.state_dict())
    calls = itertools.count(1)

    def step() -> Tensor:
        loss = loss_of(model, x)
        if next(calls) == 4:
            raise RuntimeError("of the user's own")
        return loss

    with pytest.raises(RuntimeError, match="of the user's own"):
        lowtide.verify(step)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert lowtide.verify(loss_of, model, x, steps=1)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("of the user's own")


def test_an_error_of_a_backward_after_one_in_the_forward_is_its_own() -> None:
    """It is not taken for a graph that the step has used up itself, whose gradients are not
    compared."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def step() -> Tensor:
        torch.autograd.grad(model(x).sum(), model.weight)
        out: Tensor = _Failing.apply(model(x))
        return out.sum()

    with pytest.raises(RuntimeError, match="of the user's own"):
        lowtide.verify(step)


# --- the command line ----------------------------------------------------------------------------

PROGRAM = """
import torch, itertools
from torch import nn

def build():
    torch.manual_seed(0)
    layers = [nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 96)]
    return nn.Sequential(*layers, nn.GELU()), torch.randn(64, 32)

def other():
    model, batch = build()
    count = itertools.count()
    return lambda: model(batch).sum() * next(count)
"""


def test_the_command_line_says_yes_or_no(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "verified.py"
    program.write_text(PROGRAM)
    assert main(["verify", f"{program}:build", "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("The same bits: 1 result, 6 gradients")
    assert main(["verify", f"{program}:build", "--steps", "1", "--limit", "85%", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"]
    assert told["limit"] == int(0.85 * told["plain"]["measured"])
    assert main(["verify", f"{program}:other", "--steps", "1"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("NOT COMPARABLE: ")
    assert "lowtide: NOT COMPARABLE: two plain steps differ." in said.err
    assert main(["verify", f"{program}:build", "--steps", "0"]) == 1
    assert main(["verify", f"{program}:build", "--limit", "1%"]) == 1
