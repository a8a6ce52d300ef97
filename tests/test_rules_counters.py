"""Rules 4 and 6: one memory under several tensors, of which each shows only some of the writes.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from against_plain import WAYS, Way, check, gradients, leaf

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


# Rule 4. A write between forward and backward, through another counter than what was read first.


def scaled(weight: nn.Parameter, x: Tensor) -> Tensor:
    largest = weight.data.abs().max()
    return F.linear(x, weight / largest)  # replayed from the weight; autograd saves the quotient


def transposed(weight: nn.Parameter, x: Tensor) -> Tensor:
    return x * weight.data.mean() @ weight.t().sin()


def saved_only(weight: nn.Parameter, x: Tensor) -> Tensor:
    return (x.sin() * weight.data.mean()) @ weight


@pytest.mark.parametrize("read", [scaled, transposed, saved_only])
def test_a_change_of_what_was_read_first_through_data_is_noticed(
    read: Callable[[nn.Parameter, Tensor], Tensor],
) -> None:
    weight, x = nn.Parameter(torch.randn(4, 4)), leaf(3, 4)
    y = lowtide.checkpoint(lambda x: read(weight, x.sin()).exp(), x)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(lowtide.ReplayError, match="modified by an in-place operation"):
        y.sum().backward()


@pytest.mark.parametrize("read", [scaled, transposed, saved_only])
def test_what_was_read_first_through_data_and_stays_is_replayed(
    read: Callable[[nn.Parameter, Tensor], Tensor],
) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        weight, x = nn.Parameter(torch.randn(4, 4)), leaf(3, 4)
        found = []
        for _ in range(3):
            y = way(lambda x: read(weight, x.sin()).exp(), x)
            found += gradients(y.sum(), x, weight)
            with torch.no_grad():
                weight.sub_(0.1)
        return found

    assert check(scenario).operations > 0


@pytest.mark.parametrize("changed", [0, 1])
def test_a_piece_of_a_flat_buffer_that_is_read_through_a_view_of_it(changed: int) -> None:
    """A linear layer reads its weight transposed."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    pieces = list(model.parameters())
    memory = torch.cat([piece.detach().flatten() for piece in pieces])
    for piece, part in zip(pieces, memory.split(16), strict=True):
        piece.data = part.view(4, 4)
    y = lowtide.checkpoint(lambda x: model(x.sin()).exp(), leaf(3, 4))
    with torch.no_grad():
        pieces[changed].add_(1)
    with pytest.raises(lowtide.ReplayError, match="modified by an in-place operation"):
        y.sum().backward()


# Rules 4 and 5. What is never replayed writes through `.data` too.


@torch.library.custom_op("lowtide_counters::halve", mutates_args={"x"})
def halve(x: Tensor) -> None:
    x.mul_(0.5)


@every_way
def test_a_custom_operator_that_writes_through_data(way: Way) -> None:
    """Autograd goes on with the new content of what it has saved."""

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(5, 6)

        def region(x: Tensor) -> Tensor:
            y = x.exp() * 1.0
            early = y.sin() * y
            halve(y.data)
            return early * y

        return gradients(way(region, x).sum(), x)

    check(scenario, way)


# Rule 4. A backward inside the recording, with a hook that writes what no version shows.


def fused(parameter: nn.Parameter) -> None:
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()


