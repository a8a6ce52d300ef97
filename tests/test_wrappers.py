"""ActivationCheckpointWrapper and ActivationCheckpointing.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from apart import ran_apart
from by_hand import Block, Flagged, net, same, step
from lowtide.errors import UncountedWarning, UsageError
from lowtide.modules import ActivationCheckpointWrapper, is_checkpointed
from lowtide.training_level import ActivationCheckpointing
from once import on_one_recorder

# --- the wrapper ------------------------------------------------------------------------------


def test_the_wrapper_gives_back_the_module_switched_on(replayed: Callable[[], int]) -> None:
    model, plain = net(), net()
    for at, layer in enumerate(model.layers):
        model.layers[at] = ActivationCheckpointWrapper(layer)
        assert model.layers[at] is layer
    assert same(step(model), step(plain))
    assert replayed() > 0
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.layers[0], Block)
    assert isinstance(model.layers[0], ActivationCheckpointWrapper)
    assert not isinstance(plain.layers[0], ActivationCheckpointWrapper)
    assert not isinstance(3, ActivationCheckpointWrapper)
    assert issubclass(ActivationCheckpointWrapper, nn.Module)
    assert all(layer.norm.num_batches_tracked == 1 for layer in model.layers)


def test_the_wrapper_recomputes_nothing_in_eval(replayed: Callable[[], int]) -> None:
    model = nn.Sequential(ActivationCheckpointWrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    model.eval()
    with pytest.warns(UncountedWarning, match="in eval mode"):
        step(model)
    assert replayed() == 0


def test_the_wrapper_twice_is_the_wrapper_once(replayed: Callable[[], int]) -> None:
    block = Block()
    assert ActivationCheckpointWrapper(ActivationCheckpointWrapper(block)) is block
    ActivationCheckpointWrapper.remove(block)
    assert not is_checkpointed(block)
    assert set(vars(block)) == set(vars(Block()))


def test_a_policy_for_a_module_that_is_checkpointed_already_is_refused() -> None:
    """It would have no effect."""
    block = ActivationCheckpointWrapper(Block())
    with pytest.raises(UsageError, match="this Block is already checkpointed by lowtide"):
        ActivationCheckpointWrapper(block, policy=lowtide.policies.KeepProducts())
    ActivationCheckpointWrapper.remove(block)
    ActivationCheckpointWrapper(block, policy=lowtide.policies.KeepProducts())
    ActivationCheckpointWrapper.remove(block)


@pytest.mark.parametrize("prefix", ["", "module.", "module.module.", "_checkpoint_wrapped_module."])
def test_the_wrapper_loads_plain_and_wrapped_weights(prefix: str) -> None:
    torch.manual_seed(0)
    source = Block()
    model = nn.Sequential(ActivationCheckpointWrapper(Block()))
    weights = {f"0.{prefix}{key}": value for key, value in source.state_dict().items()}
    assert not any(model.load_state_dict(weights))
    assert torch.equal(model[0].first.weight, source.first.weight)
    with pytest.raises(
        RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"0.module.nothing\""
    ):
        model.load_state_dict({**weights, "0.module.nothing": torch.zeros(1)})


def test_plain_weights_load_without_the_hooks_of_saving_them() -> None:
    block = nn.Linear(2, 2)
    weights, saved = block.state_dict(), list[str]()
    block.register_state_dict_post_hook(lambda module, state, prefix, _: saved.append(prefix))
    ActivationCheckpointWrapper(block).load_state_dict(weights)
    assert saved == []
    block.state_dict()
    assert saved == [""]


def test_a_child_that_is_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.module(x)
            return out

    holder, source = ActivationCheckpointWrapper(Holder()), Holder()
    holder.load_state_dict(source.state_dict())
    assert torch.equal(holder.module.weight, source.module.weight)  # type: ignore[union-attr]


class Named(nn.Module):
    """A block with a part that has the name of a wrapper's."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.module = part
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x) * self.scale
        return out


