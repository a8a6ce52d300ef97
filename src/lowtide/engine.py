"""Which recorder runs: the compiled one or the one in Python.

Problem: the compiled recorder is many times cheaper, but has to be built, and cannot be everywhere.
Invariant: both write the same records and give the same bits, so the choice affects only times and
plans, and everything works without a compiler. Nothing waits for the build: it runs once, in the
background, and steps are recorded in Python meanwhile. Imports the recorders. Rejected: building at
import, which makes `import lowtide` take a minute; a silent choice, which makes timings a riddle.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide import _compat
from lowtide.compiled import build
from lowtide.errors import UsageError
from lowtide.planner.flow import CutWith, Network
from lowtide.planner.polish import Polish
from lowtide.planner.relaxed import PriceWith
from lowtide.planner.simulate import Compiled, Lists, Simulator
from lowtide.replay import unpack
from lowtide.tape import generators, leafstates, watch
from lowtide.tape.recorder import Recorder
from lowtide.tape.tape import Tape
from lowtide.tape.values import Ref

_log = logging.getLogger("lowtide")
_WAYS = ("auto", "python", "compiled")

Recorder.unpack = staticmethod(unpack)


def _wrapper_met() -> None:
    _choice.wrappers = True


Recorder.wrapper_met = staticmethod(_wrapper_met)


class _Choice:
    """Which engine was chosen, and why; one object per process."""

    def __init__(self) -> None:
        self.wanted: str | None = None  # None: not chosen yet
        self.compiled: type[Recorder] | None = None
        self.core: Any = None
        self.reason = "no step has been recorded yet"
        self.told: str | None = None  # why there is no compiled recorder, once that was said
        self.building: threading.Thread | None = None
        self.built: Path | None = None
        self.active: type[Recorder] | None = None
        self.wrappers = False  # a wrapper subclass was met: only the Python recorder sees those


_choice = _Choice()
_lock = threading.RLock()


def _after_fork() -> None:
    """A child process does not have the thread that waits for the build: choose anew there."""
    if _choice.building is not None and _choice.compiled is None:
        _choice.building = _choice.wanted = _choice.active = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def name() -> str:
    """``"compiled"`` or ``"python"``: the engine of the next recording, as far as known now."""
    _settle()
    return "compiled" if _choice.active is not Recorder and not _choice.wrappers else "python"


def reason() -> str:
    """Why the engine is the one that `name` says, as a sentence for a report."""
    _settle()
    if _choice.wrappers and _choice.active is not Recorder:
        return "tensors that consist of others (DTensor, nested ones) are recorded in Python"
    return _choice.reason


@contextmanager
def use(way: str) -> Iterator[None]:
    """Inside this context, record with the engine ``"python"``, ``"compiled"`` or ``"auto"``.

    ``"compiled"`` builds it now if it is not built yet, and raises if that is not possible. The
    environment variable ``LOWTIDE_ENGINE`` makes the same choice for a whole process.

    Raises:
        UsageError: there is no engine of this name, or the compiled one cannot be used here; the
            text says why.
    """
    before, active, why = _choice.wanted, _choice.active, _choice.reason
    met = _choice.wrappers
    try:
        with _lock:
            _want(way)
            _choice.wrappers = False
        yield
    finally:
        with _lock:
            _choice.wanted, _choice.active, _choice.reason = before, active, why
            _choice.wrappers = met


def new_recorder(tape: Tape) -> Recorder:
    """A recorder for one recording, of the engine in use."""
    if _choice.wanted is None or _choice.built is not None:
        _settle()
    active = _choice.active
    assert active is not None
    if _compat.compiled_before_modes() and _compat.modes_of_users():
        return Recorder(tape)  # it keeps everything in this case
    return Recorder(tape) if _choice.wrappers else active(tape)


def annealing(times: int = 1) -> Polish | None:
    """The compiled core's annealing, which ends the planner's searches; None on Python's engine.

    `times`: how many times the usual work it may do, for a search that nobody waits for.
    """
    found = _core_to_plan_with()
    if found is None or times == 1:
        return None if found is None else found.anneal
    anneal: Polish = found.anneal
    return lambda graph, choices, retain, limit, work, *ends: anneal(
        graph, choices, retain, limit, times * work, *ends
    )


def cutting() -> CutWith | None:
    """The compiled core's minimum cut, whose results are those of the planner's own; None on
    Python's engine. A proof that is given it does more work."""
    found = _core_to_plan_with()
    return found.minimum_cut if found is not None else None


def pricing() -> PriceWith | None:
    """The compiled core's prices for the rows of a proof; None on Python's engine, which proves
    less."""
    found = _core_to_plan_with()
    return found.prices if found is not None else None


def _simulating() -> Callable[[Lists], Compiled] | None:
    """The compiled core's simulator, whose results are those of the planner's own."""
    found = _core_to_plan_with()
    return found.Simulator if found is not None else None


