"""The pages of `lowtide/compiled/cpu/pages.h`, without torch, and what the kernel says of them.

Problem: what the process takes must be what is counted, page by page, for any order of blocks.
Invariant: `driver.cpp` sees the members of `Pages`, and asks the kernel (mincore) which pages are
here. Imports lowtide's way of calling a compiler. Rejected: the resident size of the process, in
which Python's own memory moves.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from lowtide.compiled import build

_MODULE = "_cpu_pages_driver"


def driver() -> ModuleType:
    """`Pages(unit)`, an object with `take(size)`, `give(place)`, `reserve(size or None)`,
    `fit_to(size)`, `shed()` and `figures()`. `flaw()` says what of the bookkeeping is inconsistent,
    or None; `resident()` what the kernel has of it. `fill` and `holds` write and read blocks."""
    source = Path(__file__).with_name("driver.cpp")
    path = build.library(source, _MODULE, *build.CPU_HEADERS)
    return build.load(path, _MODULE)
