"""`lowtide.checkpoint`: a function in, a rematerialized region out.

Problem: `torch.utils.checkpoint` runs the function twice, so counters, statistics, hooks and random
state move twice. Invariant: here the function runs once (rule 2), and what its backward needs is
replayed operation by operation. Imports region, step, traced, limits, texttable and policies.
Rejected: torch's two modes (`use_reentrant`); there is one behaviour, which needs no such choice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, overload

import torch

from lowtide import _compat
from lowtide.errors import UsageError
from lowtide.limits import whole_number
from lowtide.policies import PolicyLike, check_policy
from lowtide.region import Selective, region
from lowtide.step import (
    RUNS_LATER,
    called_inside,
    current_recorder,
    recordable,
    tell_of_what_runs_later,
)
from lowtide.texttable import count_of
from lowtide.traced import traced_region

P = ParamSpec("P")
R = TypeVar("R")

# torch's own keywords, accepted so that a call can be moved over unchanged.
TORCH_KEYWORDS = (
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
    "debug",
    "early_stop",
    "context_fn",
    "respect_saved_tensors_hooks",
)


@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> R: ...


@overload
def checkpoint(
    *, policy: PolicyLike | None = None, **kwargs: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without storing the activations inside it.

    What backward needs of them is recomputed from the inputs, operation by operation. The function
    itself runs once, so buffers, counters, hooks and random state move once, and gradients have the
    same bits as without checkpointing. Arguments and outputs may be anything, in any nesting; no
    input needs to require grad. Regions may be nested: an inner region frees its insides even while
    the outer one is being replayed. With grad disabled nothing is recorded.

    A drop-in for `torch.utils.checkpoint.checkpoint`, whose keywords are accepted:

    - ``use_reentrant``: no effect; there is one behaviour.
    - ``preserve_rng_state``: no effect; every operation that draws random numbers is replayed with
      the state it drew from, whichever generator it used.
    - ``determinism_check``, ``debug``: no effect; an operation is replayed with the arguments that
      it had, so there is nothing to compare.
    - ``early_stop``: no effect; only the operations that lead to the requested tensor run again.
    - ``respect_saved_tensors_hooks``: hooks opened inside the function see every tensor that it
      saves; hooks around a region do not see what the region holds, so `True` is refused.
    - ``context_fn``: honoured if it makes torch's selective-checkpoint contexts
      (``functools.partial(create_selective_checkpoint_contexts, policy)``); refused otherwise.

    While `torch.compile` traces, the call becomes one of torch's own checkpoint, which the compiler
    understands.

    Without a function it is a decorator: ``@checkpoint(policy=...)`` above a function or method.

    Args:
        function: any callable.
        *args: its positional arguments.
        policy: what to keep inside the region: one of `lowtide.policies`, or a function of an
            `OperationInfo` that answers True to keep. Default: nothing.
        **kwargs: its keyword arguments, and torch's keywords above.

    Returns:
        What the function returns; without a function, the decorator.

    Raises:
        UsageError: ``policy`` is not callable or is given together with ``context_fn``;
            ``context_fn`` does not make selective-checkpoint contexts;
            ``respect_saved_tensors_hooks`` is true; or no function is given, but arguments or
            keywords other than these are.
        UnsupportedError: inside a ``torch.func`` transform.
        ReplayError: in backward, if an input or parameter was changed in place since the forward.

    Source of the idea: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016.
    """
    given = {name: kwargs.pop(name) for name in TORCH_KEYWORDS if name in kwargs} if kwargs else {}
    if function is not None:
        return _call(function, args, kwargs, policy, given)
    if args or kwargs:
        raise UsageError(
            f"checkpoint got {', '.join(kwargs) or 'arguments'} and no function. Call "
            "checkpoint(function, *args, **kwargs), or checkpoint(policy=...) for a decorator."
        )
    check_policy(policy, "checkpoint")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
            return _call(function, args, kwargs, policy, given)

        return checkpointed

    return decorate


def _call(
    function: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: PolicyLike | None,
    given: dict[str, Any],
) -> R:
    """Run a region; `given` has torch's keywords."""
    _refuse_hooks_around(given)
    if torch.compiler.is_compiling():
        return traced_region(function, args, kwargs, policy, given)
    if not callable(function):
        raise UsageError(
            f"checkpoint got {type(function).__name__} in place of a function. Pass the function "
            "and its arguments, checkpoint(function, *args), not what it returns."
        )
    if not args and not kwargs and _needs_arguments(function):
        raise UsageError(
            f"checkpoint calls {getattr(function, '__name__', 'the function')} at once, and it "
            "needs arguments. Pass them after it; above a function, write @lowtide.checkpoint(), "
            "with brackets."
        )
    if not recordable():
        return function(*args, **kwargs)
    inside = region(_policy_of(given.get("context_fn"), policy))
    result = called_inside(inside, functools.partial(function, *args, **kwargs))
    if isinstance(result, RUNS_LATER):
        tell_of_what_runs_later(result)
    return result


