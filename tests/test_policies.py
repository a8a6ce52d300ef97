"""Policies: what each keeps is not replayed, and everything else is (counted, not timed).

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from against_plain import Replayed, counted, leaf, recorded
from by_hand import same
from lowtide import policies
from lowtide.policies import (
    KeepEverything,
    KeepNamed,
    KeepNothing,
    KeepOperators,
    KeepProducts,
    OperationInfo,
    Policy,
    RecomputeOperators,
)


def attention(x: Tensor, w: Tensor) -> Tensor:
    q = lowtide.name((x @ w).sin(), "query")
    scores = lowtide.name((q @ q.t()).softmax(-1), "scores")
    return (scores @ q).exp().cos()


def run(policy: Policy | None = None, **kwargs: Any) -> Replayed:
    """Backward of `attention` under a policy: checks the bits, and returns what was replayed."""
    torch.manual_seed(0)
    x, w = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(attention(x, w).sum(), (x, w))
    with counted() as replayed:
        y = lowtide.checkpoint(attention, x, w, policy=policy, **kwargs)
        found = torch.autograd.grad(y.sum(), (x, w))
    assert same(expected, found)
    return replayed


def names(*words: str) -> Counter[str]:
    return Counter(f"aten::{word}" for word in words)


# Every operation but the last, whose output nothing saves. The sine saves its input, so keeping its
# output avoids replaying the sine only.
EVERYTHING = names("mm", "sin", "mm", "_softmax", "mm", "exp")

CASES: dict[str, tuple[Policy | None, Counter[str]]] = {
    "default": (None, EVERYTHING),
    "nothing": (KeepNothing(), EVERYTHING),
    "everything": (KeepEverything(), Counter()),
    "products": (KeepProducts(), names("sin", "_softmax", "exp")),
    "sin": (KeepOperators("sin"), EVERYTHING - names("sin")),
    "sin_in_torchs_words": (KeepOperators("aten.sin"), EVERYTHING - names("sin")),
    "sin_qualified": (KeepOperators("aten::sin"), EVERYTHING - names("sin")),
    "sin_overload": (KeepOperators("aten.sin.default"), EVERYTHING - names("sin")),
    "two": (KeepOperators("sin", "_softmax"), names("mm", "mm", "exp")),
    "all_but_exp": (RecomputeOperators("exp"), names("exp")),
    "all_but_products": (RecomputeOperators("mm"), names("mm")),
    "scores": (KeepNamed("scores"), names("mm", "sin", "mm", "exp")),
    "unknown_name": (KeepNamed("nobody"), EVERYTHING),
    "either": (KeepOperators("sin") | KeepNamed("scores"), names("mm", "mm", "exp")),
    # with the exponential kept, the product that only it reads is not replayed either
    "both": (
        KeepOperators("sin", "exp") & KeepOperators("exp", "mm"),
        names("mm", "sin", "mm", "_softmax"),
    ),
    "neither": (KeepOperators("sin") & KeepOperators("exp"), EVERYTHING),
    "three": (
        KeepProducts() | KeepOperators("sin") | KeepOperators("exp") & KeepEverything(),
        names("_softmax"),
    ),
}


@pytest.mark.parametrize(("policy", "expected"), CASES.values(), ids=CASES)
def test_what_is_kept_is_not_replayed(policy: Policy | None, expected: Counter[str]) -> None:
    assert run(policy).names() == expected


def test_keeping_everything_replays_nothing_and_nothing_keeps_nothing() -> None:
    assert run(KeepEverything()).operations == 0
    assert run(KeepNothing()).operations == sum(EVERYTHING.values())
    assert run(KeepNothing()).nbytes > run(KeepProducts()).nbytes > 0


def test_a_policy_is_a_frozen_comparable_picklable_value() -> None:
    for policy, _ in CASES.values():
        if policy is None:
            continue
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert copy.deepcopy(policy) == policy
        assert hash(policy) == hash(copy.deepcopy(policy))
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.first = KeepNothing()  # type: ignore[attr-defined]
    assert KeepOperators("mm") == KeepOperators("aten::mm") != KeepOperators("bmm")
    assert KeepOperators("mm") != RecomputeOperators("mm")
    assert "KeepNamed" in repr(KeepNamed("a") | KeepNothing())


def test_a_function_combines_with_a_policy_on_either_side() -> None:
    def sines(operation: OperationInfo) -> bool:
        return operation.name == "aten::sin"

    expected = CASES["either"][1]
    for policy in (sines | KeepNamed("scores"), KeepNamed("scores") | sines):
        assert run(policy).names() == expected
    for policy in (sines & KeepOperators("sin", "mm"), KeepOperators("sin", "mm") & sines):
        assert run(policy).names() == run(KeepOperators("sin")).names()


def test_a_policy_of_ones_own_is_asked_once_an_operation() -> None:
    seen: list[OperationInfo] = []

    class Wide(Policy):
        def __call__(self, operation: OperationInfo) -> bool:
            seen.append(operation)
            return operation.nbytes > 64

    torch.manual_seed(0)
    x = leaf(4, 4)

    def region(x: Tensor) -> Tensor:
        return torch.cat([x, x]).sin().exp().sum(0).cos().exp()

    with recorded() as operations:
        y = lowtide.checkpoint(region, x, policy=Wide())
    assert [info.name for info in seen] == operations
    assert {info.nbytes for info in seen} == {128, 16}
    assert seen[1].overload is torch.ops.aten.sin.default
    with counted() as replayed:
        y.sum().backward()
    # the large ones, up to the first exponential, are kept
    assert replayed.names() == names("sum", "cos", "exp")


def test_naming_outside_a_region_does_nothing() -> None:
    x = leaf(3)
    assert lowtide.name(x, "input") is x


def test_a_named_tensor_that_is_kept_after_a_view() -> None:
    """The name belongs to the storage: its views are kept with it."""

    def region(x: Tensor) -> Tensor:
        y = lowtide.name(x.sin().reshape(2, 8), "flat")
        return (y.t().exp() * y.t()).cos()

    x = leaf(4, 4)
    (expected,) = torch.autograd.grad(region(x).sum(), x)
    with counted() as replayed:
        y = lowtide.checkpoint(region, x, policy=KeepNamed("flat"))
        (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(expected, found)
    assert replayed["sin"] == 0
    assert replayed["exp"] == 1


@pytest.mark.parametrize(
    "call",
    [
        lowtide.checkpoint,
        lowtide.checkpoint_sequential,
        lowtide.checkpoint_modules,
        lowtide.checkpoint_levels,
        type(lowtide.ActivationCheckpointWrapper).__call__,
        lowtide.transformers.enable,
        lowtide.transformers.set_checkpointing_function,
    ],
)
def test_a_function_is_a_policy_for_a_type_checker_too(call: Callable[..., Any]) -> None:
    annotation = inspect.signature(call).parameters["policy"].annotation
    assert annotation == "PolicyLike | None"


def test_a_function_is_a_policy_in_every_call() -> None:

    def products(operation: OperationInfo) -> bool:
        return operation.name == "aten::addmm"

    x = leaf(4, 4)
    lowtide.checkpoint(torch.sin, x, policy=products).sum().backward()
    lowtide.checkpoint(policy=products)(torch.sin)(x).sum().backward()
    lowtide.checkpoint_sequential([torch.sin, torch.cos], 2, x, policy=products).sum().backward()
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    lowtide.checkpoint_modules(block, "0", policy=products).remove()
    lowtide.checkpoint_levels(block, 1, policy=products).remove()
    lowtide.ActivationCheckpointWrapper(block, policy=products)


def test_what_is_not_a_policy_is_refused() -> None:
    with pytest.raises(lowtide.UsageError) as caught:
        lowtide.checkpoint(torch.sin, leaf(3), policy="products")  # type: ignore[arg-type]
    assert "policy must be callable with an OperationInfo" in str(caught.value)
    assert "got 'products'" in str(caught.value)


def test_a_keyword_of_the_functions_own_is_told_from_a_policy() -> None:
    def act(x: Tensor, policy: nn.Module) -> Tensor:
        out: Tensor = policy(x)
        return out.exp()

    network = nn.Linear(3, 3)
    with pytest.raises(lowtide.UsageError, match=r"functools\.partial\(function, policy=\.\.\.\)"):
        lowtide.checkpoint(act, leaf(3), policy=network)  # type: ignore[arg-type]
    lowtide.checkpoint(functools.partial(act, policy=network), leaf(3)).sum().backward()


@pytest.mark.parametrize(
    ("way", "caller"),
    [
        (lambda policy: lowtide.checkpoint(torch.sin, leaf(3), policy=policy), "checkpoint"),
        (lambda policy: lowtide.checkpoint(policy=policy)(torch.sin), "checkpoint"),
        (
            lambda policy: lowtide.checkpoint_sequential([torch.sin, torch.cos], 2, leaf(3),
                                                         policy=policy),
            "checkpoint",
        ),
        (
            lambda policy: lowtide.checkpoint_modules(nn.Sequential(nn.Linear(2, 2)), nn.Linear,
                                                      policy=policy),
            "checkpoint_modules",
        ),
        (
            lambda policy: lowtide.ActivationCheckpointWrapper(nn.Linear(2, 2), policy=policy),
            "ActivationCheckpointWrapper",
        ),
        (lambda policy: KeepNamed("x") | policy, "a | b"),
        (lambda policy: KeepNamed("x") & policy, "a & b"),
    ],
)  # fmt: skip
def test_a_class_in_place_of_a_policy_is_refused_before_it_is_asked(
    way: Callable[[Any], Any], caller: str
) -> None:
    with pytest.raises(lowtide.UsageError) as caught:
        way(KeepProducts)
    assert str(caught.value).startswith(
        f"{caller}: policy is the class KeepProducts, not an instance. Write KeepProducts(), with"
    )


@pytest.mark.parametrize(
    ("save", "recompute"),
    [
        (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE),
        (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE),
        (1, None),
    ],
)
def test_a_function_may_answer_as_torchs_policies_do(save: Any, recompute: Any) -> None:
    def products(operation: OperationInfo) -> Any:
        return save if operation.name == "aten::mm" else recompute

    expected = run(KeepOperators("mm")).names()
    assert run(products).names() == expected  # type: ignore[arg-type]
    assert run(KeepNothing() | products).names() == expected  # type: ignore[operator]
    assert run(KeepEverything() & products).names() == expected  # type: ignore[operator]


def test_a_function_sees_the_names_of_tensors() -> None:
    def named(operation: OperationInfo) -> bool:
        return operation.tensor_name == "query"

    assert run(named).names() == run(KeepNamed("query")).names()  # type: ignore[arg-type]


@pytest.mark.parametrize("caller", ["checkpoint", "checkpoint_modules"])
def test_a_policy_function_of_torch_in_place_of_a_policy_is_refused(caller: str) -> None:
    given = {
        "checkpoint": (torch.sin, leaf(3)),
        "checkpoint_modules": (nn.Sequential(nn.Linear(2, 2)), nn.Linear),
    }
    with pytest.raises(lowtide.UsageError) as caught:
        getattr(lowtide, caller)(*given[caller], policy=save_products)
    text = str(caught.value)
    assert text.startswith(f"{caller}: policy is called with one OperationInfo, and save_products ")
    assert "create_selective_checkpoint_contexts, save_products" in text


# torch's selective checkpointing.


def save_products(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if func is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_large(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Looks at the arguments, as torch's policies may."""
    assert context.is_recompute is False
    large = any(isinstance(a, Tensor) and a.numel() >= 16 for a in args)
    return CheckpointPolicy.PREFER_SAVE if large else CheckpointPolicy.MUST_RECOMPUTE


