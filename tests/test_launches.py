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
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
import ttir_texts as texts
from against_plain import WAYS, Way, bits, check, counted, gradients, leaf, unseen
from lowtide._compat import launches
from lowtide.step import current_recorder
from lowtide.tape.launches import telling
from lowtide.tape.ttir import read_code


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (texts.TURN_IN_PLACE, (3, {0}, True)),
        (texts.TURN, (3, {2}, True)),  # not what it only reads
        (texts.GATHER, (4, {2, 3}, False)),  # loaded numbers are offsets; it adds up with atomics
        (texts.CHOSEN, (3, {0, 1}, True)),
        (texts.UNTIL, (2, {0, 1}, False)),
        (texts.EARLY, (2, {1}, True)),
        (texts.SIBLINGS, (3, {0, 1, 2}, True)),  # a name is used for several addresses
        (texts.ADDRESSES.replace("tt.store", "tt.load"), (2, set(), False)),  # it reads anything
        (texts.TURN.replace("tt.load %v_7, %v_5", "tt.load %v_7, %v_5 {isVolatile = true}"),
         (3, {2}, False)),
        (texts.TURN.replace("arith.mulf", "elsewhere.mulf"), (3, {2}, False)),
        (texts.BY_ASSEMBLY, (2, {1}, False)),  # through a number
        (texts.HANDED_ON, (3, {0, 1, 2}, True)),  # what is left after any number of turns
    ],
)  # fmt: skip
def test_what_a_kernel_does_is_read_off_its_code(text: str, found: Any) -> None:
    code = read_code(text)
    assert code is not None
    assert code[:3] == found


def test_which_arguments_a_kernel_reads() -> None:
    found = [(texts.TURN_IN_PLACE, {0, 1}), (texts.TURN, {0, 1}), (texts.BY_ASSEMBLY, {1})]
    assert [(text, read_code(text).reads) for text, _ in found] == found  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        texts.ADDRESSES,
        texts.APART,
        texts.FROM_NOTHING,
        texts.CALLS,
        texts.TURN.replace("tt.store", "tt.store_of_another_release"),
        texts.TURN.replace("tt.splat %out", "tt.unheard_of %out"),
        texts.UNTIL.replace("scf.yield %n_3, %p_2", "scf.yield %n_3"),
    ],
)
def test_nothing_is_said_of_code_that_cannot_be_followed(text: str) -> None:
    assert read_code(text) is None


class Kernel:
    """As Triton's `JITFunction`: `run` launches, unseen, or compiles to an object with the code."""

    compilations = 0

    def __init__(self, body: Callable[..., None], names: str, ttir: str | None) -> None:
        self.fn, self.arg_names, self.ttir = body, names.split(), ttir
        self.grids: list[Any] = []
        self.constexprs: list[int] = []
        self.pre_run_hooks: list[Callable[..., Any]] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        if warmup:
            self.compilations += 1
            return SimpleNamespace(asm={} if self.ttir is None else {"ttir": self.ttir})
        self.grids.append(tuple(grid(kwargs) if callable(grid) else grid))
        self.fn(*args, **kwargs)
        return None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


launches.watch_class(Kernel, telling(current_recorder))


def _turn(x: Tensor, cos: Tensor, out: Tensor, n: int, INPLACE: bool) -> None:
    unseen(x if INPLACE else out, x * cos)


# The same code, but for a part that must not run again.
IN_PLACE_ONCE = texts.TURN_IN_PLACE.replace("arith.mulf", "elsewhere.mulf")
ONCE = texts.TURN.replace("arith.mulf", "elsewhere.mulf")


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
@pytest.mark.parametrize(
    "ttir", [texts.TURN_IN_PLACE, IN_PLACE_ONCE, None], ids=["again", "once", "not followed"]
)
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
    again = replayed.names()["triton::_turn"]
    if ttir is texts.TURN_IN_PLACE:
        assert again
    else:  # what a kernel has written over is not made again
        assert not again
        assert replayed["mm"] <= 4
    assert kernel.compilations == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("ttir", [texts.TURN, ONCE], ids=["again", "once"])
