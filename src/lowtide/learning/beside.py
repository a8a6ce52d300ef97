"""Searching for plans beside training, whose steps meanwhile follow the plans that they have.

Problem: a search takes as long as many small steps, and a step that has a plan, or can follow that
for a larger step, need not wait for a better one. Invariant: a search gets values and returns a
value; its result is taken over between two steps, by the thread that runs them, and its errors are
raised there. Nothing is decided here. Imports prepared. Rejected: a process, which takes seconds to
start and the memory of another torch; a thread for first plans too: a step without a plan loses
more time than the wait takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lowtide.running.prepared import Prepared

Search = Callable[[], Prepared | None]


class Beside:
    """Searches that run one after another on a thread of their own, which ends with the last.

    It is not a daemon thread: a program that ends waits for the running search, a second or so, or
    as long as ten steps take, at most four seconds. None is begun for a thread that has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: deque[tuple[threading.Thread, Search]] = deque()
        self._found: list[Prepared] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a search runs; False in a process that was forked while one did."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def ask(self, search: Search) -> None:
        """Queue a search; it returns None if it finds no plan that serves."""
        with self._lock:
            self._wanted.append((threading.current_thread(), search))
            if self.busy:
                return
            self._thread = threading.Thread(target=self._run, name="lowtide-plans")
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is about to end, or there are too many
                self._thread = None
                self._wanted.clear()

    def found(self) -> list[Prepared]:
        """The plans found since the last call; raises the error of a search that failed."""
        if not self._found and self._error is None:
            return []
        with self._lock:
            found, self._found = self._found, []
            error, self._error = self._error, None
        if error is not None:
            raise error
        return found

    def wait(self) -> None:
        """Wait until all searches are over."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                asker, search = self._wanted.popleft()
            if not asker.is_alive():
                continue
            try:
                plan = search()
            except BaseException as error:
                self._error = error
                continue
            if plan is not None:
                with self._lock:
                    self._found.append(plan)