def test_operators_themselves_are_names_too() -> None:
    mm = torch.ops.aten.mm
    assert KeepOperators(mm) == KeepOperators("mm") == KeepOperators("aten::mm")
    assert KeepOperators(mm.default) == KeepOperators("aten.mm.default")
    assert RecomputeOperators(mm) == RecomputeOperators("mm")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: KeepOperators(["mm"]), "KeepOperators takes one operator per argument"),  # type: ignore[list-item]
        (lambda: RecomputeOperators(3), "RecomputeOperators takes one operator per argument"),
        (
            lambda: KeepNamed(["a"]),
            "KeepNamed takes one name per argument",
        ),  # type: ignore[list-item, arg-type]
        (lambda: KeepProducts() | None, r"a \| b: None cannot be combined\. Leave it out"),  # type: ignore[operator]
        (lambda: KeepProducts() & None, r"a & b: None cannot be combined\. Leave it out"),  # type: ignore[operator]
        (lambda: None | KeepProducts(), r"a \| b: None cannot be combined\. Leave it out"),  # type: ignore[operator]
        (lambda: KeepProducts | KeepNamed("a"), "is the class KeepProducts, not an instance"),  # type: ignore[operator]
    ],
)
def test_what_names_nothing_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(lowtide.UsageError, match=told):
        make()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("linear", "torch runs 'linear' as other operators, so no operation has this name"),
        ("aten.matmul.default", "torch runs 'aten.matmul.default' as other operators"),
        (torch.ops.aten.scaled_dot_product_attention, "as other operators"),
        ("softmaxx", "torch has no operator 'softmaxx'. Close: softmax"),
        ("aten::mm.int", "torch has no operator 'aten::mm.int'. Close: mm"),
        ("", "torch has no operator ''"),
    ],
)
@pytest.mark.parametrize("policy", [KeepOperators, RecomputeOperators])
def test_a_name_that_no_operation_has_is_refused(policy: Any, name: Any, told: str) -> None:
    """Such a policy would do nothing, and not say so."""
    with pytest.raises(lowtide.UsageError) as caught:
        policy("mm", name)
    assert told in str(caught.value)
    assert 'lowtide.saved_tensors(step, batch).by("operator")' in str(caught.value)


