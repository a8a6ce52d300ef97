"""From a target on the command line to a step that can be called.

Problem: a step is Python, and a shell has only words. Invariant: a target gives either a step or a
one-line error that says what was looked for, where, and how to write it. Imports batches, errors,
limits, _compat and torch. Rejected: a configuration file, which is one more language.

A target is ``file.py:function`` or ``package.module:function``. The function is called with the
arguments of ``--set``, if there are any, and returns ``(model, batch)``, ``(step, batch)`` or a
step without arguments. A batch is a tensor, a tuple of arguments, or a dictionary of keyword
arguments. With ``--shape``, a model class, a model or a function that returns a model can be named:
it is called with random inputs of these shapes.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lowtide import _compat
from lowtide.batches import arguments_of
from lowtide.errors import LowtideError, UsageError
from lowtide.limits import format_bytes

# Where a library's classes are, for a target that names the library alone.
_HOMES = {
    "monai": "monai.networks.nets",
    "torchvision": "torchvision.models",
    "timm": "timm.models",
}
_WAY_OUT = (
    "Write file.py:function or package.module:function, where the function returns (model, batch) "
    "or a step to call"
)
_ARGUMENTS = "Give its arguments, with --set NAME=VALUE for each"


@dataclass(frozen=True)
class Target:
    """A step by its name on the command line: ``function(*args, **kwargs)`` is its forward."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def running(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, which runs the step; the step's errors become a `UsageError`."""
        return _of_users(f"the step of {self.name}", call)


def load(text: str, shapes: Sequence[str] = (), settings: Sequence[str] = ()) -> Target:
    """Find what a target names, and make a step of it.

    Raises:
        UsageError: it cannot be found, cannot be called, or does not return a step.
    """
    return made_of(text, find(text), shapes, settings)


def find(text: str) -> Any:
    """What a target names."""
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name:
        raise UsageError(f"cannot read the target {text!r}. {_WAY_OUT}.")
    return _named(_module(home, text), name, text)


def made_of(text: str, found: Any, shapes: Sequence[str], settings: Sequence[str]) -> Target:
    """The step that `found` makes."""
    model = model_of(text, found, shapes, settings)
    if model is None:
        return _of_result(text, found, settings)
    return of_model(text, model, shapes)


def model_of(
    text: str, found: Any, shapes: Sequence[str], settings: Sequence[str]
) -> nn.Module | None:
    """The model that `found` is or makes, for inputs of these shapes; None if it makes its own
    batch."""
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return _built(text, found, shapes, settings)
    if isinstance(found, nn.Module):
        return found
    if (settings or shapes) and not callable(found):
        raise UsageError(f"{text} is {_kind(found)}, not a class or function.")
    if not shapes:
        return None
    made = _of_users(text, lambda: found(**_settings(settings)), _ARGUMENTS)
    if isinstance(made, nn.Module):
        return made
    raise UsageError(
        f"{text} returned {_kind(made)}: --shape needs a model. Leave --shape "
        "out if the function makes its own batch."
    )