@pytest.mark.parametrize("prefix", ["module.", "module.module.", "_checkpoint_wrapped_module."])
def test_wrapped_weights_of_a_block_with_a_child_that_is_called_module(prefix: str) -> None:
    for part in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        source = Named(copy.deepcopy(part))
        block = ActivationCheckpointWrapper(Named(part))
        weights = {f"{prefix}{key}": value for key, value in source.state_dict().items()}
        assert not any(block.load_state_dict(weights))
        assert same(block.parameters(), source.parameters())


class Twice(nn.Linear):
    """Behind a wrapper, its weight would have the name that its part's has without one."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.module = nn.Linear(2, 2, bias=False)


def test_wrapped_weights_that_might_mean_two_parts_are_refused() -> None:
    source, block = Twice(), ActivationCheckpointWrapper(Twice())
    weights = {f"module.{key}": value for key, value in source.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"weight\""):
        block.load_state_dict(weights)
    block.load_state_dict(source.state_dict())
    assert same(block.parameters(), source.parameters())


def test_wrapped_weights_that_might_mean_two_parts_go_to_neither() -> None:
    source, block = Twice(), ActivationCheckpointWrapper(Twice())
    before = [p.detach().clone() for p in block.parameters()]
    prefix = "_checkpoint_wrapped_module."
    weights = {f"{prefix}{key}": value for key, value in source.state_dict().items()}
    found = block.load_state_dict(dict(weights), strict=False)
    assert set(found.unexpected_keys) == weights.keys()
    assert same(block.parameters(), before)


def test_what_the_wrapper_refuses() -> None:
    with pytest.raises(UsageError, match="ModuleList has no forward; wrap the modules in it"):
        ActivationCheckpointWrapper(nn.ModuleList())
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, not int"):
        ActivationCheckpointWrapper(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="use_checkpoint is True"):
        ActivationCheckpointWrapper(Flagged(use_checkpoint=True))
    with pytest.raises(UsageError, match=r"Wrapper.remove takes a torch.nn.Module, not None"):
        ActivationCheckpointWrapper.remove(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be subclassed"):
        type("Mine", (ActivationCheckpointWrapper,), {})
    with pytest.raises(TypeError, match=r"^ActivationCheckpointWrapper\(\) got an unexpected"):
        ActivationCheckpointWrapper(nn.ReLU(), offload_to_cpu=True)  # type: ignore[call-arg]


# --- levels of single calls -------------------------------------------------------------------


@pytest.mark.parametrize("own", range(6))
@pytest.mark.parametrize("training", range(6))
def test_a_call_is_a_region_up_to_the_training_level(
    own: int, training: int, replayed: Callable[[], int]
) -> None:
    call = ActivationCheckpointing(own, training)
    weight = torch.ones(3, requires_grad=True)

    def function(x: Tensor, *, power: int) -> Tensor:
        return (weight * x).exp().pow(power)

    call(function, torch.ones(3), power=2).sum().backward()
    assert (replayed() > 0) is (own <= training)
    assert call.perform_checkpointing is (own <= training)
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 2 * torch.ones(3).exp() ** 2)


def test_a_call_can_be_switched_by_hand(replayed: Callable[[], int]) -> None:
    call = ActivationCheckpointing(2, 1)
    weight = torch.ones(3, requires_grad=True)
    call.perform_checkpointing = True
    call(lambda: (weight * 2).exp()).sum().backward()
    assert copy.deepcopy(call).perform_checkpointing
    assert replayed() > 0
    before = replayed()
    call.perform_checkpointing = False
    call.training_checkpoint_level = 3  # the levels decide again
    assert call.perform_checkpointing
    call.perform_checkpointing = False
    call(lambda: (weight * 2).exp()).sum().backward()
    assert replayed() == before
    with pytest.raises(UsageError, match=r"True or False, not 'no'"):
        call.perform_checkpointing = "no"  # type: ignore[assignment]


def test_the_calls_follow_their_model_into_eval(replayed: Callable[[], int]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.level2 = ActivationCheckpointing(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.level2(self.block, x, scale=2.0)
            return out

    model = Model()
    assert list(model.state_dict()) == [f"block.{key}" for key in Block().state_dict()]
    model.eval()
    with pytest.warns(UncountedWarning, match="ActivationCheckpointing that is in eval"):
        model(torch.randn(4, 8)).sum().backward()
    assert replayed() == 0
    model.train()
    copy.deepcopy(model)(torch.randn(4, 8)).sum().backward()
    assert replayed() > 0
    model.level2.training_checkpoint_level = 1
    assert not model.level2.perform_checkpointing
    assert repr(model.level2) == "ActivationCheckpointing(2, 1)"


def test_a_call_takes_torchs_keyword_and_the_functions_own() -> None:
    call = ActivationCheckpointing(1, 1)
    assert call(lambda x: x + 1, torch.zeros(1), use_reentrant=False) == 1
    assert call(lambda fn, policy: fn + policy, fn=1, policy=2) == 3


@pytest.mark.parametrize("training", [False, True])
def test_the_function_of_a_call_may_be_given_by_name(
    training: bool, replayed: Callable[[], int]
) -> None:
    """As with the class of vision_architectures."""
    call = ActivationCheckpointing(1, 1).train(training)
    x = torch.ones(3, requires_grad=True)
    out = call(fn=lambda y, times: (y.sin() * times).exp(), y=x, times=2).sum()
    with nullcontext() if training else pytest.warns(UncountedWarning):
        out.backward()
    assert (replayed() > 0) is training
    with pytest.raises(UsageError, match="ActivationCheckpointing got no function"):
        call(y=x)
    with pytest.raises(UsageError, match="ActivationCheckpointing got no function"):
        call()


@pytest.mark.parametrize("training_level", [0, 1])
def test_what_is_no_function_is_told_at_every_level(training_level: int) -> None:
    call = ActivationCheckpointing(1, training_level)
    with pytest.raises(UsageError, match="ActivationCheckpointing got Tensor in place of a func"):
        call(torch.ones(3), torch.sin)


def test_what_was_set_by_hand_is_printed() -> None:
    call = ActivationCheckpointing(2, 3)
    assert repr(call) == "ActivationCheckpointing(2, 3)"
    call.perform_checkpointing = False
    assert repr(call) == "ActivationCheckpointing(2, 3, perform_checkpointing=False)"
    call.training_checkpoint_level = 3
    assert repr(call) == "ActivationCheckpointing(2, 3)"


@pytest.mark.parametrize("level", [-1, 6, 100])
def test_levels_out_of_range(level: int) -> None:
    with pytest.raises(UsageError, match=rf"fn_checkpoint_level is {level}, outside 0 to 5: 1 sin"):
        ActivationCheckpointing(level, 0)
    call = ActivationCheckpointing(0, 0)
    with pytest.raises(UsageError, match=rf"training_checkpoint_level is {level}, outside 0 to 5"):
        call.training_checkpoint_level = level
    with pytest.raises(UsageError, match=rf"fn_checkpoint_level is {level}, outside 0 to 5"):
        call.fn_checkpoint_level = level


@pytest.mark.parametrize("level", [True, 1.0, "2", None, torch.tensor(2.0)])
def test_levels_of_the_wrong_type(level: Any) -> None:
    with pytest.raises(UsageError, match="is a whole number from 0 to 5, not"):
        ActivationCheckpointing(1, level)
    with pytest.raises(UsageError, match="fn_checkpoint_level is a whole number"):
        ActivationCheckpointing(level, 1)


def test_levels_are_integers_of_any_library() -> None:
    """As they come out of `numpy.arange`, and as vision_architectures takes them."""
    call = ActivationCheckpointing(np.int64(2), np.int32(3))  # type: ignore[arg-type]
    assert call.perform_checkpointing
    assert type(call.fn_checkpoint_level) is int


@on_one_recorder
def test_importing_modules_loads_no_integration() -> None:
    code = (
        "import sys, lowtide.modules, lowtide.levels; "
        "print([m for m in ('monai', 'transformers', 'lightning', 'torch._dynamo') "
        "if m in sys.modules])"
    )
    assert ran_apart(code).stdout.strip() == "[]"
