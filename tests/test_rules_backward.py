"""Rule 8: backward in any order, as often as one likes, on any thread, or never.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from against_plain import WAYS, Way, check, counted, gradients, leaf, tape_records
from lowtide import replay
from lowtide._compat import switches

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def two_heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    stem = x.sin().exp()
    return stem.cos().tanh(), stem.sigmoid().sqrt(), stem


@every_way
def test_partial_backwards_in_either_order(way: Way) -> None:
    for order in ((0, 1), (1, 0), (1,)):

        def scenario(way: Way, order: tuple[int, ...] = order) -> list[Tensor | None]:
            x = leaf(6)
            heads = way(two_heads, x)
            found: list[Tensor | None] = []
            for place in order:
                heads[place].sum().backward(retain_graph=True)
                assert x.grad is not None
                found.append(x.grad.clone())
            return found

        check(scenario, way)


@every_way
def test_inputs_chosen(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w, unused = leaf(4, 4), leaf(4, 4), leaf(4)
        y = way(lambda x: (x.tanh() @ w).sin().exp() + unused, x)
        y.sum().backward(inputs=[w], retain_graph=True)
        assert x.grad is None
        only = torch.autograd.grad(y.sum(), [x, w], retain_graph=True, allow_unused=True)
        return [w.grad, *only, *gradients(y.sum(), x, w, unused)]

    check(scenario, way)


def test_a_partial_backward_replays_its_own_part() -> None:
    x = leaf(6)
    one, two, _ = lowtide.checkpoint(two_heads, x)
    with counted() as first:
        one.sum().backward(retain_graph=True)
    assert first["cos"] == 1
    assert first["sigmoid"] == first["sqrt"] == 0
    with counted() as second:
        two.sum().backward()
    assert second["sqrt"] == 1
    assert second["cos"] == 0


@every_way
def test_several_losses_through_one_region(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(6), leaf(6)
        a, b, stem = way(two_heads, x * w)
        found: list[Tensor | None] = []
        for loss in (a.sum(), b.square().sum(), (stem * a).sum(), (a * b).exp().sum()):
            found.extend(torch.autograd.grad(loss, (x, w), retain_graph=True))
        return found

    check(scenario, way)


def test_each_retaining_backward_recomputes_once() -> None:
    """Autograd still has its handles, but what it has asked for is dropped."""

    def scenario(way: Way, times: int = 3) -> list[Tensor | None]:
        x, w = leaf(6, 6), leaf(6, 6)
        y = way(lambda a, b: (a @ b).sin().exp(), way(lambda a, b: (a @ b).sin().exp(), x, w), w)
        rows = [
            torch.autograd.grad(y[row].sum(), (x, w), retain_graph=True) for row in range(times)
        ]
        return [gradient for row in rows for gradient in row]

    once, thrice = check(lambda way: scenario(way, 1)), check(scenario)
    assert once.operations == 6
    assert thrice.operations == 3 * once.operations


def test_a_retaining_backward_does_not_gather_what_regions_recompute() -> None:
    w = [torch.randn(64, 64) for _ in range(8)]

    def rows(way: Way) -> Callable[[], None]:
        def run() -> None:
            x = y = torch.randn(256, 64, requires_grad=True)
            for each in w:
                y = way(lambda a, b: (a @ b).sin().exp().tanh().sin(), y, each)
            for row in range(3):
                torch.autograd.grad(y[row].sum(), x, retain_graph=True)

        return run

    torchs_way = functools.partial(checkpoint, use_reentrant=False)
    plain, mine, torchs = (
        lowtide.measure(rows(way), device="cpu").peak_bytes
        for way in (lambda f, *a: f(*a), lowtide.checkpoint, torchs_way)
    )
    assert mine <= torchs < 0.6 * plain


def test_a_retaining_backward_does_not_gather_what_nested_regions_read() -> None:
    """An outer region recomputes the inputs of those inside, which are dropped as backward goes."""
    w = [torch.randn(64, 64) for _ in range(6)]

    def part(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin().exp()

    def nested(x: Tensor, w: Tensor) -> Tensor:
        y = lowtide.checkpoint(part, lowtide.checkpoint(part, x, w), w)
        y = lowtide.checkpoint(torch.sin, lowtide.checkpoint(torch.tanh, y))
        return lowtide.checkpoint(nn.functional.layer_norm, y, (64,))

    def rows(way: Way, kept: list[Tensor]) -> Callable[[], None]:
        def run() -> None:
            x = y = torch.randn(256, 64, requires_grad=True)
            for each in w:
                y = way(nested, y, each)
            for row in range(3):
                torch.autograd.grad(y[row].sum(), x, retain_graph=True)
            kept.append(y)

        return run

    def scenario(way: Way) -> list[Tensor | None]:
        x = y = leaf(6, 64)
        for each in w[:2]:
            y = way(nested, y, each)
        rows = [torch.autograd.grad(y[row].sum(), x, retain_graph=True) for row in range(2)]
        return [gradient for row in rows for gradient in row]

    graphs: list[Tensor] = []
    flat, deep = (
        lowtide.measure(rows(way, graphs), device="cpu")
        for way in (lambda _, x, w: lowtide.checkpoint(part, x, w), lowtide.checkpoint)
    )
    size = 256 * 64 * 4
    assert deep.peak_bytes <= flat.peak_bytes + 4 * size  # nested: one region has four inputs
    assert deep.allocated_bytes <= flat.allocated_bytes + size
    twice = check(scenario)
    assert twice["mm"] == 2 * 2 * 2 * 2  # backwards, blocks, and once for each region around it


@every_way
def test_retain_graph_and_the_error_without_it(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6)
        y = way(two_heads, x)[0].sum()
        for _ in range(3):
            y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
        return [x.grad]

    check(scenario, way)


def test_a_backward_that_never_comes_frees_everything() -> None:
    gc.collect()
    before = tape_records()
    x = leaf(64)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    outputs = [lowtide.checkpoint(net, x) for _ in range(5)]
    inside = weakref.ref(net[0])
    assert tape_records() > before + 20
    del outputs, net
    assert inside() is None
    assert tape_records() == before


def test_reference_counts_alone_free_a_graph() -> None:
    """No cycle keeps activations until the garbage collector happens to run."""
    gc.collect()
    before = tape_records()
    gc.disable()
    try:
        x = leaf(64)
        y = lowtide.checkpoint(lambda x: (x.sin() * torch.randn(64)).exp(), x)
        with counted() as replayed:
            y.sum().backward()
        assert replayed.operations > 0
        del y
        assert tape_records() == before
    finally:
        gc.enable()


def test_a_saved_tensor_unpacked_by_hand() -> None:
    x = leaf(6)
    y = lowtide.checkpoint(lambda x: x.sin().cos(), x)
    node: Any = y.grad_fn
    expected = x.detach().sin()
    with counted() as replayed:
        assert torch.equal(node._saved_self, expected)
        assert torch.equal(node._saved_self, expected)
    assert replayed.operations <= 2
    y.sum().backward()
    (gradient,) = torch.autograd.grad(x.sin().cos().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)
    with pytest.raises(RuntimeError, match="saved tensors after they have already been freed"):
        _ = node._saved_self


def test_a_saved_tensor_read_by_hand_after_the_backward_is_no_part_of_the_step() -> None:
    """The measurement ended with the backward; the step is learned from all the same."""
    x, budget = leaf(64), lowtide.budget(1.0)
    for _ in range(3):
        with budget:
            y = x.sin().cos()
            loss = y.square().mean()
        loss.backward(retain_graph=True)
        assert torch.equal(y.grad_fn._saved_self, x.detach().sin())
        del y, loss
    assert budget.report().planned


@every_way
def test_backward_on_another_thread(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6)
        y = way(two_heads, x)[0].sum()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                y.backward()
            except BaseException as error:  # pragma: no cover - only if the test fails
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not failures
        return [x.grad]

    check(scenario, way)


def test_two_backwards_at_once_on_two_threads() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(40), leaf(40)

        def region(x: Tensor) -> tuple[Tensor, Tensor]:
            for _ in range(10):
                x = (x * w).sin()
            return x.cos().exp(), x.exp().cos()

        heads = way(region, x)
        found: list[Any] = [None, None]

        def run(place: int) -> None:
            loss = heads[place].sum()
            found[place] = torch.autograd.grad(loss, (x, w), retain_graph=True)

        threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [*found[0], *found[1]]

    check(scenario)


def test_what_one_thread_is_done_with_another_may_be_about_to_read() -> None:
    """Each backward asks for `h` while the other, on the way to the result, multiplies matrices."""
    x, w, c = leaf(200, 200), torch.randn(200, 200) / 20, torch.randn(200, 200)

    def region(x: Tensor) -> Tensor:
        h = c.exp()
        return (x @ w @ w @ w @ w * h).tanh()

    def run(loss: Tensor) -> None:
        found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])

    expected = torch.autograd.grad(region(x).sum(), x)[0]
    for _ in range(40):
        y, found = lowtide.checkpoint(region, x), []
        threads = [threading.Thread(target=run, args=(y.sum(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        assert all(torch.equal(gradient, expected) for gradient in found)


def test_two_threads_replay_under_two_default_dtypes() -> None:
    """The default dtype is the whole process's: the one waits until the other has put it back."""
    found: dict[torch.dtype, torch.dtype] = {}
    begun = {dtype: threading.Event() for dtype in (torch.float64, torch.float16)}
    over = threading.Event()

    def recorded(dtype: torch.dtype, act: Callable[[], object]) -> Any:
        def func() -> None:
            begun[dtype].set()
            act()
            found[dtype] = torch.get_default_dtype()

        return SimpleNamespace(
            facts=SimpleNamespace(func=func), ambient=None, default_dtype=dtype,
            threads=torch.get_num_threads(), flushes=switches.flushes_denormals(), casting=None,
            draws=(),
        )  # fmt: skip

    first = recorded(torch.float64, lambda: begun[torch.float16].wait(0.2))
    second = recorded(torch.float16, lambda: over.wait(0.2))

    def run(op: Any) -> None:
        replay._under_recorded_state(op, [], {}, ())
        over.set()

    threads = [threading.Thread(target=run, args=(op,)) for op in (first, second)]
    threads[0].start()
    begun[torch.float64].wait(5)
    threads[1].start()
    for thread in threads:
        thread.join()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert usual == torch.float32
    assert found == {dtype: dtype for dtype in begun}


