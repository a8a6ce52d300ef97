"""`ctc_loss` of fake tensors, by the operators that real ones get.

Problem: how large its table of probabilities is depends on the lengths of the targets, which torch
does not look up in fake tensors; and it has other operators for those. Invariant: operators and
sizes are those of real tensors on the CPU; only what is in the lengths has to be known, whatever
the rest depends on. Imports `_compat`. Rejected: the longest length that the targets leave room
for, as the loss mostly takes less memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import _compat
from lowtide._compat import fakes

NAME = "aten::_ctc_loss"
_LENGTHS = 3  # the place of those of the targets among its arguments
_MEAN, _SUM = 1, 2
_BATCHED = 3  # dimensions


def ctc_loss(usual: Callable[..., Tensor], contents: Callable[[Any], Any]) -> Callable[..., Tensor]:
    """This function, for fake tensors on the CPU as for real ones. `contents`: of one of them."""

    @functools.wraps(usual)
    def call(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = _MEAN,
        zero_infinity: bool = False,
    ) -> Tensor:
        lengths = input_lengths, target_lengths
        fake = fakes.is_fake(log_probs) and log_probs.device.type == "cpu"
        if not fake or log_probs.dim() != _BATCHED:
            return usual(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        inputs, most = [_listed(each, contents) for each in lengths]
        loss = _compat.ctc_losses(log_probs, targets, inputs, most, blank, zero_infinity)
        if zero_infinity:
            none = torch.zeros((), dtype=loss.dtype, device=loss.device)
            loss = torch.where(torch.eq(loss, float("inf")), none, loss)
        if reduction == _MEAN:
            parts = torch.tensor(most, dtype=loss.dtype).clamp_min(1)
            return torch.div(loss, parts).mean()
        return loss.sum() if reduction == _SUM else loss

    return call


def _listed(lengths: Any, contents: Callable[[Any], Any]) -> list[int]:
    if isinstance(lengths, Tensor):
        lengths = contents(lengths.to("cpu", torch.long).contiguous()).tolist()
    return list(lengths)


def on_shapes(args: tuple[Any, ...]) -> list[Tensor] | None:
    """The losses and the table, without memory; None where the lengths are in tensors."""
    if isinstance(args[_LENGTHS], Tensor) or args[0].dim() != _BATCHED:
        return None
    steps, batch, _ = args[0].shape
    places = 2 * max(args[_LENGTHS], default=0) + 1
    with _compat.disable_dispatch():
        return [
            torch.empty(shape, dtype=args[0].dtype, device="meta")
            for shape in ((batch,), (batch, steps, places))
        ]
