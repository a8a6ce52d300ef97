"""A progress bar on stderr, for whatever takes longer than a second.

Problem: a solver that is silent for a minute looks as if it hung. Invariant: nothing is written if
stderr is not a terminal, and nothing within the first second; the line is gone when the work is
done. Imports nothing; `rich` if it is installed. Rejected: a bar that guesses how long a stage
takes; this one counts stages, and says which one runs and for how long.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
import time
from typing import TextIO

_PATIENCE = 1.0
_TICK = 0.2
_BAR = 24


class Progress:
    """Context manager: ``progress.stage("...")`` before each of `count` pieces of work."""

    def __init__(self, count: int, stream: TextIO | None = None) -> None:
        self._count = count
        self._done = -1
        self._what = ""
        self._stream = sys.stderr if stream is None else stream
        self._began = time.monotonic()
        self._stage_began = self._began
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []

    def stage(self, what: str) -> None:
        """Begin the next piece of work."""
        self._done += 1
        self._what = what
        self._stage_began = time.monotonic()

    def note(self, text: str) -> None:
        """Add a line that stays; it is written when the bar is gone."""
        self._notes.append(text)

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for text in self._notes:
            print(text, file=self._stream)

    def _run(self) -> None:
        if self._over.wait(_PATIENCE):
            return
        if importlib.util.find_spec("rich") is not None and self._stream is sys.stderr:
            self._run_rich()
            return
        while True:
            self._stream.write("\r" + self.line())
            self._stream.flush()
            if self._over.wait(_TICK):
                break
        self._stream.write("\r" + " " * len(self.line()) + "\r")
        self._stream.flush()

    def line(self) -> str:
        """The bar as text."""
        done = min(max(self._done, 0), self._count)
        filled = _BAR * done // max(1, self._count)
        seconds = time.monotonic() - self._stage_began
        text = f"[{'#' * filled}{'.' * (_BAR - filled)}] {self._what} {seconds:.0f} s"
        return f"{text:<72}"[: max(20, shutil.get_terminal_size().columns - 1)]

    def _run_rich(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (BarColumn(_BAR), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(self._what, total=self._count)
            while not self._over.wait(_TICK):
                bars.update(task, description=self._what, completed=max(self._done, 0))
