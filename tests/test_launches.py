"""Rules 4 and 5: a kernel that writes to its inputs where no dispatcher sees it, as Triton's do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
import ttir_texts as texts
from against_plain import WAYS, Way, bits, check, counted, gradients, leaf, unseen
from lowtide._compat import launches
from lowtide.step import current_recorder
from lowtide.tape.launches import telling
from lowtide.tape.ttir import written_pointers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (texts.TURN_IN_PLACE, (3, {0})),
        (texts.TURN, (3, {2})),  # not what it only reads
        (texts.GATHER, (4, {2, 3})),  # a loop carries the address, and loaded numbers are offsets
        (texts.CHOSEN, (3, {0, 1})),
        (texts.UNTIL, (2, {0, 1})),
        (texts.EARLY, (2, {1})),
        (texts.SIBLINGS, (3, {0, 1, 2})),  # a name is used for several addresses
    ],
)
def test_what_a_kernel_writes_is_read_off_its_code(text: str, found: Any) -> None:
    assert written_pointers(text) == found


@pytest.mark.parametrize(
    "text",
    [
        texts.ADDRESSES,
        texts.CALLS,
        texts.TURN.replace("tt.store", "tt.store_of_another_release"),
        texts.TURN.replace("tt.splat %out", "tt.unheard_of %out"),
        texts.UNTIL.replace("scf.yield %n_3, %p_2", "scf.yield %n_3"),
    ],
)
def test_nothing_is_said_of_code_that_cannot_be_followed(text: str) -> None:
    assert written_pointers(text) is None


class Kernel:
    """As Triton's `JITFunction`: `run` launches, unseen, or compiles to an object with the code."""

    compilations = 0

    def __init__(self, body: Callable[..., None], names: str, ttir: str | None) -> None:
        self.fn, self.arg_names, self.ttir = body, names.split(), ttir

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            self.compilations += 1
            return SimpleNamespace(asm={} if self.ttir is None else {"ttir": self.ttir})
        self.fn(*args, **kwargs)
        return None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


launches.watch_class(Kernel, telling(current_recorder))


def _turn(x: Tensor, cos: Tensor, out: Tensor, n: int, INPLACE: bool) -> None:
    unseen(x if INPLACE else out, x * cos)


def in_place(ttir: str | None = texts.TURN_IN_PLACE) -> Kernel:
    return Kernel(_turn, "x cos out n INPLACE", ttir)


def elsewhere(ttir: str | None = texts.TURN) -> Kernel:
    return Kernel(_turn, "x cos out n INPLACE", ttir)


