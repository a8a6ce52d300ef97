"""Limits, and the time of a budget, under FSDP2 on gloo ranks of this machine.

    PYTHONPATH=src python benchmarks/sharded.py

Six transformer layers, a group each, AdamW. Peaks of the first rank's first step and of the highest
later one as a share of the limit, and the plain peak that the budget reports as a share of the
measured one. Then CPU milliseconds of a step of eight much smaller layers, plain and under one and
a half times its peak, in turns: nearly all of that is the work of FSDP2 and of lowtide.

On two ranks, threads of gloo free the buffers of collectives when they get to it: peaks vary by one
or two groups, of plain steps too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lowtide
from models import arguments, results

STEPS = 20


def sharded(width: int, layers: int, way: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = functools.partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
    net = nn.Sequential(*(layer(width, 2, 4 * width) for _ in range(layers)))
    reshard = way != "not resharded"
    for block in net:
        if way == "nested":
            fully_shard(block.self_attn, reshard_after_forward=reshard)
            fully_shard(block.linear1, reshard_after_forward=reshard)
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(net, reshard_after_forward=reshard)


def step(net: nn.Module, x: torch.Tensor, around: Any) -> None:
    with around:
        loss = net(x).square().mean()
    loss.backward()


def peaks(way: str, share: float) -> dict[str, Any]:
    net, x = sharded(96, 6, way), torch.randn(8, 64, 96)
    optimizer = torch.optim.AdamW(net.parameters())

    def peak(around: Any) -> int:
        found = lowtide.measure(lambda: step(net, x, around), device="cpu").peak_bytes
        optimizer.step()
        optimizer.zero_grad()
        return found

    plain = max(peak(contextlib.nullcontext()) for _ in range(4))
    budget = lowtide.budget(int(share * plain))
    found = [peak(budget) / budget.limit for _ in range(STEPS)]
    known = (budget.report().plain_peak or 0) / plain
    return {"first": found[0], "later": max(found[1:]), "known": known}


def seconds(way: str, rounds: int) -> dict[str, float]:
    net, x = sharded(16, 8, way), torch.randn(2, 8, 16)
    plain = contextlib.nullcontext()
    step(net, x, plain)
    top = lowtide.measure(lambda: step(net, x, plain), device="cpu").peak_bytes
    spent: dict[str, list[float]] = {"plain": [], "budget": []}
    ways: dict[str, Any] = {"plain": plain, "budget": lowtide.budget(int(1.5 * top))}
    for number in range(rounds + 15):
        for name, around in ways.items():
            began = time.process_time()
            step(net, x, around)
            if number >= 15:  # by then the step is known
                spent[name].append(time.process_time() - began)
            net.zero_grad()
    return {name: 1000 * statistics.median(times) for name, times in spent.items()}


def work(rank: int, ranks: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    with results(options) if rank == 0 else contextlib.nullcontext([]) as rows:
        for way in ("resharded", "not resharded", "nested"):
            for share in (0.7, 0.6 if way == "nested" else 0.55):  # 0.56 is the least for that
                row = {"ranks": ranks, "way": way, "share": share, **peaks(way, share)}
                rows.append(row)
                if rank == 0:
                    told = f"{row['first']:.3f} | {row['later']:.3f} | {row['known']:.3f}"
                    print(f"| {ranks} | {way} | {share} | {told} |", flush=True)
        for way in ("resharded", "not resharded"):
            spent = seconds(way, 11 if options.quick else 61)
            rows.append({"ranks": ranks, "way": way, **spent})
            if rank == 0:
                told = f"{spent['plain']:.1f} ms plain, {spent['budget']:.1f} ms under a budget"
                print(f"{ranks} ranks, {way}: {told}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    print("| ranks | groups | limit / plain peak | first step | later ones | plain peak known |")
    print("|---|---|---|---|---|---|")
    torch.multiprocessing.spawn(work, (options.ranks, port, options), options.ranks)


if __name__ == "__main__":
    main()
