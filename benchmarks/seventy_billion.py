"""A language model of 70 billion parameters, planned for one GPU of many without running anything.

What is computed: the model is transformers' Llama in the published 70B shape, built on the meta
device. Activations, their gradients, and temporaries of forward and backward are traced operator by
operator on fake tensors, and planned within what is left of the GPU. The memory of parameters,
gradients and Adam's state is calculated as FSDP2 shards them: 16 bytes per parameter (single
precision, two moments) divided by the world size; in addition, in bfloat16, the root's parameters
(embedding and head) at all times, those of two blocks, and the gradients of one block, once in
bfloat16 and once in single precision. Each gradient is released as soon as it is complete.

What is not computed: nothing here was measured. Times come from a model of the device;
communication is assumed to overlap with computation; 6 % of the GPU is set aside for CUDA, NCCL and
the allocator's waste. The attention kernel is the CPU's, which saves what flash attention saves.
"""

from __future__ import annotations

import resource
import time

import torch
from torch import Tensor, nn

import lowtide
from models import arguments, results

SPARE = 0.06
GPUS = (("80 GB", 80 * 10**9, "H100"), ("140 GB", 140 * 10**9, "H200"))
STEPS = ((1, 4096), (1, 8192), (2, 8192), (4, 8192), (1, 32768))


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def hand_over(parameter: Tensor) -> None:
    """Release a gradient, as FSDP does once it has been reduced: only the shard stays."""
    parameter.grad = None


def step(model: nn.Module, ids: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hand_over)
    return model(ids, labels=ids).loss


def sharded(model: nn.Module, world: int) -> int:
    """Bytes on one GPU that do not depend on the batch."""
    total = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    root = total - block * len(model.model.layers)
    return 16 * total // world + 2 * root + 2 * 2 * block + (2 + 4) * block


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--layers", type=int, default=80)
    options = parser.parse_args()
    with results(options) as rows:
        model = llama(options.layers)
        fixed = sharded(model, options.world)
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{count / 1e9:.1f} billion parameters over {options.world} GPUs: {fixed / 1e9:.1f} GB "
            "of each GPU for parameters, gradients and optimizer\n\n"
            "| GPU | batch, sequence | activations: plain | room | planned | overhead | at least "
            "| seconds |\n|---|---|---|---|---|---|---|---|"
        )
        for batch, length in STEPS[:2] if options.quick else STEPS:
            ids = torch.empty(batch, length, dtype=torch.long, device="meta")
            for label, size, name in GPUS:
                row = one(model, ids, int(size * (1 - SPARE)) - fixed, name)
                rows.append({"gpu": label, "batch": batch, "length": length, **row})
                print(f"| {label} | {batch} x {length} | {line(row)} |", flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"\nmemory of this process at most {peak / 2**20:.2f} GiB")


def one(model: nn.Module, ids: Tensor, room: int, name: str) -> dict[str, object]:
    began = time.perf_counter()
    row: dict[str, object] = {"room": room}
    try:
        plan = lowtide.plan(step, model, ids, limit=max(room, 1), on=name)
    except lowtide.BudgetError as error:
        row["minimum"] = error.minimum
    else:
        row |= {
            "plain": plan.plain_peak,
            "peak": plan.peak,
            "overhead": plan.overhead,
            "bound": plan.lower_bound,
            "operations": len(plan.operations),
        }
    row["seconds"] = time.perf_counter() - began
    return row


def line(row: dict) -> str:
    def gigabytes(key: str) -> str:
        return f"{row[key] / 1e9:.1f} GB"

    spent = f"{row['seconds']:.1f}"
    if "minimum" in row:
        return (
            f" | {gigabytes('room')} | does not fit: at least {gigabytes('minimum')} | | | {spent}"
        )
    bound = "-" if row["bound"] is None else f"{row['bound']:.1%}"
    cells = (gigabytes("plain"), gigabytes("room"), gigabytes("peak"))
    return " | ".join((*cells, f"{row['overhead']:.1%}", bound, spent))


if __name__ == "__main__":
    main()
