"""Turn raw choices into a program that plain PyTorch (nearly always) accepts.

The problem: a random list of operations is almost never a valid training step: shapes do not
match, an in-place write hits a leaf or a tensor that backward still needs.

The invariant: every statement has been tried on real tensors before it enters the program, and
one that raises, or that writes to what autograd saved, is dropped. A raw choice never depends on
another's success, so that hypothesis may delete any of them and still have a program: this is
what makes failures shrink. Imports source and driver (for the tools that a program may name).

Rejected: shape rules per operation. They are a second, worse implementation of PyTorch; and
drawing operands one by one inside hypothesis, where deleting an early choice shifts all later.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import driver
from .source import Declaration, Line, Statement, Suite, render_body, value_text

T = TypeVar("T")
SHAPES: tuple[tuple[int, ...], ...] = (
    (2, 3),
    (3, 3),
    (6,),
    (2, 3, 4),
    (3,),
    (1, 3),
    (4, 2),
    (1, 2, 3, 3),
)
LARGEST = 256
# What torch says of layouts that it calls unfinished.
STAGES = (
    ".*prototype",
    ".*TF32",
    ".*beta",
    ".*Sparse invariant",
    ".*deprecated",
    ".*pin_memory",
    ".*AccumulateGrad",
)


class Rejected(Exception):
    """The instruction does not fit here; it is left out."""


@dataclass(frozen=True)
class Raw:
    """A choice before it meets a program: an operation, some bytes, and what it may contain."""

    name: str
    picks: bytes
    body: tuple[Raw, ...] = ()
    other: tuple[Raw, ...] = ()


@dataclass
class Block:
    """Statements of a nested body, and the tensors that they define."""

    statements: tuple[Statement, ...]
    names: list[str] = field(default_factory=list)


class Assembler:
    """The program so far, and its trial: the same statements, run plain on real tensors."""

    def __init__(self, operations: dict[str, Callable[[Pick], None]]) -> None:
        self.operations = operations
        self.declarations: list[Declaration] = []
        self.scope: list[str] = []
        self.traits: set[str] = set()
        self.depth = 0
        self.tolerant = False
        self._lists: list[list[Statement]] = [[]]
        self._counts: dict[str, int] = {}
        self._saved: list[tuple[Tensor, int]] = []
        self._storages: set[int] = set()
        self.namespace: dict[str, Any] = dict(driver.TOOLS)
        self.namespace.update(region=driver.direct, calls=[], stash={})
        self.namespace.update(turn=lambda: 0, stumble=lambda: None)
        self.namespace.update(watch=lambda *_: None, observe=lambda _: None)

    # -- names and tensors

    def fresh(self, letter: str = "v") -> str:
        self._counts[letter] = self._counts.get(letter, 0) + 1
        return f"{letter}{self._counts[letter]}"

    def tensor(self, name: str) -> Tensor:
        value: Tensor = self.namespace[name]
        return value

    def visible(self) -> list[str]:
        """Names of tensors that a statement here may read, the latest first."""
        tensors = [d for d in self.declarations if d.role not in ("generator", "module")]
        fixed = [d.name for d in tensors]
        return [name for name in self.scope[::-1] + fixed[::-1] if self._usable(name)]

    def _usable(self, name: str) -> bool:
        """Some views may not be looked at any more once their base was written in place."""
        try:
            return bool(self.tensor(name).is_leaf) or True
        except RuntimeError:
            return False

    def sinks(self, names: Sequence[str]) -> list[str]:
        """Those of `names` whose graph no later one of them contains, the latest first."""
        seen: set[object] = set()
        found = []
        for name in names:
            node = self.tensor(name).grad_fn if self._usable(name) else None
            if node is None or node in seen:
                continue
            found.append(name)
            pending = [node]
            while pending:
                node = pending.pop()
                if node not in seen:
                    seen.add(node)
                    pending += [n for n, _ in node.next_functions if n is not None]
        return found

    def declare(self, role: str, shape: Sequence[int], dtype: str, bound: int = 0) -> str:
        letters = {"parameter": "p", "buffer": "b", "mask": "m", "index": "i", "generator": "g"}
        name = self.fresh(letters.get(role, "x"))
        declaration = Declaration(name, role, tuple(shape), dtype, bound)
        self.declarations.append(declaration)
        g = torch.Generator().manual_seed(len(self.declarations))
        self.namespace[name] = eval(value_text(declaration), {"torch": torch, "g": g})
        return name

    def declare_module(self, text: str) -> str:
        name = self.fresh("n")
        self.declarations.append(Declaration(name, "module", text=text))
        self.attempt(f"{name} = {text}")
        return name

    def saved(self, name: str) -> bool:
        """Whether autograd has saved something of this tensor's storage."""
        return self.tensor(name).untyped_storage()._cdata in self._storages

    def _pack(self, tensor: Tensor) -> Tensor:
        if not tensor.is_sparse and tensor.layout == torch.strided:
            self._saved.append((tensor, tensor._version))
            self._storages.add(tensor.untyped_storage()._cdata)
        return tensor

    @contextmanager
    def trial(self) -> Iterator[None]:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        with hooks, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("error")  # what warns is left out, as errors are
            for text in STAGES:
                warnings.filterwarnings("ignore", text)
            torch.manual_seed(0)
            yield

    # -- statements

    def attempt(self, text: str) -> None:
        """Run `text` in the trial; an error or a write to a saved tensor rejects it."""
        try:
            exec(text, self.namespace)
        except (RuntimeError, TypeError, ValueError, IndexError, Warning) as error:
            self._saved = [(t, t._version) for t, _ in self._saved]
            raise Rejected(str(error)) from None
        if any(t._version != version for t, version in self._saved):
            if self.tolerant:
                return
            self._saved = [(t, t._version) for t, _ in self._saved]
            raise Rejected("writes to a saved tensor")

    def emit(self, text: str) -> None:
        self.attempt(text)
        self._lists[-1].append(Line(text))

    def append(self, statement: Statement) -> None:
        """Add a statement whose effect the caller has tried already."""
        self._lists[-1].append(statement)

    def suite(self, head: str, block: Block) -> None:
        self.append(Suite(head, block.statements))

    def define(self, expression: str, count: int = 1) -> list[str]:
        """Assign `expression` to fresh names that later statements may use."""
        names = [self.fresh() for _ in range(count)]
        self.attempt(f"{', '.join(names)} = {expression}")
        for name in names:
            self._check(name)
        self._lists[-1].append(Line(f"{', '.join(names)} = {expression}"))
        self.scope += names
        return names

    def execute(self, form: str, **names: str) -> None:
        name = self.fresh()
        text = form.format(v=name, **names)
        self.attempt(text)
        self._check(name)
        self._lists[-1] += map(Line, text.split("\n"))
        self.scope.append(name)

    def _check(self, name: str) -> None:
        value = self.namespace[name]
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise Rejected(f"{name} is no strided tensor")
        if not 0 < value.numel() <= LARGEST or value.dim() > 5:
            raise Rejected(f"{name} has shape {tuple(value.shape)}")

    def bind(self, name: str, source: str) -> None:
        """Make `name` known as what `source` is, as leaving a block does."""
        self.namespace[name] = self.namespace[source]
        self.scope.append(name)

    def block(
        self, raws: Sequence[Raw], context: AbstractContextManager[Any] | None = None
    ) -> Block:
        """Assemble a nested body; its names are visible inside it only."""
        mark = len(self.scope)
        self._lists.append([])
        self.depth += 1
        try:
            with context or nullcontext():
                for raw in raws:
                    self.add(raw)
            names = self.scope[mark:]
        finally:
            self.depth -= 1
            del self.scope[mark:]
            statements = tuple(self._lists.pop())
        return Block(statements, names)

    def add(self, raw: Raw) -> None:
        """Add one instruction, or nothing if it does not fit."""
        statements, mark = len(self._lists[-1]), len(self.scope)
        traits = set(self.traits)
        self.tolerant = False
        try:
            self.operations[raw.name](Pick(self, raw))
        except Rejected:
            del self._lists[-1][statements:], self.scope[mark:]
            self.traits = traits

    def finish(self, *texts: str) -> tuple[tuple[Declaration, ...], tuple[Statement, ...]]:
        """The declarations that the program (or `texts`) names, and its body."""
        body = tuple(self._lists[0])
        used = set(re.findall(r"\w+", "\n".join((render_body(body), *texts))))
        return tuple(d for d in self.declarations if d.name in used), body


