"""What a budget costs where steps differ in their operations, not only in their sizes.

    PYTHONPATH=src python benchmarks/taking_turns.py

Each network decides in its forward what runs: one of several heads, which layers are dropped, which
expert gets which word, how many time steps there are. CPU seconds of one thread, all learning,
measuring and planning included, as a multiple of the plain step's, for the first third of the steps
and for the last. The operations are small, so the times are those of lowtide more than the
network's.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from models import arguments, mebibytes, results, settle

Step = Callable[[random.Random], Tensor]
TIMES = 0.7  # the largest peak of the first steps


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return out


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(Block(64) for _ in range(count)))


def heads() -> tuple[nn.Module, Step]:
    """A trunk, and one of three heads of other depths."""
    trunk, each = blocks(8), nn.ModuleList(map(blocks, (1, 3, 6)))
    x = torch.randn(256, 64)

    def step(draw: random.Random) -> Tensor:
        out: Tensor = each[draw.randrange(3)](trunk(x))
        return out.square().mean()

    return nn.ModuleList([trunk, each]), step


def depth() -> tuple[nn.Module, Step]:
    """Stochastic depth: later layers are dropped more often."""
    net, x = blocks(12), torch.randn(512, 64)

    def step(draw: random.Random) -> Tensor:
        out = x
        for number, block in enumerate(net):
            if draw.random() < 1 - 0.02 * number:
                out = block(out)
        return out.square().mean()

    return net, step


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate, self.experts = Block(64), nn.Linear(64, 4), blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


def experts() -> tuple[nn.Module, Step]:
    """Four layers of four experts, one for each word."""
    net = nn.Sequential(*(Experts() for _ in range(4)))
    return net, lambda _: net(torch.randn(512, 64)).square().mean()


def packed() -> tuple[nn.Module, Step]:
    """A bidirectional LSTM on packed sequences; four batches, in any order."""
    lstm = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True, dropout=0.1)
    head = nn.Linear(64, 5)
    batches = [(torch.randn(16, 20, 16), torch.randint(3, 21, (16,))) for _ in range(4)]

    def step(draw: random.Random) -> Tensor:
        x, lengths = draw.choice(batches)
        pack = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(lstm(pack)[0], True)
        return head(out).square().mean()

    return nn.ModuleList([lstm, head]), step


def cell() -> tuple[nn.Module, Step]:
    """A loop over an LSTM cell, of 5 to 30 time steps, with a loss at each."""
    lstm, head = nn.LSTMCell(32, 64), nn.Linear(64, 4)

    def step(draw: random.Random) -> Tensor:
        state, loss = None, torch.zeros(())
        for _ in range(draw.randint(5, 30)):
            state = lstm(torch.randn(64, 32), state)
            loss = loss + head(state[0]).square().mean()
        return loss

    return nn.ModuleList([lstm, head]), step


def anew() -> tuple[nn.Module, Step]:
    """A bidirectional LSTM and a GRU on packed sequences, of other lengths in each step."""
    lstm = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True, dropout=0.1)
    gru, head = nn.GRU(64, 32, batch_first=True), nn.Linear(32, 5)

    def step(draw: random.Random) -> Tensor:
        lengths = torch.tensor([draw.randint(5, 20) for _ in range(4)])
        x = torch.randn(4, int(lengths.max()), 16)
        pack = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(gru(lstm(pack)[0])[0], True)
        return head(out).square().mean()

    return nn.ModuleList([lstm, gru, head]), step


def routed(shortest: int = 192) -> tuple[nn.Module, Step]:
    """A Mixtral whose experts run one by one, each on the words that its router gives it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
    )  # fmt: skip
    net = MixtralForCausalLM(config)
    net.set_experts_implementation("eager")

    def step(draw: random.Random) -> Tensor:
        words = torch.randint(1000, (4, draw.randint(shortest, 192)))
        loss: Tensor = net(input_ids=words, labels=words).loss
        return loss

    return net, step


def lengths() -> tuple[nn.Module, Step]:
    """The same on texts of any length."""
    return routed(48)


NETWORKS = {
    "heads": heads,
    "depth": depth,
    "experts": experts,
    "packed": packed,
    "cell": cell,
    "anew": anew,
    "routed": routed,
    "lengths": lengths,
}


def contest(
    build: Callable[[], tuple[nn.Module, Step]], steps: int, limit: float
) -> dict[str, Any]:
    torch.manual_seed(0)
    net, step = build()
    draw = random.Random(0)
    budget = lowtide.budget(int(limit * max(peak(net, step, draw) for _ in range(8))))
    plain: list[float] = []
    mine: list[float] = []
    unplanned = 0
    for number in range(steps):
        seed = number + 1
        # In turns, so that other work on the machine slows both.
        for times, context in ((plain, None), (mine, budget)):
            net.zero_grad()
            draw = random.Random(seed)
            torch.manual_seed(seed)
            began = time.process_time()
            with context or contextlib.nullcontext():
                loss = step(draw)
            loss.backward()
            del loss
            if context is not None:
                settle()  # what is planned beside training counts too
            times.append(time.process_time() - began)
        unplanned += 3 * number >= 2 * steps and not budget.report().planned
    third = steps // 3
    report = budget.report()
    return {
        "operations": report.recorded_operations,
        "limit": budget.limit,
        "highest": report.highest_peak,
        "first": sum(mine[:third]) / sum(plain[:third]),
        "last": sum(mine[-third:]) / sum(plain[-third:]),
        "milliseconds": 1000 * sum(plain[-third:]) / third,
        "unplanned": unplanned,
        "idle": report.idle_steps,
    }


def peak(net: nn.Module, step: Step, draw: random.Random) -> int:
    net.zero_grad()
    return lowtide.measure(lambda: step(draw).backward(), device="cpu").peak_bytes


def main() -> None:
    parser = arguments(__doc__ or "", models=False)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit", type=float, default=TIMES, help="times the largest peak")
    options = parser.parse_args()
    with results(options) as rows:
        print(
            "| network | plain step, ms | limit, MiB | highest measured | first third | last third "
            "| of these unplanned | not recorded |\n" + "|---" * 8 + "|"
        )
        for name in options.networks:
            found = contest(NETWORKS[name], options.steps, options.limit)
            rows.append({"network": name, **found})
            cells = [
                name,
                f"{found['milliseconds']:.1f}",
                mebibytes(found["limit"]),
                mebibytes(found["highest"]),
                f"{found['first']:.2f}",
                f"{found['last']:.2f}",
                f"{found['unplanned']} of {options.steps // 3}",
                f"{found['idle']} of {options.steps}",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
