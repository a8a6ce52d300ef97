"""torch.func transforms around and inside regions and budgets: right, or refused by name.

Right: `functional_call`, `vmap`, `jvp` and forward-mode duals. Refused: reverse-mode transforms,
for which torch has no saved-tensor hooks. docs/status.md lists the combinations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import lowtide
from against_plain import WAYS, Way, check
from by_hand import counted_replays, same
from lowtide import _compat
from lowtide.errors import UnsupportedError

# torch's own warning, at the first use of forward-mode differentiation
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

Loss = Callable[[nn.Module, Tensor], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )


def inputs() -> Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(3))


def by_functional_call(model: nn.Module, x: Tensor) -> Tensor:
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    out: Tensor = functional_call(model, doubled, (x,))
    return out.square().mean()


def by_vmap(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = vmap(model, randomness="different")(x)
    return out.square().mean()


def by_vmap_of_a_mask(model: nn.Module, x: Tensor) -> Tensor:
    """As transformers builds attention masks: a transform of integers next to the network."""
    positions = torch.arange(4)
    mask = vmap(lambda q: vmap(lambda k: q >= k)(positions))(positions)
    return (model(x) @ mask.to(x.dtype)).square().mean()


def by_jvp(model: nn.Module, x: Tensor) -> Tensor:
    out, slope = jvp(model, (x,), (torch.ones_like(x),))
    return (out + slope).square().mean()


def by_duals(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = model(forward_ad.make_dual(x, torch.ones_like(x)))
        out, slope = forward_ad.unpack_dual(dual)
        assert slope is not None
        return (out + slope).square().mean()


def by_grad(model: nn.Module, x: Tensor) -> Tensor:
    slope: Tensor = grad(lambda v: model(v).sum())(x)
    return slope.square().mean()


def by_vjp(model: nn.Module, x: Tensor) -> Tensor:
    out, pull = vjp(model, x)
    return (out.sum() + pull(torch.ones_like(out))[0].sum()).square()


def by_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    slope: Tensor = jacrev(lambda v: model(v).sum(0))(x)
    return slope.square().mean()


def step(loss: Loss, how: str) -> list[Tensor]:
    model, x = net(), inputs()
    torch.manual_seed(1)
    if how == "checkpoint":
        value = lowtide.checkpoint(loss, model, x)
    elif how == "budget":
        with lowtide.budget(0.9):
            value = loss(model, x)
    else:
        value = loss(model, x)
    value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    return [value.detach(), *gradients, torch.get_rng_state()]


@pytest.mark.parametrize("how", ["checkpoint", "budget"])
@pytest.mark.parametrize("loss", [by_functional_call, by_vmap, by_vmap_of_a_mask, by_jvp, by_duals])
def test_right_inside(loss: Loss, how: str) -> None:
    assert same(step(loss, "plain"), step(loss, how))


@pytest.mark.parametrize("loss", [by_functional_call, by_vmap_of_a_mask])
def test_recomputed_inside(loss: Loss) -> None:
    with counted_replays() as count:
        step(loss, "checkpoint")
        assert count() > 0


@pytest.mark.parametrize("transform", [by_vmap, by_jvp])
def test_what_is_forgotten_inside_a_transform(transform: Loss) -> None:
    """A result whose graph is dropped inside the transform, while the program keeps its memory, is
    still known as recorded, and a write to it as one (rule 4)."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.full((8,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.scale.exp()  # saves its result, which `gate` shares
            gate = weight.detach()
            del weight
            return torch.tanh(self.inner(x) * gate).mul(gate).mul_(2)

    def scenario(way: Way) -> list[Tensor]:
        torch.manual_seed(0)
        model = Gate()
        way(transform, model, inputs()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for way in WAYS.values():
        check(scenario, way)


@pytest.mark.parametrize("how", ["checkpoint", "budget"])
@pytest.mark.parametrize("loss", [by_grad, by_vjp, by_jacrev])
def test_refused_inside(loss: Loss, how: str) -> None:
    step(loss, "plain")  # torch itself can
    with pytest.raises(UnsupportedError, match=r"torch\.func transform .* ran inside a lowtide"):
        step(loss, how)
    assert same(step(by_jvp, "plain"), step(by_jvp, how))  # and training still works


def in_region(model: nn.Module) -> Any:
    return lambda v: lowtide.checkpoint(model, v).sum()


def in_budget(model: nn.Module) -> Any:
    def run(v: Tensor) -> Tensor:
        with lowtide.budget(0.9):
            out: Tensor = model(v).sum()
        return out

    return run


def fitted(model: nn.Module) -> Any:
    lowtide.fit(model, 0.9)
    return lambda v: model(v).sum()


def modules(model: nn.Module) -> Any:
    lowtide.checkpoint_modules(model, nn.Linear)
    return lambda v: model(v).sum()


@pytest.mark.parametrize("inside", [in_region, in_budget, fitted, modules])
@pytest.mark.parametrize("transform", [grad, vmap, jacrev])
def test_refused_around(transform: Any, inside: Any) -> None:
    keywords = {"randomness": "different"} if transform is vmap else {}
    model = net()
    transform(lambda v: model(v).sum(), **keywords)(inputs())  # torch itself can
    with pytest.raises(UnsupportedError, match=r"cannot record inside a torch\.func transform"):
        transform(inside(model), **keywords)(inputs())
    assert same(step(by_jvp, "plain"), step(by_jvp, "budget"))


def test_right_around_without_gradients() -> None:
    """With grad disabled nothing is recorded, so nothing is refused (rule 12)."""
    model = net().eval()
    with torch.no_grad():
        plain = vmap(model)(inputs())
        assert torch.equal(plain, vmap(lambda v: lowtide.checkpoint(model, v))(inputs()))


def by_batched_rows(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    rows = torch.eye(loss.numel())
    return list(torch.autograd.grad(loss, leaves, rows, is_grads_batched=True, retain_graph=True))


def by_vmap_of_rows(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    def pulled(row: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, leaves, row, retain_graph=True)

    return list(vmap(pulled, randomness="different")(torch.eye(loss.numel())))


class Noise(nn.Module):
    """Out of place, in a kernel that `vmap` would draw another noise from for each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


@pytest.mark.parametrize("pull", [by_batched_rows, by_vmap_of_rows])
@pytest.mark.parametrize("how", ["checkpoint", "budget"])
def test_a_backward_inside_of_vmap(how: str, pull: Callable[..., list[Tensor]]) -> None:
    """As `torch.autograd.functional.jacobian(vectorize=True)`: what is replayed is no batch."""

    def scenario(way: Way) -> list[Tensor | None]:
        model = nn.Sequential(net(), Noise(), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 1))
        x = inputs().requires_grad_()
        out = way(lambda: model(x).exp().mean(0))
        leaves = [x, *model.parameters()]
        rows = pull(out, leaves)  # what it holds afterwards serves the next one
        return [out, *rows, *torch.autograd.grad(out.sum(), leaves)]

    assert check(scenario, WAYS[how]).operations > 0


class Noted(torch.autograd.Function):
    """Doubles its input, and notes in each of its methods whether a transform is active."""

    found: ClassVar[list[tuple[bool, bool]]] = []

    @classmethod
    def note(cls) -> None:
        told = _compat.in_functorch()
        cls.found.append((told, torch._C._functorch.peek_interpreter_stack() is not None))

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        Noted.note()
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Noted.note()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Noted.note()
        return grad * 2

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        Noted.note()
        return Noted.apply(x), in_dims[0]


def test_an_active_transform_is_known_without_asking_for_its_stack() -> None:
    def loss(x: Tensor) -> Tensor:
        Noted.note()
        return Noted.apply(x).sum()  # type: ignore[no-untyped-call]

    Noted.found.clear()
    x = torch.randn(2, 3)
    for call in (loss, grad(loss), vmap(loss), vmap(grad(loss)), jacrev(grad(loss))):
        call(x)
    vjp(loss, x)[1](torch.tensor(1.0))
    Noted.note()
    assert all(told == asked for told, asked in Noted.found)
    assert {told for told, _ in Noted.found} == {False, True}


@pytest.mark.parametrize("way", [lowtide.checkpoint, WAYS["budget"]], ids=["checkpoint", "budget"])
def test_a_step_does_not_make_a_functorch_stack(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd would copy it for each node of each later backward, also of plain steps."""

    def made(*args: Any) -> None:
        raise AssertionError("made a functorch stack")

    for name in ("peek_interpreter_stack", "get_interpreter_stack", "maybe_current_level"):
        monkeypatch.setattr(torch._C._functorch, name, made)
    model = net()
    for _ in range(3):
        way(model, inputs()).sum().backward()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.skipif(not _compat.torch_has((2, 13)), reason="torch traces no generator before 2.13")
def test_what_linearize_traces_with_has_no_memory() -> None:
    """It folds constants, in tensors whose storages have no address to be noted."""

    def step(limit: lowtide.Budget | None) -> list[Tensor]:
        model, x = net(), inputs()
        with limit or contextlib.nullcontext():
            out, push = torch.func.linearize(model, x)
            loss = out.square().sum() + push(torch.ones_like(x)).sum()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert same(step(None), step(lowtide.budget("1 GB")))
