"""What a graph knows of an operation, as far as that needs no tensors.

Problem: a step is watched as it runs, or goes alone for a while and is watched after all; its graph
must not depend on which. Invariant: both kinds of operations are noted here, in one way; what only
the arguments show is added by an observer, or is the most that it may be. Imports operation and the
tape. Rejected: a type of its own for operations that nobody watched, which each reader of a graph
would have to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.backward.operation import Call
from lowtide.tape.values import Operation, Value

if TYPE_CHECKING:
    from lowtide.running.prepared import Signature

FOREVER = 1 << 60
KEPT = ", kept"  # after the name of an operation whose results are not replayed, in a signature

# An operation of a step that nobody watched: its signature, the values that it made and overwrote,
# the bytes that were live after it, and the most that it and its backward take.
Alone = tuple["Signature", tuple[int, ...], tuple[int, ...], int, int, int]


@dataclass(slots=True)
class OpLog:
    """One operation, as numbers: values by their number, sizes in bytes, times in seconds.

    What plan files have of an operation comes first. What only a watched step has is left out of
    comparisons, so that a plan from a file equals the one that was written.
    """

    name: str
    seconds: float
    reads: tuple[int, ...]
    """As called, with repetitions; -1 for externals."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    live: int
    """Bytes of the recording's storages right after it."""
    begin: int | None
    """Mark after its random state was read, if it draws."""
    mark: int
    """Mark after it ran."""
    workspace: int
    """Bytes; modelled as closely as possible, see `lowtide.kernels.workspace`."""
    temporaries: int
    """Bytes that its backward takes, gradients of its inputs included; from sizes, until
    `look_closer` has run `call`."""
    left: int
    """How many of `temporaries` remain when its backward is over."""
    wanted: int
    """Bytes of the gradients of its arguments, see `lowtide._compat.wanted_bytes`."""
    receivers: tuple[int, ...]
    """Inputs that its backward gives gradients to: as called, -1 for externals."""
    viewing: tuple[int, ...] = ()
    """The `receivers` whose gradients are views of the gradient of its output."""
    saved: tuple[int, ...] | None = None
    """The outputs that autograd saves as results of this operation; None: not known."""
    whole: tuple[int, ...] = ()
    """Inputs that it reads as they are, from their first to their last byte."""
    pieces: tuple[int, ...] = ()
    """Inputs of which it reads a piece made by `split` or `unbind`: the gradients of all pieces
    exist before that of the whole is made of them."""
    piece_sizes: tuple[int, ...] = ()
    """For each of `pieces`, the bytes of the piece."""
    besides: int = 0
    """Bytes that are made around its backward, besides its own: if it reads a part of a value, the
    gradient is made as large as the whole."""
    overwrites: tuple[int, ...] = ()
    """Values whose memory it writes in place."""
    kept: bool = False
    """It is never replayed, and what it makes is held for what needs it."""
    call: Call | None = None
    """To run its backward on shapes alone, see `lowtide.backward.modelled.look_closer`."""
    kind: Call | None = None
    """Calls of one kind take the same time; None: no kind is known, or it was not timed."""

    # How its backward reads and makes gradients. `temporaries`, `left`, `receivers` and `besides`
    # contain what follows from it.
    split: tuple[int, ...] = field(default=(), compare=False)
    """The `pieces` made by `split`: zeros are made for pieces without a gradient."""
    views: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """(input, node) for each of `whole` that it reads through a view: the node where the gradients
    of all that reads the same view are added up."""
    unmade: tuple[tuple[int, int, int], ...] = field(default=(), compare=False)
    """For what it reads whole and no recorded operation has made: autograd's node that did, bytes,
    and which it is of the arguments that require grad."""
    through: tuple[int, int] | None = field(default=None, compare=False)
    """If it writes its first argument through a view, with a gradient: bytes of the base and of the
    view."""
    turned: tuple[int, ...] = field(default=(), compare=False)
    """Inputs that it reads whole, but through a view that is not contiguous."""
    remade: tuple[int, ...] = field(default=(), compare=False)
    """Inputs that it reads whole, through a view that copies the gradient on its way: it has
    divided or joined dimensions that were then permuted."""
    athwart: tuple[int, ...] = field(default=(), compare=False)
    """The `turned` inputs whose gradients it makes contiguous in the order in which it reads them,
    so that they are not contiguous in the order of the inputs."""
    perhaps: tuple[int, ...] = field(default=(), compare=False)
    """The `turned` inputs of which that holds if the gradient of its result is contiguous, and not
    expanded."""
    lent: bool = field(default=False, compare=False)
    """Whether something else may refer to a gradient that it gives to a leaf."""
    astray: dict[int, int] = field(default_factory=dict, compare=False)
    """The arguments, counting those that require grad, whose gradient may be laid out in memory in
    another way than they are read, with the bytes that it takes."""
    node: bool = field(default=False, compare=False)
    """Whether autograd is known to have made a node for it."""
    hidden: tuple[int, ...] | None = field(default=None, compare=False)
    """If it ran without grad: the number of autograd's newest node then, and the leaves it read."""
    function: bool = field(default=False, compare=False)
    """Whether it made the result of a custom Function."""

    # What was going on around it when it was watched.
    pad: int = field(default=0, compare=False)
    """Bytes of `workspace`, and of `temporaries`, that its kernels may do without, see
    `lowtide.kernels.scratchpad`."""
    fell: tuple[int, int] | None = field(default=None, compare=False)
    """If what another plan had held was dropped after it ran and before its mark: a mark after
    that, and how many bytes."""
    inside: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """Marks around each replay since the operation before, for a backward inside the forward."""
    unseen: int | None = field(default=None, compare=False)
    """Mark up to which something else may have run since the operation before, and been freed: a
    call that is not recorded (rule 5). None: that is not told apart from the operation itself."""


def what_ran(
    op: Operation,
    made: list[Value],
    signature: Signature,
    live: int,
    begin: int | None,
    mark: int,
) -> OpLog:
    """What an operation has read and made; that it takes more, or has a backward, is not known."""
    log = unwatched((signature, made_by(made), overwritten_by(op), live, 0, 0))
    log.seconds, log.begin, log.mark, log.receivers = op.seconds, begin, mark, log.inputs
    return log


def made_by(made: list[Value]) -> tuple[int, ...]:
    """The numbers of the values that an operation has made."""
    return tuple([value.number for value in made])


def overwritten_by(op: Operation) -> tuple[int, ...]:
    """The numbers of the values that an operation writes in place."""
    found = [ref.value for ref, _ in op.writes]
    return tuple([value.number for value in found if value and value.number >= 0])


def unwatched(ran: Alone) -> OpLog:
    """An operation that nobody watched, with the most that it and its backward may take."""
    (name, sizes, reads, wanted), outputs, overwrites, live, need, later = ran
    inputs = tuple(dict.fromkeys([number for number in reads if number >= 0]))
    plain = name.removesuffix(KEPT)
    return OpLog(
        name=plain,
        seconds=0.0,
        reads=reads,
        inputs=inputs,
        outputs=outputs,
        sizes=sizes,
        live=live,
        begin=None,
        mark=0,
        workspace=max(0, need - sum(sizes)),
        temporaries=later,
        left=min(later, wanted),
        wanted=wanted,
        receivers=inputs if later else (),
        overwrites=overwrites,
        kept=plain != name,
    )
