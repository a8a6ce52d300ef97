"""Rules 6 and 7: aliasing, in-place writes, and when an output requires grad.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from against_plain import WAYS, Way, check, counted, gradients, leaf, recorded

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

# Rule 6. Each takes a (4, 6) tensor that it may not write to, and returns something made from it.


def views(x: Tensor) -> Tensor:
    y = x.sin()
    a, b = y.t().chunk(2)
    return (a.exp() * b.flip(0).cos()).unsqueeze(0).expand(3, -1, -1).tanh()


def in_place_chain(x: Tensor) -> Tensor:
    y = x * 2
    y.mul_(3).add_(1).neg_().sigmoid_()
    z = y.exp()
    w = y.add(1)
    w.mul_(3).exp_()
    return z * w


def write_through_a_view(x: Tensor) -> Tensor:
    y = x.sin()
    y[1:3, ::2].mul_(2)
    y.t()[0].add_(1)
    return y.exp() * y


def write_through_a_transposed_view(x: Tensor) -> Tensor:
    y = x.cos()
    y.t().copy_(x.t().tanh())
    y.transpose(0, 1).diagonal().mul_(2)
    return y.sin().exp()


def read_overlapping(x: Tensor) -> Tensor:
    y = x.sin()
    windows = y.flatten().unfold(0, 5, 2)
    return (windows * windows.cos()).exp()


def write_between_overlapping_reads(x: Tensor) -> Tensor:
    y = x.sin().flatten()
    before = y.as_strided((4, 3), (2, 1)).exp()
    y.narrow(0, 2, 6).mul_(2)
    return before * y.as_strided((4, 3), (2, 1), 1).sin()


def old_version_still_read(x: Tensor) -> Tensor:
    y = x.sin()
    old = y.exp()
    y += 1
    newer = y.exp()
    y.zero_()
    return old * newer + y.exp()


def built_piece_by_piece(x: Tensor) -> Tensor:
    y = torch.zeros(4, 6)
    for row in range(4):
        y[row] = x[row].sin() * (y[row - 1].detach() + 1)
    return y.exp()


def out_argument(x: Tensor) -> Tensor:
    fixed = torch.empty(4, 6)
    torch.sin(x.detach(), out=fixed)
    return (x * fixed).exp() * fixed


def scatter_and_index(x: Tensor) -> Tensor:
    y = x.sin()
    y[y > 0] = 2.0
    y.index_add_(0, torch.tensor([0, 0, 3]), x[:3].cos())
    y.masked_fill_(x < -1, 0.5)
    return y.exp()


def swap_storage_by_dot_data(x: Tensor) -> Tensor:
    y = x.sin()
    y.data = y.data.cos()
    return (y * y).exp()


def foreach(x: Tensor) -> Tensor:
    parts = [row.sin() for row in x]
    torch._foreach_mul_(parts, 2.0)
    return torch.stack(torch._foreach_exp(parts))


def reinterpreted(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.sin().reshape(4, 3, 2))
    bits = x.detach().view(torch.int32)
    return torch.view_as_real(pairs * pairs).flatten(1) * (bits & 1)


def channels_last(x: Tensor) -> Tensor:
    y = x.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    return nn.functional.max_pool2d(y.sin(), 2).exp()


def nothing_in_it(x: Tensor) -> Tensor:
    return torch.cat([x[:0].sin().exp(), x.sin().exp()])


PROGRAMS = [
    views, in_place_chain, write_through_a_view, write_through_a_transposed_view, read_overlapping,
    write_between_overlapping_reads, old_version_still_read, built_piece_by_piece, out_argument,
    scatter_and_index, swap_storage_by_dot_data, foreach, reinterpreted, channels_last,
    nothing_in_it,
]  # fmt: skip


@every_way
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_views_and_writes(program: Callable[[Tensor], Tensor], way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4, 6)
        y = way(program, x)
        return [y.detach().clone(), *gradients(y.square().sum(), x)]

    replayed = check(scenario, way)
    if way is lowtide.checkpoint:
        assert replayed.operations > 0


@every_way
def test_an_input_written_inside(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4, 6)
        hidden, other = x + 2, torch.randn(4, 6)

        def region(hidden: Tensor, other: Tensor) -> Tensor:
            early = (hidden + other).sin().exp()
            hidden[1:].mul_(3)
            other.t().add_(1)
            return early + (hidden + other).cos().exp()

        y = way(region, hidden, other)
        return [*gradients((y + hidden.tanh()).sum(), x), hidden, other]

    check(scenario, way)


@every_way
def test_outputs_that_alias_inputs_and_each_other(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4, 6)
        hidden = x.sin()
        same, half, made, view = way(lambda h: (h, h[::2], m := h.add(1), m.t()), hidden)
        assert same is hidden
        assert half._base is hidden
        assert view._base is made
        half.mul_(2)
        view.add_(1)
        return gradients((hidden.exp().sum() + made.cos().sum()), x)

    check(scenario, way)


class ReturnsWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return ((x + y) * z).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0], ctx.saved_tensors[0], None


@every_way
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_that_a_custom_backward_returns_as_it_saved_them(inside: bool, way: Way) -> None:
    """They share no memory with each other, nor with what was saved."""

    def scenario(way: Way) -> list[Tensor | None]:
        x, y, z = leaf(6), leaf(6), leaf(6)

        def region(z: Tensor) -> Tensor:
            saved = z.sin() if inside else z
            return ReturnsWhatItSaved.apply(x, y, saved) + saved.exp().sum()  # type: ignore[no-any-return]

        way(region, z).backward()
        loss = way(region, z)
        loss.backward(retain_graph=True)
        x.grad = None
        loss.backward()
        assert x.grad is not None
        x.grad.mul_(2)
        return [loss, x.grad, y.grad, z.grad, z]

    check(scenario, way)


def test_a_storage_shared_by_many_saves_is_held_once() -> None:
    """Six saves of one storage through different views: one replay makes it for all of them."""

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6, 6)

        def region(x: Tensor) -> Tensor:
            y = x.sigmoid()
            return sum((y[i] * y[:, i]).sum() for i in range(3))  # type: ignore[return-value]

        return gradients(way(region, x), x)

    replayed = check(scenario)
    assert replayed.names() == {"aten::sigmoid": 1}
    assert replayed.nbytes == 6 * 6 * 4


def _tripled(y: Tensor) -> Tensor:
    return y.mul_(3)


def _squared(y: Tensor) -> Tensor:
    return y.mul_(y)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("write", [_tripled, _squared])
def test_a_replay_writes_where_the_step_wrote(write: Callable[[Tensor], Tensor]) -> None:
    """A temporary of the replay that nothing reads later is not copied to be written."""
    size = 1 << 20

    def net(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = write(x.detach().exp()).mean()
        return x * scale

    def step(compute: Callable[[Tensor], Tensor]) -> int:
        x = torch.linspace(0, 1, size // 4).requires_grad_()
        out = compute(x)

        def backward() -> None:
            (found[compute],) = torch.autograd.grad(out, x, torch.ones(()).expand_as(out))

        return lowtide.measure(backward, device="cpu").peak_bytes

    found: dict[Callable[[Tensor], Tensor], Tensor] = {}
    step(net)

    def checkpointed(x: Tensor) -> Tensor:
        return lowtide.checkpoint(net, x)

    peak = step(checkpointed)
    assert torch.equal(found[net], found[checkpointed])
    assert peak == pytest.approx(size, rel=0.01)  # what is written, and then the gradient


def test_a_saved_tensor_overwritten_later_is_made_again() -> None:
    """Plain autograd refuses this; a replay has the old content, so the gradient is right."""

    def region(x: Tensor, copy: bool) -> Tensor:
        y = x.sin()
        z = y.cos()  # saves y
        y = y.clone() if copy else y
        y.mul_(3)
        return z * y

    x = torch.linspace(-1, 1, 8).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        region(x, False).sum().backward()
    (expected,) = torch.autograd.grad(region(x, True).sum(), x)
    (found,) = torch.autograd.grad(lowtide.checkpoint(region, x, False).sum(), x)
    assert torch.equal(expected, found)


# Rule 7: requires_grad is as in the plain step.


def test_a_frozen_stem_gives_outputs_without_grad() -> None:
    stem, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = stem(x).tanh()
        return hidden, head(hidden).tanh().exp()

    hidden, out = lowtide.checkpoint(region, torch.randn(3, 4))
    assert not hidden.requires_grad
    assert out.requires_grad
    with counted() as replayed:
        out.sum().backward()
    assert head.weight.grad is not None
    assert stem.weight.grad is None
    # tanh and its ancestors, for the gradient of the head's weight; exp saves its output
    assert replayed["exp"] == 1


@every_way
@pytest.mark.parametrize(
    "freeze",
    [lambda net: net[0], lambda net: net[2], lambda net: net[:2], lambda net: nn.Sequential()],
    ids=["first", "middle", "stem", "nothing"],
)
def test_frozen_parts(freeze: Callable[[nn.Sequential], nn.Module], way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        net = nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        )
        freeze(net).requires_grad_(False)
        return gradients(way(net, torch.randn(5, 4)).exp().sum(), *net.parameters())

    check(scenario, way)


@every_way
def test_integer_inputs(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        tokens = torch.randint(0, 10, (3, 5))
        out = way(net, tokens)
        assert out.requires_grad
        return gradients(out.exp().sum(), *net.parameters())

    check(scenario, way)


@every_way
def test_nothing_requires_grad(way: Way) -> None:
    with counted() as replayed:
        out = way(lambda x: x.sin().exp(), torch.randn(4))
    assert not out.requires_grad
    assert replayed.operations == 0


@every_way
def test_a_low_rank_adapter_on_a_frozen_layer(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        base = nn.Linear(6, 6).requires_grad_(False)
        down, up = leaf(6, 2), leaf(2, 6)
        y = way(lambda x: (base(x) + x @ down @ up).tanh() * 2, torch.randn(3, 6))
        return gradients(y.square().sum(), down, up)

    check(scenario, way)


def test_detach_and_no_grad_inside() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)

        def region(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with torch.no_grad():
                scale = x.abs().max()
            with torch.inference_mode():
                sign = x.sign()
            y = (x / scale).sin()
            target = y.detach().round()
            return (y - target).square().exp(), scale, sign.clone()

        y, scale, sign = way(region, x)
        assert not scale.requires_grad
        return [*gradients(y.sum(), x), scale, sign + 0]

    check(scenario)


def test_requires_grad_switched_on_inside() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = torch.randn(8)

        def region(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.sin().requires_grad_()
            return y, y.cos().exp()

        y, out = way(region, x)
        return gradients(out.sum(), y)

    check(scenario)


def test_with_grad_disabled_nothing_is_recorded() -> None:
    with recorded() as seen:
        lowtide.checkpoint(lambda x: x.sin(), leaf(3))
        assert seen == ["aten::sin"]
        with torch.no_grad():
            lowtide.checkpoint(lambda x: x.sin(), leaf(3))
    assert seen == ["aten::sin"]


@every_way
def test_an_out_that_the_call_has_resized(way: Way) -> None:
    """What is left of its old content is known, and torch warns once, as in the plain step."""

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(3, 4)

        def region(x: Tensor) -> Tensor:
            with torch.no_grad():
                larger = torch.linspace(1, 2, 5) * 2
                rest = larger[4:]
                torch.sum(x, 0, out=larger)
            return (x * larger).exp().sum() + (x * rest).sin().sum()

        with pytest.warns(UserWarning, match="was resized since it had shape"):
            out = way(region, x)
        return [out, *gradients(out, x)]

    check(scenario, way)
