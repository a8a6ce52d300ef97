"""Recorded steps made by hand: the shapes of well-known networks, as planner graphs.

`Tape` stands in for the recorder. It computes what a real step would have measured: which values
the forward itself keeps alive, the gradients alive at each event of the backward, and the releases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.planner.graph import UNKNOWN, Event, Graph, OpNode, ValueNode

MIB = 1 << 20


class Tape:
    """Collects operations in forward order and closes them into a `Graph`."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self.producer: list[int] = []
        self.ops: list[tuple[str, float, tuple[int, ...], tuple[int, ...], int, bool]] = []
        self.saved: list[tuple[int, ...]] = []
        self.overwrites: list[tuple[int, ...]] = []
        self.named: dict[int, int] = {}  # value -> the last operation during which user code has it

    def external(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        self.producer.append(-1)
        return len(self.nbytes) - 1

    def op(
        self,
        name: str,
        seconds: float,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        save_inputs: bool | Sequence[int] = False,
        save_outputs: bool | Sequence[int] = False,
        workspace: int = 0,
        replayable: bool = True,
        overwrites: Sequence[int] = (),
    ) -> list[int]:
        """Record one operation; `outputs` are sizes, the result their value ids."""
        made = []
        for nbytes in outputs:
            self.nbytes.append(nbytes)
            self.producer.append(len(self.ops))
            made.append(len(self.nbytes) - 1)
        self.ops.append((name, seconds, tuple(inputs), tuple(made), workspace, replayable))
        self.overwrites.append(tuple(overwrites))
        kept = _chosen(inputs, save_inputs) + _chosen(made, save_outputs)
        self.saved.append(tuple(dict.fromkeys(kept)))
        return made

    def close(self, *, gradients: bool = True) -> Graph:
        """The graph of a step whose loss is the last operation."""
        count = len(self.ops)
        last_use = list(self.producer)
        first_use = [count] * len(self.nbytes)
        for index, op in enumerate(self.ops):
            for x in op[2]:
                last_use[x] = max(last_use[x], index)
                first_use[x] = min(first_use[x], index)
        named = [self.named.get(v, -1) for v in range(len(self.nbytes))]
        natural = _sums(self.nbytes, self.producer, list(map(max, last_use, named)), count)
        ops = tuple(
            OpNode(*op, natural[i], natural[i] + op[4], written)
            for i, (op, written) in enumerate(zip(self.ops, self.overwrites, strict=True))
        )
        overwritten = {value for written in self.overwrites for value in written}
        # The gradient of a value lives from its last consumer's backward to its producer's.
        grads = _sums(self.nbytes, self.producer, last_use, count) if gradients else [0] * count
        events: list[Event] = []
        owner: dict[int, int] = {}
        for index in reversed(range(count)):
            for value in self.saved[index]:
                owner[value] = index
        for index in reversed(range(count)):
            values = self.saved[index]
            work = self.ops[index][4]
            for place, value in enumerate(values):
                final = place == len(values) - 1
                gone = tuple(v for v in values if owner[v] == index) if final else ()
                before = max(grads[index] - sum(self.nbytes[x] for x in self.ops[index][2]), 0)
                if not gradients:
                    before = 0
                top = grads[index] + work if final else before
                more = len(values) - 1 - place
                events.append(Event(value, before, max(top, before), gone, more=more))
        values_ = tuple(
            ValueNode(size, maker, overwritten=value in overwritten, named=last)
            for value, (size, maker, last) in enumerate(
                zip(self.nbytes, self.producer, named, strict=True)
            )
        )
        return Graph(values_, ops, tuple(events))


def _chosen(values: Sequence[int], which: bool | Sequence[int]) -> list[int]:
    if isinstance(which, bool):
        return list(values) if which else []
    return [values[i] for i in which]


def _sums(
    nbytes: Sequence[int], first: Sequence[int], last: Sequence[int], count: int
) -> list[int]:
    steps = [0] * (count + 2)
    for size, a, b in zip(nbytes, first, last, strict=True):
        if a >= 0:
            steps[a] += size
            steps[b + 1] -= size
    total, sums = 0, []
    for step in steps[:count]:
        total += step
        sums.append(total)
    return sums


def chain(length: int, nbytes: int = MIB, seconds: float = 1e-3) -> Graph:
    """Equal operations in a row, each saving its input."""
    tape = Tape()
    x = tape.external(nbytes)
    for _ in range(length):
        (x,) = tape.op("f", seconds, [x], [nbytes], save_inputs=True)
    tape.op("loss", 1e-6, [x], [4])
    return tape.close()


def _norm_relu_conv(
    tape: Tape, x: int, n_in: int, n_out: int, seconds: float, workspace: int = 0
) -> int:
    cheap = n_in / MIB * 2e-4
    norm, _, _ = tape.op(
        "norm", cheap * 2, [x], [n_in, 256, 256], save_inputs=True, save_outputs=[1, 2]
    )
    (active,) = tape.op("relu", cheap, [norm], [n_in], save_outputs=True)
    (out,) = tape.op("conv", seconds, [active], [n_out], save_inputs=True, workspace=workspace)
    return out


def densenet(blocks: Sequence[int] = (6, 12, 24, 16), unit: int = MIB) -> Graph:
    """Dense blocks: each layer reads the concatenation of all earlier ones."""
    tape = Tape()
    image = tape.external(unit)
    growth = unit
    (x,) = tape.op("conv", 8e-3, [image], [2 * growth], save_inputs=True)
    size = 2 * growth
    for layers in blocks:
        features, total = [x], size
        for _ in range(layers):
            (joined,) = tape.op("cat", total / MIB * 2e-4, features, [total])
            middle = _norm_relu_conv(tape, joined, total, 4 * growth, total / MIB * 1.5e-3)
            new = _norm_relu_conv(tape, middle, 4 * growth, growth, 6e-3)
            features.append(new)
            total += growth
        (joined,) = tape.op("cat", total / MIB * 2e-4, features, [total])
        half = _norm_relu_conv(tape, joined, total, total // 2, total / MIB * 1.5e-3)
        growth //= 4
        size = total // 8
        (x,) = tape.op("pool", total / MIB * 1e-4, [half], [size], save_inputs=True)
    tape.op("loss", 1e-5, [x], [4])
    return tape.close()


def resnet(blocks: int = 16, unit: int = 4 * MIB) -> Graph:
    """Residual blocks of two convolutions, halving in size every fourth."""
    tape = Tape()
    (x,) = tape.op("conv", 5e-3, [tape.external(unit)], [unit], save_inputs=True)
    for index in range(blocks):
        shrink = 2 if index and index % 4 == 0 else 1
        small = unit // shrink
        y = _norm_relu_conv(tape, x, unit, small, 6e-3, workspace=unit)
        y = _norm_relu_conv(tape, y, small, small, 6e-3, workspace=small)
        if shrink == 2:
            (x,) = tape.op("conv", 1e-3, [x], [small], save_inputs=True)
        (x,) = tape.op("add", small / MIB * 1e-4, [x, y], [small])
        unit = small
    tape.op("loss", 1e-5, [x], [4])
    return tape.close()


def unet(levels: int = 4, unit: int = 16 * MIB) -> Graph:
    """Encoder, decoder, and skips that live from one to the other."""
    tape = Tape()
    (x,) = tape.op("conv", 2e-2, [tape.external(unit)], [unit], save_inputs=True)
    skips: list[tuple[int, int]] = []
    size = unit
    for _ in range(levels):
        for _ in range(2):
            x = _norm_relu_conv(tape, x, size, size, size / MIB * 2e-3, workspace=size)
        skips.append((x, size))
        (x,) = tape.op("down", size / MIB * 5e-4, [x], [size // 4], save_inputs=True)
        size //= 4
    x = _norm_relu_conv(tape, x, size, size, size / MIB * 2e-3)
    for skip, size in reversed(skips):
        (x,) = tape.op("up", size / MIB * 1e-3, [x], [size], save_inputs=True)
        (x,) = tape.op("cat", size / MIB * 2e-4, [skip, x], [2 * size])
        x = _norm_relu_conv(tape, x, 2 * size, size, size / MIB * 4e-3, workspace=size)
        x = _norm_relu_conv(tape, x, size, size, size / MIB * 2e-3, workspace=size)
    tape.op("loss", 1e-5, [x], [4])
    return tape.close()


def transformer(layers: int = 84, unit: int = MIB) -> Graph:
    """Pre-norm transformer blocks, twelve operations each, with dropout masks."""
    tape = Tape()
    (x,) = tape.op("embed", 1e-4, [tape.external(64)], [unit])
    light = unit / MIB * 1e-4
    for _ in range(layers):
        y, _, _ = tape.op(
            "norm", 2 * light, [x], [unit, 256, 256], save_inputs=True, save_outputs=[1, 2]
        )
        (qkv,) = tape.op("linear", 3e-3, [y], [3 * unit], save_inputs=True)
        y, _ = tape.op(
            "attention", 2e-3, [qkv], [unit, unit // 32], save_inputs=True, save_outputs=True
        )
        (y,) = tape.op("linear", 1e-3, [y], [unit], save_inputs=True)
        y, _ = tape.op("dropout", light, [y], [unit, unit // 4], save_outputs=[1])
        (x,) = tape.op("add", light, [x, y], [unit])
        y, _, _ = tape.op(
            "norm", 2 * light, [x], [unit, 256, 256], save_inputs=True, save_outputs=[1, 2]
        )
        (y,) = tape.op("linear", 4e-3, [y], [4 * unit], save_inputs=True)
        (y,) = tape.op("gelu", 4 * light, [y], [4 * unit], save_inputs=True)
        (y,) = tape.op("linear", 4e-3, [y], [unit], save_inputs=True)
        y, _ = tape.op("dropout", light, [y], [unit, unit // 4], save_outputs=[1])
        (x,) = tape.op("add", light, [x, y], [unit])
    (logits,) = tape.op("linear", 1e-2, [x], [8 * unit], save_inputs=True)
    tape.op("loss", 1e-4, [logits], [4], save_inputs=True)
    return tape.close()


def random_graph(seed: int, ops: int) -> Graph:
    """A small graph with branches, several outputs, workspaces, operations that cannot be replayed
    or write in place, values that user code holds, and externals that only the record has."""
    rng = random.Random(seed)
    tape = Tape()
    values = [tape.external(rng.randint(1, 9))]
    for index in range(ops):
        ins = [values[-1]] if rng.random() < 0.7 else []
        ins += rng.sample(values, rng.randint(0 if ins else 1, min(2, len(values))))
        ins = list(dict.fromkeys(ins))
        sizes = [rng.randint(1, 9) for _ in range(rng.choice((1, 1, 1, 2)))]
        saved = {value for each in tape.saved for value in each}
        written = [x for x in ins if x not in saved][: rng.random() < 0.4]
        for x in written:  # its old content is read no more
            values.remove(x)
            sizes[0] = tape.nbytes[x]
        values += tape.op(
            f"op{index}",
            rng.randint(0, 5) * 1e-3,
            ins,
            sizes,
            save_inputs=[i for i, x in enumerate(ins) if x not in written and rng.random() < 0.5],
            save_outputs=[i for i in range(len(sizes)) if rng.random() < 0.4],
            workspace=rng.choice((0, 0, rng.randint(1, 9))),
            replayable=rng.random() > 0.1,
            overwrites=written,
        )
    for value in values[1:]:
        if rng.random() < 0.3:
            tape.named[value] = rng.randint(tape.producer[value], ops)
    return with_owned(tape.close(), rng, rng.choice((0, 0, 1, 2)))


def with_cut(graph: Graph, seed: int) -> Graph:
    """The same step, where some values may be cut off from the operations that make them."""
    rng = random.Random(seed)
    share = rng.choice((0.0, 0.1, 0.4))
    values = list(graph.values)
    for number, (node, stays) in enumerate(zip(values, graph.stays, strict=True)):
        if node.producer >= 0 and not node.pinned and rng.random() < share:
            values[number] = replace(node, cut=min(stays, len(graph.ops) - 1))
    return replace(graph, values=tuple(values))


def with_owned(graph: Graph, rng: random.Random, count: int) -> Graph:
    """The same step with more externals, which only the record has: some operations read them, and
    autograd may have saved them until some event."""
    values, ops, events = list(graph.values), list(graph.ops), list(graph.events)
    for number in range(len(values), len(values) + count):
        readers = sorted(rng.sample(range(len(ops)), rng.randint(1, min(3, len(ops)))))
        until = rng.randint(readers[-1], len(ops)) if rng.random() < 0.6 else -1
        nbytes = rng.randint(1, 9)
        values.append(ValueNode(nbytes, -1, named=until, owned=True))
        for index in range(min(max(readers[-1], until) + 1, len(ops))):
            op = ops[index]  # until then it is in memory whatever a plan says
            ops[index] = replace(
                op,
                inputs=(*op.inputs, number) if index in readers else op.inputs,
                other=op.other + nbytes,
                peak_other=op.peak_other + nbytes,
            )
        if events and rng.random() < 0.3:
            place = rng.randrange(len(events))
            event = events[place]
            events[place] = replace(event, releases=(*event.releases, number))
    return replace(graph, values=tuple(values), ops=tuple(ops), events=tuple(events))


def with_later(graph: Graph, seed: int) -> Graph:
    """The same step, whose memory rises at some events once their values were released."""
    rng = random.Random(seed)
    later = [rng.choice((0, event.peak_other + rng.randint(0, 12))) for event in graph.events]
    pairs = zip(graph.events, later, strict=True)
    return replace(graph, events=tuple(replace(event, after=most) for event, most in pairs))


def with_nodes(graph: Graph, seed: int) -> Graph:
    """The same step, of some of whose events it is not known when their node is over, or whose node
    is over later: those of a backward that it runs lie between."""
    rng = random.Random(seed)
    events = tuple(
        replace(event, more=rng.choice((event.more, UNKNOWN, rng.randrange(left))))
        for event, left in zip(graph.events, range(len(graph.events), 0, -1), strict=True)
    )
    return replace(graph, events=events)


def run_twice(graph: Graph) -> Graph:
    """The same step, whose backward runs twice: the graph is retained for the second time."""
    first = tuple(replace(event, releases=()) for event in graph.events)
    return replace(graph, events=(*first, *graph.events))


NETWORKS: dict[str, Callable[[], Graph]] = {
    "densenet": densenet,
    "resnet": resnet,
    "unet": unet,
    "transformer": transformer,
    "chain": lambda: chain(200),
}
