"""The recorder whose hot path is compiled.

Problem: recording in Python costs more than small kernels do. Invariant: same records, same rules;
what `core` leaves to Python runs the methods of `Recorder` itself. Imports the tape and, once it
has been built, the extension. Rejected: subclass tests all over the package; only
`engine.new_recorder` knows which recorder it makes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _compat
from lowtide.tape.recorder import Recorder
from lowtide.tape.tape import Tape


class _Fallback(Recorder):
    """Sees operators through a boxed fallback instead of a dispatch mode. The class that is made of
    it has the fallback's own part, `core.State`, before it."""

    extension: Any  # the `core` that it runs in
    open: Callable[[], None]
    shut: Callable[[], None]
    headroom: Any  # `core.Headroom` of a step that goes alone, or None
    calls: Any  # `core.Calls`: the step's, or those to compare it with while idle; or None
    takes_apart = False  # it sees operations on the parts, but not which wrapper they are of

    def __init__(self, tape: Tape) -> None:
        # Not as a mode: it is never entered as one, and what torch makes for that takes long.
        self._wholes = []
        self.begin(tape)

    def __enter__(self) -> _Fallback:
        self._thread = threading.get_ident()
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shut()

    def leave(self) -> None:
        self.shut()

    def met_unusual(self) -> None:
        calls = self.calls
        if calls is not None and calls.idle:
            self.wake()
        elif calls is not None:
            calls.unusual = True

    def wake(self) -> None:
        """The step is another one than the idle recorder was to compare it with."""
        calls, self.calls = self.calls, None
        self.tape.decisions.woken(calls.at)

    def begin(self, tape: Tape) -> None:
        Recorder.begin(self, tape)
        self.calls = self.headroom = None  # a second step in its context

    def sees_calls(self) -> bool:
        core = self.extension
        return core.current_recorder() is self and not _compat.excludes(core.KEY)

    def _aside(self, run: Callable[[], Any]) -> Any:
        return self.extension.aside(run)

    _beside = _aside

    def pack_slowly(self, tensor: torch.Tensor) -> Any:
        """What the fallback leaves to Python of what autograd saves; `run` is that of calls."""
        if _compat.is_wrapper(type(tensor)):
            self.tape.decisions.kept_whole()
            self.wrapper_met()
            self.keep_parts(tensor)
        return Recorder.pack(self, tensor)

    def writes_were_seen(self) -> None:
        """Nothing to do: it knows no wrappers."""

    def name(self, tensor: torch.Tensor, label: str) -> None:
        self.met_unusual()
        self.extension.aside(Recorder.name, self, tensor, label)


for _function in (_Fallback.run, _Fallback.pack_slowly):
    _compat.never_compiled(_function)


def recorder_class(core: Any) -> type[Recorder]:
    """The recorder over a loaded extension."""

    def unpacked_here(packed: Any) -> torch.Tensor:
        """Compiled autograd traces into the hooks that it is given. A function of the extension's
        it would warn of, and compile the Python code that this calls."""
        unpacked: torch.Tensor = core.unpack(packed)
        return unpacked

    _compat.never_compiled(unpacked_here)
    core.unpack_through(unpacked_here)

    class CompiledRecorder(core.State, _Fallback):  # type: ignore[misc, no-any-unimported]
        extension = core
        unpack = staticmethod(unpacked_here)
        new_value, new_entry, new_handle = core.Value, core.Entry, core.Handle
        new_table, new_counter = core.Table, staticmethod(core.counter_of)

        @staticmethod
        def new_count(table: Any) -> tuple[Any, Any]:
            live = core.Box(0)
            return live, core.Forget(table, live)

    return CompiledRecorder


def catch_higher_order(core: Any) -> None:
    """Have higher-order operators come to the recorder: they are dispatched in Python, which looks
    for a kernel under its key."""
    _compat.each_higher_order_operator(
        lambda operator: _compat.kernel_at_key(operator, core.KEY, _HigherOrder(core, operator))
    )


class _HigherOrder:
    """Runs a higher-order operator as an opaque call (rule 5)."""

    def __init__(self, core: Any, operator: Any) -> None:
        self.core = core
        self.operator = operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.core.current_recorder()
        if recorder is None:
            return self.core.aside(self._call, args, kwargs)
        recorder.met_unusual()
        return self.core.aside(recorder.run, self.operator, args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.operator(*args, **kwargs)
