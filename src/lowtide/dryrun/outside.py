"""A loss to come: what one outside of a model's forward stores, and takes for itself.

Problem: a dry run of a forward alone, for `lowtide.fit`, does not see the loss, but the first step
under its plan has it: the gradient of a result is as large as that, and so is what a loss saves and
makes on the way. Invariant: a loss takes three times the largest result besides the gradient of
that (a first step without a plan leaves more, as only that step recomputes for it), and none is to
come if a result is one number; the room for it is a guess, so that it makes plans smaller and
refuses nothing. Imports nothing of lowtide.
Rejected: the sum of the results, whose gradient is one number and takes no memory (first steps were
up to 31 % over their limit).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stand_in(results: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A loss of the largest of these results that require grad, run outside of the recording; None:
    one of them is the loss, or none can have such a loss.

    Its logarithms are what it saves; the backward of their squares makes three tensors.
    """
    if any(result.numel() == 1 for result in results):
        return None
    known = [t for t in results if t.is_floating_point() and t.layout is torch.strided and t.dim()]
    if not known:
        return None
    largest = max(known, key=lambda t: t.numel() * t.element_size())
    return largest.log_softmax(-1).square().sum()
