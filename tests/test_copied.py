"""Deep copies of a wrapped block are wrapped (rule 11)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from by_hand import Block, OwnCopy, same, step
from lowtide.modules import ActivationCheckpointWrapper, is_checkpointed

Replayed = Callable[[], int]


def test_layers_that_are_copied_from_a_wrapped_one_are_checkpointed(replayed: Replayed) -> None:
    def encoder(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        return nn.TransformerEncoder(wrap(layer), 3, enable_nested_tensor=False)  # type: ignore[arg-type]

    def gradients(model: nn.Module) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        model(torch.randn(2, 5, 8)).square().mean().backward()
        return [p.grad for p in model.parameters()]

    plain, wrapped = encoder(lambda layer: layer), encoder(ActivationCheckpointWrapper)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert all(map(is_checkpointed, wrapped.layers))  # type: ignore[arg-type, union-attr]
    assert same(gradients(wrapped), gradients(plain))  # type: ignore[arg-type]
    per_layer = replayed() / 3
    assert per_layer > 10
    ActivationCheckpointWrapper.remove(wrapped.layers[1])  # type: ignore[index, arg-type]
    gradients(wrapped)
    assert replayed() == 5 * per_layer


def test_copies_of_copies_and_what_each_of_them_loads() -> None:
    block = ActivationCheckpointWrapper(Block())
    state = {f"module.{key}": value for key, value in block.state_dict().items()}
    second = copy.deepcopy(copy.deepcopy(nn.Sequential(block)))[0]
    assert second is not block
    assert isinstance(second, ActivationCheckpointWrapper)
    second.load_state_dict(state)
    assert set(vars(second)) == set(vars(block))
    assert second.forward.__self__ is second
    ActivationCheckpointWrapper.remove(second)
    assert set(vars(second)) == set(vars(Block()))
    assert is_checkpointed(block)
    assert not is_checkpointed(copy.deepcopy(second))


def test_the_policy_goes_along(replayed: Replayed) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid())
    ActivationCheckpointWrapper(model, policy=lowtide.policies.KeepProducts())
    step(model)
    without_products = replayed()
    step(copy.deepcopy(model))
    assert replayed() == 2 * without_products
    step(ActivationCheckpointWrapper(copy.deepcopy(nn.Sequential(*model))))
    assert replayed() > 3 * without_products


def test_pickles_and_shallow_copies_stay_plain() -> None:
    block = ActivationCheckpointWrapper(Block())
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    assert b"lowtide" not in buffer.getvalue()
    loaded = torch.load(buffer, weights_only=False)
    for each in loaded, pickle.loads(pickle.dumps(block)), copy.copy(block):
        assert set(vars(each)) == set(vars(Block()))


def test_a_block_that_is_no_longer_wrapped_is_copied_plain() -> None:
    """Whatever else is around it, which no copy has."""
    block = ActivationCheckpointWrapper(Block())
    budget = lowtide.fit(block, 0.9)
    assert is_checkpointed(copy.deepcopy(block))
    ActivationCheckpointWrapper.remove(block)
    assert set(vars(copy.deepcopy(block))) == set(vars(Block()))
    budget.remove()
    assert set(vars(block)) == set(vars(Block()))


class Shared(nn.Linear):
    """There is one of it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        raise RuntimeError("no copies of this")


def test_classes_that_copy_in_a_way_of_their_own() -> None:
    x = torch.ones(1, 3)
    block = ActivationCheckpointWrapper(OwnCopy(3, 3))
    copied = copy.deepcopy(block)
    assert is_checkpointed(copied)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    assert torch.equal(copied(x), torch.zeros(1, 3))
    loaded = pickle.loads(pickle.dumps(block))
    assert not is_checkpointed(loaded)
    assert same([copy.deepcopy(loaded)(x)], [block(x)])

    shared = ActivationCheckpointWrapper(Shared(3, 3))
    assert copy.deepcopy(nn.Sequential(shared))[0] is shared
    assert set(vars(shared)) == set(vars(block))

    uncopied = ActivationCheckpointWrapper(Uncopied(3, 3))
    for _ in range(2):  # not only once
        with pytest.raises(RuntimeError, match="no copies of this"):
            copy.deepcopy(uncopied)
    assert is_checkpointed(uncopied)


def test_a_dictionary_that_is_copied_has_no_entry_to_copy_by() -> None:
    block = ActivationCheckpointWrapper(Block())
    new = Block()
    new.__dict__.update(copy.deepcopy(vars(block), {id(block): new}))
    assert vars(new)["__deepcopy__"] is None
    assert copy.deepcopy(new) is not new