def test_overloads_in_every_form_and_operators_of_others() -> None:
    expected = KeepOperators("aten.mm.default")
    assert KeepOperators("mm.default") == KeepOperators("aten::mm.default") == expected
    assert KeepOperators("others::new.default") == KeepOperators("others.new.default")
    assert KeepOperators("others.new") == KeepOperators("others::new")


@pytest.mark.parametrize("given", [(3, "a"), ("a", torch.ones(2)), ([torch.ones(2)], "a")])
def test_only_tensors_are_named(given: Any) -> None:
    said = r"takes a tensor and its name as text.*; got \w+ and ('a'|Tensor)\.$"
    with pytest.raises(lowtide.UsageError, match=said):
        lowtide.checkpoint(lambda: lowtide.name(*given))
    assert lowtide.name(*given) is given[0]  # outside of a region it does nothing


def test_torchs_selective_contexts_with_a_list() -> None:
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default, torch.ops.aten.exp.default],
    )
    replayed = run(context_fn=contexts, use_reentrant=False)
    assert replayed.names() == names("sin", "_softmax")


def test_torchs_selective_contexts_with_a_function() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    assert run(context_fn=contexts).names() == run(KeepProducts()).names()
    contexts = functools.partial(create_selective_checkpoint_contexts, save_large)
    assert run(context_fn=contexts).operations == 0


