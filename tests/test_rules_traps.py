"""Known traps, from issues of other projects; and other mechanisms around and inside a region.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from against_plain import WAYS, Way, bits, check, counted, gradients, leaf
from by_hand import same
from lowtide.region import region
from lowtide.step import current_recorder
from lowtide.tape.recorder import Recorder

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4), nn.Softplus()
    )


# Other saved-tensor hooks (user code that is called for saves: it sees each save once).


@every_way
@pytest.mark.parametrize("order", ["inside", "around"])
def test_save_on_cpu(order: str, way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        model, x = net(), leaf(3, 4)

        def offloaded(x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return (model(x) if order == "inside" else way(model, x)).exp()

        y = way(lambda x: offloaded(x.sin()).cos(), x) if order == "inside" else offloaded(x)
        return gradients(y.sum(), x, *model.parameters())

    check(scenario, way)


def test_hooks_of_the_users_own_inside_a_region_see_tensors() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6)
        seen: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.detach().clone())
            return tensor * 2

        def region(x: Tensor) -> Tensor:
            y = x.sin()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / 2):
                z = y.exp().cos()
            return z.tanh()

        return [*gradients(way(region, x).sum(), x), *seen]

    check(scenario)


# torch's own checkpointing.

TORCH_MODES = [True, False]


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


def twice(tensor: Tensor) -> Tensor:
    return tensor * 2 if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("kind", ["hooks", "mode"])
def test_contexts_that_are_entered_inside_and_left_outside(kind: str) -> None:
    """A generator, or an `ExitStack`, leaves contexts in another order (rules 2 and 10)."""

    def enter() -> AbstractContextManager[Any]:
        if kind == "mode":
            return Doubled()
        return torch.autograd.graph.saved_tensors_hooks(twice, lambda kept: kept)

    def scenario(budget: AbstractContextManager[Any]) -> list[Tensor | None]:
        torch.manual_seed(0)
        x = leaf(4, 6)
        with ExitStack() as stack:
            with budget:
                y = x.tanh()
                stack.enter_context(enter())
                y = y.sin()
            y = (y * 3).sin()
        return gradients(y.sin().sum(), x)

    expected = [bits(tensor) for tensor in scenario(nullcontext())]
    assert [bits(tensor) for tensor in scenario(region())] == expected
    assert [bits(tensor) for tensor in scenario(lowtide.budget(0.99))] == expected
    check(lambda way: [way(torch.tanh, leaf(3))])  # nothing is left on


@pytest.mark.parametrize("make", [region, lambda: lowtide.budget(0.99)], ids=["region", "budget"])
def test_a_mode_that_is_left_outside_is_on_until_then(
    make: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Each mode remembers whether torch took any for on before it. A recorder among them was taken
    for on for ever, and torch 2.10 compiled nothing in this process any more (rule 10)."""
    with make(), ExitStack() as stack:
        for _ in range(2):
            leaf(3).tanh()
            stack.enter_context(Doubled())
        left = stack.pop_all()
    assert is_in_torch_dispatch_mode()
    left.close()
    assert not is_in_torch_dispatch_mode()


