"""What the running backward does not reach: the output of another head, which a variable holds.

Nothing asks for what was saved for it, and it is in memory until its graph dies (rule 13). Autograd
can be asked for that with the compiled core only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from by_hand import same
from lowtide import _compat, engine
from lowtide.observing.reached import UNKNOWN, Nodes, Numbers, Reached

pytestmark = [
    pytest.mark.skipif("lowtide.engine.name() != 'compiled'", reason="needs the compiled core"),
    pytest.mark.filterwarnings("ignore::lowtide.DryRunWarning"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outward(F.gelu(self.inward(x)))


class Detached(torch.autograd.Function):
    """One that has a graph of its own while its forward runs, before it saves anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            out = x.detach().requires_grad_().sigmoid().exp()
        ctx.save_for_backward(x)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * s.exp() * s * (1 - s)


class TwoHeads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.other = (nn.Sequential(*(Block() for _ in range(n))) for n in (6, 4))
        self.head, self.how = nn.Linear(64, 10), how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        other = self.other(h)
        if self.how == "custom":
            h = Detached.apply(h)
        elif self.how == "in place":
            h = h * 1.0
            h[:128].mul_(torch.ones(64, requires_grad=True)).sigmoid_()
        return self.head(h).square().mean(), other


def steps(how: str) -> Callable[[Any], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    net, x = TwoHeads(how), torch.randn(256, 64)

    def step(limit: Any) -> tuple[Tensor, ...]:
        net.zero_grad()
        with limit:
            loss, other = net(x)
        loss.backward()
        return (loss, other.detach(), *(p.grad for p in net.parameters() if p.grad is not None))

    return step


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
@pytest.mark.parametrize("how", ["", "custom", "in place"])
def test_an_unused_output_that_is_held(how: str, share: float) -> None:
    step = steps(how)
    plain = step(contextlib.nullcontext())
    peak = lowtide.measure(lambda: step(contextlib.nullcontext()), device="cpu").peak_bytes
    limit = lowtide.budget(int(share * peak))
    for _ in range(3):
        found: list[tuple[Tensor, ...]] = []
        took = lowtide.measure(lambda to=found: to.append(step(limit)), device="cpu").peak_bytes
        assert took <= share * peak
        assert same(plain, found[0])


class Normalized(nn.Module):
    """Normalized features are a view, which the activation after it writes to. One head is on what
    comes halfway, as those of deep supervision are."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (
            nn.Sequential(
                *(
                    layer
                    for _ in range(4)
                    for layer in (
                        nn.Conv2d(16, 16, 3, padding=1),
                        nn.InstanceNorm2d(16),
                        nn.LeakyReLU(inplace=True),
                    )
                )
            )
            for _ in range(2)
        )
        self.aside, self.head = nn.Conv2d(16, 2, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.early(x)
        aside = self.aside(x)
        return self.head(self.late(x)).square().mean(), aside


def test_a_head_on_what_was_written_through_a_view() -> None:
    """What the write to the view left in the graph was taken for the head's, and so the head for
    one that the backward reaches: a nnU-Net's first step was 25 to 43 % over its limit."""
    torch.manual_seed(0)
    net, x = Normalized(), torch.randn(4, 16, 16, 16)

    def step(limit: Any) -> list[Tensor | None]:
        net.zero_grad()
        with limit:
            loss, _aside = net(x)
        loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    plain = step(contextlib.nullcontext())
    peak = lowtide.measure(lambda: step(contextlib.nullcontext()), device="cpu").peak_bytes
    for share in (0.6, 0.5, 0.45):
        limit, found = lowtide.budget(int(share * peak)), []

        def run(to: list[Any] = found, of: Any = limit) -> None:
            with contextlib.suppress(lowtide.BudgetError):  # a first step may be (rule 13)
                to.extend(step(of))

        assert lowtide.measure(run, device="cpu").peak_bytes <= share * peak
        assert not found or same(plain, found)


# ------------------------------------------------------------------------------ autograd's answer


class Counted(TorchDispatchMode):
    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self.nodes = nodes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        self.nodes.ran()
        return made


def test_what_a_write_to_a_view_makes_is_not_for_the_next_call() -> None:
    base = torch.randn(8, requires_grad=True) * 1.0
    nodes, spans = Nodes(), []
    hooks = torch.autograd.graph.saved_tensors_hooks
    with Counted(nodes), hooks(lambda t: spans.append(nodes.saving()) or t, lambda t: t):
        view = base.view(2, 4)
        view.relu_()
        written = _compat.newest_node()
        view.sin()
    assert written > spans[0][0]
    assert spans[-1] == (written + 1, written + 1)


def test_what_is_multiplied_in_place_is_saved_for_that() -> None:
    """Its node is made and saves the factor; the clone that it saves next has a node of its own."""
    x = torch.randn(8, requires_grad=True)
    made, factor = x * 1.0, x * 2.0
    nodes, spans = Nodes(), []
    first = _compat.newest_node() + 1
    hooks = torch.autograd.graph.saved_tensors_hooks
    with Counted(nodes), hooks(lambda t: spans.append(nodes.saving()) or t, lambda t: t):
        made.mul_(factor)
    assert made.grad_fn is not None
    assert made.grad_fn._sequence_nr() == first
    assert spans == [(first, first), (first, first + 1)]


def numbered(run: Callable[[], Any]) -> tuple[Any, Numbers]:
    """A result, and the numbers of the nodes that were made for it."""
    before = _compat.newest_node()
    made = run()
    return made, (before + 1, _compat.newest_node())


def reached() -> Reached:
    return Reached(engine.core().reached())


def asked_in(backward: Callable[[], object], through: Tensor) -> Reached:
    found: list[Reached] = []
    handle = through.register_hook(lambda _: found.append(reached()))
    backward()
    handle.remove()
    return found[0]


def each(nodes: Numbers) -> list[Numbers]:
    return [(number, number) for number in range(nodes[0], nodes[1] + 1)]


def test_siblings_of_the_first_node_are_reached() -> None:
    x = torch.randn(8, requires_grad=True)
    stem, below = numbered(lambda: x.sin())
    (left, a), (right, b) = numbered(lambda: stem.exp().tanh()), numbered(lambda: stem.cos().exp())
    _, aside = numbered(lambda: stem.sigmoid().tanh())
    loss = left.sum() + right.sum()
    found = asked_in(loss.backward, right)
    assert all(map(found.asks, [*each(below), *each(a), *each(b)]))
    assert not any(map(found.asks, [*each(aside), aside]))
    assert found.asks((b[1], aside[1]))  # one of them
    assert found.asks((aside[0], aside[1] + 1))


def test_inputs_restrict_what_is_reached() -> None:
    x, y = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    (one, a), (two, b) = numbered(lambda: x.sin().exp().tanh()), numbered(lambda: y.cos().exp())
    loss = (one * two).sum()
    found = asked_in(lambda: torch.autograd.grad(loss, x), one)
    assert all(map(found.asks, each(a)))
    assert not found.asks(b)


def test_all_that_runs_in_a_custom_function_is_reached() -> None:
    x = torch.randn(8, requires_grad=True)
    made, inside = numbered(lambda: Detached.apply(x))
    after, _ = numbered(lambda: made.exp())
    found = asked_in(after.sum().backward, after)
    assert len(each(inside)) > 2
    assert all(map(found.asks, each(inside)))


def test_writes_to_views_are_reached() -> None:
    x = torch.randn(8, requires_grad=True)
    base = x * 1.0
    view, other = base[:4], x[:4]
    first = _compat.newest_node() + 1
    view.mul_(other)
    assert base.grad_fn is not None
    last = base.grad_fn._sequence_nr()  # the view has a new node of its own after that
    found = asked_in(base.sum().backward, x)
    assert last - first >= 2
    assert all(map(found.asks, each((first, last))))


def test_what_a_call_makes_besides_counts_as_its_own() -> None:
    """A clone of what is overwritten is made, and saved, after the node itself."""
    x = torch.randn(8, requires_grad=True)
    y, nodes = x * 1.0, Nodes()
    first = _compat.newest_node() + 1
    torch.tanh(y)  # its node saves its result
    nodes.ran()
    assert nodes.saving() == (first, first)
    y.exp(), y.clone()
    assert nodes.saving() == (first + 1, first + 2)
    nodes.ran()
    assert nodes.saving() == (first + 1, first + 2)
    nodes.ran()  # an operation without a node
    assert reached().asks(nodes.saving())


def test_outside_of_a_backward_everything_may_be_asked_for() -> None:
    newest = _compat.newest_node()
    assert reached().asks((newest, newest))
    x = torch.randn(8, requires_grad=True)
    found = asked_in(x.exp().sum().backward, x)
    assert found.asks(UNKNOWN)
    assert not found.asks((newest, newest))