class Rotary(torch.autograd.Function):
    """Works in place and does not say so, as those of kernel libraries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, kernel: Kernel) -> Tensor:
        x = x.contiguous()
        kernel[1,](x, cos, x, x.numel(), INPLACE=True)
        ctx.save_for_backward(cos)
        return x

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        (cos,) = ctx.saved_tensors
        return given * cos, None, None


class Scaled(torch.autograd.Function):
    """Reads its input and fills memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, kernel: Kernel) -> Tensor:
        out = torch.empty_like(x)
        kernel[1,](x, cos, out, x.numel(), INPLACE=False)
        ctx.save_for_backward(x, cos)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        x, cos = ctx.saved_tensors
        return given * cos, (given * x), None


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("ttir", [texts.TURN_IN_PLACE, None], ids=["followed", "not followed"])
def test_what_was_written_in_place_is_not_replayed_as_it_was(way: Way, ttir: str | None) -> None:
    kernel = in_place(ttir)

    def scenario(way: Way) -> list[Tensor | None]:
        layers = [leaf(16, 16) for _ in range(4)]
        x, cos = leaf(32, 16), torch.randn(32, 16)

        def forward(x: Tensor) -> Tensor:
            for layer in layers:
                x = Rotary.apply((x @ layer).sin() @ layer, cos, kernel)
                x = x.cos() * x.sin()
            return x.square().sum()

        return gradients(way(forward, x), x, *layers)

    replayed = check(scenario, way)
    assert replayed["sin"]
    assert replayed["mm"] <= 4  # those that a kernel has written over are not made again
    assert kernel.compilations == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_a_kernel_only_reads_is_still_dropped(way: Way) -> None:
    kernel = elsewhere()

    def scenario(way: Way) -> list[Tensor | None]:
        layers = [leaf(16, 16) for _ in range(4)]
        x, cos = leaf(32, 16), leaf(32, 16)

        def forward(x: Tensor) -> Tensor:
            for layer in layers:
                x = Scaled.apply((x @ layer).sin(), cos, kernel)
            return x.square().sum()

        return gradients(way(forward, x), x, cos, *layers)

    replayed = check(scenario, way)
    assert replayed["mm"] >= 3
    assert replayed["sin"] >= 3


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_autograd_goes_on_with_what_a_kernel_wrote_over_what_it_saved(way: Way) -> None:
    """As in the plain step, however wrong that is; what was made of it before is made of it again
    as it was."""
    kernel = in_place()

    def scenario(way: Way) -> list[Tensor | None]:
        x, w, cos = leaf(32, 16), leaf(16, 16), torch.randn(32, 16)

        def forward(x: Tensor) -> Tensor:
            y = (x @ w).tanh() * 2
            before = y.sin().exp()  # saves y, and the result of the sine
            z = y.detach()
            kernel[1,](z, cos, z, z.numel(), INPLACE=True)
            return (before * y.cos()).sum()

        return gradients(way(forward, x), x, w)

    replayed = check(scenario, way)
    assert replayed["tanh"] or replayed["sin"]


def test_an_external_that_a_kernel_writes_over_is_replayed_from_as_it_was() -> None:
    kernel = in_place()

    def scenario(way: Way) -> list[Tensor | None]:
        torch.manual_seed(3)
        x, state, cos = leaf(32, 16), torch.randn(32, 16), torch.randn(32, 16)

        def forward(x: Tensor) -> Tensor:
            y = (x * state.exp()).sin()
            kernel[1,](state, cos, state, state.numel(), INPLACE=True)
            return (y.cos() * state.exp()).sum()

        return [*gradients(way(forward, x), x), state]

    assert check(scenario)["exp"] == 2


def test_a_kernel_in_a_backward_inside() -> None:
    kernel = in_place()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cos: Tensor) -> Tensor:
            ctx.save_for_backward(cos)
            return x * 2

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> Any:
            (cos,) = ctx.saved_tensors
            given = given.contiguous() + 0
            kernel[1,](given, cos, given, given.numel(), INPLACE=True)
            return given, None

    def scenario(way: Way) -> list[Tensor | None]:
        x, w, cos = leaf(32, 16), leaf(16, 16), torch.randn(32, 16)

        def forward(x: Tensor) -> Tensor:
            y = Doubled.apply((x @ w).sin(), cos)
            (slope,) = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)
            return (y * slope.detach()).exp().sum()

        return gradients(way(forward, x), x, w)

    assert check(scenario).operations


def test_kernels_inside_of_operators_and_declared_functions_are_theirs() -> None:
    """Their schema, or who declared them, says what they write."""
    kernel = elsewhere(None)  # nothing is known of its code

    @torch.library.custom_op("lowtide_tests_launches::scaled", mutates_args=())
    def scaled(x: Tensor, cos: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[1,](x, cos, out, x.numel(), INPLACE=False)
        return out

    scaled.register_autograd(
        lambda ctx, given: (given * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )

    @lowtide.replayable
    class Declared(Scaled):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cos: Tensor) -> Tensor:
            return Scaled.forward(ctx, x, cos, kernel)

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> Any:
            return Scaled.backward(ctx, given)[:2]

    def scenario(way: Way) -> list[Tensor | None]:
        x, w, cos = leaf(32, 16), leaf(16, 16), torch.randn(32, 16)

        def forward(x: Tensor) -> Tensor:
            y = scaled((x @ w).sin(), cos).cos()
            y = Declared.apply((y @ w).sin(), cos).cos()
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)  # replays inside
            return (y * slope.detach()).sum()

        return gradients(way(forward, x), x, w)

    replayed = check(scenario)
    assert replayed.names()["function::Declared"] == 1
    assert not kernel.compilations  # nobody had to ask what it writes