def through_data(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.data.sub_(parameter.grad, alpha=0.5)


@pytest.mark.parametrize("update", [fused, through_data])
def test_an_optimizer_in_a_backward_inside_a_budget_writes_what_is_still_read(
    update: Callable[[nn.Parameter], None],
) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        weight, other = nn.Parameter(torch.randn(8, 8)), leaf(8)
        weight.register_post_accumulate_grad_hook(update)
        x, found = torch.randn(16, 8), []

        def step() -> Tensor:
            with torch.no_grad():  # nobody waits for this use of the weight
                read = torch.tanh(x @ weight).exp()
            early = (read * other).sin()
            loss = early.mean() + torch.tanh(x @ weight).square().mean()
            loss.backward()
            return loss.detach()

        for _ in range(2):
            found += [way(step), weight.grad, other.grad]
            weight.grad = other.grad = None
        return [*found, weight]

    check(scenario, lambda step: _dropping(step))


def _dropping(step: Callable[[], Tensor]) -> Tensor:
    """The budget under which `step` drops the most."""
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        try:
            with lowtide.budget(share):
                return lowtide.checkpoint(step)
        except lowtide.BudgetError:
            continue
    raise AssertionError("every budget was refused")


# Rule 4. Chunks have version counters of their own: what one shows, autograd does not notice.


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_any_value_of_a_recurrent_net_may_be_kept(kind: type[nn.RNNBase]) -> None:
    """Its gates are chunks of one memory, written in place one after the other."""

    def keeping(kept: range) -> Callable[..., list[Tensor | None]]:
        def scenario(way: Way) -> list[Tensor | None]:
            net, x = kind(4, 3), leaf(2, 2, 4)
            asked = itertools.count()

            def policy(info: lowtide.policies.OperationInfo) -> bool:
                return next(asked) in kept

            region = way if way is not lowtide.checkpoint else partial(way, policy=policy)
            return gradients(region(lambda x: net(x.sin())[0], x).sum(), x, *net.parameters())

        return scenario

    for first in range(24):
        check(keeping(range(first, first + 1)))
        check(keeping(range(first, 100)))


# Rules 4 and 6. Sparse and nested tensors share memory with dense ones.


def rows(values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(torch.tensor([0, 3, 6]), torch.arange(3).repeat(2), values)


def columns(values: Tensor) -> Tensor:
    return torch.sparse_csc_tensor(torch.tensor([0, 3, 6]), torch.arange(3).repeat(2), values)


def blocks(values: Tensor) -> Tensor:
    offsets, places = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    return torch.sparse_bsr_tensor(offsets, places, values.view(2, 3, 1))


def coordinates(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.arange(6)[None], values, (6,), is_coalesced=True)


@every_way
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("make", [rows, columns, blocks, coordinates])
def test_a_write_to_a_sparse_tensor_changes_the_dense_one_it_was_made_of(
    make: Callable[[Tensor], Tensor], saved: bool, way: Way
) -> None:
    """No version of the dense one moves: autograd goes on with the new content."""

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(5, 6)

        def region(x: Tensor) -> Tensor:
            values = x.detach().sin().mean(0)
            early = values * x if saved else x
            make(values).neg_()
            return (values * early.sin()).exp()

        return gradients(way(region, x).sum(), x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # compressed layouts are in beta
        check(scenario, way)


@every_way
@pytest.mark.parametrize("outside", [False, True])
def test_a_write_to_a_nested_tensor_whose_rows_were_read(outside: bool, way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(5, 6)
        made = torch.nested.nested_tensor([torch.randn(5, 6), torch.randn(3, 6)])

        def region(x: Tensor) -> Tensor:
            nested = made if outside else torch.nested.nested_tensor([x.detach(), x.detach()[:3]])
            row = nested.unbind()[0]
            early = (row.exp().cos() * x).sum()
            nested.mul_(2)
            return early + (nested.unbind()[1] * x[:3]).sum()

        return gradients(way(region, x), x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
        check(scenario, way)


# Rule 6. Views of other dtypes of a memory that is no whole number of their elements.


@every_way
def test_pieces_of_different_dtypes_of_one_odd_memory(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        memory = torch.randint(60, 64, (4 + 64 + 2,), dtype=torch.uint8)
        half = memory[:4].view(torch.bfloat16).requires_grad_()
        single = memory[4:68].view(torch.float32).view(4, 4).requires_grad_()
        last = memory[68:].view(torch.bfloat16).requires_grad_()

        def region(x: Tensor) -> Tensor:
            y = (x.bfloat16() * half[0] * half).float().repeat(1, 2) @ single
            return (y.sin() * single.sum() * last).exp()

        x = leaf(3, 2)
        return gradients(way(region, x).sum(), x, half, single, last)

    check(scenario, way)


@every_way
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.int16])
def test_a_view_of_another_dtype_of_an_odd_number_of_elements(dtype: torch.dtype, way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(7)

        def region(x: Tensor) -> Tensor:
            y = x.sin()
            other = y.detach()[:6].view(dtype)
            if dtype.is_complex:
                other = torch.view_as_complex(y[:6].view(3, 2))
            return (other * other).abs().sum() + (other.abs() * x.sum()).sum()

        return gradients(way(region, x).sum(), x)

    check(scenario, way)


# Rule 1. A norm that reads what it moves: a replay moves scratch memory, and would read it unmoved.


@every_way
def test_a_norm_whose_weight_is_its_running_variance(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        mean, var, x = torch.zeros(8), torch.ones(8), leaf(16, 8)

        def normed(x: Tensor) -> Tensor:
            return F.batch_norm(x.sin(), mean, var, var, mean, training=True).square().exp().tanh()

        found = [gradient for _ in range(3) for gradient in gradients(way(normed, x).sum(), x)]
        return [*(None if each is None else each.clone() for each in found), mean, var]

    check(scenario, way)


@every_way
def test_a_norm_whose_statistics_and_weight_are_parts_of_one_memory_is_replayed(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        flat, x = torch.rand(4, 8) + 1, leaf(16, 8)

        def normed(x: Tensor) -> Tensor:
            y = F.batch_norm(x.sin(), flat[0], flat[1], flat[2], flat[3], training=True)
            return y.square().exp().tanh()

        return [*gradients(way(normed, x).sum(), x), flat]

    assert check(scenario, way)["native_batch_norm"]
