"""`lowtide.checkpoint` and `lowtide.checkpoint_sequential` as drop-ins for torch's.

The engine's promises are tested in test_rules_*.py; this file is about the calls themselves.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential as torchs_sequential

import lowtide
from against_plain import Way, check, counted, gradients, leaf, plainly, recorded
from lowtide import KeptWarning, UsageError
from lowtide.policies import KeepNamed

# Every keyword of torch's checkpoint, with values that change what torch's does.
KEYWORDS: list[dict[str, Any]] = [
    {"use_reentrant": True},
    {"use_reentrant": False},
    {"preserve_rng_state": False},
    {"preserve_rng_state": True},
    {"determinism_check": "none"},
    {"determinism_check": "default"},
    {"debug": True},
    {"early_stop": False},
    {"early_stop": True, "use_reentrant": False, "debug": False, "preserve_rng_state": False},
    {"context_fn": torch.utils.checkpoint.noop_context_fn},
    {"respect_saved_tensors_hooks": False},
]


@pytest.mark.parametrize("keywords", KEYWORDS, ids=lambda k: "-".join(f"{n}" for n in k))
def test_torchs_keywords_are_taken_and_change_nothing(keywords: dict[str, Any]) -> None:
    def region(x: Tensor, scale: float, *, shift: float) -> Tensor:
        return nn.functional.dropout((x * scale + shift).sin(), 0.5).exp().cos()

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        given = keywords if way is lowtide.checkpoint else {}
        return gradients(way(region, x, 2.0, shift=0.5, **given).sum(), x)

    replayed = check(scenario)
    # the exponential saves its output; the sine and the dropout are replayed on the way to it
    assert replayed["exp"] == replayed["sin"] == 1


def test_torchs_keywords_are_those_of_torchs_signature() -> None:
    """A keyword that a later torch adds fails here; it must not be passed on to the function."""
    import inspect

    taken = {k for keywords in KEYWORDS for k in keywords} | {"function", "args", "kwargs"}
    parameters = set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters)
    assert parameters <= taken


def test_hooks_around_a_region_are_not_promised_what_it_holds() -> None:
    with pytest.raises(UsageError, match="Open the hooks inside the function"):
        lowtide.checkpoint(torch.sin, leaf(3), respect_saved_tensors_hooks=True)


def test_without_a_function_it_is_a_decorator() -> None:
    class Block:
        factor = 2.0

        @lowtide.checkpoint(policy=KeepNamed("made"), use_reentrant=False)
        def forward(self, x: Tensor, *, policy: float = 1.0) -> Tensor:
            """Its own."""
            return lowtide.name((x * self.factor).sin(), "made").exp() * policy

    def plain(x: Tensor) -> Tensor:
        return (x * 2.0).sin().exp() * 3.0

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        decorated = way is lowtide.checkpoint
        y = Block().forward(x, policy=3.0) if decorated else plain(x)
        return gradients(y.sum(), x)

    replayed = check(scenario)
    assert replayed["exp"] == 1
    assert replayed["sin"] == 0
    assert Block.forward.__doc__ == "Its own."


def test_a_decorator_takes_nothing_for_a_function() -> None:
    with pytest.raises(UsageError, match=r"got scale and no function. Call checkpoint\(function"):
        lowtide.checkpoint(scale=2.0)
    with pytest.raises(UsageError, match="got arguments and no function"):
        lowtide.checkpoint(None, 3)


def test_what_cannot_be_called_as_it_is_given_says_how() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(
        UsageError, match=r"got Tensor in place of a function.*\(function, \*args\)"
    ):
        lowtide.checkpoint(x.sin())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"calls double at once.* write @lowtide.checkpoint\(\)"):

        @lowtide.checkpoint
        def double(a: Tensor) -> Tensor:
            return 2 * a

    assert torch.equal(lowtide.checkpoint(lambda: 2 * x), 2 * x)
    lowtide.checkpoint(dict)  # has no signature


def test_callables_of_every_kind() -> None:
    class Called:
        def __call__(self, x: Tensor) -> Tensor:
            return x.sin().exp()

        def method(self, x: Tensor) -> Tensor:
            return x.sin().exp()

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        kinds: list[Callable[[Tensor], Tensor]] = [
            Called(), Called().method, functools.partial(torch.mul, other=x.detach()), torch.exp,
            nn.Tanh(), nn.Sequential(nn.Softplus(), nn.Tanh()), Tensor.sin,
        ]  # fmt: skip
        y: Tensor = x
        for kind in kinds:
            y = way(kind, y)
        return gradients(y.sum(), x)

    check(scenario)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda y: None,
    "number": lambda y: 3,
    "tuple": lambda y: (y, y.exp()),
    "nested": lambda y: {"a": [y, (y.cos(), None)], "b": "text"},
    "empty": lambda y: (),
}


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_come_back_as_they_are(make: Callable[[Tensor], Any]) -> None:
    made: list[Any] = []

    def region(x: Tensor) -> Any:
        made.append(make(x.sin()))
        return made[0]

    assert lowtide.checkpoint(region, leaf(3)) is made[0]


def test_the_annotations_keep_the_functions_result() -> None:
    """`checkpoint` is typed by its function; nothing is wrapped at run time either."""
    assert lowtide.checkpoint(len, [1, 2]) == 2


def test_without_grad_the_function_is_simply_called() -> None:
    with torch.no_grad(), recorded() as seen:
        lowtide.checkpoint(torch.sin, torch.ones(3), use_reentrant=False, context_fn=None)
    assert seen == []


def test_a_generator_of_tensors_as_a_function_is_not_run_early() -> None:
    """A lazy result is computed where it is consumed: outside the region, and still right."""

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4)

        def lazy(x: Tensor) -> Any:
            y = x.sin()
            yield y.exp()
            yield y.cos()

        one, two = way(lazy, x)
        return gradients((one * two).sum(), x)

    with pytest.warns(KeptWarning, match="returned a generator, .*lazy: what it computes runs aft"):
        check_only = check(scenario)
    assert check_only.operations == 0


def test_a_coroutine_is_right_and_told_of() -> None:
    @lowtide.checkpoint()
    async def later(x: Tensor) -> Tensor:
        return x.sin().exp()

    x = leaf(4)
    with pytest.warns(KeptWarning, match="returned a coroutine"):
        out = asyncio.run(later(x))
    assert out.requires_grad
    with torch.no_grad():  # nothing would be recomputed anyway
        asyncio.run(later(x))


# checkpoint_sequential


def layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(7))
    )


@pytest.mark.parametrize("segments", range(1, 8))
@pytest.mark.parametrize("as_list", [False, True])
def test_sequential_is_right_at_every_number_of_segments(segments: int, as_list: bool) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        model, x = layers(), leaf(5, 4)
        if way is lowtide.checkpoint:
            functions = list(model) if as_list else model
            y = lowtide.checkpoint_sequential(functions, segments, x, use_reentrant=False)
        else:
            y = model(x)
        found = gradients(y.square().sum(), x, *model.parameters())
        return [*found, *model.buffers()]

    check(scenario)


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_a_module_that_comes_twice_in_a_sequential_runs_twice(segments: int) -> None:
    """Not in torch's, which drops it the second time: an activation or a layer that is shared."""

    def scenario(way: Way) -> list[Tensor | None]:
        shared, act, x = nn.Linear(4, 4), nn.GELU(), leaf(5, 4)
        model = nn.Sequential(shared, act, nn.Linear(4, 4), act, shared)
        y = model(x) if way is plainly else lowtide.checkpoint_sequential(model, segments, x)
        return gradients(y.square().sum(), x, *model.parameters())

    check(scenario)