def test_torchs_selective_checkpoint_replays_the_same() -> None:
    """What torch's own checkpoint recomputes under the policy function is an upper bound."""
    from torch.utils.checkpoint import checkpoint

    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    torch.manual_seed(0)
    x, w = leaf(4, 4), leaf(4, 4)
    y = checkpoint(attention, x, w, use_reentrant=False, context_fn=contexts)
    assert isinstance(y, Tensor)
    expected = torch.autograd.grad(y.sum(), (x, w))
    found = torch.autograd.grad(
        lowtide.checkpoint(attention, x, w, context_fn=contexts).sum(), (x, w)
    )
    assert same(expected, found)


def test_torchs_empty_contexts_are_no_policy() -> None:
    from torch.utils.checkpoint import noop_context_fn

    assert run(context_fn=noop_context_fn).names() == EVERYTHING


def test_another_context_fn_is_refused() -> None:
    def contexts() -> tuple[Any, Any]:
        return torch.no_grad(), torch.no_grad()

    with pytest.raises(lowtide.UsageError) as caught:
        run(context_fn=contexts)
    text = str(caught.value)
    assert "does not make torch's selective-checkpoint contexts" in text
    assert "there is no second run to put a context around" in text
    assert "functools.partial(create_selective_checkpoint_contexts, policy)" in text
    run()


