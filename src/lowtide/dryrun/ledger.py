"""The ledger of a step: every storage, every call, what autograd saved, what was returned.

Problem: to show a step, one must know which bytes belong to what, long after its tensors are freed.
Invariant: numbers and names only; a storage is entered once and closed once, so the open entries of
any moment add up to what is live then. Imports requests. Rejected: storing this in the graph, which
solvers copy and files contain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.observing.requests import Request

FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's program: the operator, the module that called it, the source line."""

    operator: str = ""
    module: str = ""
    line: str = ""


@dataclass(slots=True)
class Block:
    """One storage that a dry run made; `place` is its index among all of them.

    `born` and `died` are indices into `Ledger.steps`: the storage is live from the step that makes
    it (inclusive) to the step before which it is freed (exclusive). If it became the gradient of a
    leaf, `name` is that leaf's name.
    """

    place: int
    nbytes: int
    site: Site
    shape: tuple[int, ...]
    dtype: str
    born: int
    died: int = FOREVER
    values: list[int] = field(default_factory=list)
    saved: bool = False
    gradient: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of an operator in a dry run, or a mark between two calls (then without operator).

    `segment` is the last mark before it, `level` the bytes live after it, `peak` the most bytes
    live while it ran.
    """

    site: Site
    segment: int
    level: int
    peak: int


@dataclass(frozen=True, slots=True)
class Saved:
    """One value (version of a storage) that autograd saved.

    `number` is -1 for an external, `block` -1 if the storage was not made in a dry run.
    """

    number: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    name: str
    site: Site
    block: int


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the step returned, and why it does or does not require grad."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    site: Site
    reason: str


@dataclass(frozen=True)
class Ledger:
    """What a witness has recorded.

    Attributes:
        sites: for each operation of the graph, where it was called.
        saved: what autograd held at the end of the forward, each value once.
        standing: bytes that were in memory before the step, by kind.
        parameters: (number of parameters, how many of them require grad).
        outputs: what the step returned.
        blocks, steps: every storage and every call; empty if a real step was recorded.
        requests: for each event, what asks.
        held: the values that only the tape held when backward began.
        gradients: (bytes, last reader in the forward, name) of each leaf whose gradient the step
            allocates.
    """

    sites: tuple[Site, ...]
    saved: tuple[Saved, ...]
    standing: dict[str, int]
    parameters: tuple[int, int]
    outputs: tuple[Output, ...]
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    requests: tuple[Request, ...]
    held: frozenset[int]
    gradients: tuple[tuple[int, int, str], ...]
    marks: tuple[tuple[int, int], ...]
    """For each operation, the marks before and after it."""
    own_backward: bool = False
    """Whether the step ran backward itself, before it returned."""
    in_regions: bool = False
    """Whether a part of it is checkpointed by lowtide, which a dry run leaves out."""