def _branch(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.tanh(x @ weight)
    return x


def _forks(x: Tensor, weight: Tensor) -> Tensor:
    branches = [torch.jit.fork(_branch, x + i, weight) for i in range(4)]
    y = _branch(x, weight)
    for branch in branches:
        y = y + torch.jit.wait(branch)
    return y.square().mean()


def test_forks_of_torchscript_are_not_recorded() -> None:
    """They run on threads to which torch hands modes and hooks on, beside the one that records
    (rule 14)."""
    recorder_threads = set()
    original = Recorder._run_simple

    def run(self: Any, *args: Any) -> Any:
        recorder_threads.add(threading.get_ident())
        return original(self, *args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        forks = torch.jit.script(_forks)
    x, weight = torch.randn(20, 16), leaf(16, 16)
    expected = forks(x, weight)
    (gradient,) = torch.autograd.grad(expected, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "_run_simple", run)
        for _ in range(5):
            loss = lowtide.checkpoint(forks, x, weight)
            assert torch.equal(loss, expected)
            (found,) = torch.autograd.grad(loss, weight)
            assert torch.allclose(
                found, gradient, rtol=0.01, atol=0.01
            )  # threads add to it in any order
    assert recorder_threads <= {threading.get_ident()}


@every_way
@pytest.mark.parametrize("use_reentrant", TORCH_MODES)
def test_torchs_checkpoint_inside(use_reentrant: bool, way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        model, x = net(), leaf(3, 4)

        def region(x: Tensor) -> Tensor:
            y: Tensor = torch_checkpoint(model, x.sin(), use_reentrant=use_reentrant)
            return y.exp().cos()

        return gradients(way(region, x).sum(), x, *model.parameters())

    check(scenario, way)


@pytest.mark.parametrize("use_reentrant", TORCH_MODES)
def test_torchs_checkpoint_around(use_reentrant: bool) -> None:
    """torch runs the function twice; what lowtide records is right each time."""

    def scenario(way: Way) -> list[Tensor | None]:
        model, x = net(), leaf(3, 4)

        def block(x: Tensor) -> Tensor:
            out: Tensor = way(model, x.sin())
            return out.exp().cos()

        y = torch_checkpoint(block, x, use_reentrant=use_reentrant)
        assert isinstance(y, Tensor)
        return gradients(y.sum(), x, *model.parameters())

    check(scenario)


@pytest.mark.parametrize(("use_reentrant", "times"), [(True, 2), (False, 1)])
def test_how_often_torchs_checkpoint_around_counts_a_batch(use_reentrant: bool, times: int) -> None:
    """What a region has saved is not asked of torch, whose replay stops before the region's end."""
    norm, x = nn.BatchNorm1d(4), leaf(8, 4)
    out = torch_checkpoint(lambda x: lowtide.checkpoint(norm, x), x, use_reentrant=use_reentrant)
    assert isinstance(out, Tensor)
    out.square().sum().backward()
    assert norm.num_batches_tracked == times


def test_a_budget_around_regions_around_torchs_checkpoint() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        model, x = net(), leaf(3, 4)

        def inner(x: Tensor) -> Tensor:
            y: Tensor = torch_checkpoint(model, x, use_reentrant=False)
            return y.exp()

        def outer(x: Tensor) -> Tensor:
            if way is WAYS["budget"]:
                return lowtide.checkpoint(inner, x).cos()  # type: ignore[no-any-return]
            return inner(x).cos()

        return gradients(way(outer, x).sum(), x, *model.parameters())

    check(scenario, WAYS["budget"])


# Tensors in containers.


@dataclass
class Parcel:
    image: Tensor
    extra: dict[str, list[Tensor]]


@every_way
def test_containers_in_and_out(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(6), leaf(6)

        def region(parcel: Parcel, /, *, more: dict[str, Any]) -> dict[str, Any]:
            y = parcel.image.sin() * parcel.extra["by"][0]
            for tensor in more["generator"]:
                y = y * tensor.exp()
            return {"parcel": Parcel(y.cos(), {"by": [y.exp()]}), "count": 3, "none": None}

        def tensors() -> Iterator[Tensor]:
            yield w.tanh()
            yield w.sin()

        out = way(region, Parcel(x, {"by": [w]}), more={"generator": tensors()})
        assert out["count"] == 3
        assert out["none"] is None
        parcel = out["parcel"]
        return gradients((parcel.image * parcel.extra["by"][0]).sum(), x, w)

    check(scenario, way)


def test_arguments_reach_the_function_as_they_are() -> None:
    given: list[Any] = []
    marker = object()
    lowtide.checkpoint(lambda *a, **k: given.append((a, k)), marker, 1, use_reentrant=False, b=2)
    assert given == [((marker, 1), {"b": 2})]
    assert given[0][0][0] is marker


# Decisions that a second run could take differently.


@every_way
def test_top_k_routing(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        gate = nn.Linear(6, 4)
        experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        load = torch.zeros(4)
        x = leaf(9, 6)

        def region(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                scores = gate(x).float().softmax(-1) + load  # the counter changes the routing
            weight, chosen = scores.topk(2)
            load.add_(torch.bincount(chosen.flatten(), minlength=4))
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                token, slot = torch.where(chosen == number)
                out = out.index_add(0, token, expert(x[token]).tanh() * weight[token, slot, None])
            return out

        y = way(region, way(region, x))
        return [*gradients(y.square().sum(), x, *gate.parameters()), load]

    check(scenario, way)


@every_way
def test_shared_weights_under_autocast(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        shared, x = nn.Linear(6, 6), leaf(3, 6)
        with torch.autocast("cpu", torch.bfloat16):
            first = way(lambda x: shared(shared(x).tanh()), x)
            second = way(lambda x: shared(x).sin(), first)
            loss = (shared(second).float() * first.float()).sum()
        return gradients(loss, x, *shared.parameters())

    check(scenario, way)


# What is refused, with an explanation.


def transform_inside() -> Tensor:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda t: t.sin().sum())(x)
        return slope * x

    result: Tensor = lowtide.checkpoint(region, x)
    return result


def transform_around() -> Tensor:
    slope: Tensor = torch.func.grad(lambda t: lowtide.checkpoint(torch.sin, t).sum())(torch.ones(3))
    return slope


def transform_around_a_budget() -> Tensor:
    def loss(t: Tensor) -> Tensor:
        with lowtide.budget("1 MiB"):
            return t.sin().sum()

    slope: Tensor = torch.func.grad(loss)(torch.ones(3))
    return slope


BACKWARDS = "torch.func transform that differentiates backwards (grad, vjp, jacrev, ...) ran"
ANY = "inside a torch.func transform (grad, vmap, jvp, vjp, jacrev, ...)"
TRANSFORMS = {
    transform_inside: BACKWARDS,
    transform_around: ANY,
    transform_around_a_budget: ANY,
}


@pytest.mark.parametrize("run", TRANSFORMS, ids=lambda f: f.__name__)
def test_transforms_of_torch_func_are_refused(run: Callable[[], Tensor]) -> None:
    """Inside a budget, vmap and forward mode are right; around one, none is."""
    with pytest.raises(lowtide.UnsupportedError) as caught:
        run()
    text = str(caught.value)
    assert TRANSFORMS[run] in text
    assert "torch.autograd.grad" in text
    assert current_recorder() is None

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4)
        return gradients(way(lambda x: x.sin().exp(), x).sum(), x)

    assert check(scenario).operations > 0


def hooks_disabled() -> AbstractContextManager[None]:
    return torch.autograd.graph.disable_saved_tensors_hooks("no hooks, please")


@every_way
@pytest.mark.parametrize("where", ["inside", "around"])
def test_hooks_that_are_disabled_are_a_refusal_of_ours(where: str, way: Way) -> None:
    def disabled(x: Tensor) -> Tensor:
        with hooks_disabled():
            return x.sin()

    around = hooks_disabled() if where == "around" else nullcontext()
    with around, pytest.raises(lowtide.UnsupportedError) as caught:
        way(disabled if where == "inside" else torch.sin, leaf(4))
    text = str(caught.value)
    assert "torch.autograd.graph.disable_saved_tensors_hooks" in text
    assert "no hooks, please" in text
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert current_recorder() is None
    with torch.autograd.graph.save_on_cpu():  # hooks are enabled again
        pass
    # The program's own error with the same text is not replaced.
    with pytest.raises(RuntimeError) as own:
        way(lambda x: _raise("no hooks, please"), leaf(4))
    assert type(own.value) is RuntimeError


def _raise(text: str) -> Tensor:
    raise RuntimeError(text)


@every_way
def test_vmap_inside_a_region(way: Way) -> None:
    """vmap alone saves nothing of its own: the tape sees the batched operations below it."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(5, 3), leaf(3, 3)

        def each(row: Tensor) -> Tensor:
            return (row.sin() @ w).exp() * F.dropout(row, 0.5).sum()

        y = way(lambda x: torch.func.vmap(each, randomness="different")(x.tanh()).cos(), x)
        return gradients(y.sum(), x, w)

    check(scenario, way)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_forward_mode_inside_a_region() -> None:
    """Forward-mode gradients need no saved tensors: they pass through."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, tangent = torch.randn(4), torch.randn(4)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            out = way(lambda d: d.sin().exp(), dual)
            return list(torch.autograd.forward_ad.unpack_dual(out))

    check(scenario)


# Compiled code.


def test_a_compiled_function_inside_a_region_is_right() -> None:
    torch._dynamo.reset()

    @functools.partial(torch.compile, backend="aot_eager")
    def compiled(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin().exp()

    x, w = leaf(6), leaf(6)
    plain = torch.autograd.grad((x.tanh() * w).sin().exp().cos().sum(), (x, w))
    with pytest.warns(UserWarning, match="runs eagerly there, with the right result"):
        y = lowtide.checkpoint(lambda x: compiled(x.tanh(), w).cos(), x)
    found = torch.autograd.grad(y.sum(), (x, w))
    assert same(plain, found)


def test_while_compiling_the_call_goes_to_torchs_checkpoint() -> None:
    torch._dynamo.reset()
    calls: list[int] = []

    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(x @ w).sin()

    def model(x: Tensor, w: Tensor) -> Tensor:
        result: Tensor = lowtide.checkpoint(block, x, w)
        return result.exp()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(sum("checkpoint" in str(node.target) for node in graph.graph.nodes))
        return graph

    x, w = leaf(3, 3), leaf(3, 3)
    plain = torch.autograd.grad(block(x, w).exp().sum(), (x, w))
    with counted() as replayed:
        found = torch.autograd.grad(
            torch.compile(model, backend=backend, fullgraph=True)(x, w).sum(), (x, w)
        )
    assert calls == [1]
    assert replayed.operations == 0
    for one, two in zip(plain, found, strict=True):
        torch.testing.assert_close(one, two)
