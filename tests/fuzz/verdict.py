"""What a run did, as copies, and the comparison of two runs.

The problem: bits must be compared after the tensors are gone, and a run that raised says something
too: whether an error of lowtide's is right depends on what plain did.

The invariant: an outcome holds no tensor, and every comparison ends in exactly one of KINDS.
Imports torch and numpy only.

Rejected: a boolean. "Refused" and "different" are repaired in different places of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

KINDS = {
    "equal": "the same bits",
    "raised": "plain raises, and so does the other",
    "lenient": "only plain raises, because autograd saw a saved tensor change",
    "stale": "refused, because something was written where no recorder could see it (rule 4)",
    "unseen": "other bits, as it wrote behind autograd where no recorder could see it (rule 4)",
    "unstable": "two plain runs differ: says nothing",
    "different": "other bits than plain",
    "refused": "plain runs, the other raises",
    "accepted": "plain raises, the other does not",
    "leaked": "something outlives the step that plain frees",
    "exceeded": "the measured peak is above the limit (rule 13)",
}
FAILURES = ("different", "refused", "accepted", "leaked", "exceeded")
# How autograd says that what it has saved was written since.
VERSION_CHECKS = ("modified by an inplace operation", "and its base or another view of its base")

Bits = tuple[object, ...]


@dataclass
class Outcome:
    """What one run did: its record up to the error, if there was one."""

    record: list[tuple[str, Bits]] = field(default_factory=list)
    error: BaseException | None = None
    where: str = ""
    leaked: list[int] = field(default_factory=list)
    watched: int = 0
    freed: int = 0
    fraction: float = 1.0
    finite: bool = True
    exceeded: str = ""

    @property
    def message(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of KINDS; `freed` counts watched storages gone after the forward."""

    kind: str
    detail: str = ""
    watched: int = 0
    freed: tuple[int, int] = (0, 0)

    @property
    def bad(self) -> bool:
        return self.kind in FAILURES


def bits(value: object) -> Bits:
    """A tensor as (dtype, shape, requires_grad, bytes); anything else as it is.

    Views and numpy only: an allocation of torch's would count against the budget under test.
    """
    if not isinstance(value, Tensor):
        return (value,)
    raw = np.ascontiguousarray(array(value)).tobytes()
    return (str(value.dtype), tuple(value.shape), value.requires_grad, raw)


def array(value: Tensor) -> np.ndarray[Any, Any]:
    plain = (value.detach().to_dense() if value.is_sparse else value.detach()).resolve_conj()
    plain = plain.resolve_neg()
    return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()


def judge(plain: Outcome, other: Outcome) -> Verdict:
    """Compare a run under lowtide (or torch's checkpoint) with the plain run."""
    if plain.error is not None:
        if other.error is not None:
            return Verdict("raised", plain.message)
        if any(text in plain.message for text in VERSION_CHECKS):
            return Verdict("lenient", plain.message)
        return Verdict("accepted", f"plain raised in {plain.where}: {plain.message}")
    if other.error is not None:
        return Verdict("refused", f"raised in {other.where}: {other.message}")
    for (label, expected), (name, found) in zip(plain.record, other.record, strict=False):
        if label != name or expected != found:
            return Verdict("different", _difference(label, expected, name, found))
    if len(plain.record) != len(other.record):
        return Verdict("different", f"{len(plain.record)} against {len(other.record)} entries")
    leaked = sorted(set(other.leaked) - set(plain.leaked))
    if leaked:
        return Verdict("leaked", f"watched storages {leaked} outlive the step")
    return Verdict("exceeded", other.exceeded) if other.exceeded else Verdict("equal")


def _difference(label: str, expected: Bits, name: str, found: Bits) -> str:
    if label != name:
        return f"plain recorded {label}, the other run {name}"
    return f"{label}: plain {_show(expected)}, got {_show(found)}"


def _show(value: Bits) -> str:
    if len(value) != 4:
        return str(value[0])[:300]
    dtype, shape, requires_grad, raw = value
    assert isinstance(dtype, str)
    assert isinstance(shape, tuple)
    assert isinstance(raw, bytes)
    known = getattr(torch, dtype.removeprefix("torch."))
    buffer = torch.frombuffer(bytearray(raw), dtype=known) if raw else torch.empty(0)
    head = ", ".join(f"{v:.9g}" for v in buffer[:6].double().tolist())
    return f"{dtype}{list(shape)} requires_grad={requires_grad} [{head}...]"