def _refuse_hooks_around(given: dict[str, Any]) -> None:
    if given.get("respect_saved_tensors_hooks"):
        raise UsageError(
            "respect_saved_tensors_hooks=True: what a region holds for its replay does not go "
            "through the saved-tensor hooks around it. Open the hooks inside the function, where "
            "they see every tensor that it saves, or leave the keyword out."
        )


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Whether a plain function, which is what a decorator gets, cannot be called without arguments.
    `inspect` would take as long as a small region."""
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    without_defaults = code.co_argcount - len(function.__defaults__ or ())
    return without_defaults > 0 or code.co_kwonlyargcount > len(function.__kwdefaults__ or ())


def _policy_of(context_fn: Any, policy: PolicyLike | None) -> Any:
    if context_fn is None and policy is None:
        return None
    check_policy(policy, "checkpoint")
    if context_fn is None:
        return policy
    if policy is not None:
        raise UsageError("give either policy or context_fn, not both: each decides what is kept.")
    contexts = context_fn() if callable(context_fn) else context_fn
    first = contexts[0] if isinstance(contexts, tuple) and contexts else None
    function = _compat.selective_policy(first)
    if function is None:
        if contexts is not None and _are_null(contexts):
            return None
        raise UsageError(
            f"context_fn={context_fn!r} does not make torch's selective-checkpoint contexts. "
            "lowtide runs the function once and replays operations, so there is no second run to "
            "put a context around. Use functools.partial(create_selective_checkpoint_contexts, "
            "policy), or pass policy=... from lowtide.policies."
        )
    return Selective(function)


def _are_null(contexts: Any) -> bool:
    import contextlib

    return isinstance(contexts, tuple) and all(
        isinstance(c, contextlib.nullcontext) for c in contexts
    )


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002 - the name that torch gave it
    *,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> Any:
    """Run a sequence of modules in ``segments`` checkpointed pieces.

    As in `torch.utils.checkpoint.checkpoint_sequential`, the last piece is not checkpointed, since
    its backward comes first. The peak is about that of one piece plus one input per piece;
    ``segments`` near the square root of the number of modules is a good start (Chen et al. 2016).

    Args:
        functions: an ``nn.Sequential`` or a sequence of callables, applied in order.
        segments: the number of pieces, 1 to ``len(functions)``.
        input: the argument of the first callable.
        policy: as for `checkpoint`.
        **kwargs: torch's keywords, as for `checkpoint`.

    Returns:
        What the last callable returns.

    Raises:
        UsageError: ``segments`` is out of range, ``functions`` is empty, not a sequence of
            callables or an ``nn.Sequential`` with a forward of its own, or as for `checkpoint`.
    """
    modules = _callables_of(functions)
    pieces = _number_of_pieces(segments, len(modules))
    _check_keywords(kwargs, policy)
    size = len(modules) // pieces
    starts = [size * piece for piece in range(pieces)] + [len(modules)]
    value = input
    for start, end in itertools.pairwise(starts):
        piece = functools.partial(_apply, modules[start:end])
        if end == len(modules):
            value = piece(value)
        else:
            value = checkpoint(piece, value, policy=policy, **kwargs)
    return value


def _callables_of(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
) -> list[Callable[..., Any]]:
    if isinstance(functions, torch.nn.Sequential):
        if type(functions).forward is not torch.nn.Sequential.forward:
            raise UsageError(
                "checkpoint_sequential runs modules one after the other, and "
                f"{type(functions).__name__} has a forward of its own, which would not run. If "
                "that is what you want, give [*functions]."
            )
        functions = list(functions)  # `children` has a module that comes twice only once
    if not isinstance(functions, Iterable):
        raise UsageError(
            "checkpoint_sequential takes an nn.Sequential or a sequence of callables; got "
            f"{type(functions).__name__}. For one function use lowtide.checkpoint(function, input)."
        )
    modules: list[Callable[..., Any]] = list(functions)
    for position, function in enumerate(modules):
        if not callable(function):
            raise UsageError(
                "checkpoint_sequential takes an nn.Sequential or a sequence of callables; number "
                f"{position} of them is of type {type(function).__name__}."
            )
    return modules


def _number_of_pieces(segments: object, functions: int) -> int:
    pieces = whole_number(segments)
    if pieces is None or pieces < 1:
        got = f"{segments!r}."
        if not isinstance(segments, int | float | str | None):  # the batch, for instance
            order = "checkpoint_sequential(functions, segments, input)"
            got = f"an object of type {type(segments).__name__}. The order is {order}."
        raise UsageError(f"segments must be a positive int; got {got}")
    if not functions:
        raise UsageError("functions is empty: there is nothing to checkpoint.")
    if pieces > functions:
        raise UsageError(
            f"segments={pieces} is more than the {count_of(functions, 'function')} given; "
            f"use at most {functions}."
        )
    return pieces


def _check_keywords(kwargs: dict[str, Any], policy: PolicyLike | None) -> None:
    """Refuse here what `checkpoint` would refuse: with one segment it is never called."""
    unknown = [name for name in kwargs if name not in TORCH_KEYWORDS]
    if unknown:
        raise UsageError(
            f"checkpoint_sequential got {', '.join(unknown)}: apart from policy it takes torch's "
            "keywords only. The functions are called with one argument, what the one before "
            "returned; give others with functools.partial."
        )
    _refuse_hooks_around(kwargs)
    if not torch.compiler.is_compiling():
        _policy_of(kwargs.get("context_fn"), policy)


def _apply(modules: list[Callable[..., Any]], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def name(tensor: torch.Tensor, label: str) -> torch.Tensor:
    """Name an activation, so that the policy `KeepNamed` can keep it.

    Like `jax.ad_checkpoint.checkpoint_name`. Outside a region it does nothing.

    Args:
        tensor: the activation.
        label: its name, for `KeepNamed`.

    Returns:
        The same tensor.

    Raises:
        UsageError: inside a region, if `tensor` is no tensor or `label` no text.
    """
    recorder = current_recorder()
    if recorder is not None:
        if not (isinstance(tensor, torch.Tensor) and isinstance(label, str)):
            got = repr(label) if isinstance(label, str) else type(label).__name__
            raise UsageError(
                'lowtide.name takes a tensor and its name as text, name(x, "attn_out"); got '
                f"{type(tensor).__name__} and {got}."
            )
        recorder.name(tensor, label)
    return tensor
