"""What stays plain while a forward is overridden (rule 11).

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import Block, OwnCopy, fails, net, same, step
from lowtide.models.override import override_forward
from lowtide.modules import ActivationCheckpointWrapper, checkpoint_modules, is_checkpointed


def test_names_and_types_are_those_of_the_plain_model() -> None:
    model, plain = net(), net()
    checkpoint_modules(model, Block)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [(n, type(m)) for n, m in model.named_modules()] == [
        (n, type(m)) for n, m in plain.named_modules()
    ]
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


def copies(model: nn.Module) -> Iterator[nn.Module]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield pickle.loads(pickle.dumps(model, protocol=0))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)
    yield copy.deepcopy(copy.deepcopy(model))


def test_copies_are_plain_and_train(replayed: Callable[[], int]) -> None:
    model, plain = net(), net()
    checkpoint_modules(model, [Block, "head"])
    expected = step(plain)
    for each in copies(model):
        for one, two in zip(each.modules(), net().modules(), strict=True):
            assert set(vars(one)) == set(vars(two))
            assert not is_checkpointed(one)
        assert same(step(each), expected)
    assert replayed() == 0
    assert is_checkpointed(model.head)
    assert same(step(model), expected)


def test_a_shallow_copy_is_plain() -> None:
    model = net(1)
    checkpoint_modules(model, Block)
    each = copy.copy(model.layers[0])
    assert set(vars(each)) == set(vars(Block()))
    assert each.first is model.layers[0].first


def test_a_pickle_names_lowtide_nowhere() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    checkpoint_modules(model, nn.Linear)
    assert b"lowtide" not in pickle.dumps(model)


def test_a_class_that_copies_by_hand_gets_a_copy_that_runs_itself() -> None:
    model = nn.Sequential(OwnCopy(3, 3))
    checkpoint_modules(model, OwnCopy)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not is_checkpointed(each[0])
        with torch.no_grad():
            each[0].weight.zero_()
            each[0].bias.zero_()
        assert torch.equal(each(torch.ones(1, 3)), torch.zeros(1, 3))
        assert each[0].forward.__self__ is each[0]


def test_a_copied_method_belongs_to_a_copied_module() -> None:
    block = Block()
    ActivationCheckpointWrapper(block)
    forward = copy.deepcopy(block.forward)
    assert forward.__self__ is not block
    assert type(forward.__self__) is Block


def test_a_traced_graph_module_copies() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    ActivationCheckpointWrapper(graph)
    x = torch.randn(3, 2)
    assert torch.equal(copy.deepcopy(graph)(x), graph(x))


def test_signature_and_unwrapping_see_the_plain_forward() -> None:
    block = Block()
    expected = inspect.signature(block.forward)
    ActivationCheckpointWrapper(block)
    assert inspect.signature(block.forward) == expected
    assert block.forward.__self__ is block
    # Accelerate unwraps as far as possible and binds the result, which must include the layers.
    assert not hasattr(block.forward.__func__, "__wrapped__")
    assert inspect.signature(block.forward.__func__) == inspect.signature(Block.forward)
    assert block.forward.__name__ == "forward"
    assert repr(block.forward) == "<forward of Block, checkpoint>"


def overridden(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Tanh())
    if how == "regions":
        checkpoint_modules(model, ["0", "1"])
    elif how == "budget":
        lowtide.fit(model, "1 GB")
    return model


@pytest.mark.parametrize("how", ["regions", "budget"])
@pytest.mark.parametrize("training", [True, False])
def test_torchscript_compiles_the_plain_forward(how: str, training: bool) -> None:
    """Rule 11: what it reads of a forward is its source, its globals and its closure."""
    model, plain, x = overridden(how), overridden("plain"), torch.randn(6, 4)
    assert inspect.ismethod(model.forward if how == "budget" else model[0].forward)  # type: ignore[index]
    scripted = torch.jit.script(model.train(training))
    assert torch.equal(scripted(x), plain.train(training)(x))
    assert same(scripted.buffers(), plain.buffers())


@pytest.mark.parametrize("how", ["regions", "budget"])
def test_an_overridden_model_is_exported(how: str) -> None:
    x = torch.randn(6, 4)
    exported = torch.export.export(overridden(how).eval(), (x,))
    assert torch.equal(exported.module()(x), overridden("plain").eval()(x))


def test_marks_on_a_forward_are_still_found() -> None:
    class Marked(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    Marked.forward.handled = "elsewhere"  # type: ignore[attr-defined]
    block = Marked()
    ActivationCheckpointWrapper(block)
    assert block.forward.handled == "elsewhere"  # type: ignore[attr-defined]
    assert not hasattr(block.forward, "nothing")
    assert block.forward.__code__ is Marked.forward.__code__


class Cube:
    def __call__(self, x: Tensor) -> Tensor:
        return x**3


class Scaled(nn.Module):
    def scaled(self, x: Tensor, by: float) -> Tensor:
        return (by * x).exp().sin()


def cubed(*args: Any, exponent: int) -> Tensor:
    """Of its last argument: a `functools.partial` in a class is a method since Python 3.14."""
    return torch.pow(args[-1], exponent)


@pytest.mark.filterwarnings("ignore:functools.partial will be a method:FutureWarning")
@pytest.mark.parametrize(
    "forward",
    [
        staticmethod(lambda x: x.exp().sin()),
        classmethod(lambda cls, x: x.exp().sin()),
        torch.sin,
        functools.partial(cubed, exponent=3),
        functools.partialmethod(Scaled.scaled, by=0.5),
        Cube(),
    ],
    ids=["static", "class", "operator", "partial", "partialmethod", "callable"],
)
def test_forwards_that_are_no_methods(forward: Any) -> None:
    """Rule 1."""
    kind = type("Kind", (Scaled,), {"forward": forward})
    model = nn.Sequential(nn.Linear(3, 3), kind())
    x = torch.randn(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    handle = checkpoint_modules(model, kind)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, expected)
    assert callable(model[1].forward.__func__)  # what Accelerate wraps
    handle.remove()
    assert torch.equal(model(x), nn.Sequential(model[0], kind())(x))


class Chosen(nn.Module):
    """A forward that is looked up at each access, whatever the instance has under that name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def one(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()

    @property
    def forward(self) -> Any:
        return self.one


class Asked(Chosen):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("one" if name == "forward" else name)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("kind", "what"), [(Chosen, "is a property"), (Asked, "is made anew at each access")]
)
def test_a_forward_that_cannot_be_put_around_is_refused(kind: type[nn.Module], what: str) -> None:
    """A region that never runs would be silent."""
    model = nn.Sequential(nn.Linear(8, 8), kind())
    before = [dict(vars(module)) for module in model]
    calls: list[Callable[[], object]] = [
        lambda: checkpoint_modules(model, nn.Module),
        lambda: ActivationCheckpointWrapper(model[1]),
        lambda: lowtide.fit(model[1], 0.5),
    ]
    for call in calls:
        with pytest.raises(lowtide.UsageError, match=f"of this {kind.__name__} {what}.*a method"):
            call()
    assert [dict(vars(module)) for module in model] == before


