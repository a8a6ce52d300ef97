"""Rule 12: a checkpointed module in eval mode is a plain one, unless it was to be one there too."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from against_plain import bits, counted
from by_hand import Net
from lowtide.errors import UncountedWarning
from once import on_one_recorder

pytestmark = on_one_recorder


def by_type(model: Net, **options: Any) -> None:
    lowtide.checkpoint_modules(model, "layers.*", **options)


def by_level(model: Net, **options: Any) -> None:
    lowtide.checkpoint_levels(model, 2, **options)


def wrapped(model: Net, **options: Any) -> None:
    for layer in model.layers:
        lowtide.ActivationCheckpointWrapper(layer, **options)


APPLIED = [by_type, by_level, wrapped]
applied = pytest.mark.parametrize("apply", APPLIED, ids=lambda apply: apply.__name__)
Apply = Callable[..., None]


def make(apply: Apply | None = None, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    if apply is not None:
        apply(model, **options)
    return model.eval()


def step(model: Net, x: Tensor) -> list[Any]:
    model.zero_grad()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    out.square().sum().backward()
    return [bits(out.detach()), bits(gradient), *(bits(p.grad) for p in model.parameters())]


def batch() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()


def test_a_call_with_a_level_says_so_too_and_may_stay_in_training_alone() -> None:
    layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    call = lowtide.ActivationCheckpointing(2, 3).eval()

    def step(call: lowtide.ActivationCheckpointing) -> None:
        call(layer, batch()).sum().backward()

    with pytest.warns(UncountedWarning, match="an ActivationCheckpointing that is in eval mode"):
        step(call)
    with warnings.catch_warnings(), counted() as seen:
        warnings.simplefilter("error")
        step(call)  # said once
        lowtide.ActivationCheckpointing(2, 3).eval()(layer, batch())  # a validation with grad
        step(lowtide.ActivationCheckpointing(4, 3).eval())  # a call that is no region anyway
        assert not seen.operations
        step(call.train())
    assert seen["relu"] == 1


@applied
def test_with_in_eval_it_is_a_region_there_too(apply: Apply) -> None:
    wanted, model = step(make(), batch()), make(apply, in_eval=True)
    with counted() as seen:
        assert step(model, batch()) == wanted
    assert seen["relu"] >= 4
    with torch.no_grad(), counted() as seen:
        model(batch())
    assert not seen.operations
    model.train()
    with counted() as seen:
        step(model, batch())
    assert seen["relu"] >= 4


def test_deep_copies_of_a_wrapped_block_are_regions_in_eval_too() -> None:
    model = make(wrapped, in_eval=True)
    model.layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.layers)
    with counted() as seen:
        step(model, batch())
    assert seen["relu"] >= 4


@applied
def test_the_first_backward_through_a_plain_one_says_so(apply: Apply) -> None:
    wanted, model = step(make(), batch()), make(apply)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())  # a validation that forgot `no_grad`
        with torch.no_grad():
            model(batch())
        with lowtide.budget(1 << 30):  # which counts what it stores
            out = model(batch())
        out.sum().backward()
    with (
        counted() as seen,
        pytest.warns(UncountedWarning, match="a backward goes through a .*in_eval=True") as told,
    ):
        assert step(model, batch()) == wanted
    assert not seen.operations
    assert len(told) == (1 if apply is not wrapped else len(model.layers))  # of each wrapper
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(model, batch()) == wanted


class InADict(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"count": 1, "out": [super().forward(x)]}


def test_a_result_in_a_dictionary_is_looked_into() -> None:
    layer = lowtide.ActivationCheckpointWrapper(InADict(4, 4)).eval()
    with pytest.warns(UncountedWarning, match="through a InADict that"):
        layer(batch())["out"][0].sum().backward()


class InItself(nn.Linear):
    def forward(self, x: Tensor) -> list[Any]:  # type: ignore[override]
        found: list[Any] = []
        found += [found, super().forward(x)]
        return found


def test_a_result_that_contains_itself_is_no_obstacle() -> None:
    layer = lowtide.ActivationCheckpointWrapper(InItself(4, 4)).eval()
    with pytest.warns(UncountedWarning, match="through a InItself that"):
        layer(batch())[1].sum().backward()


def offloaded(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        out: Tensor = layer(x)
        return out


@pytest.mark.parametrize(
    "run",
    [
        offloaded,
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
    ],
    ids=["offloaded", "checkpoint", "reentrant"],
)
def test_where_others_take_what_is_saved_nothing_is_said(run: Callable[..., Tensor]) -> None:
    layer = lowtide.ActivationCheckpointWrapper(nn.Sequential(nn.Linear(4, 4), nn.GELU())).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(layer, batch()).sum().backward()


def test_a_compiled_one_is_one_graph() -> None:
    model, x = make(by_type), batch()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), make()(x))


def test_under_a_transform_nothing_is_watched() -> None:
    model, x = make(by_type), batch().detach()
    found = torch.func.grad(lambda x: model(x).sum())(x)
    assert torch.equal(found, torch.func.grad(lambda x: make()(x).sum())(x))


def test_what_is_refused() -> None:
    layer = lowtide.ActivationCheckpointWrapper(nn.Linear(4, 4))
    with pytest.raises(lowtide.UsageError, match=r"already checkpointed .* in_eval would have no"):
        lowtide.ActivationCheckpointWrapper(layer, in_eval=True)
    with pytest.raises(lowtide.UsageError, match="in_eval is True or False, not 1"):
        lowtide.checkpoint_modules(Net(), "layers.*", in_eval=1)  # type: ignore[arg-type]
