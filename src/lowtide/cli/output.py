"""What verbs print and write.

Problem: text for people, JSON for programs, files that took a while to make. Invariant: a file that
is there is not overwritten without ``--force``, which is checked before the work and not after it;
JSON goes to stdout alone. Imports errors; `rich` where it is installed and stdout is a terminal.
Rejected: colours that carry meaning: with and without them the text is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide.errors import UsageError


def add_output(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Where to write."""
    more = f" (default: {default})" if default else ""
    parser.add_argument("-o", "--output", default=default, metavar="FILE", help=what + more)
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it is there")


def add_rows(parser: argparse.ArgumentParser, what: str) -> None:
    """How long a table may be."""
    parser.add_argument(
        "--rows", type=int, default=24, help=f"{what} to print, 0 for all (default: %(default)s)"
    )


def rows_of(arguments: argparse.Namespace) -> int | None:
    """The most rows to print; None: all of them."""
    if arguments.rows < 0:
        raise UsageError(f"--rows is a number of rows, 0 for all; got {arguments.rows}.")
    return arguments.rows or None


def free_place(arguments: argparse.Namespace) -> Path | None:
    """The file to write, if one was named. Raises `UsageError` if it must not be written."""
    if arguments.output is None:
        return None
    path = Path(arguments.output)
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Name the file to write with -o, {path / 'NAME'}.")
    if path.exists() and not arguments.force:
        raise UsageError(
            f"{path} exists and is not overwritten. Name another file with -o, or add --force."
        )
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into. Make it.")
    return path


def write(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says against writing a file becomes a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. Name another file.") from error


def show(text: str) -> None:
    """Print text, with figures and names set off where the terminal extra is installed."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console(soft_wrap=True).print(text, markup=False, highlight=True)
    else:
        print(text)


def show_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def wrote(path: Path) -> None:
    """Say so on stderr, so that stdout stays what it is."""
    print(f"wrote {path}", file=sys.stderr)
