"""What a verification has found, as figures and as text.

Problem: an answer of "the same" has to say what was compared, and one of "different" where to look.
Invariant: true only if everything that was compared had the plain step's bits, nothing differs
between two plain steps, and the limit was kept. Imports observed, origin, limits, texttable.
Rejected: an exception where bits differ, which would hide the rest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide.export.document import Trial
from lowtide.limits import format_bytes
from lowtide.texttable import count_of, table
from lowtide.verifying.observed import Difference
from lowtide.verifying.origin import Origin

ALL = "all recomputed"
"""The label of a step that is one region, in which all is recomputed that can be."""
_MOST = 5  # differences that are printed
_PLURAL = {"input": "inputs", "random state": "random states"}


@dataclass(frozen=True)
class VerifiedStep:
    """One step with lowtide.

    Attributes:
        trial: its measured peak in bytes and its seconds. It is labelled "planned", with the peak
            that its plan predicted; "unplanned", under the limit without a plan; "as it is",
            without a limit of `verify`'s; or "all recomputed", as one region, without a limit.
        replayed: how many operations were recomputed.
        differences: what it has left with other bits than the plain step.
    """

    trial: Trial
    replayed: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True, repr=False)
class Verification:
    """Whether steps with lowtide have left the bits of the plain step. True if they have, all of
    it could be compared, and the limit was kept; prints as a report.

    Attributes:
        limit: the limit of the steps, in bytes; None if they ran as they are.
        plain: the plain step, measured.
        steps: the steps with lowtide.
        compared: how many tensors were compared, by kind: "result", "gradient", "parameter",
            "buffer", "input", "optimizer state", "random state".
        unrepeatable: what differs between plain steps, of which nothing can be said.
        origin: the first saved tensor of the forward that came back with another content, if bits
            differ and steps that are recorded in Python show it.
    """

    limit: int | None
    plain: Trial
    steps: tuple[VerifiedStep, ...]
    compared: dict[str, int]
    unrepeatable: tuple[Difference, ...]
    origin: Origin | None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What differed from the plain step, in the order of the steps."""
        return tuple(found for step in self.steps for found in step.differences)

    @property
    def same(self) -> bool:
        """Whether all could be compared, and had the plain step's bits."""
        return not self.differences and not self.unrepeatable

    @property
    def held(self) -> bool:
        """Whether no step took more than its limit. All that the function allocates counts here,
        also after its last backward (the first state of an optimizer), where a limit has ended."""
        return self.limit is None or self.highest <= self.limit

    @property
    def highest(self) -> int:
        """The highest measured peak in bytes of the steps under the limit, if there is one."""
        limited = [step for step in self.steps if step.trial.label != ALL]
        return max(step.trial.measured for step in limited)

    @property
    def replayed(self) -> int:
        """The most operations that a step has recomputed. With 0 nothing was put to the test."""
        return max(step.replayed for step in self.steps)

    def __bool__(self) -> bool:
        return self.same and self.held

    def __repr__(self) -> str:
        found = "the same bits" if self.same else "not the same bits"
        return f"<Verification: {found}, peak {format_bytes(self.highest)}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types: sizes in bytes, times in seconds."""
        told = asdict(self)
        return {**told, "same": self.same, "held": self.held, "replayed": self.replayed}

    def __str__(self) -> str:
        return "\n".join([self.verdict, "", *self._table(), *self._details()])

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two: the first line of the report."""
        if self.differences:
            said = f"DIFFERENT: not everything has the bits of the plain step, in {self._where()}."
        elif self.unrepeatable:
            said = (
                "NOT COMPARABLE: two plain steps differ. What does not differ in them is the same "
                f"in {self._where()}."
            )
        else:
            said = f"The same bits: {self._what()}, in {self._where()}."
        if not self.held:
            said += f" The limit was EXCEEDED: {format_bytes(self.highest)} were measured."
        if not self.compared.get("gradient"):
            said += " There is no gradient: the step left none, nor a result that requires grad."
        elif not self.replayed:
            said += " Nothing was recomputed, so little was put to the test."
        return said

    def _where(self) -> str:
        limited = [step for step in self.steps if step.trial.label != ALL]
        said = count_of(len(limited), "step")
        if self.limit is not None:
            said += f" under {format_bytes(self.limit)}"
        return said + (" and in one that recomputes all" if len(limited) < len(self.steps) else "")

    def _what(self) -> str:
        kinds = [
            f"{count} {_PLURAL.get(kind, kind + 's') if count != 1 else kind}"
            for kind, count in self.compared.items()
            if count
        ]
        return ", ".join(kinds)

    def _table(self) -> list[str]:
        rows = [[*_measured(self.plain), "", "plain", ""]]
        for step in self.steps:
            found = count_of(len(step.differences), "difference") if step.differences else "same"
            rows.append([*_measured(step.trial), str(step.replayed), step.trial.label, found])
        return table(("peak", "seconds", "replayed", "step", "bits"), rows, right=3)

    def _details(self) -> list[str]:
        said = []
        if self.unrepeatable:
            said += ["", "Other bits in another plain step, from the same state:"]
            said += _listed(self.unrepeatable)
            said.append(
                "A kernel is not deterministic (torch.use_deterministic_algorithms), or the step "
                "goes on from a state that is not put back: a loader, an iterator, a file."
            )
        if self.differences:
            first = next(step for step in self.steps if step.differences)
            said += ["", f"Other bits than the plain step's, in the one {first.trial.label!r}:"]
            said += _listed(first.differences)
            if self.origin is not None:
                said.append(f"It begins with {self.origin}: its replay has another content.")
            said.append(
                "Something wrote to a tensor unseen (rule 4: a kernel of an extension, NumPy, a "
                "raw pointer), or an operator does not compute the same twice. If it is neither, "
                "this is a fault in lowtide: please report it."
            )
        return said


def _measured(trial: Trial) -> list[str]:
    return [format_bytes(trial.measured), f"{trial.seconds:.3f}"]


def _listed(found: tuple[Difference, ...]) -> list[str]:
    lines = [f"  {one}" for one in found[:_MOST]]
    left = len(found) - _MOST
    return [*lines, f"  and {left} more"] if left > 0 else lines