def _module(home: str, text: str) -> ModuleType:
    here = os.getcwd()
    if home.endswith(".py"):
        path = Path(home)
        if not path.is_file():
            raise UsageError(f"there is no file {home!r} (looked in {here}). {_WAY_OUT}.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.resolve().parent))
        loader = spec.loader
        _of_users(home, lambda: loader.exec_module(module))
        return module
    if here not in sys.path:
        sys.path.insert(0, here)
    home = _HOMES.get(home, home)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(home)
    except ModuleNotFoundError as error:
        missing = error.name or home
        if home == missing or home.startswith(missing + "."):
            raise UsageError(
                f"there is no module {missing!r} for the target {text!r}: install it, or run this "
                f"where it can be imported. {_WAY_OUT}."
            ) from error
        raise UsageError(
            f"importing {home} failed: it needs {missing!r}, which is not installed."
        ) from error
    except Exception as error:
        raise UsageError(_failed(f"importing {home}", error)) from error


def _named(module: ModuleType, name: str, text: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n, f in vars(module).items() if not n.startswith("_") and callable(f)]
            own = [n for n in public if getattr(vars(module)[n], "__module__", "")
                   == module.__name__][:6]  # fmt: skip
            there = f" It has {', '.join(own)}." if own else ""
            meant = _nearest(part, [n for n in dir(found) if not n.startswith("_")])
            raise UsageError(
                f"{module.__name__} has no {part!r} for the target {text!r}.{meant or there}"
            )
        found = getattr(found, part)
    return found


def _of_users(what: str, call: Callable[[], Any], on_type_error: str = "Correct it") -> Any:
    """The result of a part of the user's program; whatever goes wrong becomes a `UsageError`.
    What it prints goes to stderr: on stdout it would stand in the middle of the answer."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return call()
    except LowtideError:
        raise
    except SystemExit as error:
        raise UsageError(
            f"{what} ended the program with status {error.code}: it exits when it is imported, or "
            'parses the command line. Put that under if __name__ == "__main__".'
        ) from error
    except Exception as error:
        way_out = on_type_error if isinstance(error, TypeError) else "Correct it"
        raise UsageError(_failed(what, error, way_out)) from error


def _failed(what: str, error: Exception, way_out: str = "Correct it") -> str:
    text = str(error).rstrip(".")
    raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{what} raised {raised}. {way_out}, or add --traceback to see where."


# ---------------------------------------------------------------------------- what it returns


def _of_result(text: str, found: Any, settings: Sequence[str]) -> Target:
    if not callable(found):
        raise UsageError(f"{text} is {_kind(found)}, not a function. {_WAY_OUT}.")
    made = _of_users(text, lambda: found(**_settings(settings)), _ARGUMENTS)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return _with_batch(text, made[0], made[1])
    if isinstance(made, nn.Module):
        return of_model(text, made, ())
    if callable(made):
        return Target(text, made, (), {})
    raise UsageError(
        f"{text} returned {_kind(made)}. Return (model, batch), (step, batch) or a step "
        "to call; a step returns its loss and leaves backward to lowtide."
    )


def _with_batch(text: str, function: Callable[..., Any], batch: Any) -> Target:
    found = arguments_of(batch)
    if found is None:
        raise UsageError(
            f"{text} returned a batch of type {type(batch).__name__}. A batch is a tensor, a tuple "
            "of arguments, or a dictionary of keyword arguments. With any other, return a step to "
            "call, which has it."
        )
    args, kwargs = found
    if isinstance(function, nn.Module):
        _check_arguments(text, function, args, kwargs)
        function = functools.partial(_loss, function)
    return Target(text, function, args, kwargs)


def _check_arguments(
    text: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a batch that the model cannot be called with: mostly a data loader's (x, y), for a
    model that takes x alone."""
    if _compat.forward_pre_hooks(model) or type(model).__call__ is not nn.Module.__call__:
        return  # these decide what forward is called with
    try:
        takes = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        form = "**batch" if kwargs else "*batch"
        raise UsageError(
            f"{text}: the model is called as model({form}), but the forward of "
            f"{type(model).__name__} does not accept this batch of {len(args) or len(kwargs)}: "
            f"{error}. Return (step, batch), where step({form}) computes your loss."
        ) from error


def _loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The loss in a model's output if there is one, else all of the output."""
    result = model(*args, **kwargs)
    loss = getattr(result, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else result


# ---------------------------------------------------------------------------- classes by name


def _built(
    text: str, cls: type[nn.Module], shapes: Sequence[str], settings: Sequence[str]
) -> nn.Module:
    if not shapes:
        raise UsageError(
            f"{text} is a class: give the shape of its input, for instance --shape 2x3x224x224, "
            "and the arguments to build it with, for instance --set in_channels=3."
        )
    named = _settings(settings)
    for shape in shapes:
        _read_shape(shape)  # report a mistake before the model is built, which may take a while
    config = getattr(cls, "config_class", None)

    def build() -> nn.Module:  # a model of transformers is built from its configuration
        return cls(**named) if config is None else cls(_configured(config, named))

    _check_room(text, build)
    model: nn.Module = _of_users(text, build, _ARGUMENTS)
    return model


def _configured(config: Callable[..., Any], named: dict[str, Any]) -> Any:
    """A configuration of transformers. It takes any name and keeps one that nothing reads: the
    model would be built as if it had not been given."""
    made = config(**named)
    try:
        usual = config()
    except Exception:  # some have no defaults
        return made
    for name in named:
        if name in vars(made) and not hasattr(usual, name):
            raise UsageError(
                f"{type(made).__name__} has no {name!r}, so --set would change nothing."
                f"{_nearest(name, vars(usual))}"
            )
    return made


def _nearest(name: str, names: Iterable[str]) -> str:
    """A question for a name that was mistyped, after a space; nothing if no other is close."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _check_room(text: str, build: Callable[[], nn.Module]) -> None:
    """Refuse a model that does not fit in memory: the system would kill the program silently."""
    try:
        with torch.device("meta"):
            nbytes = sum(parameter.nbytes for parameter in build().parameters())
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except Exception:  # some models cannot be built on meta; a wrong argument is reported later
        return
    if nbytes > memory:
        raise UsageError(
            f"{text} as built has {format_bytes(nbytes)} of parameters, but this machine has only "
            f"{format_bytes(memory)} of memory. Make it smaller with --set NAME=VALUE, or build it "
            'under torch.device("meta") in a function of your own, file.py:function.'
        )


def of_model(text: str, model: nn.Module, shapes: Sequence[str]) -> Target:
    """The step of a model on random inputs of these shapes."""
    if not shapes:
        raise UsageError(
            f"{text} is a model without a batch. Return (model, batch), or add --shape."
        )
    model.train()
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    batch = [_tensor(shape, words) for shape in shapes]
    takes = inspect.signature(model.forward).parameters
    if words is not None and len(batch) == 1 and not batch[0].is_floating_point():
        named = {"input_ids": batch[0]}
        if "labels" in takes and _gives_words(model):
            named["labels"] = batch[0].clone()
        return _with_batch(text, model, named)
    return _with_batch(text, model, tuple(batch))


def _gives_words(model: nn.Module) -> bool:
    """Whether its labels have the shape of its input, not one label per sequence."""
    head = getattr(model, "get_output_embeddings", None)
    return head is not None and head() is not None


def _tensor(shape: str, words: int | None) -> torch.Tensor:
    """A random input; token ids if the model has a vocabulary and the shape has 2 sizes."""
    size, dtype = _read_shape(shape)
    if dtype is None:
        dtype = torch.int64 if words is not None and len(size) == 2 else torch.float32
    try:
        if dtype.is_floating_point:
            return torch.randn(size, dtype=dtype)
        return torch.randint(0, words or 2, size).to(dtype)
    except (RuntimeError, TypeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"torch cannot make a random input of --shape {shape}: {why}. Use smaller sizes or "
            "another dtype, or a function of your own, file.py:function, that makes the batch."
        ) from error


def _read_shape(shape: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """``2x3x64x64`` or ``2x128:int64``."""
    sizes, _, dtype_name = shape.partition(":")
    try:
        size = tuple(int(part) for part in sizes.split("x"))
        if min(size) < 1:
            raise ValueError
        dtype = getattr(torch, dtype_name) if dtype_name else None
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise AttributeError
    except (ValueError, AttributeError) as error:
        raise UsageError(
            f"cannot read the shape {shape!r}: write sizes joined by x, and the dtype if it is not "
            "float32, as in 2x3x224x224 or 4x128:int64."
        ) from error
    return size, dtype


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"cannot read --set {pair!r}: write name=value, as in depth=4.")
        try:
            named[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            named[name] = value
    return named


def _kind(made: object) -> str:
    """What a target returned, with its article: "an int"."""
    name = type(made).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
