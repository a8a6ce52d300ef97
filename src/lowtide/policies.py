"""Policies: which operations to keep and which to recompute, decided one by one.

Problem: users know that matrix products are expensive and activations cheap, and want to say so
once. Invariant: a policy is a frozen, comparable, picklable value that is called with an
`OperationInfo` and answers "keep?"; it never sees a tensor. Policies combine with `|` (either
keeps) and `&` (both keep). Imports torch, `_compat` and errors. Rejected: torch's dispatch-mode
contexts, which need to run Python again.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

from torch import nn

from lowtide import _compat
from lowtide.errors import UsageError

_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::addbmm",
        "aten::baddbmm",
        "aten::addmv",
        "aten::mv",
        "aten::dot",
        "aten::vdot",
        "aten::matmul",
        "aten::linear",
        "aten::einsum",
        "aten::_addmm_activation",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_int_mm",
        "aten::convolution",
        "aten::_convolution",
        "aten::cudnn_convolution",
        "aten::mkldnn_convolution",
        "aten::convolution_overrideable",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_trilinear",
        "aten::mkldnn_rnn_layer",
    }
)


_WHICH = (
    'lowtide.saved_tensors(step, batch).by("operator") lists the operators that matter in a step; '
    "KeepProducts() has all products, convolutions and attention."
)


@dataclasses.dataclass(frozen=True, slots=True)
class OperationInfo:
    """One operation as a policy sees it.

    Attributes:
        name: the operator, e.g. ``"aten::mm"``.
        overload: the operator overload itself, e.g. ``torch.ops.aten.mm.default``.
        nbytes: bytes of the output's storage.
        tensor_name: the name that `lowtide.name` gave the output, or None.
    """

    name: str
    overload: Any
    nbytes: int
    tensor_name: str | None = None


class Policy(abc.ABC):
    """Decides, for each operation, whether its output is kept for backward."""

    @abc.abstractmethod
    def __call__(self, operation: OperationInfo) -> bool:
        """True: keep the output. False: drop it and recompute it if backward asks."""

    def __or__(self, other: Policy | Callable[[OperationInfo], bool]) -> Policy:
        return Either(self, other)

    def __and__(self, other: Policy | Callable[[OperationInfo], bool]) -> Policy:
        return Both(self, other)

    # `function | policy`: a function answers as a policy does, and has no operators of its own.
    def __ror__(self, other: Callable[[OperationInfo], bool]) -> Policy:
        return Either(other, self)

    def __rand__(self, other: Callable[[OperationInfo], bool]) -> Policy:
        return Both(other, self)


# What is taken as a policy wherever one is: a function of the user's own may answer as torch's do.
PolicyLike: TypeAlias = Policy | Callable[[OperationInfo], Any]


def keeps(policy: Any, operation: OperationInfo) -> bool:
    """Ask a policy. One of the user's own may answer as torch's policies do: each member of that
    enumeration is true as a bool, those that mean "recompute" too."""
    answer = policy(operation)
    return answer if type(answer) is bool else means_keep(answer)


def means_keep(answer: Any) -> bool:
    """What a policy's answer means: a bool, or a `CheckpointPolicy` of torch's. None, which a
    function returns that says nothing, is "recompute", as for torch.

    Raises:
        UsageError: it is text, which would be true whatever it says.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    if isinstance(answer, CheckpointPolicy):
        return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    if isinstance(answer, str):
        raise UsageError(
            f"a policy has answered {answer!r}. Answer True to keep what the operation makes, "
            "False to recompute it, or with a member of torch.utils.checkpoint.CheckpointPolicy."
        )
    return bool(answer)


def check_policy(policy: object, caller: str) -> None:
    """Refuse what is no policy before the first operation asks it.

    Raises:
        UsageError: it is a class instead of an instance, cannot be called, is a module, or needs
            more than one argument.
    """
    if isinstance(policy, type):
        raise UsageError(
            f"{caller}: policy is the class {policy.__name__}, not an instance. Write "
            f"{policy.__name__}(), with its arguments if it takes any."
        )
    if isinstance(policy, nn.Module):  # callable, as the policy network of a training is
        raise UsageError(
            f"{caller}: policy is a module, {type(policy).__name__}; here it says what a region "
            "keeps, for instance lowtide.policies.KeepProducts(). Give a function its own argument "
            "of that name with functools.partial(function, policy=...)."
        )
    if policy is not None and not callable(policy):
        raise UsageError(
            f"{caller}: policy must be callable with an OperationInfo, for instance "
            f"lowtide.policies.KeepProducts(); got {policy!r}."
        )
    if isinstance(policy, FunctionType):  # cheaply: a region in a loop asks each time
        needed = policy.__code__.co_argcount - len(policy.__defaults__ or ())
        if needed > 1:
            raise UsageError(
                f"{caller}: policy is called with one OperationInfo, and {policy.__name__} needs "
                f"{needed} arguments. Its .overload is the operator. A policy function of torch's, "
                "(ctx, op, *args, **kwargs), goes into checkpoint(..., context_fn=functools.partial"
                f"(create_selective_checkpoint_contexts, {policy.__name__}))."
            )


@dataclasses.dataclass(frozen=True)
class KeepNothing(Policy):
    """Recompute everything inside the region. This is the default of `checkpoint`."""

    def __call__(self, operation: OperationInfo) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class KeepEverything(Policy):
    """Recompute nothing, as if there were no region."""

    def __call__(self, operation: OperationInfo) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class KeepProducts(Policy):
    """Keep matrix products, convolutions and attention; recompute the cheap rest."""

    def __call__(self, operation: OperationInfo) -> bool:
        return operation.name in _PRODUCTS