def test_what_a_kernel_only_reads_is_dropped(way: Way, ttir: str) -> None:
    kernel = elsewhere(ttir)

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
    assert (replayed.names()["triton::_turn"] > 0) == (ttir is texts.TURN)


def _peak(kernel: Kernel, way: Callable[..., Any]) -> int:
    layers, x = [leaf(64, 64) for _ in range(4)], leaf(256, 64)
    cos = torch.randn(256, 64)

    def block(x: Tensor, layer: Tensor) -> Tensor:
        y = Scaled.apply(x @ layer, cos, kernel)
        return x + Rotary.apply(y @ layer, cos, in_place()).sin()

    def step() -> None:
        y = x
        for layer in layers:
            y = way(block, y, layer)
        y.sum().backward()

    step()
    return lowtide.measure(step, device="cpu").peak_bytes


def test_blocks_with_kernels_take_no_more_than_under_torchs_checkpoint() -> None:
    def torchs(block: Any, *args: Any) -> Any:
        return torch_checkpoint(block, *args, use_reentrant=False)

    assert _peak(elsewhere(), lowtide.checkpoint) <= _peak(elsewhere(), torchs)
    assert _peak(elsewhere(ONCE), lowtide.checkpoint) > _peak(elsewhere(), torchs)


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


def _written(*launches: Callable[[Tensor, Tensor], None], of: Any = torch.empty) -> Any:
    """A scenario in which launches fill one piece of memory, from what the record has made."""

    def scenario(way: Way) -> list[Tensor | None]:
        torch.manual_seed(5)
        x, w, cos = leaf(8, 16), leaf(16, 16), torch.randn(8, 16)

        class Filled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                out = of(8, 16)
                for launch in launches:
                    launch(out, x * cos)
                return out

            @staticmethod
            def backward(ctx: Any, given: Tensor) -> Tensor:
                return given * cos

        def forward(x: Tensor) -> Tensor:
            return Filled.apply((x @ w).sin()).cos().exp().sum()

        return gradients(way(forward, x), x, w)

    return scenario


def test_what_fills_memory_in_two_goes() -> None:
    kernel = elsewhere()

    def all_of_it(out: Tensor, x: Tensor) -> None:
        kernel[1,](x, x, out, 1, INPLACE=False)

    def more(out: Tensor, x: Tensor) -> None:
        kernel[1,](out, x, out, 2, INPLACE=False)

    assert check(_written(all_of_it, more)).names()["triton::_turn"] == 2
    assert not check(_written(more, all_of_it)).names()["triton::_turn"]  # reads what nobody wrote


def test_a_kernel_that_fills_two_pieces_of_memory() -> None:
    """As a norm does, which notes what backward needs."""

    def body(x: Tensor, out: Tensor, scale: Tensor) -> None:
        unseen(scale, x.square().sum(1, keepdim=True).rsqrt())
        unseen(out, x * scale)

    kernel = Kernel(body, "x out scale", texts.NORM)

    class Normed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out, scale = torch.empty_like(x), torch.empty(x.shape[0], 1)
            kernel[1,](x, out, scale)
            ctx.save_for_backward(x, scale)
            return out

        @staticmethod
        def backward(ctx: Any, given: Tensor) -> Tensor:
            x, scale = ctx.saved_tensors
            return given * scale - x * scale.pow(3) * (given * x).sum(1, keepdim=True)

    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(32, 16), leaf(16, 16)

        def forward(x: Tensor) -> Tensor:
            return Normed.apply((Normed.apply((x @ w).sin()) @ w).cos()).exp().sum()

        return gradients(way(forward, x), x, w)

    assert check(scenario).names()["triton::body"] >= 2


