"""Files are written whole or not at all."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from lowtide import files
from lowtide.files import replace_file
from once import on_one_recorder

pytestmark = on_one_recorder


def test_permissions_and_links_are_those_of_the_file(tmp_path: Path) -> None:
    place, link = tmp_path / "file", tmp_path / "link"
    place.write_bytes(b"old")
    place.chmod(0o640)
    link.symlink_to(place)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert place.read_bytes() == b"new"
    assert place.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_new_file_is_as_readable_as_any(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    replace_file(tmp_path / ("x" * 255), b"")
    assert (tmp_path / ("x" * 255)).stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_to_nothing_makes_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes")
def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    replace_file(tmp_path / "pipe", b"new")
    reader.join()
    assert read == [b"new"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"new")


def test_a_folder_that_takes_no_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"old")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", refuse, raising=False)
    replace_file(place, b"new")
    assert place.read_bytes() == b"new"
