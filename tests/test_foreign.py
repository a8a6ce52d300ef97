"""Models that others have checkpointed, compiled or scripted.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import Flagged, fails, net
from lowtide.models.foreign import find_active_checkpointing
from lowtide.modules import checkpoint_modules


@pytest.mark.parametrize(
    "flag", ["use_checkpoint", "use_checkpointing", "memory_efficient", "grad_checkpointing"]
)
def test_flags_are_found(flag: str) -> None:
    assert find_active_checkpointing(nn.Sequential(Flagged(**{flag: False}))) == []
    assert find_active_checkpointing(nn.Sequential(Flagged(**{flag: "auto"}))) == []
    model = nn.Sequential(Flagged(), Flagged(**{flag: True}))
    assert find_active_checkpointing(model) == [
        ("1", f"{flag} is True; build the model with {flag}=False or set it to False")
    ]
    text = fails("0", model)
    assert "this Sequential is already checkpointed by other means in 1 of its modules" in text
    assert f"{flag} is True" in text
    assert text.endswith(": 1")


def test_transformers_flag_is_found_and_can_be_switched_off() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=20,
    )
    model = transformers.BertModel(config)
    assert find_active_checkpointing(model) == []
    model.activation_checkpointing_enable()
    names = [name for name, _ in find_active_checkpointing(model)]
    assert "encoder.layer.1" in names
    assert "call model.activation_checkpointing_disable()" in fails("encoder.layer.*", model)
    model.activation_checkpointing_disable()
    checkpoint_modules(model, "encoder.layer.*")


def test_transformers_flag_with_lowtide_behind_it_is_no_conflict() -> None:
    function = functools.partial(lowtide.checkpoint)
    model = Flagged(gradient_checkpointing=True, _gradient_checkpointing_func=function)
    assert find_active_checkpointing(model) == []


def test_monais_flag_and_wrapper_are_found() -> None:
    pytest.importorskip("monai")
    from monai.networks.nets.swin_unetr import SwinTransformerBlock
    from monai.networks.nets.unet import CheckpointUNet

    block = SwinTransformerBlock(8, 2, (2, 2), (0, 0), use_checkpoint=True)
    assert [name for name, _ in find_active_checkpointing(block)] == [""]
    found = find_active_checkpointing(CheckpointUNet(2, 1, 1, (2, 2), (2,)))
    assert [name for name, _ in found] == ["model.0", "model.1.submodule", "model.2"]
    assert "monai's ActivationCheckpointWrapper" in found[0][1]


def test_torchs_wrappers_are_found() -> None:
    from torch.distributed._composable import checkpoint
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    checkpoint(model[1])
    found = dict(find_active_checkpointing(model))
    assert set(found) == {"0", "1"}
    assert "torch's CheckpointWrapper" in found["0"]
    assert "composable checkpoint()" in found["1"]


def test_a_script_module_is_refused() -> None:
    model = net()
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        model.head = torch.jit.script(nn.Linear(8, 2))
    assert "'head' is a TorchScript module" in fails("head", model)
    checkpoint_modules(model, "stem")


def test_compiled_modules_are_refused() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    text = fails("_orig_mod.layers.*", compiled)
    assert "inside the model, which is already compiled with torch.compile" in text
    assert "apply lowtide first, then compile" in text
    with pytest.raises(lowtide.UsageError, match="Wrapper: the model itself is already compiled"):
        lowtide.ActivationCheckpointWrapper(compiled)
    model.layers[0].compile(backend="eager")
    assert "'layers.0.first' is inside 'layers.0'" in fails("layers.0.first", model)
    checkpoint_modules(model, "layers.1")


def test_compiling_after_lowtide_has_no_graph_break() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.second = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).relu())
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Plain(), Plain())
    plain = copy.deepcopy(model)
    checkpoint_modules(model, Plain)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for each in (compiled, plain):
        torch.manual_seed(1)
        each(torch.randn(3, 4)).square().sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
