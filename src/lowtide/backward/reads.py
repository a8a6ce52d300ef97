"""Which inputs of an operation get gradients, and how much of them it reads.

Problem: autograd makes the gradient of a part (a slice, a piece of a split) as large as the whole,
and nothing in the operation that reads the part shows it. Invariant: only numbers are noted, no
tensor is kept. Imports `_compat` and the tape's references. Rejected: asking the view that made the
part, which need not have been recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide import _compat

if TYPE_CHECKING:
    from lowtide.observing.rebuild import OpLog
    from lowtide.tape.values import Ref


def look_at_reads(log: OpLog, refs: list[Ref], tensors: list[torch.Tensor], chunks: bool) -> None:
    """Note which inputs get gradients, and how much of them the operation reads. `chunks`: it
    splits its input into chunks that autograd does not know to be views."""
    receivers, whole, besides = [], [], 0
    views: list[tuple[int, int]] = []
    pieces: list[tuple[int, int]] = []
    split: list[int] = []
    for ref, tensor in zip(refs, tensors, strict=True):
        if not tensor.requires_grad:
            continue
        value = ref.value
        number = -1 if value is None else value.number
        nbytes = tensor.numel() * tensor.element_size()
        if chunks:
            besides += nbytes  # the gradients of all its chunks, until they are joined
        if value is not None and number >= 0:
            if nbytes == value.nbytes:
                whole.append(number)
                view, _ = _compat.first_view(tensor)
                if view is not None:
                    views.append((number, view))
            elif nbytes < value.nbytes:
                made = _compat.gradient_of_part(tensor)
                if made == "own":
                    number = -1
                elif made in ("joined", "stacked"):
                    pieces.append((number, nbytes))
                    if made == "joined":
                        split.append(number)
                else:
                    besides += value.nbytes
        receivers.append(number)
    log.receivers, log.whole = tuple(receivers), tuple(whole)
    log.views = tuple(views)
    log.pieces = tuple([number for number, _ in pieces])
    log.piece_sizes = tuple([nbytes for _, nbytes in pieces])
    log.split = tuple(split)
    log.besides += besides
