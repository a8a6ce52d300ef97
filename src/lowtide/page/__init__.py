"""The page: one HTML file, with everything in it.

Problem: the page must be easy to send, and to open years later without a network. Invariant: data
in, text out; the page contains the document that it draws, and loads nothing. Imports nothing of
the package. Rejected: a plotting library, whose script alone is a hundred times this page.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any


def page(document: dict[str, Any]) -> str:
    """A document (`lowtide.export.document`) as one self-contained HTML page."""
    parts = {name: _asset(name) for name in ("page.html", "page.css", "page.js")}
    # In a script element only "</" and "<!--" could end the data early.
    data = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    text = parts["page.html"]
    for mark, filling in (
        ("%TITLE%", html.escape(f"{document['name']} · lowtide")),
        ("%CSS%", parts["page.css"]),
        ("%JS%", parts["page.js"]),
        ("%DATA%", data),
    ):
        before, found, after = text.partition(mark)
        assert found, mark
        text = before + filling + after
    return text


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
