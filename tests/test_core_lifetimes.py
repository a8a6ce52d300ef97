"""How long what the compiled core has in C++ lives, where threads, finalizers or imports end it.

Each program here read or wrote freed memory before, or failed with an error from inside of lowtide.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch

import lowtide
from apart import ran_apart
from lowtide import engine
from lowtide.compiled import build
from lowtide.step import current_recorder
from once import on_one_recorder

BUILDABLE = build.target().exists() or build.possible() is None
needs_compiler = pytest.mark.skipif(not BUILDABLE, reason="no compiled recorder here")
pytestmark = on_one_recorder  # each test chooses its own
both = pytest.mark.parametrize("way", ["python", pytest.param("compiled", marks=needs_compiler)])


@both
def test_who_is_told_that_a_handle_is_gone_does_not_get_it(way: str) -> None:
    """A weak reference's callback asks the value for its handles."""
    found: list[list[Any]] = []
    x = torch.randn(2, 4, requires_grad=True)
    with engine.use(way), lowtide.budget("1 GB"):
        recorder = current_recorder()
        assert recorder is not None
        y = x.exp()  # has a handle of its own
        handle = recorder.pack(y.detach())
        value, handle_id = handle.value, id(handle)
        gone = weakref.ref(handle, lambda _: found.append(value.handles()))
        del handle
        assert gone() is None
        ((left,),) = found
        assert id(left) != handle_id
        assert value.handles() == [left]


ENDING = """
import threading, time, weakref
import torch, lowtide
from torch.autograd.graph import saved_tensors_hooks

class Hooks:
    def __init__(self):
        self.losses = []
    def same(self, tensor):
        return tensor

left = []

def work():
    hooks = Hooks()
    left.append(weakref.ref(hooks))
    saved_tensors_hooks(hooks.same, hooks.same).__enter__()  # never left: it dies after the thread
    limit = lowtide.budget("1 GB")
    for _ in range(3):
        with limit:
            x = torch.randn(8, 16, requires_grad=True)
            for _ in range(6):
                x = (x * 2).sin()
        hooks.losses.append(x.sum())
    with limit:
        loss = torch.randn(8, 16, requires_grad=True).exp().sin().sum()
    loss.backward()

for _ in range(3):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
while any(weak() is not None for weak in left):  # the thread is not over yet
    time.sleep(0.01)
print("over")
"""


@needs_compiler
def test_a_graph_may_die_after_the_thread_that_recorded_it() -> None:
    """It is freed when the thread-locals of that thread are. `MALLOC_PERTURB_` fills freed memory,
    so that using it shows."""
    assert ran_apart(ENDING, LOWTIDE_ENGINE="compiled", MALLOC_PERTURB_="165").stdout == "over\n"


SWITCHED = """
from contextlib import contextmanager
import torch, lowtide
from torch import nn
from lowtide._compat import switches

x = torch.randn(4, 4, requires_grad=True)
layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)])
losses = [lowtide.checkpoint(layers, x).sum() for _ in range(3)]
(expected,) = torch.autograd.grad(layers(x).sum(), x)
restored = switches.restored_ambient

@contextmanager
def meanwhile(ambient):
    with restored(ambient):
        if losses:  # as a finalizer might, which Python may run here
            losses.pop().backward()
        yield

switches.restored_ambient = meanwhile
torch.use_deterministic_algorithms(True)  # not as in the forward: Python runs the operations
losses.pop().backward()
assert not losses
assert torch.allclose(x.grad, 3 * expected)
print("over")
"""


@needs_compiler
def test_switches_may_change_while_operations_run_again() -> None:
    """By another backward within a replay, under other switches than the first one began with."""
    assert ran_apart(SWITCHED, LOWTIDE_ENGINE="compiled").stdout == "over\n"


TWICE = """
import sys
import torch
from torch import nn
import lowtide

model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(6)])
x = torch.randn(512, 64)

def steps(lowtide):
    limit = lowtide.budget(0.5)
    for _ in range(3):
        with limit:
            loss = model(x).exp().sum()
        loss.backward()
    report = limit.report()
    assert report.planned and report.replayed_operations
    return lowtide.engine.name(), lowtide.engine.reason()

first = steps(lowtide)
for name in [name for name in sys.modules if name.split(".")[0] == "lowtide"]:
    del sys.modules[name]
import lowtide as again

assert again is not lowtide
print(*first, *steps(again), sep="\\n")
assert steps(lowtide) == first
try:
    with again.engine.use("compiled"):
        pass
except again.UsageError as error:
    print(error)
"""


@needs_compiler
def test_lowtide_may_be_imported_twice_in_a_process() -> None:
    """As by a notebook's or a test runner's deep reload: only the first import has the core."""
    first, why, second, why_not, error = ran_apart(TWICE, LOWTIDE_ENGINE="auto").stdout.splitlines()
    assert first == "compiled", why
    assert second == "python"
    assert "imported before in this process" in why_not
    assert "Use the engine 'python' or 'auto'" in error


@needs_compiler
def test_a_large_recording_leaves_small_ones_no_large_table() -> None:
    """A table goes over all of its memory when it is cleared, and leaves that to the next one: each
    small call took 8 times as long from then on."""

    def size_of_table(count: int) -> int:
        sizes = []

        def call(x: torch.Tensor) -> list[torch.Tensor]:
            made = [x + n for n in range(count)]
            sizes.append(sys.getsizeof(current_recorder().table))  # type: ignore[union-attr]
            return made

        lowtide.checkpoint(call, torch.ones(2, requires_grad=True))
        return sizes[0]

    many = 20_000
    with engine.use("compiled"):
        small = size_of_table(3)
        assert size_of_table(many) > 16 * many > 16 * small
        size_of_table(3)  # has what the large one has left
        assert size_of_table(3) <= small


MUCH_OF_LITTLE = """
import sys, threading, time, torch, lowtide

sys.setswitchinterval(60)  # the other thread runs while this one gives the lock up, and no more
column = torch.rand(1200, 1)
row = torch.rand(1, 1200, requires_grad=True)
done, turns = threading.Event(), 0

def watch():
    global turns
    while not done.is_set():
        turns += 1
        time.sleep(0)

def turns_meanwhile():
    before = turns
    lowtide.checkpoint(torch.pow, column, row)
    return turns - before

thread = threading.Thread(target=watch)
thread.start()
for _ in range(3):
    lowtide.checkpoint(torch.pow, column[:2], row[:, :2])
first = turns_meanwhile()  # nobody has seen yet that it makes much
most = max(turns_meanwhile() for _ in range(12))
done.set()
thread.join()
print(first, most)
"""


@needs_compiler
def test_other_threads_run_while_much_is_made_of_little() -> None:
    """Of small arguments kernels take short, and keep Python's lock; but not all of them do."""
    first, most = map(int, ran_apart(MUCH_OF_LITTLE, LOWTIDE_ENGINE="compiled").stdout.split())
    assert most > 10 * (first + 1)
