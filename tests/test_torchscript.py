"""Models of which some parts are TorchScript, as those that e3nn generates: rules 1, 11 and 12.

Problem: torch keeps what such a part consists of out of Python's sight: its class has no forward to
give, and its parameters are no attributes. Invariant: whatever is applied to a model around it, or
found out about it, the model trains as before, with the parameters it had. Imports torch, lowtide.
Rejected: one test for all ways, where the first failure would hide the others.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide._compat import fakes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),  # torch 2.15
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Irreps(tuple):
    """A tuple that refuses to be counted."""

    def __len__(self) -> int:
        raise NotImplementedError


def _model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    # Under any dispatch mode torch fails to run a traced BatchNorm, which counts its calls.
    norm = nn.LayerNorm(64) if kind == "trace" else nn.BatchNorm1d(64)
    part: Any = nn.Sequential(nn.Linear(16, 64), norm, nn.Tanh(), nn.Linear(64, 16))
    if kind == "script":
        part = torch.jit.script(part)
    elif kind == "trace":
        part = torch.jit.trace(part, torch.randn(4, 16), check_trace=False)
    return nn.Sequential(nn.Linear(16, 16), nn.Sequential(part, nn.GELU()), nn.Linear(16, 16))


def _step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def _trained(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        _step(model, torch.ones(32, 16)).backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


WAYS = {
    "plan": lambda model: lowtide.plan(_step, model, torch.ones(32, 16)),
    "explain": lambda model: lowtide.explain(_step, model, torch.ones(32, 16)),
    "saved_tensors": lambda model: lowtide.saved_tensors(_step, model, torch.ones(32, 16)),
    "fit": lambda model: lowtide.fit(model, "1 GiB"),
    "fit of the part": lambda model: lowtide.fit(model[1][0], "1 GiB"),
    "levels": lambda model: lowtide.checkpoint_levels(model, 3),
    "modules": lambda model: lowtide.checkpoint_modules(model, "1"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_a_model_with_a_scripted_part_trains_as_before(kind: str, way: str) -> None:
    model = _model(kind)
    parameters = list(map(id, model.parameters()))
    keep = WAYS[way](model)  # what is switched on is off again when nobody has it
    assert list(map(id, model.parameters())) == parameters
    # torch rewrites a part after some calls, and the trace that a dry run has called sooner.
    exact = {} if kind == "trace" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(_trained(model), _trained(_model(kind)), **exact)
    del keep


def test_levels_take_what_is_around_a_scripted_part() -> None:
    scripted = lowtide.find_levels(_model("script"))
    assert scripted.names(2) == lowtide.find_levels(_model("plain")).names(2) == ("1",)
    assert scripted.names(1) == ("0", "2")


def test_a_part_that_is_chosen_by_name_is_refused() -> None:
    with pytest.raises(lowtide.UsageError, match=r"'1\.0' is a TorchScript module"):
        lowtide.checkpoint_modules(_model("trace"), "1.0")


def test_attributes_that_refuse_to_be_counted() -> None:
    model = _model("plain")
    model.irreps = Irreps((1, [2, 3]))
    assert lowtide.plan(_step, model, torch.ones(32, 16)).source == "fake"


class Picks(nn.Module):
    """Makes tensors of lists: one of sizes, and one of indices."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, [0, 2]] * torch.tensor([x.size(0), 1])


class Forks(nn.Module):
    """Does so on another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.picks = Picks()

    def forward(self, x: Tensor) -> Tensor:
        return torch.jit.wait(torch.jit.fork(self.picks, x))


@pytest.mark.parametrize("part", [Picks, Forks])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_tensor_that_is_made_of_a_list_is_no_end_of_the_process(
    part: type[nn.Module], kind: str
) -> None:
    """TorchScript writes to its memory, of which a dry run has none."""
    scripted: Any = torch.jit.script(part())
    model = nn.Sequential(nn.Linear(3, 3), scripted)
    x = torch.randn(4, 3)

    def step() -> Tensor:
        if kind == "module":
            return _step(model, x)
        loss: Tensor = scripted.forward(model[0](x)).square().sum()
        return loss

    with pytest.warns(lowtide.DryRunWarning, match="makes a tensor of a list"):
        plan = lowtide.plan(step)
    assert plan.source == "recorded"
    step().backward()  # nothing is refused afterwards


def test_lists_are_refused_on_the_thread_of_the_dry_run_alone() -> None:
    """Two of them that overlap leave TorchScript as it was."""

    @torch.jit.script
    def picked(x: Tensor) -> Tensor:
        return x[:, [0, 2]]

    before = torch._C.ScriptFunction.__call__
    x = torch.arange(6.0).reshape(2, 3)
    begun, end = threading.Event(), threading.Event()

    def other() -> None:
        with fakes.lists_refused():
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    with fakes.lists_refused():
        thread.start()
        begun.wait()
        with pytest.raises(RuntimeError, match="a tensor of a list in picked"):
            picked(x)
    assert picked(x).tolist() == [[0.0, 2.0], [3.0, 5.0]]
    end.set()
    thread.join()
    assert torch._C.ScriptFunction.__call__ is before
