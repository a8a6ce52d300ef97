"""Rule 5: what cannot be replayed is kept; and the global state that operations read.

Rules of docs/semantics.md are cited by number.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from against_plain import WAYS, Scenario, Way, check, gradients, leaf
from by_hand import same
from lowtide import replay, step
from lowtide._compat import switches
from lowtide.errors import UnsupportedError
from lowtide.running.anchors import Anchors
from lowtide.tape.regions import Region
from lowtide.tape.values import Operation, Value

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


# Memory that something unseen fills.


class ThroughNumpy(torch.autograd.Function):
    """Fills an empty tensor through NumPy, and keeps things on `ctx` in every possible way."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ThroughNumpy.calls += 1
        out = torch.empty_like(x)
        np.multiply(x.detach().numpy(), factor, out=out.numpy())
        table = torch.zeros(x.shape)
        table.numpy()[:] = np.cos(x.detach().numpy())
        ctx.save_for_backward(out, table)
        ctx.factor = factor
        ctx.attribute = x.detach().sin()  # a tensor that autograd does not know about
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        out, table = ctx.saved_tensors
        return gradient * ctx.factor * table + out * 0.1 + ctx.attribute, None


class ThroughPointers(torch.autograd.Function):
    """Writes by address, as kernels bound by ctypes do; no version counter moves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        source = x.detach().contiguous()
        out = x.new_empty(x.shape)
        ctypes.memmove(out.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        return gradient * out


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda x: ThroughNumpy.apply(x.tanh(), 1.5).sin().exp(),
    "pointers": lambda x: ThroughPointers.apply(x.tanh()).sin().exp(),
    "numpy_outside_autograd": lambda x: (x * torch.from_numpy(x.detach().numpy() ** 2)).sin().exp(),
    "item": lambda x: (x * x.detach().max().item()).sin().exp(),
    "tolist": lambda x: (x * torch.tensor(x.detach().tolist())).sin().exp(),
    "memory_written_through_data": lambda x: ((x * 2).sin() * _filled(x)).exp(),
    "seen_by_pointer_only": lambda x: (x * _copied(x)).sin().exp(),
}


def _filled(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out.data.copy_(x.detach() + 1)
    return out


def _copied(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    ctypes.memmove(out.data_ptr(), x.detach().data_ptr(), x.numel() * x.element_size())
    return out


@every_way
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_memory_that_somebody_unseen_fills(function: Callable[[Tensor], Tensor], way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        return gradients(way(function, x).sum(), x)

    replayed = check(scenario, way)
    assert replayed["empty"] == replayed["empty_like"] == replayed["new_empty"] == 0


def test_a_custom_function_runs_once() -> None:
    ThroughNumpy.calls = 0
    lowtide.checkpoint(FUNCTIONS["numpy"], leaf(8)).sum().backward()
    assert ThroughNumpy.calls == 1


# Operators that are not torch's own.


def test_a_custom_operator_is_kept() -> None:
    calls: list[int] = []

    @torch.library.custom_op("lowtide_tests::noisy", mutates_args=())
    def noisy(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    noisy.register_autograd(lambda ctx, g: g * 2)
    x = leaf(8)
    y = lowtide.checkpoint(lambda x: noisy(x.sin()).cos().exp(), x)
    y.sum().backward()
    assert calls == [1]
    assert x.grad is not None


def library_with(namespace: str, name: str, calls: list[int]) -> tuple[Any, Any]:
    """A library with one operator, which counts its calls; and the operator."""
    library = torch.library.Library(namespace, "FRAGMENT")

    def run(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, run, "CompositeExplicitAutograd")
    return library, getattr(getattr(torch.ops, namespace), name).default


def test_an_operator_that_the_program_adds_to_torchs_is_kept() -> None:
    calls: list[int] = []
    library, counting = library_with("aten", "lowtide_tests_added", calls)
    x = leaf(8)
    lowtide.checkpoint(lambda x: (counting(x.detach().exp()) * x).sin(), x).sum().backward()
    assert calls == [1]
    library._destroy()
    # The next operator may have its schema at the same address.
    calls.clear()
    library, counting = library_with("lowtide_tests_next", "other", calls)
    lowtide.checkpoint(lambda x: (counting(x.detach().exp()) * x).sin(), x).sum().backward()
    assert calls == [1]
    library._destroy()


def test_a_collective_runs_once(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:

        def scenario(way: Way) -> list[Tensor | None]:
            x = leaf(8)

            def region(x: Tensor) -> Tensor:
                y = x.sin()
                mean = y.detach().clone()
                dist.all_reduce(mean)
                gathered = [torch.empty(8)]
                dist.all_gather(gathered, mean.exp())
                return ((y - mean) * gathered[0]).cos().exp()

            return gradients(way(region, x).sum(), x)

        replayed = check(scenario)
        assert replayed.operations > 0
        assert not [name for name in replayed.names() if name.startswith("c10d")]
    finally:
        dist.destroy_process_group()


# State that operations read without having it as an argument.


def _with_default_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        ramp = torch.linspace(0, 1, 8) + torch.zeros(8).add_(0.1) + torch.arange(8.0)
        return (x * ramp.sqrt()).sin().exp()
    finally:
        torch.set_default_dtype(torch.float32)


def _without_onednn(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 36).reshape(4, 1, 3, 3)
    image = x.reshape(1, 1, 2, 4).sin().repeat(2, 1, 4, 2)
    with warnings.catch_warnings():  # `flags` sets every flag that it knows, which warns
        warnings.simplefilter("ignore")
        off = torch.backends.mkldnn.flags(enabled=False)
        off.__enter__()
    try:
        return F.conv2d(F.conv2d(image, weight).exp().transpose(0, 1), weight[:, :, :2, :2]
                        .repeat(1, 2, 1, 1)).cos().exp()  # fmt: skip
    finally:
        off.__exit__(None, None, None)


def _without_nnpack(x: Tensor) -> Tensor:
    """If oneDNN is off too, NNPACK is tried next."""
    weight = torch.linspace(-1, 1, 36).reshape(2, 2, 3, 3)
    ramp = torch.linspace(1, 2, 32 * 2 * 49).reshape(32, 2, 7, 7, 1, 1)
    images = (x.reshape(2, 4).sin() * ramp).permute(0, 1, 2, 4, 3, 5).reshape(32, 2, 14, 28)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off = torch.backends.mkldnn.flags(enabled=False)
        off.__enter__()
    (before,) = torch.backends.nnpack.set_flags(False)
    try:
        return F.conv2d(images, weight, padding=1).exp()
    finally:
        torch.backends.nnpack.set_flags(before)
        off.__exit__(None, None, None)


def _activation_without_onednn(x: Tensor) -> Tensor:
    points = x.sin()[:, None] * torch.linspace(-4, 4, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off = torch.backends.mkldnn.flags(enabled=False)
        off.__enter__()
    try:
        return F.gelu(points).sin().exp()
    finally:
        off.__exit__(None, None, None)


def _flushing_denormals(x: Tensor) -> Tensor:
    assert torch.set_flush_denormal(True)
    try:
        return ((x.sin() * 1e-20) * 1e-20 * 1e20 * 1e20).cos().exp()
    finally:
        torch.set_flush_denormal(False)


def _math_attention(x: Tensor) -> Tensor:
    q = x.reshape(1, 1, 2, 4).sin()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        attended = F.scaled_dot_product_attention(q, q, q * 2, is_causal=True)
    return attended.cos().exp()


def _deterministic(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True)
        try:
            y = x.sin().index_put((torch.tensor([0, 0, 1]),), x[:3].cos(), accumulate=True)
            return torch.cumsum(y, 0).exp().cos()
        finally:
            torch.use_deterministic_algorithms(False)


def _autocast(x: Tensor) -> Tensor:
    weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        first = F.linear(x.reshape(2, 4).sin(), weight)
        again = F.linear(first.tanh(), weight)  # the cast weight is shared, as by tied layers
        with torch.autocast("cpu", enabled=False):
            return F.linear(again.float(), weight).exp() + first.exp().sum()


class _SineForTanh(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


def _function_mode(x: Tensor) -> Tensor:
    with _SineForTanh():
        return torch.tanh(x * 2).exp().cos()


def _device_context(x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return (x * torch.ones(8)).sin().exp()


STATES = [
    _with_default_dtype, _without_onednn, _without_nnpack, _activation_without_onednn,
    _flushing_denormals, _math_attention, _deterministic, _autocast, _function_mode,
    _device_context,
]  # fmt: skip


@every_way
@pytest.mark.parametrize("region", STATES, ids=lambda f: f.__name__.strip("_"))
def test_state_that_stands_only_in_the_forward(
    region: Callable[[Tensor], Tensor], way: Way
) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        return gradients(way(region, x).sum(), x)

    replayed = check(scenario, way)
    if way is lowtide.checkpoint:
        assert replayed.operations > 0
    assert torch.get_default_dtype() is torch.float32
    assert torch.backends.mkldnn.enabled
    assert not switches.flushes_denormals()
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_multiplies_matrices_inside_remembers_the_switches() -> None:
    # On some CPUs the bits of a distance depend on the precision of float32 products.
    points = leaf(64, 8)
    seen: list[Operation] = []
    replay.listeners.append(seen.extend)
    try:
        lowtide.checkpoint(lambda: torch.cdist(points.sin(), points).sin()).sum().backward()
    finally:
        replay.listeners.remove(seen.extend)
    distances = [op for op in seen if op.facts.name == "aten::_euclidean_dist"]
    assert distances
    assert all(op.ambient is not None for op in distances)


class _Shifted(TorchDispatchMode):
    """A user's mode that changes the result of an activation function."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + 0.1 if func is torch.ops.aten.gelu.default else out


