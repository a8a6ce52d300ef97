"""``python -m lowtide.compiled``: build the extension now; prints its path, or why it failed.

Problem: the first step of a program would wait a minute for the compiler, and where it fails the
reason is not shown. Invariant: it builds what `lowtide` would build. Imports build. Rejected:
building at installation, when torch may not be there yet.
"""

from __future__ import annotations

import sys

from lowtide.compiled.build import BuildError, build

if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as failure:
        sys.exit(str(failure))
