"""``python -m lowtide.compiled``: build what is compiled now; prints the core's path, or why not.

Problem: the first step of a program would wait a minute for the compiler, and where it fails the
reason is not shown. Invariant: it builds what `lowtide` would build, and ends with 2 where nothing
can be built, and with 1 where the compiler fails, which a test run must not pass over. Imports
build. Rejected: building at installation, when torch may not be there yet.
"""

from __future__ import annotations

import sys

from lowtide.compiled.build import BuildError, build, cpu_allocator, possible

if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(1 if possible() is None else 2)
    try:
        cpu_allocator()
    except BuildError as failure:
        sys.stderr.write(f"without the allocator: {failure}\n")
