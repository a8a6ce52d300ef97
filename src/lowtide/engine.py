"""Which recorder runs: the compiled one or the one in Python.

Problem: the compiled recorder is many times cheaper, but must be built, and cannot be everywhere.
Invariant: both write the same records and give the same bits, so the choice is about time only;
without a compiler everything works. Nobody waits: while the build runs in the background, once,
steps are recorded in Python. Imports the recorders. Rejected: building at import, which makes
`import lowtide` take a minute; a silent choice, which makes timings a riddle.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide import _compat
from lowtide.compiled import build
from lowtide.errors import UsageError
from lowtide.planner.flow import CutWith
from lowtide.planner.polish import Polish
from lowtide.replay import unpack
from lowtide.tape.recorder import Recorder
from lowtide.tape.tape import Tape

_log = logging.getLogger("lowtide")
_WAYS = ("auto", "python", "compiled")

Recorder.unpack = staticmethod(unpack)


def _wrapper_met() -> None:
    _choice.wrappers = True


Recorder.wrapper_met = staticmethod(_wrapper_met)


class _Choice:
    """What has been found out so far; one a process."""

    def __init__(self) -> None:
        self.wanted: str | None = None  # None: not asked yet
        self.compiled: type[Recorder] | None = None
        self.core: Any = None
        self.reason = "no step has been recorded yet"
        self.building: threading.Thread | None = None
        self.built: Path | None = None
        self.active: type[Recorder] | None = None
        self.wrappers = False  # met one, of which only the recorder in Python sees the whole


_choice = _Choice()
_lock = threading.RLock()


def _after_fork() -> None:
    """A child has no thread that builds."""
    if _choice.building is not None and _choice.compiled is None:
        _choice.building = _choice.wanted = _choice.active = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def name() -> str:
    """``"compiled"`` or ``"python"``: what the next recording will run on, as far as known now."""
    _settle()
    return "compiled" if _choice.active is not Recorder and not _choice.wrappers else "python"


def reason() -> str:
    """Why it is that one: a sentence for a report."""
    _settle()
    if _choice.wrappers and _choice.active is not Recorder:
        return "tensors that consist of others (DTensor, nested ones) are recorded in Python"
    return _choice.reason


@contextmanager
def use(way: str) -> Iterator[None]:
    """Record on this engine inside: ``"python"``, ``"compiled"`` or ``"auto"``.

    ``"compiled"`` builds it now if need be, and raises if that is not possible. The environment
    variable ``LOWTIDE_ENGINE`` says the same for a whole process.

    Raises:
        UsageError: another name, or no compiled recorder here; the text says why.
    """
    with _lock:
        before, active, why = _choice.wanted, _choice.active, _choice.reason
        met, _choice.wrappers = _choice.wrappers, False
        _want(way)
    try:
        yield
    finally:
        with _lock:
            _choice.wanted, _choice.active, _choice.reason = before, active, why
            _choice.wrappers = met


def new_recorder(tape: Tape) -> Recorder:
    """A recorder for one recording, of the engine in force."""
    active = _choice.active
    if active is None or _choice.built is not None:
        _settle()
        active = _choice.active
    assert active is not None
    if _compat.compiled_before_modes() and _compat.modes_of_users():
        return Recorder(tape)  # which keeps everything then
    return Recorder(tape) if _choice.wrappers else active(tape)


def annealing() -> Polish | None:
    """What the planner ends its searches with; None where the Python recorder is in force."""
    found = _core_to_plan_with()
    return found.anneal if found is not None else None


def cutting() -> CutWith | None:
    """What the planner proves with; None where the Python recorder is in force."""
    found = _core_to_plan_with()
    return found.minimum_cut if found is not None else None


def _core_to_plan_with() -> Any:
    """Whoever only plans has no recorder built for it."""
    if _choice.wanted is None and _asked_for() == "auto" and not build.target().exists():
        return None
    _settle()
    return core()


def core() -> Any:
    """The loaded extension, or None where the Python recorder is in force."""
    return _choice.core if _choice.active is not Recorder else None


# ---------------------------------------------------------------------- choosing


def _asked_for() -> str:
    return os.environ.get("LOWTIDE_ENGINE", "auto")


def _settle() -> None:
    with _lock:
        if _choice.wanted is None:
            _want(_asked_for())
        if _choice.built is not None and _choice.wanted == "auto":
            built, _choice.built = _choice.built, None
            _load_or_say_why(built)


def _want(way: str) -> None:
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
    _choice.wanted = way
    _choice.active, _choice.reason = Recorder, f"the engine {way!r} was asked for"
    if way == "compiled" or (way == "auto" and _choice.compiled is not None):
        _choice.active = _choice.compiled
    elif way == "auto":
        _look_for_it()


def _look_for_it() -> None:
    """Load what has been built before, or begin to build it."""
    target = build.target()
    if target.exists():
        _load_or_say_why(target)
        return
    impossible = build.possible()
    if impossible is not None:
        _choice.reason = impossible
        return
    _choice.reason = "the compiled recorder is being built"
    if _choice.building is None:
        _log.warning(
            "lowtide builds its compiled recorder in the background, once for this version of "
            "torch (about a minute); until then steps are recorded in Python, with the same "
            "results. LOWTIDE_ENGINE=python does without."
        )
        _choice.building = threading.Thread(target=_build_beside, daemon=True)
        _choice.building.start()


def _build_beside() -> None:
    """In a process of its own, so that training keeps its thread and its environment."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lowtide.compiled"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    except (OSError, TypeError) as error:  # no interpreter to be found, as in an embedded one
        _choice.reason = f"the build could not be started: {error}"
        return
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and said:
        _choice.built = Path(said[-1])
    else:
        _choice.reason = said[-1] if said else "the build failed without a word"


def _load_or_say_why(path: Path) -> None:
    try:
        _load(path)
    except (build.BuildError, ImportError, RuntimeError, OSError) as error:
        _choice.reason = f"the compiled recorder cannot be loaded: {error}"
        return
    _choice.active = _choice.compiled
    _choice.reason = "it has been built for this version of torch"


def _load(path: Path) -> None:
    if _choice.compiled is not None:
        return
    from lowtide.compiled.recorder import recorder_class

    build.check_owner(path)

    loader = importlib.machinery.ExtensionFileLoader(build.MODULE, str(path))
    spec = importlib.util.spec_from_loader(build.MODULE, loader)
    assert spec is not None
    core = importlib.util.module_from_spec(spec)
    loader.exec_module(core)
    _compat.use_recorder_key(core.KEY)
    _choice.core = core
    _choice.compiled = recorder_class(core)
