"""Nets of vision_architectures with `lowtide.ActivationCheckpointing` in place of their own.

The library depends on a whole documentation tool chain, so it is installed without dependencies:
`pip install --no-deps vision-architectures loguru munch` is enough for these tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide.errors import UsageError
from once import on_one_recorder

LIBRARY = "vision_architectures"
HOME = f"{LIBRARY}.utils.activation_checkpointing"

pytestmark = [
    on_one_recorder,  # as the other frameworks
    pytest.mark.skipif(
        importlib.util.find_spec(LIBRARY) is None, reason="vision_architectures is not installed"
    ),
]


def library(theirs: bool) -> Callable[[str], Any]:
    """The library, freshly imported, with its own class or with lowtide's in its place."""
    for name in [name for name in sys.modules if name.partition(".")[0] == LIBRARY]:
        del sys.modules[name]
    if not theirs:
        importlib.import_module(HOME).ActivationCheckpointing = lowtide.ActivationCheckpointing
    return lambda name: importlib.import_module(f"{LIBRARY}.nets.{name}")


def vit(nets: Callable[[str], Any], level: int) -> nn.Module:
    model: nn.Module = nets("vit_3d").ViT3DEncoderWithPatchEmbeddings(
        {
            "dim": 12,
            "num_heads": 2,
            "mlp_ratio": 2,
            "layer_norm_eps": 1e-6,
            "attn_drop_prob": 0.1,
            "proj_drop_prob": 0.1,
            "mlp_drop_prob": 0.1,
            "encoder_depth": 2,
            "patch_size": (4, 4, 4),
            "in_channels": 1,
            "num_class_tokens": 1,
        },
        checkpointing_level=level,
    )
    return model


def swin(nets: Callable[[str], Any], level: int) -> nn.Module:
    stage = {
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 2,
        "window_size": (2, 2, 2),
        "layer_norm_eps": 1e-6,
        "use_relative_position_bias": True,
    }
    merging = {"merge_window_size": (2, 2, 2), "in_dim": 12, "out_dim": 24}
    model: nn.Module = nets("swin_3d").Swin3DEncoderWithPatchEmbeddings(
        {
            "patch_size": (4, 4, 4),
            "in_channels": 1,
            "dim": 12,
            "stages": [dict(stage, dim=12), dict(stage, dim=24, patch_merging=merging)],
        },
        checkpointing_level=level,
    )
    return model


BUILDERS = {"vit": vit, "swin": swin}


def tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        for part in out.values():
            yield from tensors(part)
    elif isinstance(out, list | tuple):
        for part in out:
            yield from tensors(part)


def step(build: Any, nets: Callable[[str], Any], level: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = build(nets, level).train()
    x = torch.randn(2, 1, 16, 16, 16)
    found = [t for t in tensors(model(x, spacings=torch.ones(2, 3))) if t.requires_grad]
    loss = torch.stack([t.square().mean() for t in found]).sum()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    return [loss.detach(), *gradients, torch.get_rng_state()]


@pytest.mark.parametrize("name", list(BUILDERS))
def test_the_bits_at_every_level(name: str, replayed: Callable[[], int]) -> None:
    build = BUILDERS[name]
    expected = step(build, library(theirs=True), 0)
    ours = library(theirs=False)
    counts = []
    for level in range(6):
        before = replayed()
        assert same(step(build, ours, level), expected)
        counts.append(replayed() - before)
    assert counts[0] == 0
    assert counts[5] > 0
    assert same(step(build, library(theirs=True), 5), expected)


def test_a_net_that_was_pickled_with_their_own_class(replayed: Callable[[], int]) -> None:
    """The pickle names their class, and finds lowtide's where that stands in its place."""
    library(theirs=True)
    their_calls = importlib.import_module(HOME).ActivationCheckpointing
    calls = [their_calls(2, 3), their_calls(3, 2), their_calls(2, 3)]
    calls[2].perform_checkpointing = False
    pickled = pickle.dumps(nn.ModuleList(calls).train())
    library(theirs=False)
    on = []
    for call in pickle.loads(pickled):
        assert type(call) is lowtide.ActivationCheckpointing
        assert sorted((call.fn_checkpoint_level, call.training_checkpoint_level)) == [2, 3]
        before = replayed()
        call(lambda x: x.sin().cos(), torch.ones(2, requires_grad=True)).sum().backward()
        on.append(replayed() > before)
    assert on == [True, False, False]


def test_their_own_class_is_found_switched_on() -> None:
    model = vit(library(theirs=True), 5)
    with pytest.raises(UsageError, match="perform_checkpointing is True"):
        lowtide.fit(model, 0.7)
    lowtide.fit(vit(library(theirs=True), 0), 0.7)
    lowtide.fit(vit(library(theirs=False), 5), 0.7)