@every_way
@pytest.mark.parametrize("backward", [True, False], ids=["backward too", "forward"])
def test_a_dispatch_mode_around_that_changes_results(way: Way, backward: bool) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_Shifted())
            y = way(lambda x: F.gelu(x.sin()).sin().exp(), x).sum()
            if not backward:
                stack.close()
            y.backward()
        return [y, x.grad]

    check(scenario, way)


def test_a_mode_around_counts_what_the_program_runs() -> None:
    """What a first step takes is found out on shapes, of which a mode around sees nothing."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    rows = torch.randn(64, 8)

    def products(limit: int | None) -> int:
        budget = contextlib.nullcontext() if limit is None else lowtide.budget(limit)
        with FlopCounterMode(display=False) as counter, budget:
            loss = net(rows).square().mean()
        loss.backward()
        return counter.get_total_flops()

    assert products(20_000) == products(None) > 0


@every_way
def test_a_body_of_a_higher_order_operator_that_would_lose_a_gradient(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch finds its closure by compiling it, which is off inside a recording."""
    from torch._higher_order_ops.map import map as each

    monkeypatch.setattr(step, "_warned", True)  # given once per process; other tests want it

    weight = torch.linspace(-1, 1, 16).reshape(4, 4)
    rows = torch.linspace(0, 1, 8).reshape(2, 4)

    def region(x: Tensor, closed: Tensor) -> Tensor:
        out: Tensor = each(lambda row: (row @ closed).sin(), rows).sum()
        return x.sin().exp() * out

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        return gradients(way(lambda x: region(x, weight), x).sum(), x)

    check(scenario, way)
    parameter = nn.Parameter(weight.clone())
    with pytest.raises(UnsupportedError, match=r"map_impl reads a tensor of shape \(4, 4\) that"):
        way(lambda x: region(x, parameter), leaf(8))


