"""The compiled recorder receives saved tensors without a call into Python: which ones, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import engine
from lowtide.compiled import build
from once import on_one_recorder

pytestmark = [
    on_one_recorder,  # the compiled one, whichever is asked for
    pytest.mark.skipif(
        not build.target().exists() and build.possible() is not None,
        reason="no compiled recorder here",
    ),
]


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with engine.use("compiled"):
        yield


@pytest.fixture
def handed_over() -> Callable[[], int]:
    """A function: how many saved tensors were received that way since the test began."""
    core = engine.core()
    before = core.count_direct()
    return lambda: int(core.count_direct() - before)


def some(x: Tensor) -> Tensor:
    return x.sin().exp().tanh().sum()


def test_what_a_region_saves_comes_directly(handed_over: Callable[[], int]) -> None:
    x = torch.randn(5, requires_grad=True)
    lowtide.checkpoint(some, x).backward()
    assert handed_over() == 3  # sin saves its input, exp and tanh their results


def test_what_is_saved_outside_of_a_recording_does_not(handed_over: Callable[[], int]) -> None:
    x = torch.randn(5, requires_grad=True)
    lowtide.checkpoint(some, x).backward()
    before = handed_over()
    some(x).backward()
    assert handed_over() == before


def test_hooks_of_the_program_inside_get_what_is_theirs(handed_over: Callable[[], int]) -> None:
    seen: list[Tensor] = []

    def theirs(x: Tensor) -> Tensor:
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            y = y.exp().tanh()
        return y.cos().sum()

    x = torch.randn(5, requires_grad=True)
    lowtide.checkpoint(theirs, x).backward()
    assert (len(seen), handed_over()) == (2, 2)


def test_a_hook_of_torchs_own_below_ours_gets_nothing(handed_over: Callable[[], int]) -> None:
    with torch.autograd.graph.save_on_cpu():
        x = torch.randn(5, requires_grad=True)
        lowtide.checkpoint(some, x).backward()
    assert handed_over() == 3


def test_a_nested_recording_hands_over_to_the_outer_one(handed_over: Callable[[], int]) -> None:
    x = torch.randn(5, requires_grad=True)
    with lowtide.budget("1 MB"):
        lowtide.checkpoint(some, x).backward()
    assert handed_over() == 3


def test_a_saved_tensor_shows_its_hooks_result() -> None:
    """Compiled autograd asks for it, and for the function that unpacks it."""
    x = torch.randn(5, requires_grad=True)
    y = lowtide.checkpoint(torch.sin, x)
    with torch._dynamo.compiled_autograd._enable(lambda gm: gm):
        y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_an_error_in_backward_keeps_its_class_and_words() -> None:
    x = torch.randn(5, requires_grad=True)
    scale = torch.ones(5)
    loss = lowtide.checkpoint(lambda t: (t.sin() * scale).exp().sum(), x)
    scale.add_(1)
    with pytest.raises(lowtide.ReplayError, match="is at version 1, expected version 0"):
        loss.backward()


def test_an_error_in_backward_keeps_its_class_on_another_thread() -> None:
    import threading

    x, scale = torch.randn(5, requires_grad=True), torch.ones(5)
    loss = lowtide.checkpoint(lambda t: (t.sin() * scale).exp().sum(), x)
    scale.add_(1)
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            loss.backward()
        except lowtide.ReplayError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_a_limit_that_is_refused_while_autograd_saves_is_raised_as_it_is() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    with pytest.raises(lowtide.BudgetError), lowtide.budget(100):
        net(torch.randn(64, 64))
    net(torch.randn(64, 64)).sum().backward()  # plain training still works


def test_detect_anomaly_names_the_line_of_the_forward() -> None:
    x = torch.zeros(3, requires_grad=True)
    with (
        pytest.warns(UserWarning, match=r"(?s)SqrtBackward0.*test_direct\.py.*t\.sqrt\(\)"),
        pytest.warns(UserWarning, match="Anomaly Detection has been enabled"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        lowtide.checkpoint(lambda t: (t.sqrt() * 0).sum(), x).backward()


def test_a_graph_that_dies_in_the_forward_lets_go() -> None:
    x = torch.randn(1000, requires_grad=True)
    core = engine.core()
    with lowtide.budget("1 MB"):
        some(x)
        kept = some(x)
        inside = core.count_records()
        del kept
        assert core.count_records() < inside


_FORKED = """
import os, sys, torch, lowtide
from lowtide import engine

def step(context):
    x = torch.ones(4, requires_grad=True)
    with context:
        loss = x.sin().exp().sum()
    torch.ops.aten._backward(loss, [x])  # of torch's engine, without Python
    return x.grad

with engine.use("compiled"):
    from contextlib import nullcontext
    expected = step(nullcontext())
    assert torch.equal(step(lowtide.budget("1 MB")), expected)
    child = os.fork()
    if child == 0:
        same = torch.equal(step(lowtide.budget("1 MB")), expected)
        same = same and torch.equal(step(nullcontext()), expected)
        os._exit(0 if same else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_has_an_engine_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKED],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("inside", [True, False], ids=["in the context", "after it"])
def test_the_bits_are_those_of_the_plain_step(inside: bool) -> None:
    torch.manual_seed(0)
    layer: Any = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 5, 16)

    def step(context: Any) -> list[Tensor]:
        layer.zero_grad()
        torch.manual_seed(1)
        with context:
            loss = layer(x).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad.clone() for p in layer.parameters()]

    plain, limit = step(nullcontext()), lowtide.budget(0.8)
    for _ in range(3):
        assert all(map(torch.equal, step(limit), plain))