def test_one_piece_of_fresh_memory_that_is_given_twice() -> None:
    kernel = elsewhere()

    def packed(out: Tensor, x: Tensor) -> None:
        out.copy_(x)
        both = torch.empty(16, 16)
        kernel[1,](x, both[8:], both[:8], 3, INPLACE=False)  # reads what nobody wrote
        kernel[1,](x, x, both, 3, INPLACE=False)

    def itself(out: Tensor, x: Tensor) -> None:
        kernel.fn = lambda x, cos, out, n, INPLACE: unseen(out, torch.full((8, 16), 2.0))
        kernel[1,](out, out, out, 3, INPLACE=False)

    check(_written(packed))
    check(_written(itself))


def test_a_launch_that_does_not_fit_its_code_may_write_to_anything() -> None:
    kernel = Kernel(lambda x, cos: unseen(x, x * cos), "x cos", texts.TURN)

    def scenario(way: Way) -> list[Tensor | None]:
        x, w, cos = leaf(8, 16), leaf(16, 16), torch.randn(8, 16)

        def forward(x: Tensor) -> Tensor:
            z = (x @ w).sin().detach() * 2
            kernel[1,](z, cos)
            return (x * z.exp()).cos().sum()

        return gradients(way(forward, x), x, w)

    assert check(scenario)["exp"]


def test_a_step_with_launches_after_steps_without() -> None:
    """The compiled recorder has stopped to record them, as they fit."""
    kernel, w, cos = elsewhere(), leaf(16, 16), torch.randn(32, 16)
    x, budget = torch.randn(32, 16), lowtide.budget("1 GiB")

    def step(with_kernel: bool) -> list[Any]:
        w.grad = None
        y = (x @ w).sin()
        y = Scaled.apply(y.cos(), cos, kernel) if with_kernel else y.cos() * cos
        loss = y.exp().sum()
        loss.backward()
        return [bits(loss.detach()), bits(w.grad)]

    for with_kernel in [*[False] * 6, True, False, True, True]:
        expected = step(with_kernel)
        with budget:
            assert step(with_kernel) == expected


def test_parts_that_kernels_fill() -> None:
    """Only the first is made again: of what a kernel may read besides, a part is not known."""
    kernel = elsewhere()

    def first(out: Tensor, x: Tensor) -> None:
        kernel[1,](x[:4], x[:4], out[:4], 4, INPLACE=False)

    def second(out: Tensor, x: Tensor) -> None:
        kernel[1,](x[4:], x[4:], out[4:], 4, INPLACE=False)

    def by_torch(out: Tensor, x: Tensor) -> None:
        out[4:] = x[4:]

    check(_written(first, second))
    assert check(_written(first, by_torch)).names()["triton::_turn"] == 1
    check(_written(by_torch, first))
    check(_written(first, by_torch, first))


def test_a_kernel_that_works_on_what_another_library_has_filled() -> None:
    """A kernel of an extension, which nothing sees, before one of Triton's in place."""
    kernel = in_place()

    def launch(out: Tensor, x: Tensor) -> None:
        unseen(out, x.cos())
        kernel[1,](out, x, x, 3, INPLACE=True)

    assert not check(_written(launch)).names()["triton::_turn"]


@pytest.mark.parametrize("make", [torch.ones, torch.empty])
def test_a_kernel_may_read_beyond_the_part_that_it_is_given(make: Any) -> None:
    """Such as the values beside the keys: what is there is not in the record."""

    def body(part: Tensor, cos: Tensor, out: Tensor, n: int, INPLACE: bool) -> None:
        unseen(out, part * part.as_strided((8, 16), (16, 1), part.storage_offset() + 128))

    kernel = Kernel(body, "x cos out n INPLACE", texts.TURN)

    def launch(out: Tensor, x: Tensor) -> None:
        both = make(2, 8, 16)
        both[0] = x
        if make is torch.empty:
            unseen(both[1], torch.full((8, 16), 3.0))
        kernel[1,](both[0], x, out, 3, INPLACE=False)

    assert check(_written(launch)).names()["triton::body"] == 1