@pytest.mark.parametrize("segments", range(1, 8))
def test_sequential_checkpoints_the_pieces_that_torch_does(segments: int) -> None:
    """Same boundaries; the last piece is not checkpointed, since its backward comes first."""
    outside: list[list[int]] = []

    class Probe(nn.Module):
        def __init__(self, place: int, log: list[int]) -> None:
            super().__init__()
            self.place, self.log = place, log

        def forward(self, x: Tensor) -> Tensor:
            # Inside a region of either kind there are saved-tensor hooks.
            if not torch._C._autograd._top_saved_tensors_default_hooks(False):
                self.log.append(self.place)
            return x.sin()

    for sequential in (torchs_sequential, lowtide.checkpoint_sequential):
        log: list[int] = []
        model = nn.Sequential(*(Probe(place, log) for place in range(7)))
        out: Any = sequential(model, segments, leaf(3), use_reentrant=False)
        outside.append(list(log))
        del out
    assert outside[0] == outside[1]
    assert outside[1] == list(range(7 // segments * (segments - 1), 7))


def test_sequential_takes_a_number_of_segments_from_numpy() -> None:
    """As in `int(sqrt(n))` without the int: torch's takes it."""
    x = torch.ones(5, 4)
    out = lowtide.checkpoint_sequential(layers(), np.int64(2), x)  # type: ignore[arg-type]
    assert out.shape == x.shape


def test_sequential_replays_nothing_of_its_last_piece() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Softplus(), nn.Sigmoid(), nn.Tanh())
    x = leaf(4)
    with counted() as replayed:
        lowtide.checkpoint_sequential(model, 2, x).sum().backward()
    assert replayed.names() == {"aten::tanh": 1}  # softplus saves it; its own output is the input


def test_sequential_takes_a_policy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    x = leaf(4, 4)
    with counted() as replayed:
        y = lowtide.checkpoint_sequential(
            model, 2, x, policy=lowtide.policies.KeepEverything(), preserve_rng_state=False
        )
        y.sum().backward()
    assert replayed.operations == 0


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * 2
        return out


@pytest.mark.parametrize(
    ("functions", "segments", "text"),
    [
        (layers(), 0, "segments must be a positive int; got 0."),
        (layers(), -2, "segments must be a positive int; got -2."),
        (layers(), True, "segments must be a positive int; got True."),
        (layers(), 2.0, "segments must be a positive int; got 2.0."),
        (layers(), 8, "segments=8 is more than the 7 functions given; use at most 7."),
        ([torch.sin], 2, "segments=2 is more than the 1 function given; use at most 1."),
        (
            layers(),
            torch.ones(5, 4),
            "segments must be a positive int; got an object of type Tensor. The order is "
            "checkpoint_sequential(functions, segments, input).",
        ),
        (
            Doubling(nn.Linear(4, 4)),
            1,
            "checkpoint_sequential runs modules one after the other, and Doubling has a forward of "
            "its own, which would not run. If that is what you want, give [*functions].",
        ),
        (nn.Sequential(), 1, "functions is empty: there is nothing to checkpoint."),
        ([], 1, "functions is empty: there is nothing to checkpoint."),
        (
            nn.Linear(4, 4),
            1,
            "checkpoint_sequential takes an nn.Sequential or a sequence of callables; got Linear. "
            "For one function use lowtide.checkpoint(function, input).",
        ),
        (
            [torch.sin, 3],
            1,
            "checkpoint_sequential takes an nn.Sequential or a sequence of callables; number 1 of "
            "them is of type int.",
        ),
    ],
)
def test_sequential_refuses(functions: Any, segments: Any, text: str) -> None:
    with pytest.raises(lowtide.UsageError) as caught:
        lowtide.checkpoint_sequential(functions, segments, torch.ones(5, 4))
    assert str(caught.value) == text


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"mask": None}, "checkpoint_sequential got mask: apart from policy it takes torch's"),
        ({"respect_saved_tensors_hooks": True}, "respect_saved_tensors_hooks=True: what"),
        ({"context_fn": lambda: (1, 2)}, "does not make torch's selective-checkpoint contexts"),
        ({"policy": 3}, "policy must be callable"),
    ],
)
def test_sequential_refuses_keywords_at_every_number_of_segments(
    segments: int, keywords: dict[str, Any], text: str
) -> None:
    with pytest.raises(lowtide.UsageError) as caught:
        lowtide.checkpoint_sequential(layers(), segments, torch.ones(5, 4), **keywords)
    assert text in str(caught.value)
