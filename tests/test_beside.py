"""Plans searched for in the background: steps go on under the plans they have, with equal bits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from apart import ran_apart
from by_hand import same
from lowtide.learning import planning
from lowtide.learning.beside import Beside
from lowtide.learning.effort import LESSONS
from lowtide.learning.learned import Learned
from lowtide.planner.retention import Retention, keep_all
from lowtide.running.prepared import Prepared
from once import on_one_recorder
from one_step import peak_of, rows

pytestmark = [on_one_recorder, pytest.mark.beside, pytest.mark.usefixtures("one_thread")]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
    return nn.Sequential(*layers)


class Gate:
    """Makes searches wait until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.threads = threading.Event(), set[str]()
        search: Callable[..., Prepared | None] = Learned.search

        def waiting(*args: Any) -> Prepared | None:
            self.threads.add(threading.current_thread().name)
            assert self.open.wait(60)
            return search(*args)

        monkeypatch.setattr(Learned, "search", waiting)


def test_training_goes_on_while_a_better_plan_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, replayed: Callable[[], int]
) -> None:
    gate = Gate(monkeypatch)
    model = net()
    twin, x = copy.deepcopy(model), rows(500)
    share = int(0.6 * peak_of(twin, x))
    limit = lowtide.budget(share)

    def step() -> None:
        assert peak_of(model, x, limit) <= share
        peak_of(twin, x)
        assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])

    for _ in range(6):  # the first step is planned at once, the second in the background
        step()
    assert gate.threads == {"lowtide-plans"}
    [first] = limit._loop._plans
    assert limit.report().planned
    assert replayed()
    gate.open.set()
    limit._loop._beside.wait()
    step()
    [better] = limit._loop._plans
    assert better is limit._loop._active[-1].prepared
    assert first.lessons == better.lessons == LESSONS  # searched for only once
    assert better is not first  # its graph may be equal: times are medians of both steps
    assert not limit._loop._beside.busy


def test_training_waits_for_no_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    solve: Callable[..., Any] = Learned.solve
    searches, times = [], []

    def noting(learned: Learned, limit: int, polish: Any = None) -> Any:
        searches.append((threading.current_thread().name, polish))
        return solve(learned, limit, polish)

    def annealing(_graph: Any, _choices: Any, retain: list[int], *_: Any) -> list[int]:
        return retain

    monkeypatch.setattr(Learned, "solve", noting)

    def asked(many: int = 1) -> Any:
        times.append(many)
        return annealing

    monkeypatch.setattr(lowtide.engine, "annealing", asked)
    monkeypatch.setattr(planning, "annealings", lambda _: 3)
    model, x = net(), rows(500)
    limit = lowtide.budget(int(0.6 * peak_of(model, x)))
    for _ in range(6):
        peak_of(model, x, limit)
    limit._loop._beside.wait()
    assert searches == [("MainThread", None), ("lowtide-plans", annealing)]
    assert times == [3]  # nobody waits for it


def test_a_better_plan_that_takes_more_than_predicted_is_followed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step's graph says of other plans than that which ran is right only if the measurement
    was understood."""
    search: Callable[..., Prepared | None] = Learned.search
    misled = []

    def mislead(learned: Learned, limit: int, *polish: Any) -> Prepared | None:
        if learned.lessons != LESSONS or misled:
            return search(learned, limit, *polish)
        misled.append(True)
        graph = learned.graph
        at_once = [
            choice if value in graph.must_hold or graph.values[value].pinned else max(choice, 0)
            for value, choice in enumerate(keep_all(graph).retain)
        ]
        return learned.prepared(Retention(tuple(at_once)), limit)

    monkeypatch.setattr(Learned, "search", mislead)
    model, x = net(), rows(500)
    share = int(0.6 * peak_of(model, x))
    limit = lowtide.budget(share)
    over = []
    for _ in range(8):
        over.append(peak_of(model, x, limit) > share)
        limit.report()
        limit._loop._beside.wait()
    assert misled
    assert over == [False, False, True, False, False, False, False, False]


def test_a_much_smaller_step_does_not_wait_for_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    share = int(0.6 * peak_of(model, rows(600)))
    limit = lowtide.budget(share)
    for _ in range(4):
        peak_of(model, rows(600), limit)
    limit._loop._beside.wait()
    gate = Gate(monkeypatch)
    for _ in range(3):
        assert peak_of(model, rows(400), limit) <= share
        assert limit._loop._active[-1].covered
    gate.open.set()
    limit._loop._beside.wait()
    assert peak_of(model, rows(400), limit) <= share
    assert limit.report().planned
    assert not limit._loop._active or not limit._loop._active[-1].covered


def test_what_goes_wrong_there_is_raised_where_steps_are_taken() -> None:
    limit = lowtide.budget(0.5)

    def wrong() -> Prepared | None:
        raise ArithmeticError("no such plan")

    limit._loop._beside.ask(wrong)
    limit._loop._beside.wait()
    with pytest.raises(ArithmeticError, match="no such plan"), limit:
        pass
    with limit:  # it is said once
        pass


def test_searches_run_one_after_the_other() -> None:
    beside, running, most = Beside(), 0, 0

    def search() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.01)
        running -= 1

    for _ in range(5):
        beside.ask(search)
    beside.wait()
    assert most == 1
    assert not beside.busy
    assert beside.found() == []


OUTLIVES = """
import threading, time
from lowtide.learning.beside import Beside

def train():
    threading.main_thread().join()
    beside = Beside()
    beside.ask(lambda: print("found"))
    beside.wait()

threading.Thread(target=train).start()
"""

ENDS = """
import time
from lowtide.learning.beside import Beside
from lowtide.learning.effort import LESSONS

beside = Beside()
beside.ask(lambda: time.sleep(0.5))
beside.ask(lambda: print("the next is not begun"))
print("over")
"""


def test_training_on_a_thread_after_the_main_one_has_ended() -> None:
    done = ran_apart(OUTLIVES)
    assert (done.stdout, done.stderr) == ("found\n", "")


def test_a_program_ends_while_a_plan_is_looked_for() -> None:
    done = ran_apart(ENDS)
    assert (done.stdout, done.stderr) == ("over\n", "")
