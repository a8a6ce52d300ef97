"""Which line of the user's program is running.

Problem: an operator is called from deep inside torch, but users know their own lines. Invariant:
the line is never torch's or lowtide's if there is another; a look-up takes microseconds. Imports
torch. Rejected: `traceback`, which reads source files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__)
_OURS = os.path.dirname(_HERE) + os.sep
_LAYERS = os.path.join(_TORCH, "nn", "modules") + os.sep
_DRY_RUN = os.path.join(_HERE, "run.py")
_short: dict[str, str] = {}


def line_of_caller() -> str:
    """The innermost line that is neither torch's nor lowtide's; else that of the torch layer.

    Written as ``path:number``; the path is relative to the working directory or to `sys.path`.
    """
    frame = sys._getframe(1)
    layer = ""
    around: Any = frame
    while around is not None:
        name = around.f_code.co_filename
        if name.startswith(_TORCH):
            if not layer and name.startswith(_LAYERS) and not name.endswith("module.py"):
                layer = f"{_shortened(name)}:{around.f_lineno}"
        elif name == _DRY_RUN and around.f_code.co_name in ("<lambda>", "_record"):
            break
        elif not name.startswith(_OURS) and not name.startswith("<frozen"):
            return f"{_shortened(name)}:{around.f_lineno}"
        around = around.f_back
    return layer


def line_of_error(error: BaseException) -> str:
    """The innermost line on the way to where an error was raised that is neither torch's nor
    lowtide's, written as by `line_of_caller`; "" if there is none."""
    line, at = "", error.__traceback__
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if not name.startswith((_TORCH, _OURS, "<frozen")):
            line = f"{_shortened(name)}:{at.tb_lineno}"
        at = at.tb_next
    return line


def _shortened(name: str) -> str:
    found = _short.get(name)
    if found is None:
        found = name
        roots = sorted((p for p in sys.path if p and name.startswith(p.rstrip(os.sep) + os.sep)),
                       key=len)  # fmt: skip
        here = os.getcwd().rstrip(os.sep) + os.sep
        if "site-packages" not in name and name.startswith(here):
            found = name[len(here) :]
        elif roots and not name.startswith("<"):
            found = str(Path(name).relative_to(roots[-1]))
        _short[name] = found
    return found
