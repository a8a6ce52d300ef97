"""The training steps that the benchmarks run, and what they share: timing, tables, arguments.

Problem: a figure is meaningful only for steps that users really run. Invariant: every step is a
network of MONAI or transformers as shipped, with random data, sized so that activations outweigh
gradients and a step takes a second or two on one core. Imports lowtide's public API only. Rejected:
hand-written networks, which could be chosen to make the figures look good.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A network, its data, its loss, and the blocks one would checkpoint by hand."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()


# ---------------------------------------------------------------------------- networks


def logits_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out if isinstance(out, Tensor) else out.logits, batch[1])


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0], labels=batch[0]).loss


def dice_loss(model: nn.Module, batch: Batch) -> Tensor:
    from monai.losses import DiceCELoss

    return DiceCELoss(to_onehot_y=True, softmax=True)(model(batch[0]), batch[1])


def in_autocast(
    loss: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch
) -> Tensor:
    """The loss under autocast in bfloat16, on the model's device."""
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        return loss(model, batch)


def volumes(size: int | tuple[int, ...], dtype: torch.dtype, count: int = 1) -> Batch:
    shape = (count, 1, *((size,) * 3 if isinstance(size, int) else size))
    labels = torch.randint(0, 3, shape).to(dtype)
    return torch.randn(*shape), labels


def images(count: int, size: int) -> Batch:
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def of_type(*names: str) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [m for m in model.modules() if type(m).__name__ in names]


def unet_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the encoder, the bottleneck, and those of the decoder."""
    found: list[nn.Module] = []

    def visit(level: nn.Module) -> None:
        parts = list(level.children())
        if len(parts) == 3 and type(parts[1]).__name__ == "SkipConnection":
            found.extend((parts[0], parts[2]))
            visit(parts[1].submodule)
        else:
            found.append(level)

    for module in model.modules():
        if type(module).__name__ == "UNet":
            visit(module.model)
    return found


def brain_unet() -> nn.Module:
    """The network of examples/segment_brain.py."""
    from monai.networks.nets import UNet

    unet = UNet(3, 1, 16, (16, 32, 64, 128), (1, 2, 2), num_res_units=1, dropout=0.1)
    return nn.Sequential(unet, nn.Conv3d(16, 3, kernel_size=1))


def residual_unet() -> nn.Module:
    from monai.networks.nets import UNet

    unet = UNet(3, 1, 16, (16, 32, 64, 128), (2, 2, 2), num_res_units=2, norm="batch", dropout=0.1)
    return nn.Sequential(unet, nn.Conv3d(16, 3, kernel_size=1))


def densenet() -> nn.Module:
    from monai.networks.nets import DenseNet121

    return DenseNet121(spatial_dims=2, in_channels=3, out_channels=10)


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=10))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6,
        n_embd=384,
        n_head=6,
        vocab_size=5000,
        n_positions=128,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    return ViTForImageClassification(config)


_TO_LEARN = 5
WORKLOADS = {
    work.name: work
    for work in (
        Workload("unet3d", brain_unet, lambda: volumes(64, torch.float32), dice_loss, unet_blocks),
        Workload(
            "unet3d-res2", residual_unet, lambda: volumes(64, torch.float32), dice_loss, unet_blocks
        ),
        Workload(
            "densenet121", densenet, lambda: images(2, 128), logits_loss, of_type("_DenseLayer")
        ),
        Workload(
            "resnet50",
            resnet,
            lambda: images(8, 96),
            logits_loss,
            of_type("ResNetBottleNeckLayer"),
        ),
        Workload(
            "gpt2",
            gpt2,
            lambda: (torch.randint(0, 5000, (4, 128)),),
            language_loss,
            of_type("GPT2Block"),
        ),
        Workload("vit", vit, lambda: images(2, 224), logits_loss, of_type("ViTLayer")),
    )
}


def wrap_blocks(
    work: Workload, model: nn.Module, call: Callable[..., Any] | None = None
) -> nn.Module:
    """Every block in `torch.utils.checkpoint`, as done by hand, or in `call` instead."""
    call = call or partial(checkpoint, use_reentrant=False)
    blocks = work.blocks(model)
    assert blocks, f"{work.name} has no blocks"
    for block in blocks:
        block.forward = partial(call, block.forward)
    return model


# ---------------------------------------------------------------------------- one step


def train_step(
    work: Workload, model: nn.Module, batch: Batch, budget: lowtide.Budget | None = None
) -> float:
    """Forward and backward; the gradients are left in the model."""
    with budget or contextlib.nullcontext():
        loss = work.loss(model, batch)
    loss.backward()
    return loss.item()


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def measured_peak(work: Workload, model: nn.Module, budget: lowtide.Budget | None = None) -> int:
    """Peak of one step that starts without gradients."""
    clear(model)
    batch = work.batch()
    return lowtide.measure(lambda: train_step(work, model, batch, budget), device="cpu").peak_bytes


def turns(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """CPU seconds of each contender; they run in turns, so that other load slows all of them alike.

    CPU time of one thread is the wall clock of an otherwise idle machine; with more threads it also
    counts the time in which they wait for each other.
    """
    settle()
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        order = list(contenders)
        for name in order[index % len(order) :] + order[: index % len(order)]:
            began = clock()
            contenders[name]()
            spent[name].append(clock() - began)
    return spent


def settle() -> None:
    """Wait for the background search for plans, whose CPU time counts as the process's."""
    for thread in threading.enumerate():
        if thread.name == "lowtide-plans":
            thread.join()


def learn(step: Callable[[], object]) -> None:
    """Let a budget learn a step: it measures the first ones, and one under each plan found in the
    background; after that it is as fast as it gets."""
    for _ in range(_TO_LEARN):
        step()
        settle()


def added(step: Callable[[], object], plain: Callable[[], object], rounds: int) -> float:
    """The time that a step adds to the plain one, as a share of it: the median over rounds in which
    the two run one right after the other, so that both see the same machine load."""
    spent = turns({"plain": plain, "step": step}, rounds)
    pairs = zip(spent["step"], spent["plain"], strict=True)
    return statistics.median(mine / other - 1 for mine, other in pairs)


def interleave(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The medians of `turns`."""
    spent = turns(contenders, rounds)
    return {name: statistics.median(times) for name, times in spent.items()}


def timed_step(
    work: Workload, model: nn.Module, batch: Batch, budget: lowtide.Budget | None = None
) -> Callable[[], object]:
    def step() -> None:
        clear(model)
        train_step(work, model, batch, budget)

    return step


# ---------------------------------------------------------------------------- output


def mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def arguments(description: str, *, models: bool = True) -> argparse.ArgumentParser:
    """The flags that the benchmarks have in common."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    if models:
        parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rougher")
    return parser


@contextlib.contextmanager
def results(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Collect rows, and write them as JSON if asked to, even if the run was interrupted."""
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, load {os.getloadavg()[0]:.1f}\n")
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    try:
        yield rows
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        spent = time.perf_counter() - began
        print(f"\n{spent:.0f} s, load at the end {os.getloadavg()[0]:.1f}")
