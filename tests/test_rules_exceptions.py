"""Rules 10, 12 and 14: errors leave nothing behind; off is off; threads do not interfere.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import lowtide
from against_plain import WAYS, Way, check, counted, gradients, leaf, recorded
from apart import ran_apart
from by_hand import same
from lowtide.loop import Loop
from lowtide.step import current_recorder
from lowtide.tape.values import Operation

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Boom(Exception):
    pass


def surroundings() -> tuple[Any, ...]:
    return (
        len(_get_current_dispatch_mode_stack()),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch._C._get_mkldnn_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        current_recorder(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
    )


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Whatever happens inside, global state is as before and the next step is right."""
    before = surroundings()
    yield
    assert surroundings() == before

    def scenario(way: Way) -> list[Tensor | None]:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        x = leaf(3, 4)
        found = gradients(way(net, x).square().sum(), x, *net.parameters())
        return [*found, *net.buffers()]

    assert check(scenario).operations > 0
    check(scenario, WAYS["budget"])


ERRORS = [Boom, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit]


@every_way
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_forward(error: type[BaseException], way: Way) -> None:
    x = leaf(6)

    def region(x: Tensor) -> Tensor:
        x.sin().exp()
        raise error("in forward")

    with nothing_left_behind(), pytest.raises(error, match="in forward"):
        way(region, x)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_a_nested_forward_that_is_caught_outside(error: type[BaseException]) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6)

        def inner(x: Tensor) -> Tensor:
            x.cos().exp()
            raise error

        def outer(x: Tensor) -> Tensor:
            y = x.sin()
            try:
                way(inner, y)
            except error:
                y = y.tanh()
            return way(lambda y: y.exp().cos(), y)

        return gradients(way(outer, x).sum(), x)

    with nothing_left_behind():
        check(scenario)


def test_an_error_of_torch_inside() -> None:
    with nothing_left_behind(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lowtide.checkpoint(lambda x: x.sin() @ torch.ones(3, 3), leaf(2, 2))


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_while_replaying(error: type[BaseException]) -> None:
    """The replay listener stands in for anything that fails between request and answer."""
    x = leaf(6)
    y = lowtide.checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp().cos(), x)
    calls: list[int] = []

    def failing(operations: list[Any]) -> None:
        calls.append(len(operations))
        raise error("in replay")

    with nothing_left_behind():
        state = torch.get_rng_state()
        lowtide.replay.listeners.append(failing)
        try:
            with pytest.raises(error, match="in replay"):
                y.sum().backward(retain_graph=True)
        finally:
            lowtide.replay.listeners.remove(failing)
        assert calls
        assert torch.equal(state, torch.get_rng_state())
        y.sum().backward()  # the same graph can be used again
        assert x.grad is not None


def test_an_error_in_the_middle_of_a_replay() -> None:
    """An operator fails in its replay, while random state and default dtype are replaced. It writes
    a part of uninitialized memory, so that both recorders have it as an object of Python's."""
    x = leaf(6)

    def region(x: Tensor) -> Tensor:
        noise = torch.empty(2, 6)
        torch.set_default_dtype(torch.float64)
        try:
            noise[0].uniform_()
        finally:
            torch.set_default_dtype(torch.float32)
        return (x * noise[0]).sin().exp().cos()

    y = lowtide.checkpoint(region, x)
    # the only operation that draws on a live tape
    tape = [o for o in gc.get_objects() if issubclass(type(o), Operation)]
    (drawing,) = [op for op in tape if op.facts.name == "aten::uniform_"]

    class Failing:
        name = "aten::uniform_"
        generator = None

        @staticmethod
        def func(*args: Any, **kwargs: Any) -> Any:
            assert torch.get_default_dtype() == torch.float64
            torch.rand(3)
            raise MemoryError("no room")

    with nothing_left_behind():
        state = torch.get_rng_state()
        drawing.facts = Failing
        with pytest.raises(MemoryError, match="no room"):
            y.sum().backward()
        assert torch.equal(state, torch.get_rng_state())