def test_a_policy_and_a_context_fn_together_are_refused() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    with pytest.raises(lowtide.UsageError, match="give either policy or context_fn, not both"):
        run(KeepNothing(), context_fn=contexts)


def test_the_module_of_policies_is_public() -> None:
    assert lowtide.policies is policies
    assert issubclass(policies.KeepProducts, policies.Policy)


def stack(activation: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), activation(), nn.Linear(256, 256), activation(), nn.Linear(256, 64)
    )


def peak_of(way: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        way(model, x).square().sum().backward()

    def anew() -> None:
        model.zero_grad()
        x.grad = None

    anew()
    step()
    anew()
    return lowtide.measure(step, device="cpu").peak_bytes


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.GELU])
def test_what_is_kept_is_freed_once_what_is_made_of_it_is_there(
    activation: type[nn.Module],
) -> None:
    """A ReLU saves its result and not its input: while its result is there, what the policy has
    kept, which is its input, is needed by nothing."""
    from torch.utils.checkpoint import checkpoint

    def of_torch(model: nn.Module, x: Tensor) -> Tensor:
        y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        assert isinstance(y, Tensor)
        return y

    def here(model: nn.Module, x: Tensor) -> Tensor:
        y = lowtide.checkpoint(model, x, policy=KeepProducts())
        assert isinstance(y, Tensor)
        return y

    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    model, x = stack(activation), leaf(128, 64)
    plain = peak_of(lambda model, x: model(x), model, x)
    assert peak_of(here, model, x) <= min(plain, peak_of(of_torch, model, x))


def test_what_was_made_of_what_is_kept_serves_later_backwards() -> None:
    model, x = stack(nn.Tanh), leaf(128, 64)
    w = [x, *model.parameters()]

    def second(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.square().sum(), w, create_graph=True)
        again = torch.autograd.grad(y.sum(), w, retain_graph=True)
        penalty = sum((gradient.square().sum() for gradient in first), torch.zeros(()))
        return (*again, *torch.autograd.grad(penalty, w))

    with counted() as replayed:
        found = second(lowtide.checkpoint(model, x, policy=KeepProducts()))
    assert replayed.names() == names("tanh", "tanh")  # each once, for all three backwards
    assert same(second(model(x)), found)


def test_an_answer_that_is_text_is_refused() -> None:
    """Each text is true, "recompute" too."""
    words = iter(["recompute"])
    with pytest.raises(lowtide.UsageError, match="answered 'recompute'"):
        run(lambda operation: next(words))  # type: ignore[arg-type,return-value]


def test_no_answer_is_to_recompute() -> None:
    replayed = run(lambda operation: None)  # type: ignore[arg-type,return-value]
    assert replayed.names() == EVERYTHING


class Running(nn.Module):
    """Fills its buffer in each forward, and reads a copy of that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mean(x, 0, out=self.mean)
        return (x * self.mean.clone()).exp()


def test_a_buffer_that_a_policy_keeps_may_move_again_before_backward() -> None:
    x = leaf(3, 4)
    found = []
    for policy in (None, KeepNothing(), KeepOperators("mean")):
        model = Running()
        y = model(x) if policy is None else lowtide.checkpoint(model, x, policy=policy)
        model(x.detach() * 2)  # outside of the region, which does not see it
        found.append(torch.autograd.grad(y.sum(), x))
    assert same(found[0], found[1])
    assert same(found[0], found[2])
