"""From a selection that a user writes to the modules it means.

Problem: the same wish is written as a type, a name, the module itself, a rule or "every other one",
and if a selection that matches nothing were accepted, it would silently save no memory. Invariant:
every entry of a selection matches at least one module that is called, or a `UsageError` names what
came close. Imports torch, `_compat`, `errors` and `limits`. Rejected: `fnmatch` on the whole name,
where `layers.*` also matches every module inside every layer.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeAlias, TypeGuard, Union, get_args, get_origin

from torch import nn

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.limits import whole_number

# One string: of two side by side, pyright reads none.
Which: TypeAlias = "type[Any] | UnionType | str | nn.Module | Callable[[str, nn.Module], bool] | Every | Iterable[Which]"  # noqa: E501
Named = list[tuple[str, nn.Module]]


@dataclass(frozen=True, slots=True)
class Every:
    """Every `n`-th of the modules that `which` selects, from number `start` on.

    The modules are counted in the order of `model.named_modules()`.
    """

    n: int
    which: Which
    start: int = 0

    def __post_init__(self) -> None:
        for field, value, least in (("n", self.n, 1), ("start", self.start, 0)):
            number = whole_number(value)
            if number is None or number < least:
                raise UsageError(
                    f"every(n={self.n!r}, start={self.start!r}): `{field}` must be an int, "
                    f"{least} or more; every(2, 'layers.*') takes layers 0, 2, 4 and so on"
                )
            object.__setattr__(self, field, number)


def every(n: int, which: Which, start: int = 0) -> Every:
    """Select every `n`-th of the modules that `which` selects: `every(2, "layers.*")`.

    Args:
        n: 1 or more.
        which: as for `checkpoint_modules`. Its modules are counted in the order of
            `model.named_modules()`.
        start: the number of the first module to take, from 0.

    Raises:
        UsageError: ``n`` or ``start`` is not an int in range.
    """
    return Every(n, which, start)


def select(model: nn.Module, which: Which) -> Named:
    """The modules of `model` that `which` selects, each once, in the model's order."""
    everything = list(model.named_modules(remove_duplicate=False))
    return _each_once(_matches(which, everything), everything)


def _each_once(found: Named, everything: Named) -> Named:
    chosen: dict[int, tuple[str, nn.Module]] = {}
    for name, module in found:
        chosen.setdefault(id(module), (name, module))
    order = {id(module): at for at, (_, module) in reversed(list(enumerate(everything)))}
    return sorted(chosen.values(), key=lambda pair: order[id(pair[1])])


def is_container(module: nn.Module) -> bool:
    """Whether `module` has no forward of its own and so is never called."""
    return _compat.is_never_called(module)


def name_matches(name: str, pattern: str) -> bool:
    """Whether a qualified name matches a pattern.

    `*`, `?` and `[...]` match inside one part of the name, `**` any number of parts, including
    none. A first part that is just `*` matches one or more: "*.mlp" is any mlp, however deep.
    """
    patterns = pattern.split(".")
    if patterns[0] == "*" and len(patterns) > 1:
        patterns.insert(1, "**")
    return _parts_match(name.split("."), patterns)


def _parts_match(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_parts_match(parts[at:], patterns[1:]) for at in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatch.fnmatchcase(parts[0], patterns[0])
        and _parts_match(parts[1:], patterns[1:])
    )


def _matches(which: Which, everything: Named) -> Named:
    if isinstance(which, Every):
        return _every_nth(which, everything)
    if get_origin(which) is Union:  # typing.Union[A, B], which before Python 3.14 is not `A | B`
        which = functools.reduce(operator.or_, get_args(which))
    if _is_several(which):
        entries = list(which)
        if not entries:
            raise UsageError("the selection is empty: give a type, a name pattern or a predicate")
        return [pair for entry in entries for pair in _matches(entry, everything)]
    if isinstance(which, str):
        found = [(name, m) for name, m in everything if name and name_matches(name, which)]
    elif isinstance(which, (type, UnionType)):
        found = [(name, module) for name, module in everything if isinstance(module, which)]
    elif isinstance(which, nn.Module):
        found = [(name, module) for name, module in everything if module is which]
    elif callable(which) and get_origin(which) is None:  # list[A] can be called, and is no rule
        _check_predicate(which)
        found = [(name, module) for name, module in everything if which(name, module)]
    else:
        raise UsageError(
            f"cannot select modules by {which!r} ({type(which).__name__}): give a type, a pattern "
            "of qualified names such as 'encoder.layers.*', a module of the model, a predicate "
            "(name, module) -> bool, every(n, ...) of these, or a list of these"
        )
    if not found:
        raise UsageError(_nothing_matched(which, everything))
    called = [(name, module) for name, module in found if not is_container(module)]
    if not called:
        raise UsageError(_only_containers(which, found))
    return called