class Pick:
    """Choices of one raw instruction, read from its bytes; all zero bytes is the simplest."""

    def __init__(self, assembler: Assembler, raw: Raw) -> None:
        self.a = assembler
        self.raw = raw
        self._bytes = iter(raw.picks)

    def below(self, n: int) -> int:
        return next(self._bytes, 0) % n

    def chance(self, percent: int) -> bool:
        """True for that share of the bytes; never for zero, so that shrinking removes it."""
        return next(self._bytes, 0) * 100 >= 256 * (100 - percent)

    def of(self, choices: Sequence[T]) -> T:
        if not choices:
            raise Rejected("nothing to choose from")
        return choices[self.below(len(choices))]

    def where(self, accept: Callable[[Tensor], bool]) -> str:
        """A visible tensor that satisfies `accept`; in half of the cases one of the latest."""
        names = [n for n in self.a.visible() if accept(self.a.tensor(n))]
        if not names:
            raise Rejected("no such tensor")
        byte = next(self._bytes, 0)
        return names[byte % min(len(names), 4) if byte < 128 else byte % len(names)]

    def floating(self, least: int = 0, most: int = 5) -> str:
        return self.where(lambda t: t.is_floating_point() and least <= t.dim() <= most)

    def like(self, name: str) -> str:
        """Another tensor of the same shape and dtype."""
        t = self.a.tensor(name)
        found = self.where(lambda o: o.shape == t.shape and o.dtype == t.dtype)
        if found == name:
            found = self.where(lambda o: o is not t and o.shape == t.shape and o.dtype == t.dtype)
        return found

    def fitting(self, name: str) -> str:
        """A floating tensor that broadcasts to the shape of `name`, itself if there is no other."""
        t = self.a.tensor(name)

        def fits(other: Tensor) -> bool:
            if not other.is_floating_point() or other.dim() > t.dim():
                return False
            pairs = zip(other.shape[::-1], t.shape[::-1], strict=False)
            return all(n in (1, m) for n, m in pairs)

        return self.where(fits)

    def target(self) -> str:
        """A floating tensor that may be written in place; rarely one that is saved already."""
        self.a.tolerant = risky = self.chance(3)
        return self.where(
            lambda t: (
                t.is_floating_point()
                and not (t.requires_grad and t.is_leaf and torch.is_grad_enabled())
                and (risky or t.untyped_storage()._cdata not in self.a._storages)
            )
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.a.tensor(name).shape)

    def rows(self, name: str) -> int:
        """The length of the first dimension, which indices go into."""
        shape = self.shape(name)
        if not shape:
            raise Rejected(f"{name} has no dimension")
        return shape[0]

    def dtype(self, name: str) -> str:
        return str(self.a.tensor(name).dtype).removeprefix("torch.")

    def dim(self, name: str) -> int:
        return self.below(max(self.a.tensor(name).dim(), 1))

    def declared(self, role: str, shape: Sequence[int], dtype: str, bound: int = 0) -> str:
        """A declared tensor of this kind, an old one in half of the cases."""
        same = [
            d.name
            for d in self.a.declarations
            if (d.role, d.shape, d.dtype, d.bound) == (role, tuple(shape), dtype, bound)
        ]
        if same and self.below(2) == 0:
            return self.of(same)
        return self.a.declare(role, shape, dtype, bound)

    def weight(self, shape: Sequence[int], like: str) -> str:
        return self.declared("parameter", shape, self.dtype(like))

    def mask(self, like: str) -> str:
        return self.declared("mask", self.shape(like), "bool")

    def index(self, shape: Sequence[int], bound: int) -> str:
        return self.declared("index", shape, "int64", bound)

    def generator(self) -> str:
        self.a.traits.add("generator")
        return self.declared("generator", (), "float32")

    def define(self, expression: str, count: int = 1) -> list[str]:
        return self.a.define(expression, count)

    def emit(self, text: str) -> None:
        self.a.emit(text)

    def execute(self, form: str, **names: str) -> None:
        """Lines that end with a new tensor under the name {v}."""
        self.a.execute(form, **names)

    def trait(self, name: str) -> None:
        self.a.traits.add(name)
