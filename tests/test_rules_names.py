"""Rule 11: a model under lowtide looks like the plain model.

Rules of docs/semantics.md are cited by number. test_override.py is about single modules; this file
about `lowtide.fit`, and combinations of ways.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import recorded
from by_hand import same
from lowtide.errors import UncountedWarning
from once import on_one_recorder


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = model(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


def fitted(model: nn.Module) -> Callable[[], None]:
    return lowtide.fit(model, 0.95).remove


def by_module(model: nn.Module) -> Callable[[], None]:
    return lowtide.checkpoint_modules(model, "blocks.*").remove


def both(model: nn.Module) -> Callable[[], None]:
    first, second = by_module(model), fitted(model)

    def undo() -> None:
        second()
        first()

    return undo


APPLIED = [fitted, by_module, both]
applied = pytest.mark.parametrize("apply", APPLIED, ids=lambda f: f.__name__)
Apply = Callable[[nn.Module], Callable[[], None]]


@applied
def test_names_and_types(apply: Apply) -> None:
    model, plain = make(), make()
    apply(model)
    assert type(model) is Net
    assert isinstance(model.blocks[0], nn.Sequential)
    for what in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        one, two = getattr(model, what)(), getattr(plain, what)()
        assert [(n, type(v)) for n, v in one] == [(n, type(v)) for n, v in two]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


@applied
def test_copies_and_pickles_are_plain_models_that_train(apply: Apply) -> None:
    model = make()
    expected = step(make())
    apply(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    assert b"lowtide" not in pickle.dumps(model)
    for each in copies:
        with recorded() as seen:
            assert same(step(each), expected)
        assert seen == []
    with recorded() as seen:
        assert same(step(model), expected)
    assert seen


@applied
def test_copies_after_training_steps(apply: Apply) -> None:
    """Even after a budget has plans and a tape has run, nothing of them is copied."""
    model, plain = make(), make()
    apply(model)
    for _ in range(3):
        assert same(step(model), step(plain))
    copied = copy.deepcopy(model)
    assert vars(copied).keys() == vars(plain).keys()
    assert same(step(copied), step(plain))


def by_dict(module: nn.Module) -> nn.Module:
    """A copy of the `__dict__`, as some libraries make it, with parameters of its own."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    own = {
        name: nn.Parameter(2 * p.detach())
        for name, p in module._parameters.items()
        if p is not None
    }
    copied.__dict__["_parameters"] = own
    copied.__dict__["_buffers"] = {name: b.clone() for name, b in module._buffers.items()}  # type: ignore[union-attr]
    copied.__dict__["_modules"] = {name: by_dict(m) for name, m in module._modules.items() if m}
    return copied


@applied
@pytest.mark.parametrize("hooked", [False, True])
def test_a_copy_of_the_dictionary_runs_with_its_own_parameters(apply: Apply, hooked: bool) -> None:
    """Its `forward` is the entry of the module that it was copied from."""
    model, plain = make(), make()
    apply(model)
    wanted, found = by_dict(plain), by_dict(model)
    if hooked:  # torch then calls the forward from another function
        found.register_forward_hook(lambda *_: None)
        found.blocks[0].register_forward_hook(lambda *_: None)  # type: ignore[index, union-attr]
    assert same(step(found), step(wanted))
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in vars(found)
    assert vars(copy.deepcopy(found)).keys() == vars(wanted).keys()
    with recorded() as seen:
        assert same(step(model), step(plain))
    assert seen


@applied
def test_a_copy_of_the_dictionary_is_to_lowtide_a_plain_model(apply: Apply) -> None:
    """It is no region that was there before, and what it is given is not put on the original."""
    model, plain = make(), make()
    apply(model)
    wanted, found = by_dict(plain), by_dict(model)
    before = {name: value for name, value in vars(model).items() if callable(value)}
    apply(found)
    assert {name: value for name, value in vars(model).items() if callable(value)} == before
    assert vars(found).keys() == vars(model).keys()
    for one, other in ((found, wanted), (model, plain)):
        with recorded() as seen:
            assert same(step(one), step(other))
        assert seen


