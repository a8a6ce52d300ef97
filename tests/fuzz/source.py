"""A program as data, and its one reading: Python source.

The problem: the program that a test runs and the one that a failure prints must be the same, and
a person must be able to paste, shorten and step through it.

The invariant: `render` is the only reading of a program. Names are assigned once per function, so
that a body can become a region, a branch or a loop without renaming. Imports the standard library
only: a program holds no tensor and can be pickled.

Rejected: an abstract syntax tree of operations. Every new operation would need a node, a printer
and an executor; a line of Python is all three.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One simple statement."""

    text: str


@dataclass(frozen=True)
class Suite:
    """A compound statement: a head (`def r1(v1):`, `with torch.no_grad():`) and its body."""

    head: str
    body: tuple[Statement, ...]


Statement = Line | Suite


@dataclass(frozen=True)
class Declaration:
    """A tensor or generator that exists before the step.

    role: parameter (requires grad), buffer (persists, may be written), input (new every step),
    mask (bool, new every step), index (int64 below `bound`, new every step), generator, module
    (what `text` makes).
    """

    name: str
    role: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    bound: int = 0
    text: str = ""


PERSISTENT = ("parameter", "buffer", "generator", "module")


@dataclass(frozen=True)
class Ending:
    """What follows the forward: lines of `backward(s, out)` and of `between(s)`, which runs before
    the next step, and what forward returns."""

    losses: tuple[str, ...]
    outs: tuple[str, ...]
    mids: tuple[str, ...]
    lines: tuple[str, ...]
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A whole step; `traits` name what it contains that other tools are known to get wrong."""

    declarations: tuple[Declaration, ...]
    body: tuple[Statement, ...]
    ending: Ending
    outer: bool
    inside: bool
    traits: frozenset[str] = frozenset()

    @property
    def source(self) -> str:
        return render(self)

    @property
    def size(self) -> int:
        return sum(1 for _ in _lines(self.body, 0))


def value_text(declaration: Declaration) -> str:
    """The expression that makes a declared tensor; `g` is a generator where it stands."""
    shape = ", ".join(map(str, declaration.shape))
    size = f"({shape},)" if len(declaration.shape) == 1 else f"({shape})"
    kind = f"dtype=torch.{declaration.dtype}"
    draw = f"torch.randn({size}, generator=g, {kind})"
    match declaration.role:
        case "parameter":
            return f"{draw}.mul_(0.5).requires_grad_()"
        case "buffer":
            return f"{draw}.abs_().add_(0.5)"
        case "input":
            return draw
        case "mask":
            return f"torch.rand({size}, generator=g) < 0.5"
        case "index":
            return f"torch.randint({declaration.bound}, {size}, generator=g)"
        case "generator":
            return "torch.Generator().manual_seed(3)"
        case "module":
            return declaration.text
    raise ValueError(f"unknown role {declaration.role!r} of {declaration.name}")


def _maker(head: str, seed: str, declarations: list[Declaration]) -> list[str]:
    lines = [head, f"    g = torch.Generator().manual_seed({seed})", "    return {"]
    lines += [f'        "{d.name}": {value_text(d)},' for d in declarations]
    return [*lines, "    }", ""]


def _lines(body: tuple[Statement, ...], depth: int) -> list[str]:
    pad = "    " * depth
    out: list[str] = []
    for statement in body:
        if isinstance(statement, Line):
            out.append(pad + statement.text)
        else:
            out.append(pad + statement.head)
            out += _lines(statement.body, depth + 1) or [pad + "    pass"]
    return out


def render_body(body: tuple[Statement, ...]) -> str:
    """A list of statements on its own, for trying it out."""
    return "\n".join(_lines(body, 0))


def _list(names: tuple[str, ...]) -> str:
    return f"[{', '.join(names)}]"


def render(program: Program) -> str:
    """The program as the text of a Python module."""
    kept = [d for d in program.declarations if d.role in PERSISTENT]
    fresh = [d for d in program.declarations if d.role not in PERSISTENT]
    ending = program.ending
    forward = ["def forward(s):"]
    forward += [f'    {d.name} = s["{d.name}"]' for d in program.declarations]
    forward += _lines(program.body, 1)
    parts = [f'"{key}": {_list(getattr(ending, key))}' for key in ("losses", "outs", "mids")]
    forward += [f"    return {{{', '.join(parts)}}}", ""]
    backward = ["def backward(s, out):", *(f"    {line}" for line in ending.lines), ""]
    if ending.between:
        backward += ["def between(s):", *(f"    {line}" for line in ending.between), ""]
    flags = [f"OUTER = {program.outer}  # the whole forward is one region"]
    flags += [f"INSIDE = {program.inside}  # backward runs before the budget is left"]
    written = bool(program.traits & {"write", "buffer"})
    flags += [f"WRITES = {written}  # outside of the outermost region, if there is none"]
    behind = "behind" in program.traits
    flags += [f"BEHIND = {behind}  # some of them move no version counter of autograd's"]
    flags += [f"TOUCHES = {'touch' in program.traits}  # between forward and backward", ""]
    lines = _maker("def state():", "1", kept) + _maker("def data(step):", "step + 2", fresh)
    return "\n".join(lines + forward + backward + flags)


def paste(program: Program, method: str, fraction: float) -> str:
    """The program as a script to be run from the repository root."""
    head = "# Paste into a file in the repository root and run it there.\n"
    head += "from tests.fuzz.driver import TOOLS, compare\n\nglobals().update(TOOLS)\n\n"
    call = f"compare(globals(), {method!r}, fraction={fraction}, peaks=True)"
    return f'{head}{program.source}\nif __name__ == "__main__":\n    print({call})\n'