def test_somebody_elses_patched_forward_is_kept(replayed: Callable[[], int]) -> None:
    model = net(1)
    block = model.layers[0]
    calls: list[int] = []
    own = block.forward

    def patched(x: Tensor, **kwargs: Any) -> Tensor:
        calls.append(1)
        out: Tensor = own(x, **kwargs)
        return out

    block.forward = patched
    handle = checkpoint_modules(model, Block)
    step(model)
    assert len(calls) == 1
    assert replayed() > 0
    handle.remove()
    assert vars(block)["forward"] is patched


def test_a_patch_put_over_ours_is_left_alone(replayed: Callable[[], int]) -> None:
    model = net(1)
    block = model.layers[0]
    handle = checkpoint_modules(model, Block)
    ours = block.forward

    @functools.wraps(ours)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    block.forward = patched
    assert is_checkpointed(block)
    assert "already checkpointed" in fails(Block, model)
    handle.remove()
    assert vars(block)["forward"] is patched
    assert not is_checkpointed(block)
    step(model)
    assert replayed() == 0
    checkpoint_modules(model, Block)
    step(model)
    assert replayed() > 0


def test_a_forward_taken_apart_and_bound_again_stays_a_region(
    replayed: Callable[[], int],
) -> None:
    """What Accelerate does to put autocast around a forward."""
    model, other = net(1), net(1)
    block = model.layers[0]
    handle = checkpoint_modules(model, Block)
    function = block.forward.__func__

    @functools.wraps(function)
    def around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    block.forward = types.MethodType(around, block)
    other.layers[0].forward = types.MethodType(function, other.layers[0])
    assert is_checkpointed(block)
    assert same(step(other), step(net(1)))
    assert replayed() == 0
    assert same(step(model), step(net(1)))
    before = replayed()
    assert before > 0
    handle.remove()
    step(model)
    assert replayed() == before


def test_layers_of_overrides_come_off_in_any_order() -> None:
    block = Block().eval()
    seen: list[str] = []

    def layer(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                seen.append(label)
                return forward(*args, **kwargs)

            return call

        return make

    inner = override_forward(block, layer("inner"))
    outer = override_forward(block, layer("outer"))
    x = torch.zeros(2, 8)
    block(x)
    assert seen == ["outer", "inner"]
    inner.remove()
    seen.clear()
    block(x)
    assert seen == ["outer"]
    outer.remove()
    outer.remove()
    assert set(vars(block)) == set(vars(Block()))
    assert not outer.active


def test_an_override_that_fails_to_build_leaves_nothing() -> None:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        raise KeyError("no")

    block = Block()
    with pytest.raises(KeyError):
        override_forward(block, make)
    assert set(vars(block)) == set(vars(Block()))


def test_a_data_parallel_replica_runs_its_own_forward(replayed: Callable[[], int]) -> None:
    linear = nn.Linear(2, 2)
    handle = checkpoint_modules(nn.Sequential(linear), "0")
    replica = linear._replicate_for_data_parallel()
    replica.weight = torch.zeros(2, 2)
    replica.bias = torch.ones(2)
    assert torch.equal(replica(torch.randn(1, 2)), torch.ones(1, 2))
    assert is_checkpointed(replica)
    handle.remove()
    assert not is_checkpointed(linear)
