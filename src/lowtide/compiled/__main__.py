"""``python -m lowtide.compiled``: build the extension now; prints its path, or why it failed."""

from __future__ import annotations

import sys

from lowtide.compiled.build import BuildError, build

if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except BuildError as failure:
        sys.exit(str(failure))
