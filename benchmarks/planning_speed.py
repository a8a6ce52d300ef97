"""How long planning takes, and how it grows: transformers of rising depth, from fake tensors.

The CPU seconds of the dry run and of the search for a plan at half of the plain peak, and the
process's peak memory so far. No kernel runs; the first dry run of a process, which imports parts of
torch, is not counted.
"""

from __future__ import annotations

import resource
import time

import torch
from torch import nn

import lowtide
from lowtide.plans import plan_step
from models import arguments, markdown, results

DEPTHS = (6, 25, 96, 250)
LIMIT = 0.5


def transformer(depth: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=depth,
        n_embd=64,
        n_head=4,
        vocab_size=500,
        n_positions=64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS)
    options = parser.parse_args()
    depths = options.depths[:2] if options.quick else options.depths
    tokens = torch.randint(0, 500, (8, 64))
    with results(options) as rows:
        for depth in (1, *depths):
            model = transformer(depth)
            began = time.process_time()
            plain = lowtide.plan(lambda x, m=model: m(x, labels=x).loss, tokens)
            dry = time.process_time() - began
            if depth == 1:
                continue
            began = time.process_time()
            plan = plan_step(plain.step, LIMIT)
            solve = time.process_time() - began
            rows.append(
                {
                    "layers": depth,
                    "operations": len(plan.step.graph.ops),
                    "dry run, s": round(dry, 2),
                    "search, s": round(solve, 2),
                    "together, s": round(dry + solve, 2),
                    "gap, points": round(100 * (plan.gap or 0.0), 1),
                    "memory so far, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                }
            )
        print(markdown(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
