"""What verbs print and write.

Problem: text for people, JSON for programs, files that took a while to make. Invariant: an existing
file is not overwritten without ``--force``, which is checked before the work and not after it; only
JSON goes to stdout with ``--json``. Imports errors; `rich` if it is installed and stdout is a
terminal. Rejected: colours that carry meaning: with and without them the text is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide.errors import UsageError
from lowtide.files import replace_file


def add_output(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Add the file to write."""
    more = f" (default: {default})" if default else ""
    parser.add_argument("-o", "--output", default=default, metavar="FILE", help=what + more)
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add the length of a table."""
    parser.add_argument(
        "--rows", type=int, default=24, help="rows to print, 0 for all (default: %(default)s)"
    )


def rows_of(arguments: argparse.Namespace) -> int | None:
    """The most rows to print; None: all of them."""
    if arguments.rows < 0:
        raise UsageError(f"--rows is how many rows to print, 0 for all; got {arguments.rows}.")
    return arguments.rows or None


def free_place(arguments: argparse.Namespace) -> Path | None:
    """The file to write, if one was named. Raises `UsageError` if it cannot be written."""
    if arguments.output is None:
        return None
    path = Path(arguments.output)
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long, a part of it that is a file
        raise UsageError(f"cannot write {path}: {error.strerror}. Name another file.") from error
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Name a file to write: -o {path / 'NAME'}.")
    if path.exists() and not arguments.force:
        raise UsageError(
            f"{path} exists and is not overwritten. Name another file with -o, or add --force."
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent} to write {path.name} into. Create it first."
        )
    return path


def write(path: Path, text: str) -> None:
    with writing(path):
        replace_file(path, text.encode())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's error about a file that is written into a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. Name another file.") from error


def show(text: str) -> None:
    """Print text; with the terminal extra installed, figures and names are highlighted."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console(soft_wrap=True).print(text, markup=False, highlight=True)
    else:
        _print(text)


def show_json(document: Any) -> None:
    _print(json.dumps(document, indent=2))


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # Python writes the rest as it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(
            f"cannot write the answer to stdout: {error.strerror}. Send it elsewhere."
        ) from error


def wrote(path: Path) -> None:
    """Say so on stderr, so that stdout has the results alone."""
    print(f"wrote {path}", file=sys.stderr)
