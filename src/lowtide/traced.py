"""A region inside of compiled code, handed over to torch's own checkpoint.

Problem: the compiler traces a region with no tensor in it, and plans recomputation itself; there is
nothing to record. Invariant: no graph break, and a policy keeps what it keeps elsewhere, as far as
the compiler can tell. Imports policies and errors. Rejected: leaving compiled code at each region,
which ends what the compiler may fuse.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from lowtide import _compat
from lowtide.errors import CompiledWarning, UnsupportedError
from lowtide.policies import KeepNamed, OperationInfo, Policy, PolicyLike, check_policy, keeps

R = TypeVar("R")

# Whether torch's compiler treats a frozen dataclass as a constant.
_POLICIES_ARE_CONSTANTS = _compat.torch_has((2, 12))


def traced_region(
    function: Callable[..., R],
    args: Any,
    kwargs: dict[str, Any],
    policy: PolicyLike | None,
    given: dict[str, Any],
) -> R:
    """Run a region while torch's compiler traces: its policy may be any of `lowtide.policies`."""
    from torch.utils import checkpoint as torch_checkpoint

    if _compat.is_exporting():  # no backward comes, and torch's own fails if it is strict
        return function(*args, **kwargs)
    if "fn" in kwargs:  # torch's checkpoint has a parameter of this name inside
        function, kwargs = functools.partial(function, fn=kwargs["fn"]), {**kwargs}
        del kwargs["fn"]
    given = {**given, "use_reentrant": False}
    given.pop("respect_saved_tensors_hooks", None)  # torch 2.13 does not know it
    if policy is not None:
        if not _POLICIES_ARE_CONSTANTS:
            raise UnsupportedError(
                "a policy inside a function that torch.compile traces needs torch 2.12 or later. "
                "Leave it out, or use torch's own: context_fn=functools.partial("
                "create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])."
            )
        given["context_fn"] = functools.partial(_torch_contexts, _number_of(policy))
    result: R = torch_checkpoint.checkpoint(function, *args, **given, **kwargs)
    return result


_traced_policies: list[PolicyLike] = []


@_compat.constant_while_compiling
def _number_of(policy: PolicyLike) -> int:
    """A number for a policy: while torch's checkpoint is traced, it takes only constants."""
    check_policy(policy, "checkpoint")
    if not _is_whole(policy):
        raise UnsupportedError(
            f"a {type(policy).__name__} policy was made inside a function that torch.compile "
            "traces, where its fields are not known yet. Make it once outside, and pass it in."
        )
    if _asks_for_names(policy):
        warnings.warn(
            "KeepNamed keeps nothing in compiled code, where the names that lowtide.name gives are "
            "not known. Use KeepProducts or KeepOperators there.",
            CompiledWarning,
            stacklevel=2,
        )
    if policy not in _traced_policies:
        _traced_policies.append(policy)
    return _traced_policies.index(policy)


def _asks_for_names(policy: Any) -> bool:
    parts = vars(policy).values() if isinstance(policy, Policy) else ()
    return isinstance(policy, KeepNamed) or any(map(_asks_for_names, parts))


def _is_whole(policy: Any) -> bool:
    fields = getattr(policy, "__dataclass_fields__", {})
    if not all(name in vars(policy) for name in fields):
        return False
    return all(_is_whole(v) for v in vars(policy).values() if isinstance(v, Policy))


def _torch_contexts(number: int) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    policy = _traced_policies[number]

    def decide(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        keep = keeps(policy, OperationInfo(_compat.schema_of(func).name, func, 0))
        return CheckpointPolicy.PREFER_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
