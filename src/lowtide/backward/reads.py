"""Which inputs of an operation get gradients, and how much of them it reads.

Problem: autograd makes the gradient of a part (a slice, a piece of a split) as large as the whole,
and nothing in the operation that reads the part shows it. Invariant: only numbers are noted, no
tensor is kept. Imports `_compat` and the tape's references. Rejected: asking the view that made the
part, which need not have been recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat

if TYPE_CHECKING:
    from lowtide.observing.logs import OpLog
    from lowtide.tape.values import Ref, Value

_AT_ONCE = 2  # gradients that are added up: their sum so far, and the next one


def look_at_reads(
    log: OpLog,
    refs: list[Ref],
    tensors: list[torch.Tensor],
    chunks: bool,
    summed: Collection[int],
    anew: Callable[[Value, torch.Tensor], bool],
) -> None:
    """Note which inputs get gradients, and how much of them the operation reads.

    Args:
        chunks: it splits its input into chunks that autograd does not know to be views.
        summed: dimensions along which the gradient that it gives is expanded, see `summed`.
        anew: whether the gradient of a value that is read as a whole is made anew for this read.
    """
    handed_on = log.name == "aten::clone" or len(tensors) > 1
    reads = _Reads(summed, anew, handed_on)
    for ref, tensor in zip(refs, tensors, strict=True):
        if tensor.requires_grad:
            if chunks:  # the gradients of all its chunks, until they are joined
                reads.besides += tensor.numel() * tensor.element_size()
            reads.look(ref.value, tensor, bool(log.through) and tensor is tensors[0])
    reads.note(log)


class _Reads:
    """What is known of the inputs of one operation that were looked at."""

    def __init__(
        self,
        summed: Collection[int],
        anew: Callable[[Value, torch.Tensor], bool],
        handed_on: bool,
    ) -> None:
        self._summed, self._anew, self._handed_on = summed, anew, handed_on
        self._receivers: list[int] = []
        self._whole: list[int] = []
        self._views: list[tuple[int, int]] = []
        self._turned: list[int] = []
        self._remade: list[int] = []
        self._pieces: list[tuple[int, int]] = []
        self._split: list[int] = []
        self._unmade: list[tuple[int, int, int]] = []
        self._arrived: Counter[int] = Counter()
        self._scattered = 0
        self.besides = 0

    def look(self, value: Value | None, tensor: torch.Tensor, through: bool) -> None:
        """One more input, which requires grad; `through`: its gradient is that of the result."""
        number = -1 if value is None else value.number
        nbytes = tensor.numel() * tensor.element_size()
        if value is not None and number >= 0 and not through:
            if nbytes == value.nbytes:
                self._look_at_whole(value, tensor)
            elif nbytes < value.nbytes:
                number = self._look_at_part(value, tensor, nbytes)
            elif _scattered(tensor):
                self._look_at_windows(value, tensor, nbytes)
        elif value is not None and value.op is None and nbytes == value.nbytes:
            maker = _compat.made_by(tensor)
            if maker is not None:
                self._unmade.append((maker, nbytes, len(self._receivers)))
        self._receivers.append(number)

    def _look_at_whole(self, value: Value, tensor: torch.Tensor) -> None:
        number = value.number
        self._whole.append(number)
        view, _ = _compat.first_view(tensor)
        if view is None:
            if self._anew(value, tensor):
                self.besides += value.nbytes
            return
        self._views.append((number, view))
        straight = tensor.is_contiguous()
        if (self._summed or not straight) and _compat.base_is_contiguous(tensor):
            copied, arrives = _through_views(tensor, self._summed)
            if copied:
                self._remade.append(number)
            if not (arrives or straight):
                self._turned.append(number)

    def _look_at_part(self, value: Value, tensor: torch.Tensor, nbytes: int) -> int:
        """The number of the value that the part's gradient counts for."""
        made = _compat.gradient_of_part(tensor)
        if made == "own":
            return -1
        if made in ("joined", "stacked"):
            self._pieces.append((value.number, nbytes))
            if made == "joined":
                self._split.append(value.number)
        else:
            self.besides += _made_for(tensor, value.nbytes, self._arrived)
        return value.number

    def _look_at_windows(self, value: Value, tensor: torch.Tensor, nbytes: int) -> None:
        """Overlapping windows: added by the places of their elements, of all of the whole and of
        the windows. What a copy was given is handed on, that of a product is turned: made
        contiguous here."""
        places = torch.long.itemsize * (nbytes + value.nbytes) // tensor.element_size()
        handed = nbytes if self._handed_on else 0
        self._scattered = max(self._scattered, value.nbytes + places + handed)

    def note(self, log: OpLog) -> None:
        """Write all of it into the operation's log."""
        log.receivers, log.whole = tuple(self._receivers), tuple(self._whole)
        log.views, log.turned = tuple(self._views), tuple(self._turned)
        log.remade = tuple(self._remade)
        log.pieces = tuple([number for number, _ in self._pieces])
        log.piece_sizes = tuple([nbytes for _, nbytes in self._pieces])
        log.split, log.unmade = tuple(self._split), tuple(self._unmade)
        log.besides += self.besides + self._scattered  # one after another


def _made_for(tensor: torch.Tensor, whole: int, arrived: Counter[int]) -> int:
    """Bytes of gradients as large as the whole that are in memory for this part of it: each one is
    added to the first in place where they arrive, so there are two, however many parts are read."""
    node = _compat.arrives_at(tensor)
    if node is None:
        return whole
    arrived[node] += 1
    return whole if arrived[node] <= _AT_ONCE else 0


def _scattered(tensor: torch.Tensor) -> bool:
    """Whether it is overlapping windows, whose gradient is added to zeros as large as the whole."""
    return _overlaps(tensor) and bool(_compat.made_anew(tensor))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may be in one place, other than by being expanded."""
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride:
            if stride <= reach:
                return True
            reach += stride * (length - 1)
    return False


def summed(name: str, args: Sequence[Any]) -> tuple[int, ...]:
    """The dimensions along which a sum expands its gradient, if not along all."""
    if name != "aten::sum" or len(args) < 2 or not args[1]:
        return ()
    return tuple([dim % args[0].dim() for dim in args[1]]) if args[0].dim() else ()


def _through_views(tensor: torch.Tensor, expanded: Collection[int]) -> tuple[bool, bool]:
    # so that no mode of the program sees or counts it
    with _compat.below_autograd(), _compat.no_overrides():
        return _compat.gradient_through_views(tensor, expanded)


def writes_through(log: OpLog, target: torch.Tensor) -> None:
    """If an operation with a gradient writes `target` in place and that is a view, note it.

    Autograd then writes to the base: the backward copies the gradient of the base, and that of the
    view once more, which it gives to the operation. What that returns for the view is copied into
    the copy of the base's.
    """
    base = _compat.written_through(target)
    if not base:
        return
    log.through = base, target.numel() * target.element_size()
    add_through(log)


def add_through(log: OpLog, views_of_output: bool = False) -> None:
    """Add what the write through a view takes to what the operation's own backward takes.

    `views_of_output`: the backward returns the gradient that it was given, or none, for the view.
    """
    if log.through is None:
        return
    base, view = log.through
    log.temporaries += base + view
    log.left = max(0, log.left + base - (0 if views_of_output else view))