def test_a_kernel_that_raises_leaves_the_step_as_it_is_plainly() -> None:
    def broken(x: Tensor, cos: Tensor) -> None:
        raise ValueError("no such grid")

    kernel = Kernel(broken, "x cos", None)

    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(32, 16), leaf(16, 16)

        def forward(x: Tensor) -> Tensor:
            y = (x @ w).sin()
            with pytest.raises(ValueError, match="no such grid"):
                kernel[1,](y.detach(), w)
            return y.cos().sum()

        return gradients(way(forward, x), x, w)

    check(scenario)


def test_a_budget_that_sees_launches_plans_and_holds() -> None:
    kernel = in_place()
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
    x, cos = torch.randn(256, 32), torch.randn(256, 32)

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = Rotary.apply(layer(x), cos, kernel).sin().cos() + x
        return x.square().sum()

    def plain() -> list[Any]:
        layers.zero_grad()
        loss = forward(x)
        loss.backward()
        return [bits(loss.detach()), *(bits(p.grad) for p in layers.parameters())]

    expected = plain()
    limit = lowtide.measure(plain, device="cpu").peak_bytes * 7 // 10
    budget = lowtide.budget(limit)
    for _ in range(3):
        layers.zero_grad()
        with counted() as replayed, budget:
            loss = forward(x)
            loss.backward()
        assert [bits(loss.detach()), *(bits(p.grad) for p in layers.parameters())] == expected
    measured = budget.report().measured_peak
    assert measured is not None
    assert measured <= limit
    assert replayed.operations


def test_other_arguments_may_be_other_code() -> None:
    """Numbers are not: a kernel is asked about once for any batch size, but a one is a constant."""
    kernel = in_place()
    x = torch.ones(4, 4)

    def launch(n: int, inplace: bool, kind: torch.dtype = torch.float32) -> None:
        y = x.to(kind)
        kernel[1,](y, y, y, n, INPLACE=inplace)

    def compilations(*calls: tuple[Any, ...]) -> int:
        before = kernel.compilations
        for call in calls:
            lowtide.checkpoint(launch, *call)
        return kernel.compilations - before

    assert compilations((16, True), (48, True), (7, True)) == 1
    assert compilations((1, True)) == 1
    assert compilations((16, False)) == 1
    assert compilations((16, True, torch.float64)) == 1
    assert compilations((1, True), (16, False), (3, True)) == 0


def test_a_default_is_an_argument_of_its_own_kind() -> None:
    """Else a call that names one argument would be taken for a call that names another."""
    kernel = Kernel(lambda **_: None, "first second", None)

    def launch(**given: Any) -> None:
        kernel[1,](**given)

    for given in ({"first": True}, {"second": True}, {"first": True}):
        lowtide.checkpoint(launch, **given)
    assert kernel.compilations == 2


def test_triton_may_be_imported_in_the_middle_of_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "lowtide_tests_late_triton"
    (tmp_path / f"{name}.py").write_text(
        "from test_launches import Kernel\nclass Late(Kernel): pass"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launches, "_LAUNCHERS", ((name, "Late"),))
    monkeypatch.delitem(sys.modules, name, raising=False)
    seen: list[Any] = []

    def launched(kernel: Any, run: Any, args: Any, kwargs: Any) -> None:
        seen.append((kernel, args))

    launches.watch_launches(launched)
    launches.watch_launches(launched)  # a second recording before the import
    assert not seen
    late = importlib.import_module(name)
    kernel = late.Late(print, "x", None)
    kernel[1,](1)
    assert seen == [(kernel, (1,))]
    assert all(getattr(finder, "name", None) != name for finder in sys.meta_path)
