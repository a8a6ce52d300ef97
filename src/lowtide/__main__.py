"""``python -m lowtide``: the command line.

Problem: the script may not be on the path. Invariant: it does what the script does. Imports cli.
Rejected: anything of its own.
"""

from lowtide.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