@every_way
def test_a_module_as_a_body_that_would_lose_a_gradient(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_warned", True)  # given once per process; other tests want it

    def region(x: Tensor) -> Tensor:
        out: Tensor = torch.cond(rows.sum() > 0, net, net, (rows,))
        return out * x.exp()

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4)
        return gradients(way(region, x).sum(), x)

    rows, net = torch.ones(2, 4), nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match=r"cond reads a tensor of shape \(4, 4\) that"):
        way(region, leaf(4))
    net.requires_grad_(False)
    check(scenario, way)


@every_way
@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no")  # torch 2.12
def test_a_score_function_that_would_lose_a_gradient(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flex_attention` too finds what it closes over by compiling it; on the CPU torch refuses."""
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(step, "_warned", True)  # given once per process; other tests want it
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    bias = torch.randn(8, 8)

    def region(x: Tensor, bias: Tensor) -> Tensor:
        def score(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[i, j]

        found: Tensor = flex.flex_attention(x.sin(), x, x, score_mod=score)
        return found.exp()

    def both(x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = region(x, learned)
        return region(x, bias) * teacher

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(1, 2, 8, 4)
        return gradients(way(both, x).sum(), x)

    learned = nn.Parameter(bias.clone())
    check(scenario, way)
    with pytest.raises(UnsupportedError, match=r"flex_attention reads a tensor of shape \(8, 8\)"):
        way(region, leaf(1, 2, 8, 4), learned)


@every_way
@pytest.mark.parametrize("inner", [lambda t: {"out": t}, lambda t: ((t,), t + 1)])
def test_bodies_that_return_what_autograd_takes_for_no_tensors(
    way: Way, inner: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes it apart by compiling the bodies, which is off inside a recording."""
    monkeypatch.setattr(step, "_warned", True)  # given once per process; other tests want it

    def region(x: Tensor, give: Callable[[Tensor], Any]) -> Tensor:
        found = torch.cond(x.sum() > 0, lambda t: give(t.sin()), lambda t: give(t.cos()), (x,))
        found = tree_leaves(found)[0]
        return found.exp() + x

    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        return gradients(way(lambda x: region(x, lambda t: (t,)), x).sum(), x)

    check(scenario, way)
    with pytest.raises(UnsupportedError, match="cond return something else than a tuple of"):
        way(lambda x: region(x, inner), leaf(8))
    way(lambda x: region(x, inner), torch.ones(8))  # no gradient could be lost

    from torch._higher_order_ops.map import map as each

    with pytest.raises(UnsupportedError, match="map_impl return something else than a tuple of"):
        way(lambda x: each(lambda row: row.sin(), x)[0].exp(), leaf(4, 2))  # of the first row


@every_way
def test_denormals_that_are_flushed_only_in_the_backward(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        y = way(lambda x: ((x.sin() * 1e-20) * 1e-20 * 1e20 * 1e20).cos().exp(), x).sum()
        torch.set_flush_denormal(True)
        try:
            y.backward()
            assert switches.flushes_denormals()
        finally:
            torch.set_flush_denormal(False)
        return [y, x.grad]

    check(scenario, way)


@every_way
def test_state_that_stands_only_in_the_backward(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        y = way(_without_onednn, x).sum() + way(lambda x: (x * torch.ones(8)).sin().exp(), x).sum()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                y.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        return [y, x.grad]

    check(scenario, way)


def _of_integers(x: Tensor) -> Tensor:
    """Numbers that get the default dtype, as nothing else determines it."""
    ramp = torch.arange(1, 9)
    positive = x.detach() > 0
    made = [
        ramp / 3, ramp * 0.3, ramp.sqrt(), torch.atan2(ramp, ramp + 1),
        torch.tensor(3) * 0.3 * ramp, torch.tensor(0.3) * ramp, positive.exp(),
        torch.where(positive, 0.1, 0.3), F.one_hot(ramp % 8).sum(0).sigmoid(),
    ]  # fmt: skip
    return torch.cat([(x.exp() * factor).sin() * factor for factor in made])


@every_way
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
        (torch.float16, torch.bfloat16),  # the same size, but other numbers
        (torch.bfloat16, torch.float16),
    ],
)
def test_what_becomes_of_integers_under_the_default_dtype(
    way: Way, forward: torch.dtype, backward: torch.dtype
) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)
        try:
            torch.set_default_dtype(forward)
            y = way(_of_integers, x)
            torch.set_default_dtype(backward)
            return [y, *gradients(y.sum(), x)]
        finally:
            torch.set_default_dtype(torch.float32)

    replayed = check(scenario, way)
    if way is lowtide.checkpoint:
        assert {"div", "mul", "sqrt", "atan2", "exp", "where", "sigmoid"} <= {
            name.removeprefix("aten::") for name in replayed.names()
        }


@every_way
@pytest.mark.parametrize(("forward", "backward"), [(1, 3), (3, 1)])
def test_the_number_of_threads_that_an_operation_had(way: Way, forward: int, backward: int) -> None:
    def region(x: Tensor) -> Tensor:
        positive = x.exp() + 0.1
        made = [F.silu(x), F.mish(x), x.sigmoid(), F.softplus(x), F.elu(x), positive.pow(1.7),
                torch.atan2(x, positive), x.sinh(), torch.logaddexp(x, positive)]  # fmt: skip
        return torch.stack([(part * part).sin() for part in made])

    def scenario(way: Way) -> list[Tensor | None]:
        x, before = leaf(100_003), torch.get_num_threads()
        try:
            torch.set_num_threads(forward)
            y = way(region, x)
            torch.set_num_threads(backward)
            return [y, *gradients(y.sum(), x)]
        finally:
            torch.set_num_threads(before)

    replayed = check(scenario, way)
    if way is lowtide.checkpoint:
        assert {"silu", "mish", "pow", "sigmoid"} <= {
            name.removeprefix("aten::") for name in replayed.names()
        }


# Tensors that are not plain memory.


def test_complex_with_lazy_conjugation_and_negation() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(4, 4, dtype=torch.complex64)

        def region(x: Tensor) -> Tensor:
            y = x.exp().conj()
            z = y.imag * 2  # a lazily negated view
            w = (y @ x.mH).sin() * torch.view_as_real(x.resolve_conj()).sum()
            return w.abs() + z.exp() * y.real

        return gradients(way(region, x).sum(), x)

    assert check(scenario).operations > 0


@every_way
@pytest.mark.parametrize("part", ["conjugated", "negated"])
def test_lazily_conjugated_or_negated_before_beside_what_it_is_a_view_of(
    part: str, way: Way
) -> None:
    """Their storage is known from the plain tensor, and does not show what they are."""

    def scenario(way: Way) -> list[Tensor | None]:
        number = torch.randn(16, 16, dtype=torch.complex64)
        if part == "conjugated":
            plain, lazy, x = number, number.mH, leaf(16, 16, dtype=torch.complex64)
            assert lazy.is_conj()
        else:
            plain, lazy, x = number.imag, number.conj().imag, leaf(16, 16)
            assert lazy.is_neg()

        def region(x: Tensor) -> Tensor:
            y = (x * plain).tanh()
            read = torch.mm(lazy, y).sin() * 0.1  # read by what is replayed
            saved = (x.sin() * lazy).cos()  # saved as it is
            return (read.exp() * y).abs() + saved.abs()

        return gradients(way(region, x).sum(), x)

    check(scenario, way)


@every_way
def test_lazily_conjugated_in_an_earlier_step_of_the_context(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        number, x = torch.randn(16, 16, dtype=torch.complex64), leaf(16, 16, dtype=torch.complex64)

        def steps() -> Tensor:
            lazy = number.conj()
            ((x * number).tanh() * lazy).abs().sum().backward()
            y = (x * number).tanh()
            return ((y * lazy).sin() * y).abs().sum()

        return gradients(way(steps), x)

    check(scenario, way)


@every_way
def test_sparse(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x, w = leaf(4, 4), leaf(4, 3)

        def region(x: Tensor) -> Tensor:
            y = x.relu().to_sparse()
            z = torch.sparse.mm(y, w.sin())
            fixed = torch.eye(4).to_sparse_csr() @ z.exp()
            return (fixed * z).cos().exp()

        return gradients(way(region, x).sum(), x, w)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(scenario, way)


@every_way
def test_a_sparse_gradient_of_an_embedding(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        table = nn.Embedding(10, 4, sparse=True)
        y = way(lambda i: table(i).sin().exp(), torch.tensor([1, 3, 3]))
        y.sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        return [table.weight.grad.to_dense()]

    check(scenario, way)


@every_way
def test_quantized(way: Way) -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(8)

        def region(x: Tensor) -> Tensor:
            y = x.sin()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                q = torch.quantize_per_tensor(y.detach(), 0.02, 3, torch.qint8)
            fake = torch.fake_quantize_per_tensor_affine(y, 0.02, 3, -128, 127)
            return (fake * q.dequantize()).exp().cos()

        return gradients(way(region, x).sum(), x)

    check(scenario, way)


def test_meta_tensors() -> None:
    x = torch.randn(3, 4, device="meta", requires_grad=True)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Tanh()).to("meta")
    lowtide.checkpoint(net, x).exp().sum().backward()
    assert x.grad is not None
    assert x.grad.device.type == "meta"
    assert x.grad.shape == (3, 4)


def test_opaque_tensors_of_onednn_in_a_recurrent_net() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        net = nn.LSTM(4, 5, num_layers=2, dropout=0.3, bidirectional=True)
        x = leaf(3, 2, 4)
        out, (h, c) = way(net, x)
        return gradients(out.exp().sum() + h.sin().sum() + c.sum(), x, *net.parameters())

    check(scenario)


class Tagged(Tensor):
    """A subclass that adds only Python attributes: its memory is plain."""


def test_a_plain_subclass() -> None:
    def scenario(way: Way) -> list[Tensor | None]:
        x = leaf(6).as_subclass(Tagged)
        base = leaf(6)
        y = way(lambda x: (x * base).sin().exp(), x)
        assert isinstance(y, Tagged)
        y.as_subclass(Tensor).sum().backward()
        return [base.grad]

    assert check(scenario).operations > 0


# Memory that NumPy or another process has too.


def numpy_writes_between(way: Way) -> list[Tensor | None]:
    """After the operation that made it, before it is read."""

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        mask = y.detach().exp()
        there = mask.numpy()
        there[...] = there * 3 + 1
        return (y * mask).tanh() * mask

    x = leaf(8)
    return gradients(way(region, x).sum(), x)


def numpy_writes_after_it_was_saved(way: Way) -> list[Tensor | None]:
    """Autograd goes on with what it finds; what was made of it before is what it was."""

    def region(x: Tensor) -> Tensor:
        mask = x.detach().exp()
        y = x.sin() * mask
        z = (mask * 2).cos() * y
        mask.numpy()[...] = 7
        return z.tanh() + y * mask

    x = leaf(8)
    return gradients(way(region, x).sum(), x)


def torch_writes_what_numpy_has(way: Way) -> list[Tensor | None]:
    def region(x: Tensor) -> Tensor:
        mask = x.detach().exp()
        there = mask.numpy()
        mask.mul_(2)
        y = x.sin() * mask.view(2, 4).t().reshape(8)
        there[...] += 1
        mask.add_(y.detach())
        return y.tanh() * mask

    x = leaf(8)
    return gradients(way(region, x).sum(), x)


def several_processes_share_it(way: Way) -> list[Tensor | None]:
    def region(x: Tensor) -> Tensor:
        mask = x.detach().exp().share_memory_()
        y = x.sin() * mask
        ctypes.memset(mask.data_ptr(), 0, 16)  # as another one would
        return y.tanh() * mask

    x = leaf(8)
    return gradients(way(region, x).sum(), x)


@every_way
@pytest.mark.parametrize(
    "scenario",
    [
        numpy_writes_between,
        numpy_writes_after_it_was_saved,
        torch_writes_what_numpy_has,
        several_processes_share_it,
    ],
)
def test_memory_that_somebody_else_has_is_kept(scenario: Scenario, way: Way) -> None:
    """Once it is read again: torch marks it as not to be resized, and nothing else tells."""
    check(scenario, way)


@every_way
def test_a_batch_norm_whose_statistics_are_shared_is_replayed(way: Way) -> None:
    norm = nn.BatchNorm1d(4).share_memory()

    def scenario(way: Way) -> list[Tensor | None]:
        norm.reset_running_stats()
        x = leaf(16, 4)
        out = way(lambda x: norm(norm(x.sin()).exp()).exp(), x).square().sum()
        return [*gradients(out, x), norm.running_mean, norm.running_var]

    check(scenario, way)
    assert check(scenario)["native_batch_norm"] > 0


def test_what_is_cut_off_stays_held_when_a_plan_is_left() -> None:
    """Rule 5: FSDP2 has freed what its operation read, so nothing would make it again."""
    anchors, region = Anchors(), Region(None, None)
    values = [Value(cast(Operation, object()), 4, region) for _ in range(2)]
    for number, value in enumerate(values):
        value.number = number
        anchors.hold(value)
        value.held, value.op = torch.zeros(1), None  # as something has read it
    anchors.cut_off = 1
    anchors.release()
    assert [value.keep for value in values] == [True, False]
    assert [value.op is None for value in values] == [True, False]


def test_what_was_freed_and_filled_again_has_no_old_content() -> None:
    """Rule 5: as FSDP2 does to a parameter, where a single rank fills it without a label."""
    weight, content = nn.Parameter(torch.randn(64)), torch.randn(64)
    storage = weight.untyped_storage()

    def fill() -> None:
        storage.resize_(256)
        ctypes.memset(storage.data_ptr(), 255, 256)  # what is in memory that was just allocated
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(content)

    def body(x: Tensor) -> Tensor:
        fill()
        with torch.profiler.record_function("FSDP::pre_forward"):
            pass
        y = (x * weight).sin()
        storage.resize_(0)
        with torch.profiler.record_function("FSDP::post_forward"):
            pass
        fill()
        return y

    found = []
    for recorded in (False, True):
        x = torch.ones(64, requires_grad=True)
        out = lowtide.checkpoint(body, x) if recorded else body(x)
        found.append(torch.autograd.grad(out.sum(), (x, weight)))
    assert same(*found)
