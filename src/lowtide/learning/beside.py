"""Plans that are looked for beside training, while its steps go by the ones that they have.

Problem: to look for a plan takes as long as many small steps do, and a step that has one, or may go
by that for a larger step, need not wait for a better. Invariant: a search is given values and gives
a value; what was found is taken up between two steps, by the thread that takes them, and what goes
wrong in a search is raised there. Nothing here decides anything. Imports prepared. Rejected: a
process, which takes seconds to start and the memory of another torch; a thread for first plans as
well: what a step without one takes longer is more than the wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lowtide.running.prepared import Prepared

Search = Callable[[], Prepared | None]


class Beside:
    """Searches that run one after the other on a thread of their own, which ends with the last.

    It is no daemon: a program that ends waits for the search that runs, a second or so. None is
    begun for a thread that has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: deque[tuple[threading.Thread, Search]] = deque()
        self._found: list[Prepared] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a search runs; in a process that was forked from where it did, none does."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def ask(self, search: Search) -> None:
        """Look for a plan; None is none that serves."""
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
        """The plans that were found since this was asked last."""
        if not self._found and self._error is None:
            return []
        with self._lock:
            found, self._found = self._found, []
            error, self._error = self._error, None
        if error is not None:
            raise error
        return found

    def wait(self) -> None:
        """Until all searches are over."""
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
