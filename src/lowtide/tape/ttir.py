"""Which of its arguments a kernel of Triton's writes to, and whether it may run twice.

Problem: a kernel gets addresses, and only its code tells which of them it stores to. Invariant: an
argument that is left out is never written, and a kernel that may run again is a function of its
arguments, to the bit; where the code cannot be followed (an address that was loaded, a call, an
operation that is not known), nothing is said. Imports nothing. Rejected: looking at the memory
before and after a launch, which takes two passes over it, and does not see a write that happens to
leave it as it was.

Triton's own representation (TTIR) is in static single assignment form: what a name is made of
follows from the line that makes it, and loops say what they hand on from turn to turn. From each
store, the address is followed back to parameters. Masks and shapes are not followed, and offsets
only where addresses are made numbers: one may then be the distance to another address.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Their first operand is an address that they write to.
_STORES = frozenset({"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store",
                     "tt.descriptor_reduce", "tt.descriptor_scatter",
                     "tt.experimental_descriptor_store"})  # fmt: skip
# They read through their first operand.
_LOADS = frozenset({"tt.load", "tt.descriptor_load", "tt.descriptor_gather",
                    "tt.experimental_descriptor_load"})  # fmt: skip
# They make an address of their first operand; the others are offsets or shapes.
_MOVES = frozenset({"tt.addptr", "tt.advance", "tt.make_tensor_ptr", "tt.make_tensor_descriptor"})
# They make an address of any operand.
_PASSES = frozenset({"tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape",
                     "tt.trans", "tt.bitcast", "tt.cat", "tt.join", "tt.split", "tt.ptr_to_int",
                     "tt.int_to_ptr"})  # fmt: skip
_ENDS = frozenset({"tt.return", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"})

# A kernel of these, and of the dialects, makes the same bits again. Not of atomics: what they add
# up depends on which program comes first.
_PURE = _LOADS | _MOVES | _PASSES | _ENDS | frozenset({
    "tt.store", "tt.descriptor_store", "tt.experimental_descriptor_store", "tt.func", "tt.assert",
    "tt.get_program_id", "tt.get_num_programs", "tt.make_range", "tt.dot", "tt.dot_scaled",
    "tt.reduce", "tt.scan", "tt.map_elementwise", "tt.clampf", "tt.fp_to_fp", "tt.mulhiui",
    "tt.precise_sqrt", "tt.precise_divf", "tt.histogram", "tt.gather",
})  # fmt: skip
_PURE_DIALECTS = frozenset({"arith", "math", "scf", "cf", "ub"})
_BARRIERS = frozenset({"ttg.barrier", "gpu.barrier"})  # of one program, whose order they fix
# These may be, and say so.
_SAYING_SO = frozenset({"tt.elementwise_inline_asm", "tt.extern_elementwise"})
_WAITS = "isVolatile = true"  # for another program

_LOCATION = re.compile(r'\s*\bloc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)')
_QUOTED_NAME = re.compile(r'"([a-z_]\w*(?:\.\w+)+)"(?=\()')
_TEXT = re.compile(r'"[^"]*"')
_LINE = re.compile(r"(?:(?P<made>%[^=]+?)\s*=\s*)?(?P<operation>[a-z_]\w*(?:\.\w+)+)\b(?P<rest>.*)")
_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_TYPED = re.compile(r"(%[\w$.-]+)\s*:\s*(!?[\w.]+)")
_CARRIED = re.compile(r"(%[\w$.-]+)\s*=\s*(%[\w$.-]+(?:#\d+)?)")
_ADDRESS = re.compile(r"!tt\.(?:ptr|tensordesc)\b")

_LOOPS = frozenset({"scf.for", "scf.while"})


class Code(NamedTuple):
    """What is known of a kernel's code.

    Attributes:
        addresses: how many it takes.
        writes: the places among them of those that it writes to.
        repeatable: run again with the same arguments, it writes the same bits.
        reads: the places of those that it may read.
    """

    addresses: int
    writes: frozenset[int]
    repeatable: bool
    reads: frozenset[int]


def read_code(text: str) -> Code | None:
    """What a kernel does; None if its code cannot be followed."""
    try:
        return _Kernel(text).code()
    except _UnknownCodeError:
        return None


class _UnknownCodeError(Exception):
    """This code cannot be followed."""


class _Name:
    """One definition. Regions that are not inside each other may use one name for two.

    Attributes:
        place: of a parameter that is an address, its place among those; else None.
        made_of: what an address in it may come from.
        anything: it may be an address of which nothing is known.
    """

    __slots__ = ("anything", "made_of", "place")

    def __init__(self, *made_of: _Name, place: int | None = None, anything: bool = False) -> None:
        self.place, self.anything = place, anything
        self.made_of = list(made_of)


class _Region:
    """What is between two braces: its names, and what its `yield` and `condition` hand on to."""

    def __init__(self, yields: list[_Name] | None = None, hands: list[_Name] | None = None) -> None:
        self.names: dict[str, _Name] = {}
        self.yields = yields or []
        self.hands = hands or []


class _Kernel:
    """A kernel's lines, as far as addresses go."""

    def __init__(self, text: str) -> None:
        self.parameters = 0
        self.functions = 0
        self.stored: list[_Name] = []
        self.loaded: list[_Name] = []
        self.given_away: list[_Name] = []
        self.pure = True
        self.numbers = "tt.ptr_to_int" in text  # are made of addresses
        self.regions = [_Region()]
        for line in text.splitlines():
            if not line.startswith("#"):
                line = _QUOTED_NAME.sub(r"\1", _LOCATION.sub("", line))
                self._read(_TEXT.sub("", line).strip())

    def code(self) -> Code:
        stored = _reached(self.stored)
        if any(name.anything for name in stored):
            raise _UnknownCodeError
        loaded, given_away = _reached(self.loaded), _reached(self.given_away)
        pure = self.pure and not any(name.anything for name in loaded)
        writes, reads = _places(stored | given_away), _places(loaded | given_away)
        return Code(self.parameters, writes, pure, reads)

    # ------------------------------------------------------------------ lines

    def _read(self, line: str) -> None:
        opens = line.endswith("{")
        if line.startswith("}"):
            if len(self.regions) == 1:
                raise _UnknownCodeError
            closed = self.regions.pop()
            if opens:  # `} else {`, `} do {`
                self.regions.append(_Region(closed.yields, closed.hands))
        elif line.startswith("^"):
            self._block(line)
        elif match := _LINE.match(line):
            made, operation, rest = match.group("made", "operation", "rest")
            region = self._operation(_names(made or ""), operation, rest)
            if opens:
                self.regions.append(region or _Region())
        elif opens:  # the module
            self.regions.append(_Region())

    def _block(self, line: str) -> None:
        """Arguments of a block: of the second part of a loop, what its condition hands on."""
        names = [name for name, _ in _TYPED.findall(line)]
        handed = self.regions[-1].hands
        for place, name in enumerate(names):
            if len(names) == len(handed):
                self._define(name, handed[place])
            else:
                self._define(name, anything=True)

    def _operation(self, made: list[str], operation: str, rest: str) -> _Region | None:
        """Note what a line makes; returns the region that it opens, if something is handed on."""
        if operation == "tt.func":
            return self._function(rest)
        pure = _is_pure(operation, rest)
        self.pure = self.pure and pure
        operands = list(map(self._find, _NAME.findall(rest))) if operation not in _LOOPS else []
        if operation in _LOOPS:
            return self._loop(made, rest)
        if operation == "scf.if":
            return _Region([self._define(name) for name in made])
        if operation == "scf.yield":
            _hand(operands, self.regions[-1].yields)
        elif operation == "scf.condition":
            _hand(operands[1:], self.regions[-1].hands)
        elif operation in _STORES or operation in _LOADS:
            (self.stored if operation in _STORES else self.loaded).extend(operands[:1])
            self._make(made, _Name(anything=True))
        elif operation in _MOVES:
            self._make(made, *(operands if self.numbers else operands[:1]))
        elif operation == "arith.select":
            self._make(made, *operands[1:])
        elif operation in _PASSES or not _ADDRESS.search(rest):
            self._make(made, *operands)
        elif operation not in _ENDS and not operation.startswith("cf."):
            raise _UnknownCodeError
        if not pure and operation not in _STORES | _LOADS:  # it may take a number for an address
            self.given_away.extend(operands)
        return None

    def _function(self, rest: str) -> _Region:
        self.functions += 1
        if self.functions > 1:  # the first calls it
            raise _UnknownCodeError
        region = _Region()
        for name, kind in _TYPED.findall(rest):
            address = _ADDRESS.match(kind) is not None
            place = self.parameters if address else None
            region.names[name] = _Name(place=place, anything=not address)
            self.parameters += address
        return region

    def _loop(self, made: list[str], rest: str) -> _Region:
        """A loop carries `%turn = %first`, and makes what its last turn hands on."""
        _, of_for, after = rest.rpartition("iter_args(")
        carried = _CARRIED.findall(after if of_for or " to " not in rest else "")
        if len(carried) < len(made):
            raise _UnknownCodeError
        firsts = [self._find(first) for _, first in carried]
        results = [self._define(name) for name in made]
        region = _Region(hands=results)
        for (turn, _), first in zip(carried, firsts, strict=True):
            region.yields.append(_Name(first))
            region.names[turn] = region.yields[-1]
        if of_for:
            _hand(region.yields, results)
        return region

    # ------------------------------------------------------------------ names

    def _find(self, name: str) -> _Name:
        for region in reversed(self.regions):
            if name in region.names:
                return region.names[name]
        return _Name(anything=True)  # such as the index of a loop

    def _define(self, name: str, *made_of: _Name, anything: bool = False) -> _Name:
        made = self.regions[-1].names[name] = _Name(*made_of, anything=anything)
        return made

    def _make(self, made: list[str], *of: _Name) -> None:
        for name in made:
            self._define(name, *of, anything=not of)  # a number of its own, such as a constant


def _reached(names: list[_Name]) -> set[_Name]:
    """All that an address in these may come from, and themselves."""
    reached: set[_Name] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left.extend(name.made_of)
    return reached


def _places(names: set[_Name]) -> frozenset[int]:
    return frozenset(name.place for name in names if name.place is not None)


def _is_pure(operation: str, rest: str) -> bool:
    if operation in _SAYING_SO:
        return "pure = true" in rest
    known = (
        operation in _PURE
        or operation in _BARRIERS
        or operation.partition(".")[0] in _PURE_DIALECTS
    )
    return known and _WAITS not in rest


def _hand(operands: list[_Name], to: list[_Name]) -> None:
    if len(operands) < len(to):
        raise _UnknownCodeError
    for name, operand in zip(to, operands, strict=False):
        name.made_of.append(operand)


def _names(made: str) -> list[str]:
    """The names that a line makes: `%a, %b` or `%a:2`, of which the first is `%a#0`."""
    names: list[str] = []
    for each in filter(None, (part.strip() for part in made.split(","))):
        name, _, count = each.partition(":")
        names += [f"{name}#{place}" for place in range(int(count))] if count else [name]
    return names
