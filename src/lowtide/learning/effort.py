"""Which steps a budget measures, and which it plans.

Problem: measuring and planning a step pays if a step like it comes again; loops alternate between a
few steps, end an epoch with a short batch, or never take the same step twice. Invariant: what is
decided here costs or saves time, and never affects whether the limit holds: a step that was
measured above its limit is always planned, or refused. Imports awaited, newest and prepared.
Rejected: planning every step that no plan covers, which took a hundred times the step's own time
where teacher forcing is random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lowtide.learning.awaited import Awaited
from lowtide.learning.newest import Newest
from lowtide.running.prepared import Prepared, Signature

LESSONS = 2
"""Measured steps before a plan is final."""
_PATIENCE = 4  # for each 4 plans that no step followed, a step must come once more to get one
_COUNTED = 1000  # unplanned steps whose occurrences are counted
_ROW = 3  # times in a row that a step follows the plan for a larger one before it gets its own
_NEAR = 0.85  # from this share of the larger step's bytes on, its plan costs little more
_BETWEEN = 8  # at least this many steps follow a much too large plan before one of them is planned
_SHARE = 0.1  # the share of those steps' time that planning that one may take
_VAIN = 8  # from so many measured in vain on, one of 2 ** `_VAIN` steps is measured
_LONG = 8  # at most so many times the usual annealing is done beside training
_STEPS = 10  # and for about as long as this many steps take
_ANNEALING = 0.5  # seconds that the usual annealing takes
_GAIN = 2  # a short step without a plan takes longer by about this many times its own time


def annealings(step: float) -> int:
    """How many times the usual annealing a search beside training is worth, for steps of so many
    seconds: what it saves, it saves in each of them."""
    return min(max(int(_STEPS * step / _ANNEALING), 1), _LONG)


class Effort:
    """What a budget remembers about its steps for these decisions; one for each budget."""

    def __init__(self) -> None:
        self._awaited = Awaited()
        self._vain = 0  # steps that were measured, and did not follow the plan in question
        self._skipped = 0  # steps that might have followed it since, and were not measured
        self._hoped = False  # whether a step is measured because it may follow that plan
        self._row = 0, 0  # the last step that followed the plan for a larger one; times in a row
        self._between = _BETWEEN  # how many follow a much too large plan before one is planned
        self._far = _BETWEEN  # how many have since the last that was planned
        self._barren = 0  # plans that were made and not followed
        self._cost = 0.0  # seconds that the last plan took to make
        self._debt = 0.0  # seconds that plans took and have not brought back
        self._strange = False  # whether an unmeasured step did what its plan knows nothing of
        self._untried = False  # whether one followed a plan under which no step was measured
        self._came = Newest[int, int](_COUNTED)  # how often steps came that no plan covers
        # For them: searches in vain, steps since.
        self._planless = Newest[int, tuple[int, int]](_COUNTED)
        self._to_watch = 0  # so many steps are not left alone
        self._failed = 0  # steps that were, and came near the limit
        self._recurring = 0  # those that were and had come before, less those that had not
        self._planless_row = 0, 0  # the same for the steps that came last, whichever they were

    def to_measure(self, expected: Prepared | None, unmeasured: Callable[[], bool]) -> bool:
        """Whether to measure a step that begins now. `unmeasured`: whether a step that has a plan
        was never measured.

        A better plan that follows from a measured step is measured once, too: what was measured
        holds for every plan only if it was understood. Plans that are bounds are not. Where nobody
        knows which step comes next, most follow another plan than the expected one: measuring, a
        multiple of the time of a step of small operations, is then tried ever more seldom.
        """
        if expected is None:
            return self._may_get_a_plan()
        if _to_learn(expected):
            if self._skipped >= _skips(self._vain):
                self._skipped, self._hoped = 0, True
                return True
            self._skipped += 1
        if self._awaited.is_due:
            return True
        return self._awaited.waits and (self._strange or self._untried or unmeasured())

    def begins(self, step: int) -> None:
        """The step of this number begins."""
        self._awaited.begins(step)
        self._to_watch = max(0, self._to_watch - 1)

    def measured(self, followed: Prepared | None) -> None:
        """A measured step followed this plan, as it was when the step began, or none."""
        if followed is not None and _to_learn(followed):
            self._vain //= 2
        elif self._hoped:
            self._vain = min(self._vain + 1, _VAIN)
        self._hoped = False
        self._awaited.waited()

    def smaller(self, larger: Prepared, seen: Sequence[Signature], *, measured: bool) -> bool:
        """Whether to plan a step that followed the plan for a larger one.

        That plan recomputes more than this step needs to. A step that comes again and again gets
        its own plan. Of steps for which the plan is much too large, some do, as many as take little
        time: after a while there is a plan near each size.
        """
        if larger.peak == larger.plain_peak:
            return False
        step, (last, times) = hash(tuple(seen)), self._row
        self._row = step, times + 1 if step == last else 1
        if self._row[1] == _ROW:
            return True
        planned = sum(map(_bytes, larger.signatures))
        if larger.measured and sum(map(_bytes, seen)) >= _NEAR * planned:
            return False
        self._far += 1
        if self._far < self._between and not measured:
            return False
        self._far = 0
        return True

    def spent(self, seconds: float, step: float) -> None:
        """How long such a plan took, for a step of so many seconds: the next one waits until steps
        have taken many times that."""
        self._between = max(_BETWEEN, math.ceil(seconds / (_SHARE * step)) if step > 0 else 0)

    def spent_first(self, seconds: float) -> None:
        """How long a plan took for a step that none covered."""
        self._cost = seconds
        self._debt += seconds

    def followed(
        self,
        prepared: Prepared,
        *,
        covered: bool,
        measured: bool,
        strange: bool = False,
        far_below: bool = False,
    ) -> None:
        """A step followed one of the plans.

        What should be measured and was not is waited for: else a step that begins under another
        step's plan each time, as where both are at one place of a loop, would never be measured
        under its own.

        Args:
            prepared: the plan.
            covered: it is that of a larger step.
            measured: whether the step was measured.
            strange: it did what the plan knows nothing of.
            far_below: it fits however far its plan is off, so that the plan need not be tried.
        """
        self._barren //= 2
        if self._debt:
            self._debt = max(0.0, self._debt - _GAIN * prepared.seconds)
        self._awaited.followed()
        untried = _untried(prepared) and not far_below
        if covered or (prepared.measured and not strange and not untried):
            return
        if measured:
            self._awaited.met()
            self._strange = self._untried = False
        else:  # it recurs: measure it when it comes next
            gradients = frozenset(prepared.seen.parameters)  # to be allocated or there already
            self._awaited.missed(hash((prepared.digest, gradients, strange)))
            self._strange = self._strange or strange
            self._untried = self._untried or untried

    def again(self, prepared: Prepared) -> bool:
        """Whether to plan again a step that followed its plan and was measured."""
        return prepared.lessons < LESSONS or not prepared.measured

    def patient(self) -> bool:
        """Whether most of the recent plans have been of use."""
        return self._barren < _PATIENCE

    def leaves_alone(self) -> bool:
        """Whether steps that no plan covers may go unwatched: the first time that one comes, it
        gets no plan, see `first`."""
        return not self._to_watch and (not self.patient() or self._in_debt())

    def went_alone(self, seen: Sequence[Signature], *, in_vain: bool) -> None:
        """A step went unwatched; `in_vain`: only until it came near its limit. If most such steps
        come again, or some come near it, the next ones are watched."""
        again = self._counted(hash(tuple(seen))) >= max(1, self._barren // _PATIENCE)
        self._recurring = max(0, self._recurring + (1 if again else -1))
        self._failed = min(self._failed + 1, _VAIN) if in_vain else self._failed // 2
        if in_vain:
            self._to_watch = 1 << self._failed
        elif self._recurring >= _BETWEEN:
            self._to_watch, self._recurring = _BETWEEN, 0

    def _in_debt(self) -> bool:
        """Whether plans have taken more time than may be spent in advance."""
        return self._debt > _PATIENCE * self._cost

    def _counted(self, key: int) -> int:
        """How often a step that no plan covers has come before."""
        came = self._came.get(key, 0)
        self._came.put(key, came + 1)
        return came

    def in_vain(self) -> None:
        """A search found no plan."""
        self._barren += 1

    def planless(self, seen: Sequence[Signature]) -> None:
        """A measured step kept its limit without a plan, and a search found none that does. If it
        comes again, it is measured and searched for ever more seldom."""
        key = hash(tuple(seen))
        times, _ = self._planless.get(key, (0, 0))
        self._planless_row = min(times + 1, _VAIN), 0
        self._planless.put(key, self._planless_row)

    def more_room(self) -> None:
        """The limit has grown: there may be plans where there were none."""
        self._planless.clear()
        self._planless_row = 0, 0

    def _may_get_a_plan(self) -> bool:
        times, since = self._planless_row
        self._planless_row = times, since + 1
        return since >= _skips(times)

    def first(self, seen: Sequence[Signature], seconds: float, *, measured: bool = True) -> bool:
        """Whether to plan a step that no plan covered, and that takes so many seconds.

        Plans may take some time in advance. What they have taken beyond that has to come back from
        steps that follow them, unless this step has come so often that its own plan would have.
        """
        key = hash(tuple(seen))
        if key in self._planless:
            times, since = self._planless[key]
            self._planless[key] = times, since + 1
            if not measured or since < _skips(times):
                return False
        else:
            self._planless_row = 0, 0
        came = self._counted(key)
        self._debt = max(0.0, self._debt - _SHARE * seconds)
        if came < self._barren // _PATIENCE:
            return False
        if self._in_debt() and came * _GAIN * seconds < self._cost:
            return False
        self._barren += 1
        self._awaited.wait()
        return True


def _skips(vain: int) -> int:
    """How many steps to let pass after so many that were measured in vain."""
    return (1 << vain) - 2 if vain > 1 else 0


def _to_learn(prepared: Prepared) -> bool:
    """Whether there is something to learn from a measured step that follows this plan."""
    return prepared.lessons < LESSONS or _untried(prepared)


def _untried(prepared: Prepared) -> bool:
    """Whether no step was measured under a plan that was made from a measured one."""
    bound = prepared.grown or prepared.of_plain is not None
    return prepared.measured and not prepared.tried and not bound


def _bytes(signature: Signature) -> int:
    return sum(signature[1])
