"""A dictionary that forgets what was put into it longest ago.

Problem: a budget remembers things about steps for as long as a program runs, and there may be a new
step each time. Invariant: it has at most a fixed number of entries; putting one in again makes it
the newest, reading or assigning it does not. Imports nothing. Rejected: `functools.lru_cache`,
whose entries cannot be looked at; a weak dictionary, as most keys are hashes that nothing holds.
"""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(dict[K, V]):
    """The newest `most` entries, the oldest first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, key: K, value: V) -> None:
        """Enter this as the newest; if there are too many then, the oldest goes."""
        self.pop(key, None)
        self[key] = value
        if len(self) > self._most:
            del self[next(iter(self))]
