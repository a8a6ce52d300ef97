"""``python -m lowtide``: the command line, if the script is not on the path. Imports cli."""

from lowtide.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
