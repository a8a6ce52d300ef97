"""The command line: one file per verb.

Problem: people want to look at a step before they change a line of it. Invariant: whatever goes
wrong is one line on stderr that names the way out, and a non-zero exit status; only `main` catches
errors, only one kind, and nothing is overwritten unasked. Imports the verbs. Rejected: a framework
for it, which would be the package's only dependency besides torch.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import lowtide
from lowtide.cli import batch, curve, explain, plan, report, run, saved, snapshot, trace, verify
from lowtide.cli.arguments import of_default_limit
from lowtide.errors import BudgetError, LowtideError

_VERBS = (saved, explain, plan, curve, batch, run, verify, report, trace, snapshot)
_WIDTH = 500


def parser() -> argparse.ArgumentParser:
    """The parser of the command line. Each verb adds its own arguments; its help is the first line
    of its module's docstring."""
    made = argparse.ArgumentParser(
        prog="lowtide",
        description="See where the memory of a training step goes, and what a limit would cost.",
        epilog="TARGET is file.py:function or package.module:function, where the function returns "
        "(model, batch) or a step to call; or, with --shape, a model class or a function that "
        "returns a model: monai:UNet, transformers:LlamaForCausalLM.",
    )
    made.add_argument("--version", action="version", version=f"lowtide {lowtide.__version__}")
    verbs = made.add_subparsers(metavar="VERB", required=True)
    for verb in _VERBS:
        name = verb.__name__.rpartition(".")[2]
        first = (verb.__doc__ or "").partition("\n")[0]
        help_text = first.partition(": ")[2].rstrip(".")
        below = verbs.add_parser(name, help=help_text, description=help_text[:1].upper()
                                 + help_text[1:] + ".")  # fmt: skip
        verb.add_arguments(below)
        below.set_defaults(verb=verb.main)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 0, 1 if lowtide refuses, 130 if interrupted.
    An invalid command line exits with 2."""
    _write_any_text()
    arguments = parser().parse_args(argv)
    try:
        arguments.verb(arguments)
        sys.stdout.flush()
    except LowtideError as error:
        if getattr(arguments, "traceback", False):
            raise
        more = of_default_limit(arguments) if isinstance(error, BudgetError) else ""
        print(f"lowtide: {_one_line(error)}{more}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if getattr(arguments, "traceback", False):
            raise
        print("lowtide: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `lowtide ... | head`
        sys.stderr.close()
        return 1
    return 0


def _write_any_text() -> None:
    """Escape on stdout, as Python does on stderr, what its encoding lacks: modules, files and
    errors may have any name, and a table is no use if one of them ends it halfway. A stream
    that was closed before Python began is None: what is written there is lost."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - it stays
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _one_line(error: LowtideError) -> str:
    """The error and what was added to it. A long text is cut in the middle: the way out is at its
    end."""
    text = " ".join(" ".join((str(error), *getattr(error, "__notes__", ()))).split())
    if len(text) <= _WIDTH:
        return text
    begin, end = text[: _WIDTH // 2].rsplit(" ", 1)[0], text[-_WIDTH // 2 :].split(" ", 1)[-1]
    return f"{begin} ... {end}"


__all__ = ["main", "parser"]