@dataclasses.dataclass(frozen=True)
class KeepOperators(Policy):
    """Keep the outputs of the named operators.

    Args:
        *names: operators, as torch writes them: ``"aten::mm"``, ``"aten.mm"``, ``"mm"``, with an
            overload ``"aten.mm.default"``, or the operator itself, ``torch.ops.aten.mm.default``.

    Raises:
        UsageError: an argument is neither text nor an operator; or no operation will have this
            name, because torch has no such operator or runs it as others (``linear``).
    """

    names: frozenset[str]

    def __init__(self, *names: Any) -> None:
        object.__setattr__(self, "names", _all_qualified(names, "KeepOperators"))

    def __call__(self, operation: OperationInfo) -> bool:
        return operation.name in self.names or str(operation.overload) in self.names


@dataclasses.dataclass(frozen=True)
class RecomputeOperators(Policy):
    """Keep everything except the outputs of the named operators.

    Args:
        *names: operators, as for `KeepOperators`.

    Raises:
        UsageError: an argument is neither text nor an operator.
    """

    names: frozenset[str]

    def __init__(self, *names: Any) -> None:
        object.__setattr__(self, "names", _all_qualified(names, "RecomputeOperators"))

    def __call__(self, operation: OperationInfo) -> bool:
        return not (operation.name in self.names or str(operation.overload) in self.names)


@dataclasses.dataclass(frozen=True)
class KeepNamed(Policy):
    """Keep the tensors that the forward named with `lowtide.name(tensor, "...")`.

    Args:
        *names: the names.

    Raises:
        UsageError: a name is not text, or there is none.
    """

    names: frozenset[str]

    def __init__(self, *names: str) -> None:
        if not names:
            raise UsageError(
                'KeepNamed takes the names of the tensors to keep: KeepNamed("attn_out"). To keep '
                "nothing, leave the policy out."
            )
        for name in names:
            if not isinstance(name, str):
                raise UsageError(
                    f'KeepNamed takes one name per argument: KeepNamed("a", "b"); got {name!r}.'
                )
        object.__setattr__(self, "names", frozenset(names))

    def __call__(self, operation: OperationInfo) -> bool:
        return operation.tensor_name in self.names


@dataclasses.dataclass(frozen=True)
class Either(Policy):
    """Keep what one of two policies keeps. Written ``a | b``."""

    first: Policy | Callable[[OperationInfo], bool]
    second: Policy | Callable[[OperationInfo], bool]

    def __post_init__(self) -> None:
        _check_both(self.first, self.second, "a | b")

    def __call__(self, operation: OperationInfo) -> bool:
        return keeps(self.first, operation) or keeps(self.second, operation)


@dataclasses.dataclass(frozen=True)
class Both(Policy):
    """Keep what both policies keep. Written ``a & b``."""

    first: Policy | Callable[[OperationInfo], bool]
    second: Policy | Callable[[OperationInfo], bool]

    def __post_init__(self) -> None:
        _check_both(self.first, self.second, "a & b")

    def __call__(self, operation: OperationInfo) -> bool:
        return keeps(self.first, operation) and keeps(self.second, operation)


def _check_both(first: object, second: object, caller: str) -> None:
    for policy in (first, second):
        check_policy(policy, caller)
        if policy is None:
            raise UsageError(
                f"{caller}: None cannot be combined. Leave it out, or write KeepNothing(), which "
                "is what policy=None means."
            )


def _all_qualified(names: tuple[Any, ...], caller: str) -> frozenset[str]:
    found = []
    for name in names:
        if _compat.is_operator(name):
            name = str(name)
        elif not isinstance(name, str):
            name = _compat.operator_name(name) or name
        if not isinstance(name, str):
            raise UsageError(
                f'{caller} takes one operator per argument: {caller}("mm", "aten::addmm"); got '
                f"{name!r}."
            )
        found.append(_qualified(name, caller))
    return frozenset(found)


def _qualified(name: str, caller: str) -> str:
    """`mm` and `aten.mm` -> `aten::mm`; with an overload, as torch prints it."""
    parts = name.replace("::", ".", 1).split(".")
    if len(parts) == 1 or ("::" not in name and _compat.names_aten_operator(*parts[:2])):
        parts.insert(0, "aten")
    if parts[0] == "aten":
        _check_aten(name, parts[1:], caller)
    return "::".join(parts) if len(parts) == 2 else ".".join(parts)


def _check_aten(given: str, parts: list[str], caller: str) -> None:
    """Refuse what no operation will ever be called: such a policy would silently do nothing."""
    if not _compat.names_aten_operator(*parts[:2]):
        near = difflib.get_close_matches(parts[0], set(_compat.aten_operators()), n=5)
        close = f" Close: {', '.join(near)}." if near else ""
        raise UsageError(f"{caller}: torch has no operator {given!r}.{close} {_WHICH}")
    if _compat.runs_as_others(parts[0]):
        raise UsageError(
            f"{caller}: torch runs {given!r} as other operators, so no operation has this name. "
            f"{_WHICH}"
        )


__all__ = [
    "KeepEverything",
    "KeepNamed",
    "KeepNothing",
    "KeepOperators",
    "KeepProducts",
    "OperationInfo",
    "Policy",
    "RecomputeOperators",
]
