"""Files that lowtide writes, whole or not at all.

Problem: a disk that is full, or Ctrl-C, in the middle of writing leaves half a file, and what it
replaced is gone. Invariant: a file has its old content until it has all of the new one, except in a
folder that takes no new files; links, permissions and what is no regular file (a pipe, a terminal)
are treated as by `open`. Imports nothing. Rejected: `tempfile`, whose files only their owner can
read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, beside its place first.

    Raises:
        OSError: it cannot be written.
    """
    place = Path(os.path.realpath(path))  # a link stays one
    if (place.exists() and not place.is_file()) or not place.name:
        Path(path).write_bytes(content)  # also raises what a folder raises
        return
    # Short, as the name of the file may be as long as a name can be.
    beside = place.with_name(f".lowtide-{secrets.token_hex(8)}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(content)
        if place.exists():
            shutil.copymode(place, beside)
        os.replace(beside, place)
    except PermissionError:  # a folder that takes no new files may have one that can be written
        with contextlib.suppress(OSError):
            os.unlink(beside)
        place.write_bytes(content)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
