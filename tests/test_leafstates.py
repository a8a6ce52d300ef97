"""The states of leaves: both implementations see the same, and plans depend on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from lowtide import engine
from lowtide.compiled import build
from lowtide.observing.seen import Seen
from lowtide.tape import leafstates
from lowtide.tape.leafstates import GONE, HAS_GRADIENT, HERE, REQUIRES


def compiled() -> Callable[[leafstates.LeafRefs], bytes]:
    if not build.target().exists() and build.possible() is not None:
        pytest.skip("no compiled recorder here")
    with engine.use("compiled"):
        look: Callable[[leafstates.LeafRefs], bytes] = engine.core().leaf_states
    return look


WAYS = {"python": lambda: leafstates._one_by_one, "compiled": compiled}


@pytest.mark.parametrize("way", WAYS)
def test_a_byte_for_each_leaf(way: str) -> None:
    plain, frozen, collects = torch.ones(2), torch.ones(2), torch.ones(2, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2))
    collects.grad, frozen.grad = torch.ones(2), torch.ones(2)
    references = [weakref.ref(t) for t in (plain, frozen, collects, parameter)]
    of_the_gone = weakref.ref(torch.ones(2))
    found = WAYS[way]()((*references, of_the_gone))
    assert list(found) == [
        HERE, HERE + HAS_GRADIENT, HERE + REQUIRES + HAS_GRADIENT, HERE + REQUIRES, GONE,
    ]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_leaf_that_has_become_the_result_of_an_operation(way: str) -> None:
    """Reading its `grad` in Python would warn."""
    tensor = torch.ones(2)
    tensor.mul_(torch.ones(2, requires_grad=True))
    look, reference = WAYS[way](), (weakref.ref(tensor),)
    assert list(look(reference)) == [HERE + REQUIRES]
    tensor.retain_grad()
    tensor.sum().backward()
    assert list(look(reference)) == [HERE + REQUIRES]  # its gradient is not a leaf's


def seen_with(leaves: list[torch.Tensor], had: set[int], frozen: list[torch.Tensor]) -> Seen:
    known = {key: (0, weakref.ref(leaf)) for key, leaf in enumerate(leaves)}
    without = {key: (0, 8) for key in known if key not in had}
    return Seen((), frozenset(), without, known, 0, frozen=tuple(map(weakref.ref, frozen)))


def test_a_verdict_follows_what_is_done_to_the_leaves() -> None:
    a, b, ice = (torch.ones(2, requires_grad=True) for _ in range(3))
    ice.requires_grad_(False)
    seen = seen_with([a, b], had={1}, frozen=[ice])
    b.grad = torch.ones(2)
    assert (seen.current(), seen.same_gradients(), seen.appeared()) == (True, True, {})
    b.grad = None
    assert (seen.current(), seen.same_gradients(), seen.appeared()) == (True, False, {1: (0, 8)})
    b.grad, a.grad = torch.ones(2), torch.ones(2)
    assert (seen.current(), seen.same_gradients(), seen.appeared()) == (True, False, {})
    a.grad = None
    assert seen.same_gradients()
    a.requires_grad_(False)
    assert not seen.current()
    a.requires_grad_()
    ice.requires_grad_()
    assert not seen.current()
    ice.requires_grad_(False)
    assert seen.current()


def test_leaves_that_are_gone_decide_nothing() -> None:
    a = torch.ones(2, requires_grad=True)
    seen = seen_with([a], had={0}, frozen=[])
    assert not seen.same_gradients()
    del a
    assert (seen.current(), seen.same_gradients(), seen.appeared()) == (True, True, {})


def test_more_cases_than_are_remembered() -> None:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(5)]
    seen = seen_with(leaves, had=set(), frozen=[])
    for case in (*range(32), *range(32)):
        for place, leaf in enumerate(leaves):
            leaf.requires_grad_(bool(case >> place & 1))
        assert seen.current() == (case == 31)