def test_both_recorders_set_the_default_dtype_there(monkeypatch: pytest.MonkeyPatch) -> None:
    set_for = []

    def noted(op: Any, *args: Any) -> Any:
        set_for.append((op.facts.name, op.default_dtype))
        return under(op, *args)

    under = replay._under_recorded_state
    monkeypatch.setattr(replay, "_under_recorded_state", noted)
    x, numbers = leaf(6), torch.arange(6)

    def region(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            halves = numbers / 2
        finally:
            torch.set_default_dtype(torch.float32)
        return (x * halves).sin().exp()

    y = lowtide.checkpoint(region, x)
    assert y.dtype == torch.float64
    y.sum().backward()
    assert set_for == [("aten::div", torch.float64)]


@every_way
def test_a_gradient_penalty_inside_the_region(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = leaf(5, 4)

        def region(x: Tensor) -> Tensor:
            out = net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.mean() + (slope.norm(dim=1) - 1).square().mean()

        return gradients(way(region, x), x, *net.parameters())

    check(scenario, way)


@every_way
def test_a_gradient_penalty_around_the_region(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        net = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
        x = leaf(5, 4)
        out = way(net, x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return gradients(out.mean() + slope.square().sum(), x, *net.parameters())

    check(scenario, way)


@every_way
def test_gradients_of_intermediates(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6)
        inside: list[Tensor] = []
        seen: list[Tensor] = []

        def region(x: Tensor) -> Tensor:
            a = x.sin()
            b = a.exp()
            a.retain_grad()
            b.register_hook(lambda g: seen.append(g.clone()))
            a.register_hook(lambda g: g * 2)
            inside.append(a)
            return b.cos()

        loss = way(region, x).sum()
        (direct,) = torch.autograd.grad(loss, inside[0], retain_graph=True)
        return [direct, *gradients(loss, x), inside[0].grad, *seen]

    check(scenario, way)


def test_backward_inside_the_region() -> None:
    """A whole inner optimisation runs while the outer forward is recorded."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(6), torch.randn(6)

        def region(x: Tensor) -> Tensor:
            inner = w.clone().requires_grad_()
            for _ in range(3):
                (slope,) = torch.autograd.grad((inner * x.detach()).sin().sum(), inner)
                with torch.no_grad():
                    inner -= 0.1 * slope
            return (x * inner.detach()).sin().exp()

        return gradients(way(region, x).sum(), x)

    check(scenario)


def test_a_graph_spanning_two_regions_backwards_from_the_middle() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6)
        a, b, stem = way(two_heads, x)
        c, _, _ = way(two_heads, a + b)
        (middle,) = torch.autograd.grad(c.sum(), stem, retain_graph=True, allow_unused=True)
        return [middle, *gradients(c.sum() + stem.sum(), x)]

    check(scenario)


@every_way
def test_a_backward_in_inference_mode(way: Way) -> None:
    """What is replayed there has versions all the same, also where it is saved as another view,
    drawn, written in place, or run under the switches of its forward."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(6, 4), leaf(4, 4)

        def region(x: Tensor) -> Tensor:
            a = nn.functional.dropout(x.tanh() @ w, 0.5)
            b = torch.view_as_complex(a.exp().reshape(-1, 2).contiguous()).abs().sin()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                c = (a.sin() @ w).relu_().float()
            return b.exp().sum() + c.sin().square().sum()

        out = way(region, x).sin()
        with torch.inference_mode():
            read = out.grad_fn._saved_self.clone()
            (first,) = torch.autograd.grad(out, x, retain_graph=True)
            out.backward()
        assert x.grad is not None
        assert w.grad is not None
        return [read.clone(), first.clone(), x.grad, w.grad]

    assert check(scenario, way).operations
