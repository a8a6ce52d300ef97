"""Running the code of a page, and comparing what it prints with what the page says.

Problem: a page shows what a ``print`` prints as a comment behind it. Invariant: each such comment
is compared with what its own call printed, every time it ran, and a call that never ran fails. A
comment is one whole line of it; what follows "..." is left open. Imports nothing of lowtide.
Rejected: looking for each comment anywhere in the output, where of several ``# True`` one that
prints False is not noticed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import re
import sys
from collections import defaultdict
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(code: str, path: str = "<page>", name: str = "page") -> None:
    """Run the code of a page and check each ``print`` that has a comment."""
    printed: dict[int, list[str]] = defaultdict(list)

    def record(*values: Any, **options: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            builtins.print(*values, **options)  # noqa: T201
        printed[sys._getframe(1).f_lineno].append(out.getvalue())
        sys.stdout.write(out.getvalue())

    exec(compile(code, path, "exec"), {"__name__": name, "print": record})
    for line, said in comments(code).items():
        assert printed[line], f"line {line} did not run: {said}"
        for text in printed[line]:
            assert agrees(text, said), f"line {line} printed {text!r}, and the page says {said!r}"


def comments(code: str) -> dict[int, str]:
    """The comment behind each call of ``print``, by the line on which the call begins."""
    lines = code.splitlines()
    found = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            assert node.end_lineno is not None
            line = lines[node.end_lineno - 1].encode()
            rest = line[node.end_col_offset :].decode()
            if rest.startswith("  # "):
                found[node.lineno] = rest[4:]
    return found


def agrees(text: str, said: str) -> bool:
    """Whether a line of a text is what a comment says."""
    shown, dots, _ = said.partition("...")
    lines = [line.strip() for line in text.splitlines()]
    if dots:
        return any(line.startswith(shown.strip()) for line in lines)
    return said.strip() in lines
