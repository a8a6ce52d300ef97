"""Train a small Llama with transformers' Trainer, plain and inside a limit, and compare the bits.

The text is Python's own documentation as the standard library ships it (`pydoc_data.topics`), read
byte by byte: real data, nothing is downloaded. The second training differs in one line, the
callback `MemoryBudget(limit)`. With `--lora` only peft's adapters are trained.

    python examples/train_llama.py --limit 0.5
    torchrun --nproc-per-node 2 examples/train_llama.py --limit 0.5
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from lowtide.limits import format_bytes
from lowtide.transformers import MemoryBudget


def load_text(length: int, rows: int) -> list[dict[str, Tensor]]:
    """Pieces of the documentation, each `length` bytes, as token ids 0 to 255."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    pieces = torch.tensor(list(text[: length * rows])).reshape(rows, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def build(options: argparse.Namespace) -> nn.Module:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=options.length,
        attention_dropout=0.1,
    )
    model: nn.Module = LlamaForCausalLM(config)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    return model


def train(options: argparse.Namespace, callbacks: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    """What Trainer logged, and the weights at the end."""
    model = build(options)
    data = load_text(options.length, 8 * options.steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
    return trainer.state.log_history, model.state_dict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="0.5", help='"20 MiB", or a fraction of the plain peak')
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="bytes of text in a row")
    parser.add_argument("--lora", action="store_true", help="train peft's adapters alone")
    options = parser.parse_args()
    try:
        limit: float | str = float(options.limit)
    except ValueError:
        limit = options.limit

    print("plain")
    plain, expected = train(options, [])
    print(f"\nlimit {options.limit}")
    limited, found = train(options, [MemoryBudget(limit)])

    if dist.is_initialized():  # by Trainer, under torchrun; it leaves the end to the script
        dist.destroy_process_group()
    one, two = ([entry["loss"] for entry in log if "loss" in entry] for log in (plain, limited))
    last = [entry for entry in limited if "loss" in entry][-1]
    same_bits = all(torch.equal(expected[name], found[name]) for name in expected)
    inside = last["lowtide/measured_peak"] <= last["lowtide/limit"]
    answers = {True: "yes", False: "NO"}
    print(f"\nall {len(one)} losses identical:          {answers[one == two]}")
    print(f"all final weights identical:   {answers[same_bits]}")
    print(f"peak within the limit:         {answers[inside]}", end=", ")
    print(f"{format_bytes(last['lowtide/measured_peak'])} of {format_bytes(last['lowtide/limit'])}")
    return 0 if one == two and same_bits and inside else 1


if __name__ == "__main__":
    sys.exit(main())