@every_way
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_error_in_a_backward_hook(error: type[BaseException], way: Way) -> None:
    x = leaf(6)

    def region(x: Tensor) -> Tensor:
        y = x.sin()

        def hook(gradient: Tensor) -> None:
            raise error("in backward")

        y.register_hook(hook)
        return y.exp().cos()

    with nothing_left_behind():
        y = way(region, x)
        with pytest.raises(error, match="in backward"):
            y.sum().backward()


def test_a_budget_serves_on_after_an_error() -> None:
    limit = lowtide.budget(0.8)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    batch = torch.randn(64, 16)

    def step() -> list[Tensor]:
        net.zero_grad()
        with limit:
            loss = net(batch).square().mean()
        loss.backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    def half_a_step(error: type[BaseException]) -> None:
        with limit:
            net(batch)
            raise error

    expected = step()
    for error in (Boom, KeyboardInterrupt):
        with nothing_left_behind(), pytest.raises(error):
            half_a_step(error)
        for _ in range(3):
            assert same(step(), expected)


def test_exceptions_swallowed_inside_the_region() -> None:
    """`except Exception` in user code sees no error of lowtide's in a healthy forward."""
    caught: list[Exception] = []

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6)

        def region(x: Tensor) -> Tensor:
            try:
                return x.sin().exp()
            except Exception as error:  # pragma: no cover - only if the test fails
                caught.append(error)
                raise

        return gradients(way(region, x).sum(), x)

    check(scenario)
    assert not caught


@pytest.mark.parametrize("allowed", ["1 MB", 0.7])
def test_what_torch_refused_and_user_code_caught_is_no_operation_of_the_step(
    allowed: str | float,
) -> None:
    """User code that falls back after an error of torch's: the step is planned like any other."""
    gc.collect()  # a graph whose backward failed in another test is an unfinished step
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    batch = torch.randn(64, 16)
    limit, other = lowtide.budget(allowed), lowtide.budget(allowed)

    def step(tries: bool) -> list[Tensor]:
        net.zero_grad()
        x = batch
        for layer in net:
            x = torch.tanh(layer(x))
            try:
                x = x @ x if tries else x * 2
            except RuntimeError:
                x = x * 2
        x.square().mean().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    expected = step(tries=False)
    with other:
        step(tries=False)
    for number in range(4):
        with limit:
            assert same(step(tries=True), expected)
        report = limit.report()
        assert report.recorded_operations == other.report().recorded_operations
        assert report.planned or number == 0
    assert (report.replayed_operations > 0) == (allowed == 0.7)


def _out_of_bounds(x: Tensor) -> dict[str, Callable[[], object]]:
    """Writes to `x` with a last index out of bounds: those before it are written first."""
    rows = torch.tensor([0, 1, 10**6])
    wide = rows[:, None].expand(3, x.shape[1])
    ones = torch.ones(3, x.shape[1])
    return {
        "renorm": lambda: F.embedding(rows, x, max_norm=0.1),
        "index_put": lambda: x.index_put_((rows,), ones),
        "index_add": lambda: x.index_add_(0, rows, ones),
        "index_copy": lambda: x.index_copy_(0, rows, ones),
        "scatter": lambda: x.scatter_(0, wide, ones),
        "put": lambda: x.put_(10 * rows, ones[:, 0]),
        "masked_scatter": lambda: x.masked_scatter_(torch.ones_like(x, dtype=torch.bool), ones),
    }


@every_way
@pytest.mark.parametrize("write", _out_of_bounds(torch.zeros(1, 1)))
def test_what_an_operator_wrote_before_it_raised_is_not_lost(write: str, way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8, 4)

        def region(x: Tensor) -> Tensor:
            h = 2 * x
            with torch.no_grad(), suppress(IndexError, RuntimeError):
                _out_of_bounds(h)[write]()
            return (h.sin() * h).exp()

        return gradients(way(region, x).sum(), x)

    check(scenario, way)


# Rule 12: off means off.


OFF: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
}