class Lends(nn.Linear):
    def lent(self, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = other.forward(x)
        return out


def test_what_a_copy_of_the_dictionary_has_of_its_own_and_whom_it_calls() -> None:
    block, x = Lends(3, 3), torch.ones(3)
    block.forward = patched = torch.sin  # type: ignore[method-assign, assignment]
    lowtide.checkpoint_modules(block, block)
    copied = by_dict(block)
    del copied.__dict__["__getstate__"]  # a library may leave out what it does not know
    assert torch.equal(copied(x), x.sin())
    assert vars(copied)["forward"] is patched

    block = Lends(3, 3)
    lowtide.checkpoint_modules(block, block)
    copied = by_dict(block)
    assert torch.equal(copied.lent(block, x), block(x))  # type: ignore[operator]
    assert not torch.equal(copied(x), block(x))


def test_a_copy_of_the_dictionary_of_a_wrapped_block_loads_its_own_weights() -> None:
    block = lowtide.ActivationCheckpointWrapper(nn.Linear(3, 3))
    copied = by_dict(block)
    state = {name: torch.ones_like(p) for name, p in block.state_dict().items()}
    copied.load_state_dict(state)
    assert same(copied.state_dict().values(), state.values())
    assert not any(map(torch.equal, block.state_dict().values(), state.values()))


@applied
def test_a_forward_that_another_module_was_given_stays_that_of_its_module(apply: Apply) -> None:
    model, plain = make(), make()
    apply(model)
    borrows, wanted = Net(), Net()
    borrows.forward, wanted.forward = model.forward, plain.forward  # type: ignore[method-assign]
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    assert torch.equal(borrows(x), wanted(x))
    assert "forward" in vars(borrows)


@applied
def test_undone_is_as_if_never_done(apply: Apply) -> None:
    model = make()
    before = [set(vars(module)) for module in model.modules()]
    undo = apply(model)
    step(model)
    undo()
    assert [set(vars(module)) for module in model.modules()] == before
    with recorded() as seen:
        step(model)
    assert seen == []


@applied
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_of_the_user_fire_once(apply: Apply) -> None:
    model = make()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.register_forward_hook(lambda *_: calls.append("post"))
    model.blocks[1].register_forward_hook(lambda *_: calls.append("block"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    apply(model)
    step(model)
    assert calls == ["pre", "block", "post", "backward"]


def test_a_deleted_model_is_freed_with_its_budget_alive() -> None:
    import gc
    import weakref

    model = make()
    budget = lowtide.fit(model, 0.95)
    step(model)
    step(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert budget.report().steps == 2
    budget.remove()


def scaled(model: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: 2 * forward(x)


class Scaling:
    """A callable that keeps what it calls in an attribute."""

    def __init__(self, model: nn.Module, forward: Callable[..., Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


def by_a_global(model: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    globals()["before"] = forward
    return lambda x: 2 * before(x)  # type: ignore[name-defined] # noqa: F821


def bound(model: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return types.MethodType(lambda self, x: 2 * forward(x), model)


def partly(model: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.partial(lambda given, x: 2 * given(x), forward)


WRAPPERS = {"closure": scaled, "object": Scaling, "global": by_a_global, "method": bound,
            "partial": partly}  # fmt: skip


@on_one_recorder
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", WRAPPERS)
def test_a_forward_put_around_a_fitted_one_keeps_the_budget(way: str) -> None:
    model = make()
    budget = lowtide.fit(model, 0.9)
    model.forward = WRAPPERS[way](model, model.forward)  # type: ignore[method-assign]
    assert budget.active
    step(model)
    assert budget.report().steps == 1
    budget.remove()
    assert not budget.active


@on_one_recorder
def test_a_forward_put_in_place_of_a_fitted_one_takes_the_budget_off() -> None:
    model, plain = make(), make()
    budget = lowtide.fit(model, 0.9)
    for net in (model, plain):
        net.forward = types.MethodType(lambda self, x: self.head(x), net)  # type: ignore[method-assign]
    for one, two in zip(step(model), step(plain), strict=True):
        assert torch.equal(one, two)
    assert not budget.active
    with pytest.warns(UncountedWarning, match="forward of a model was replaced after lowtide.fit"):
        assert budget.report().steps == 0
    budget.remove()
    budget.report()
    again = lowtide.fit(model, 0.9)
    step(model)
    assert again.active
    assert again.report().steps == 1