def _is_several(which: Which) -> TypeGuard[Iterable[Which]]:
    """Whether it is a list, a set as FSDP's wrapping policies take it, `model.children()`, ..."""
    if isinstance(which, (str, bytes, type, nn.Module, Mapping)) or callable(which):
        return False
    return isinstance(which, Iterable)


def _check_predicate(which: Callable[..., object]) -> None:
    try:
        inspect.signature(which).bind("name", nn.Identity())
    except TypeError as error:
        raise UsageError(
            f"the predicate {_shown(which)} cannot be called as predicate(name, module): {error}. "
            "For a function f of the module alone, write lambda name, module: f(module)."
        ) from error
    except ValueError:  # some builtins have no signature
        return


def _every_nth(which: Every, everything: Named) -> Named:
    among = _each_once(_matches(which.which, everything), everything)
    taken = among[which.start :: which.n]
    if not taken:
        raise UsageError(
            f"every({which.n}, {_shown(which.which)}, start={which.start}) selects nothing: there "
            f"are {len(among)} such modules, numbered from 0"
        )
    return taken


def _nothing_matched(which: Any, everything: Named) -> str:
    named = [(name, module) for name, module in everything if name]
    count = f"{len(named)} modules" if len(named) != 1 else "1 module"
    owner = type(everything[0][1]).__name__
    if isinstance(which, str):
        head = f"no module is named {which!r}: it matches none of the {count} of this {owner}."
        of_type = sum(type(module).__name__ == which for _, module in everything)
        if of_type:  # as in the lists of class names that transformers and FSDP take
            return (
                f"{head} {of_type} of its modules are of a type of this name: give the type, "
                f"or lambda name, module: type(module).__name__ == {which!r}."
            )
        return head + _near_names(which, named)
    if isinstance(which, (type, UnionType)):
        members = (which,) if isinstance(which, type) else which.__args__
        shown = " or ".join(member.__name__ for member in members)
        head = f"no module is a {shown}: none of the {count} of this {owner} is one."
        return head + _near_types(members[0], everything)
    if isinstance(which, nn.Module):
        ours = {id(module) for _, module in everything}
        parts = list(which.children())
        if parts and all(id(part) in ours for part in parts):
            return (
                f"the given {type(which).__name__} is not itself a module of this {owner}, though "
                "all that it holds are (slicing makes a new one): give these as a list, "
                "[*model.layers[2:]]"
            )
        return (
            f"the given {type(which).__name__} is not a module of this {owner}, but of another "
            f"model or of a copy: give one of its {count}"
        )
    return (
        f"the predicate {_shown(which)} returned a false value for each of the {count} of this "
        f"{owner} and for the model itself; it is called as predicate(name, module)"
    )


def _near_names(pattern: str, named: Named) -> str:
    if not named:
        return " It has no modules inside that could be named."
    if not pattern:
        return " For the model itself use lowtide.ActivationCheckpointWrapper(model)."
    candidates = dict.fromkeys(_starred(name) for name, _ in named)
    for name, _ in named:
        candidates.setdefault(name)
    near = difflib.get_close_matches(pattern, candidates, n=5, cutoff=0.5)
    text = f" Close: {', '.join(near)}." if near else ""
    deeper = f"**.{pattern}"
    inside = sum(name_matches(name, deeper) for name, _ in named)
    if inside:
        text += f" {deeper!r} would match {inside}."
    if not text:
        top = dict.fromkeys(name.split(".")[0] for name, _ in named)
        text = f" Its top-level names are: {', '.join(list(top)[:10])}."
    return f"{text} `*` matches inside one part of a name, `**` any number of parts."


def _near_types(which: type[Any], everything: Named) -> str:
    counts = Counter(type(module) for _, module in everything)
    for other in counts:
        if other.__name__ == which.__name__:
            return (
                f" {counts[other]} are {other.__module__}.{other.__qualname__}, which is another "
                f"class than {which.__module__}.{which.__qualname__}."
            )
    names = Counter(type(module).__name__ for _, module in everything)
    near = difflib.get_close_matches(which.__name__, names, n=5, cutoff=0.5)
    shown = [(name, names[name]) for name in near] or names.most_common(8)
    head = "Close" if near else "It has"
    return f" {head}: {', '.join(f'{name} ({count})' for name, count in shown)}."


def _only_containers(which: Any, found: Named) -> str:
    shown = ", ".join(f"{name or '(the model)'} ({type(m).__name__})" for name, m in found[:5])
    name = found[0][0]
    return (
        f"{_shown(which)} matches only containers, which hold modules but are never called: "
        f"{shown}. Select the modules in them: {(name + '.*') if name else '*'!r}"
    )


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _shown(which: Any) -> str:
    if isinstance(which, str):
        return repr(which)
    if isinstance(which, nn.Module):
        return f"the given {type(which).__name__}"
    return str(getattr(which, "__qualname__", repr(which)))