Simulator.compiled = staticmethod(_simulating)
Network.compiled = staticmethod(cutting)


def _core_to_plan_with() -> Any:
    """The core, for planning alone, which does not start a build."""
    if _choice.wanted is None and _asked_for() == "auto" and not _is_built():
        return None
    _settle()
    return core()


def _is_built() -> bool:
    try:
        return build.is_there(build.target())
    except build.BuildError:
        return False


def core() -> Any:
    """The loaded extension, or None on Python's engine."""
    return _choice.core if _choice.active is not Recorder else None


# ---------------------------------------------------------------------- choosing


def _asked_for() -> str:
    return os.environ.get("LOWTIDE_ENGINE", "auto")


def _settle() -> None:
    with _lock:
        if _choice.wanted is None:
            _want(_asked_for())
        if _choice.built is not None and _choice.wanted == "auto":
            _load_or_say_why(_choice.built)
            _choice.built = None


def _want(way: str) -> None:
    """Choose. What is chosen counts only once `wanted` says so: after an interrupt, which may have
    come while the core was being loaded, the next recording chooses again."""
    if way not in _WAYS:
        raise UsageError(f"there is no engine {way!r}: choose one of {', '.join(_WAYS)}.")
    if way == "compiled" and _choice.compiled is None:
        try:
            _load(build.build())
        except (build.BuildError, ImportError, RuntimeError) as error:
            raise UsageError(
                f"the compiled engine cannot be used here: {error}. Use the engine 'python' or "
                "'auto': results are the same."
            ) from error
    _choice.active, _choice.reason = Recorder, f"the engine {way!r} was asked for"
    if way == "compiled" or (way == "auto" and _choice.compiled is not None):
        _choice.active = _choice.compiled
    elif way == "auto":
        _look_for_it()
    _choice.wanted = way


def _look_for_it() -> None:
    """Load an earlier build, or start one."""
    if _is_built():
        _load_or_say_why(build.target())
        return
    impossible = _impossible()
    if impossible is not None:
        _python_stays(impossible)
        return
    _choice.reason = "the compiled recorder is being built"
    if _choice.building is None or _choice.building.ident is None:  # that one was not started
        _log.warning(
            "lowtide builds its compiled recorder in the background, once for this version of "
            "torch (about a minute); until then steps are recorded in Python, with the same "
            "results. LOWTIDE_ENGINE=python does without."
        )
        _choice.building = threading.Thread(target=_build_beside, name="lowtide-core", daemon=True)
        _choice.building.start()


def _impossible() -> str | None:
    try:
        build.target()
    except build.BuildError as error:
        return str(error)
    return build.possible()


def _build_beside() -> None:
    """Build in a separate process, which leaves training's interpreter and environment alone."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lowtide.compiled"],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # as names of files are read
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "PYTHONIOENCODING": "utf-8:surrogateescape",
            },
        )
    except (OSError, TypeError) as error:  # no executable, as where Python is embedded
        _python_stays(f"the build could not be started: {error}")
        return
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and said:
        _choice.built = Path(said[-1])
    else:
        _python_stays(said[-1] if said else "the build failed without a word")


def _python_stays(why: str) -> None:
    """There will be no compiled recorder in this process: say so once, as it can be many times
    slower where operations are small."""
    _choice.reason = why
    if _choice.told == why:
        return
    _choice.told = why
    _log.warning(
        "lowtide goes on without its compiled recorder: %s. Steps are recorded in Python, with the "
        "same results and about 50 microseconds more for each operation. `python -m "
        "lowtide.compiled` tries again and shows what the compiler says; LOWTIDE_ENGINE=python "
        "does without, and without this line.",
        why,
    )


def _load_or_say_why(path: Path) -> None:
    try:
        _load(path)
    except (build.BuildError, ImportError, RuntimeError, OSError) as error:
        _python_stays(f"the compiled recorder cannot be loaded: {error}")
        return
    _choice.active = _choice.compiled
    _choice.reason = "it has been built for this version of torch"


def _load(path: Path) -> None:
    if _choice.compiled is not None:
        return
    from lowtide.compiled.recorder import catch_higher_order, recorder_class

    core: Any = build.load(path, build.MODULE)
    if core.Ref is not Ref:  # Python loads such a module once, and it knows that import's classes
        raise ImportError("lowtide was imported before in this process, and that import has it")
    _compat.use_recorder_key(core.KEY)
    _compat.ask_whether_current(core.is_current)
    _compat.compare_counters_with(core.same_counter)
    generators.copy_with(core.copy_generator)
    watch.use(core.watched)
    leafstates.use(core.leaf_states)
    catch_higher_order(core)
    _choice.core = core
    _choice.compiled = recorder_class(core)
