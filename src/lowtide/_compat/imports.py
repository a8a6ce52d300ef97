"""Acting on a module as soon as something else imports it.

Problem: what a program imports in the middle of a step (Dynamo, Triton) has to be known from its
first call on. Invariant: as in `lowtide._compat`, of which this is a part; nothing is imported that
the program would not import. Imports the standard library only. Rejected: importing such modules
ahead, which takes seconds.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

_awaited: set[str] = set()


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls back once a module has been imported, and leaves the path."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: Any) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once this module is imported; only the first such call for a name counts."""
    if name not in _awaited:
        _awaited.add(name)
        sys.meta_path.insert(0, _OnImport(name, then))
