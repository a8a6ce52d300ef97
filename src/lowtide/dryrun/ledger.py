"""The book of a step: every storage, every call, what autograd saved, what came out.

Problem: whoever draws a step needs to know whose bytes they are, long after its tensors have gone.
Invariant: numbers and names only; a storage is entered once and struck out once, so that the open
entries of any moment add up to what is live then. Imports nothing. Rejected: keeping it in the
graph, which solvers copy and files carry.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's program: what ran, in which module, on which line."""

    operator: str = ""
    module: str = ""
    line: str = ""


@dataclass(slots=True)
class Block:
    """One storage that a dry run made, and its place among all of them.

    `born` and `died` are places in `Ledger.steps`: it is there from the end of the one (itself
    included) to the beginning of the other. `name` is the leaf's where it became its gradient.
    """

    place: int
    nbytes: int
    site: Site
    shape: tuple[int, ...]
    dtype: str
    born: int
    backward: bool
    died: int = FOREVER
    values: list[int] = field(default_factory=list)
    saved: bool = False
    gradient: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of an operator in a dry run, or a mark between two (then without operator).

    `segment` is the last mark before it, `peak` the most bytes live while it ran.
    """

    site: Site
    segment: int
    level: int
    peak: int


@dataclass(frozen=True, slots=True)
class Saved:
    """One storage version that autograd saved.

    `number` is -1 for what was made outside, `block` -1 where no dry run made the storage.
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
    """What a witness has written down.

    Attributes:
        sites: of each operation of the graph, where it was called.
        saved: what autograd held at the end of the forward, each storage version once.
        standing: bytes that were there before the step, by kind.
        parameters: (number of tensors, of them with `requires_grad`).
        outputs: what the step returned.
        blocks, steps: every storage and every call, empty where a real step was recorded.
        requests: of each event, (value, operation, mark at entry, mark at its answer).
        held: the values that the step held when backward began and nobody else did.
        gradients: (bytes, last reader in the forward, name) of each leaf that collects one anew.
    """

    sites: tuple[Site, ...]
    saved: tuple[Saved, ...]
    standing: dict[str, int]
    parameters: tuple[int, int]
    outputs: tuple[Output, ...]
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    requests: tuple[tuple[int, int, int, int], ...]
    held: frozenset[int]
    gradients: tuple[tuple[int, int, str], ...]
    marks: tuple[tuple[int, int], ...]
    """Of each operation, the marks before and after it."""
    own_backward: bool = False
    """The step ran backward itself, before it returned."""
