"""How a network is prepared for a step, one function per method.

Invariant: each works on a copy that shares the plain network's parameters, and changes nothing
else; a method that does not exist for a network raises `NotThereError` with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from benchmarks.models import wrap_blocks
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import lowtide

from .cases import Case

PLAIN, COMPILED = "plain", "torch.compile"


class NotThereError(Exception):
    """This method does not exist for this network, or not on this machine."""


@dataclass
class Ready:
    """A network prepared by one method."""

    model: nn.Module
    budget: lowtide.Budget | None = None
    base: str = PLAIN
    """The method that is this one without recomputation; its time is the base for added time."""
    wrap: Callable[[Callable[[Any], Tensor]], Callable[[Any], Tensor]] = lambda forward: forward
    """Wraps forward and loss, a function of the batch."""
    around: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)
    """A context for the first step, in which compilation happens."""


Method = Callable[[Case, nn.Module], Ready]


def twin(model: nn.Module) -> nn.Module:
    """A copy with buffers of its own that shares the parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def adopt(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Give a newly built network the parameters and buffers of the plain one, and its device."""
    model.to(next(plain.parameters()).device)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        mine.data = theirs.data.view(mine.shape)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        mine.data = theirs.data.clone()
    return model.train()


# ---------------------------------------------------------------------------- torch by hand


def per_block(case: Case, plain: nn.Module) -> Ready:
    return Ready(wrap_blocks(case, twin(plain)))


_aten = torch.ops.aten
KEPT = {
    op
    for name in (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if (op := getattr(getattr(_aten, name, None), "default", None)) is not None
}


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def selective(case: Case, plain: nn.Module) -> Ready:
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    call = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    return Ready(wrap_blocks(case, twin(plain), call))


class Segments(nn.Module):
    """Consecutive blocks, run by `torch.utils.checkpoint.checkpoint_sequential`."""

    def __init__(self, blocks: list[nn.Module], segments: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.segments = segments

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls = [lambda y, block=block: block(y, *args, **kwargs) for block in self.blocks]
        return checkpoint_sequential(calls, self.segments, x, use_reentrant=False)


def segment_counts(case: Case, plain: nn.Module) -> list[int]:
    """Numbers of segments to try, from two up to the number of blocks."""
    if case.chain is None:
        return []
    blocks = len(case.chain(plain)[2])
    tried = {2, 3, round(blocks**0.5), round(1.5 * blocks**0.5), blocks // 2, blocks}
    return sorted(count for count in tried if 2 <= count <= blocks)


def sequential(segments: int, case: Case, plain: nn.Module) -> Ready:
    assert case.chain is not None
    model = twin(plain)
    owner, attribute, blocks = case.chain(model)
    setattr(owner, attribute, nn.Sequential(Segments(blocks, segments)))
    return Ready(model)


# ---------------------------------------------------------------------------- libraries


def by_library(case: Case, plain: nn.Module) -> Ready:
    """Checkpointing that the network's own library offers."""
    if case.checkpointed is not None:
        return Ready(adopt(case.checkpointed(), plain))
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # 5.20, before
    name = next((name for name in names if hasattr(plain, name)), None)
    if name is None:
        raise NotThereError("its library offers none")
    if not plain.supports_gradient_checkpointing:
        raise NotThereError("transformers does not checkpoint this network")
    model = twin(plain)
    getattr(model, name)({"use_reentrant": False})
    return Ready(model)


def library_name(case: Case) -> str:
    names = {"unet3d": "MONAI CheckpointUNet", "swin_unetr": "MONAI use_checkpoint"}
    return names.get(case.name, "Hugging Face")


def level(number: int, case: Case, plain: nn.Module) -> Ready:
    assert case.at_level is not None
    return Ready(adopt(case.at_level(number), plain))


class _Generator:
    """Saves and restores the random state, which torch_remat leaves to its user."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def snapshot(self) -> Tensor:
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def remat(case: Case, plain: nn.Module) -> Ready:
    """torch_remat around each block. It could keep values inside, if the source marked them."""
    if importlib.util.find_spec("torch_remat") is None:
        raise NotThereError("torch_remat is not installed: pip install torch_remat")
    import torch_remat

    hook = _Generator(next(plain.parameters()).device)

    def call(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return torch_remat.checkpoint(recompute_state_hooks=(hook,))(forward)(*args, **kwargs)

    return Ready(wrap_blocks(case, twin(plain), call))


# ---------------------------------------------------------------------------- torch.compile


@contextlib.contextmanager
def memory_budget(share: float) -> Iterator[None]:
    from torch._functorch import config

    with config.patch(activation_memory_budget=share):
        yield


def compiled(share: float, backend: str, case: Case, plain: nn.Module) -> Ready:
    """torch.compile at an `activation_memory_budget`, which is read while compiling."""
    base = compiled_name(1.0, backend)

    def wrap(forward: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def step(batch: Any) -> Tensor:
            return forward(batch)

        # Dynamo caches by code object: each share needs its own, or it gets another share's code.
        step.__code__ = step.__code__.replace(co_name=f"step_{share:g}".replace(".", "_"))
        return torch.compile(step, backend=backend, fullgraph=True)

    return Ready(twin(plain), None, base, wrap, partial(memory_budget, share))


def compiled_name(share: float, backend: str) -> str:
    how = COMPILED if backend == "inductor" else f"{COMPILED} ({backend})"
    return how if share == 1 else f"{how}, budget {share:g}"


# ---------------------------------------------------------------------------- lowtide


def under(limit: int | lowtide.Plan, case: Case, plain: nn.Module) -> Ready:
    return Ready(twin(plain), lowtide.budget(limit))


def peers(case: Case) -> dict[str, Method]:
    """Methods by name. The contest adds `checkpoint_sequential`, tried with several counts."""
    found: dict[str, Method] = {
        "torch per block": per_block,
        "torch selective": selective,
        library_name(case): by_library,
        "torch_remat per block": remat,
    }
    if case.levels:
        del found[library_name(case)]
    for number in case.levels:
        found[f"vision_architectures level {number}"] = partial(level, number)
    return found