def test_constants_that_a_kernel_writes_a_part_of_are_not_made_again_as_fresh_memory() -> None:
    kernel = elsewhere()

    def a_part(out: Tensor, x: Tensor) -> None:
        unseen_part = out.view(-1)  # the kernel is given all of it, and writes less
        kernel.fn = lambda x, cos, out, n, INPLACE: unseen(out[:40], x.reshape(-1)[:40])
        kernel[1,](x, x, unseen_part, 40, INPLACE=False)

    for make in (torch.zeros, torch.ones):
        assert not check(_written(a_part, of=make)).names()["triton::_turn"]


def test_an_autotuners_trials_are_no_operations() -> None:
    kernel = elsewhere()
    kernel.constexprs = [3]  # they differ in such

    def trials(out: Tensor, x: Tensor) -> None:
        for n in range(30):
            kernel[1,](x, x, out, n, INPLACE=False)

    assert not check(_written(trials)).names()["triton::_turn"]


@pytest.mark.parametrize("kind", ["a function", "of one list", "a list"])
def test_a_grid_is_that_of_the_launch(kind: str) -> None:
    kernel, size = elsewhere(), [3, 5]
    grid = {
        "a function": lambda constants: (size[0], constants["n"]),
        "of one list": lambda constants: size,
        "a list": size,
    }[kind]

    def launch(out: Tensor, x: Tensor) -> None:
        kernel[grid](x, INPLACE=False, n=5, out=out, cos=x)  # names in any order

    def scenario(way: Way) -> Any:
        size[0] = 3
        inner = _written(launch)

        def then_changed(function: Any, *args: Any) -> Any:
            loss = way(function, *args)
            size[0] = 7
            return loss

        return inner(then_changed)

    assert check(scenario).names()["triton::_turn"] == 1
    assert kernel.grids == [(3, 5), (3, 5), (3, 5)]  # the plain step, the step, the replay


@pytest.mark.parametrize("kind", ["hooks", "a tuple", "a descriptor"])
def test_launches_that_a_replay_cannot_be_given(kind: str) -> None:
    """What they write is known all the same, but for hooks: asking would run them once more."""
    kernel, hooked = in_place(), []
    if kind == "hooks":
        kernel.pre_run_hooks = [lambda *args, **_: hooked.append(args)]

    def body(x: Any, cos: Tensor, out: Any, n: int, INPLACE: bool) -> None:
        target = x if isinstance(x, Tensor) else x.base if hasattr(x, "base") else x[0]
        unseen(target, target * cos)

    kernel.fn = body

    def launch(x: Tensor, cos: Tensor) -> None:
        given = {"hooks": x, "a tuple": (x,), "a descriptor": SimpleNamespace(base=x)}[kind]
        kernel[1,](given, cos, given, 3, INPLACE=True)

    def scenario(way: Way) -> list[Tensor | None]:
        x, w, cos = leaf(8, 16), leaf(16, 16), torch.randn(8, 16)

        def forward(x: Tensor) -> Tensor:
            y = (x @ w).sin()
            z = y.detach() * 2
            launch(z, cos)
            return (y * z.exp()).cos().sum()

        return gradients(way(forward, x), x, w)

    replayed = check(scenario)
    assert replayed["exp"]
    assert not replayed.names()["triton::body"]
    assert len(hooked) == (2 if kind == "hooks" else 0)  # the plain step, the step


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

    def launch(n: float, inplace: bool, kind: torch.dtype = torch.float32) -> None:
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
    assert compilations((0.5, True), (0.25, True)) == 1


def test_a_kernel_that_is_only_compiled_is_not_launched() -> None:
    kernel, x = elsewhere(), torch.ones(4, 4)
    arguments = (x, x, x, 3)

    def compile_it() -> Any:
        return kernel.run(*arguments, INPLACE=False, grid=(1,), warmup=True)

    assert lowtide.checkpoint(compile_it).asm == {"ttir": texts.TURN}
    assert kernel.compilations == 1


