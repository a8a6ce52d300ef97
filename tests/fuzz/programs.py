"""Hypothesis strategies for whole programs.

The problem: programs have to be drawn so that hypothesis can shrink a failure to a few lines.

The invariant: hypothesis draws raw choices only, in lists from which any element may be deleted;
`assemble` turns them into a valid program without drawing. Imports the rest of this package but
the runners.

Rejected: st.data() and drawing against the growing program; see assemble.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from . import aliases, blocks, layers, operations, writes
from .assemble import SHAPES, Assembler, Pick, Raw
from .driver import TOOLS
from .endings import ending
from .source import Program

WEIGHTED: tuple[tuple[Callable[[Pick], None], int], ...] = (
    (operations.unary, 6),
    (operations.binary, 6),
    (operations.along, 3),
    (operations.product, 5),
    (operations.view, 5),
    (operations.several, 3),
    (operations.draw, 4),
    (operations.generator_draw, 1),
    (operations.indexed, 3),
    (operations.norm, 2),
    (operations.batch_norm, 2),
    (operations.join, 2),
    (operations.function, 2),
    (operations.attention, 1),
    (operations.convolution, 2),
    (operations.pool, 1),
    (operations.recurrent, 1),
    (operations.cast, 1),
    (writes.in_place, 3),
    (writes.in_place_with, 3),
    (writes.through_view, 3),
    (writes.drawn_in_place, 2),
    (writes.indexed_write, 1),
    (writes.custom_write, 1),
    (writes.data_write, 1),
    (writes.out_argument, 1),
    (writes.buffer_write, 3),
    (writes.buffer_read, 3),
    (writes.spectral, 1),
    (writes.parameter_write, 1),
    (aliases.shared, 6),
    (aliases.on_target, 2),
    (layers.shaped, 8),
    (layers.module, 5),
    (blocks.inner_gradient, 1),
    (blocks.penalty, 1),
    (blocks.count, 1),
    (blocks.reseed, 1),
    (blocks.in_turns, 2),
    (blocks.stumble, 1),
    (blocks.hook, 1),
    (blocks.smuggle, 1),
    (blocks.default_dtype, 1),
)
BLOCKS: tuple[tuple[Callable[[Pick], None], int], ...] = (
    (blocks.region, 8),
    (blocks.mode, 4),
    (blocks.branch, 2),
    (blocks.loop, 2),
    (blocks.failing_region, 1),
)
OPERATIONS = {f.__name__: f for f, _ in (*WEIGHTED, *BLOCKS)}
_LEAVES = tuple(f.__name__ for f, weight in WEIGHTED for _ in range(weight))
_BLOCKS = tuple(f.__name__ for f, weight in BLOCKS for _ in range(weight))
_PICKS = st.binary(min_size=10, max_size=10)


@dataclass(frozen=True)
class Draft:
    """Everything that hypothesis draws for one program."""

    pool: bytes
    body: tuple[Raw, ...]
    end: bytes


@st.composite
def _raw(draw: st.DrawFn, depth: int) -> Raw:
    """One instruction, with bodies nested to `depth`; composite keeps hypothesis' repr short."""
    if depth == 0 or draw(st.integers(0, 3)) < 3:
        return Raw(_LEAVES[draw(st.integers(0, len(_LEAVES) - 1))], draw(_PICKS))
    name = _BLOCKS[draw(st.integers(0, len(_BLOCKS) - 1))]
    picks = draw(_PICKS)
    body = draw(st.lists(_raw(depth - 1), min_size=1, max_size=6))
    other = draw(st.lists(_raw(0), min_size=1, max_size=4)) if name == "branch" else []
    return Raw(name, picks, tuple(body), tuple(other))


@st.composite
def drafts(draw: st.DrawFn, depth: int = 3, most: int = 16) -> Draft:
    """The raw choices of a program."""
    pool = draw(st.binary(min_size=12, max_size=12))
    body = draw(st.lists(_raw(depth), min_size=1, max_size=most))
    return Draft(pool, tuple(body), draw(st.binary(min_size=16, max_size=16)))


def _declare_pool(p: Pick) -> None:
    """The tensors that exist before the first statement."""
    dtype = "float64" if p.chance(20) else "bfloat16" if p.chance(10) else "float32"
    for role, least, spread in (("buffer", 0, 2), ("input", 1, 2), ("parameter", 2, 3)):
        for _ in range(least + p.below(spread)):
            p.a.declare(role, p.of(SHAPES), dtype)


def assemble(draft: Draft) -> Program:
    """The program that a draft stands for."""
    assembler = Assembler(OPERATIONS)
    pool, end = (Pick(assembler, Raw("", picks)) for picks in (draft.pool, draft.end))
    with assembler.trial():
        _declare_pool(pool)
        for raw in draft.body:
            assembler.add(raw)
        for line in blocks.watched([n for n in assembler.visible() if n in assembler.scope]):
            assembler.append(line)
    final = ending(end)
    texts = (*final.losses, *final.outs, *final.mids, *final.lines)
    declarations, body = assembler.finish(*texts)
    outer, inside = end.below(3) > 0, end.chance(40)
    return Program(declarations, body, final, outer, inside, frozenset(assembler.traits))


def programs(depth: int = 3, most: int = 16) -> st.SearchStrategy[Program]:
    """Random programs with regions nested to `depth`."""
    return drafts(depth, most).map(assemble)


def load(program: Program) -> dict[str, object]:
    """The program as a namespace that the driver runs."""
    namespace: dict[str, object] = dict(TOOLS)
    exec(compile(program.source, "<program>", "exec"), namespace)
    return namespace
