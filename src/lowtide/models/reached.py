"""Whether a call that somebody has put in the place of another still leads to it.

Problem: ``model.forward = f`` takes lowtide's call off a module unnoticed, unless `f` calls what
was there before; nothing but `f` itself can tell. Invariant: nothing is called, and no attribute of
a user's object is asked for; what cannot be seen counts as not reached. Imports torch. Rejected: an
entry that watches `Module.__setattr__`, which belongs to the class; a hook on the module, which
copies and pickles would have (rule 11).
"""

from __future__ import annotations

import dis
import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

_MOST = 1000  # objects looked at
# The second is that of a class body.
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_OTHERS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType,
           torch.nn.Module, torch.Tensor)  # fmt: skip


def leads_to(call: Any, target: object) -> bool:
    """Whether `call` is `target` or refers to it: in its closure, in a global variable that it
    names, as an argument that it was given, or through other objects of this kind."""
    waiting, seen = [call], {id(call): call}
    while waiting and len(seen) <= _MOST:
        item = waiting.pop(0)
        if item is target:
            return True
        for part in _parts(item):
            if id(part) not in seen and (part is target or not isinstance(part, _OTHERS)):
                seen[id(part)] = part
                waiting.append(part)
    return False


def _parts(item: Any) -> Iterator[Any]:
    if type(item) is not types.FunctionType:
        yield from gc.get_referents(item)
        return
    yield from (item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__)
    yield from (value for _, value in named_globals(item))


def named_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that a function's code names, with that of the functions inside it."""
    codes = [function.__code__]
    for code in codes:
        codes.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
        if function.__globals__.keys().isdisjoint(code.co_names):
            continue
        for name in _globals_read(code):
            if name in function.__globals__:
                yield name, function.__globals__[name]


def _globals_read(code: types.CodeType) -> Iterator[str]:
    """Among a code's names are those of attributes too (`torch.mm`, `self.model`), which say
    nothing of a global variable that happens to have the same one."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            yield instruction.argval