@every_way
@pytest.mark.parametrize("off", OFF.values(), ids=OFF)
def test_without_grad_nothing_is_recorded(
    off: Callable[[], AbstractContextManager[Any]], way: Way
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = torch.randn(3, 4)
    with recorded() as seen:
        with off():
            way(net, x)
        assert seen == []
        way(net, x)
        assert len(seen) > 3


def test_a_fitted_model_in_eval_records_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fitted = lowtide.fit(net, "1 GiB")
    x = torch.randn(3, 4)
    with recorded() as seen:
        net.eval()
        net(x).sum().backward()
        assert seen == []
        net.train()
        net(x).sum().backward()
        assert seen
        seen.clear()
        fitted.remove()
        net(x).sum().backward()
        assert seen == []


def test_grad_switched_off_inside_a_region() -> None:
    x = leaf(4)

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            lowtide.checkpoint(lambda x: x.exp(), x)
        return x.sin()

    with counted() as replayed:
        lowtide.checkpoint(region, x).sum().backward()
    assert replayed.operations == 0


# Rule 14: threads do not see each other.


def test_two_threads_with_two_budgets() -> None:
    def train(seed: int, limit: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(16, 16, generator=generator).requires_grad_() for _ in range(4)]
        x = torch.randn(32, 16, generator=generator)
        for _ in range(5):
            with limit:
                y = x
                for w in weights:
                    y = (y @ w).tanh()
                loss = y.square().mean()
            loss.backward()
        return [w.grad for w in weights if w.grad is not None]

    expected = [train(seed, nullcontext()) for seed in (1, 2)]
    found: dict[int, list[Tensor]] = {}
    budgets = {1: lowtide.budget(0.8), 2: lowtide.budget(0.95)}
    barrier = threading.Barrier(2)

    def run(seed: int) -> None:
        barrier.wait()
        found[seed] = train(seed, budgets[seed])

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, two in zip(expected, (found[1], found[2]), strict=True):
        assert len(one) == len(two) == 4
        assert same(one, two)
    assert budgets[1].report().steps == budgets[2].report().steps == 5


def on_a_thread(function: Callable[[], Any]) -> Any:
    """Run a function on another thread; its result, or the exception that it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_one_budget_on_two_threads_at_once() -> None:
    """The second use is refused, and leaves the first and the budget as they were."""
    w, x = torch.randn(16, 16, requires_grad=True), torch.randn(8, 16)
    limit = lowtide.budget("1 MiB")

    def step() -> Tensor:
        with limit:
            return (x @ w).tanh().square().mean()

    def without_grad() -> Tensor:
        with torch.no_grad():
            return step()

    (expected,) = torch.autograd.grad((x @ w).tanh().square().mean(), w)
    with limit:
        hidden = (x @ w).tanh()
        refused = on_a_thread(step)
        assert isinstance(refused, lowtide.UsageError)
        assert "entered on another thread" in str(refused)
        assert "a budget of its own" in str(refused)
        assert current_recorder() is not None
        assert not on_a_thread(without_grad).requires_grad  # rule 12: it is off there
        loss = hidden.square().mean()
    assert torch.equal(expected, torch.autograd.grad(loss, w)[0])
    other = on_a_thread(lambda: torch.autograd.grad(step(), w)[0])  # they take turns
    assert torch.equal(expected, other)
    assert torch.equal(expected, torch.autograd.grad(step(), w)[0])
    assert limit.report().steps == 3
    assert current_recorder() is None


def test_a_report_on_another_thread_while_the_next_step_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a progress bar asks for one: both learn from the step that is over, but one of them."""
    w, x = torch.randn(16, 16, requires_grad=True), torch.randn(8, 16)
    limit, finish, begun = lowtide.budget("1 MiB"), Loop._finish, threading.Event()
    errors: list[BaseException] = []

    def slowly(loop: Loop, *args: Any) -> None:
        begun.set()
        time.sleep(0.02)  # for the other one to come here too
        finish(loop, *args)

    def report() -> None:
        try:
            assert limit.report().steps > 0
        except BaseException as error:
            errors.append(error)

    for _ in range(3):
        with limit:
            loss = (x @ w).tanh().square().mean()
        loss.backward()
        with monkeypatch.context() as patched:
            patched.setattr(Loop, "_finish", slowly)
            begun.clear()
            thread = threading.Thread(target=report)
            thread.start()
            assert begun.wait(10)
            with limit:
                (x @ w).tanh().square().mean().backward()
            thread.join()
    assert not errors
    assert limit.report().steps == 6


def test_a_recorder_is_open_on_its_own_thread_only() -> None:
    seen: list[Any] = []

    def region(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(current_recorder()))
        thread.start()
        thread.join()
        seen.append(current_recorder())
        return x.sin()

    lowtide.checkpoint(region, leaf(3))
    assert seen[0] is None
    assert seen[1] is not None
    assert current_recorder() is None


def test_replays_run_in_recorded_order() -> None:
    """All ranks of a process group replay alike: in recorded order, not by request."""
    x = leaf(6)
    order: list[list[int]] = []

    def listener(operations: list[Any]) -> None:
        order.append([op.sequence for op in operations])

    lowtide.replay.listeners.append(listener)
    try:
        y = lowtide.checkpoint(
            lambda x: (x.sin() * x.cos() + x.tanh().sigmoid() * x.exp()).cos().exp(), x
        )
        y.sum().backward()
    finally:
        lowtide.replay.listeners.remove(listener)
    assert order
    assert all(numbers == sorted(numbers) for numbers in order)
    assert max(map(len, order)) > 5


_FORKING = """
import warnings
import torch
from contextlib import nullcontext
from torch import nn
import lowtide

class AtWork(torch.utils.data.Dataset):  # computes in its process, with a gradient of its own
    def __len__(self):
        return 4

    def __getitem__(self, index):
        weight = torch.ones(64, requires_grad=True)
        with lowtide.budget("64 MB"):  # not inside the budget of the process that forked this one
            loss = (weight * index).exp().sin().sum()
        loss.backward()
        return weight.grad

def step(context, workers):
    torch.manual_seed(0)
    model, loss = nn.Linear(64, 64), torch.zeros(())
    forked = "fork" if workers else None
    loader = torch.utils.data.DataLoader(
        AtWork(), num_workers=workers, multiprocessing_context=forked
    )
    with context:
        for batch in loader:
            loss = loss + model(batch).exp().square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]

warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
expected = step(nullcontext(), 0)
found = step(lowtide.budget("1 MB"), 1)
assert len(expected) == 2 and all(map(torch.equal, expected, found))
"""


def test_a_process_that_is_forked_while_recording_does_not_record() -> None:
    """In a process of its own: a CUDA build of torch without a device starts backward's threads if
    fake tensors were used before the first one, and then refuses backward in forked processes."""
    ran_apart(_FORKING)


def test_a_copy_of_a_module_that_has_a_budget_has_one_that_begins_anew() -> None:
    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)
            self.limit = lowtide.budget(0.9)

        def forward(self, x: Tensor) -> Tensor:
            with self.limit:
                loss: Tensor = self.inside(x).exp().sin().mean()
            return loss

    model, x = Limited(), torch.randn(64, 8)
    model(x).backward()
    model.limit.report()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.limit))):
        limit = twin.limit if isinstance(twin, Limited) else twin
        assert limit is not model.limit
        assert limit.limit == 0.9
        assert limit.report().steps == 0
    assert model.limit.report().steps == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript itself
def test_a_refusal_inside_of_torchscript_arrives_as_itself() -> None:
    """TorchScript replaces Python's errors by one of its own, without their text."""

    def function(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.sigmoid(torch.sin(x) * x)
        return x

    scripted = torch.jit.script(function)
    x = leaf(256, 256)
    budget = lowtide.budget(600_000)
    with pytest.raises(lowtide.BudgetError) as refused, budget:
        scripted(x)
    with lowtide.budget(2 * refused.value.minimum):
        scripted(x).sum().backward()