def test_functions_of_one_name_and_constants_among_arguments_are_other_code() -> None:
    """Of two kernels in one, one may write to what the other only reads."""
    kernel = Kernel(lambda x, how: None, "x how", None)

    class Function:
        """As one of Triton's, made by a function that makes several."""

        def __init__(self, code: str) -> None:
            self.cache_key = code

        def __repr__(self) -> str:
            return "Function(name)"

    class Constant(SimpleNamespace):
        """As Triton's `constexpr`."""

    def compilations(*given: Any) -> int:
        before = kernel.compilations
        for how in given:
            lowtide.checkpoint(lambda how=how: kernel[1,](torch.ones(2), how))
        return kernel.compilations - before

    block = SimpleNamespace(base=torch.ones(4), block_shape=[2])
    wide = SimpleNamespace(base=torch.ones(4), block_shape=[4])
    first, second = Function("a"), Function("b")
    for constexprs in ([], [1]):
        kernel.constexprs = constexprs
        vars(kernel).pop("_lowtide_known", None)
        assert compilations(first, Function("a"), first) == 1
        assert compilations(second) == 1
        assert compilations((first, 2), (second, 2), (first, 2)) == 2
        assert compilations(Constant(value=1), Constant(value=2), Constant(value=1)) == 2
        assert compilations(Constant(value=first), Constant(value=second)) == 0
    kernel.constexprs = []
    assert compilations(block, wide, block) == 2


def test_what_comes_after_any_number_of_tensors_is_seen() -> None:
    def body(x: Tensor, *more: Tensor, out: Tensor, IN: bool) -> None:
        unseen(more[-1] if IN else out, x + more[0])

    kernel = Kernel(body, "x more out IN", None)
    kernel.constexprs = [3]

    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(8, 16), leaf(16, 16)

        def forward(x: Tensor) -> Tensor:
            y = (x @ w).sin()
            first, second, out = y.detach() + 1, y.detach() * 2, y.detach() * 3
            before = y * out.exp() * second.cos()
            for inside in (False, True):
                kernel[1,](first, first, second, out=out, IN=inside)
            return (before * out.exp() * second.cos()).sum()

        return gradients(way(forward, x), x, w)

    check(scenario)
    assert kernel.compilations == 2


def test_a_default_is_an_argument_of_its_own_kind() -> None:
    """Else a call that names one argument would be taken for a call that names another."""
    kernel = Kernel(lambda **_: None, "first second", None)

    def launch(**given: Any) -> None:
        kernel[1,](**given)

    for given in ({"first": True}, {"second": True}, {"first": True}):
        lowtide.checkpoint(launch, **given)
    assert kernel.compilations == 2


def test_a_dry_run_does_not_settle_what_a_kernel_does() -> None:
    """Its tensors have no addresses, by which Triton compiles: that fails there, and not after."""

    class Addressed(Kernel):
        pass

    kernel = elsewhere()
    compile_and_run = Kernel.run

    def run(self: Kernel, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, FakeTensor) for each in args):
            raise RuntimeError("no address")
        return compile_and_run(self, *args, **kwargs)

    kernel.__class__ = Addressed
    Addressed.run = run  # type: ignore[method-assign]
    launches.watch_class(Addressed, telling(current_recorder))

    def forward(x: Tensor, w: Tensor, cos: Tensor) -> Tensor:
        for _ in range(3):
            x = Scaled.apply((x @ w).sin(), cos, kernel)
        return x.square().sum()

    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(32, 16), leaf(16, 16)
        return gradients(way(forward, x, w, torch.randn(32, 16)), x, w)

    with pytest.warns(lowtide.DryRunWarning, match="no address"):
        lowtide.plan(forward, leaf(32, 16), leaf(16, 16), torch.randn(32, 16))
    assert check(scenario).names()["triton::_turn"]
    assert kernel.compilations == 1


def test_code_that_is_cut_off_is_not_followed() -> None:
    lines = texts.GATHER.splitlines()
    for place in range(len(lines)):
        read_code("\n".join(lines[place:]))
        read_code("\n".join(lines[:place] + lines[place + 1 :]))
    assert read_code("}\n" + texts.GATHER) is None


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
