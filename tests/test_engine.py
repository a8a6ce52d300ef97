"""The compiled recorder and the Python one: same records, same replays, and which one runs when."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from against_plain import counted
from apart import ran_apart
from lowtide import engine
from lowtide._compat import devices
from lowtide.compiled import build
from lowtide.region import RegionDecisions
from lowtide.running.decide import StepDecisions
from lowtide.step import Recording, current_recorder
from lowtide.tape.operators import facts_of
from lowtide.tape.regions import Region
from lowtide.tape.values import Operation, Value
from once import on_one_recorder

BUILDABLE = build.target().exists() or build.possible() is None
needs_compiler = pytest.mark.skipif(not BUILDABLE, reason="no compiled recorder here")
pytestmark = on_one_recorder  # each test chooses its own


# ------------------------------------------------------------------ the same records


class Told(RegionDecisions):
    """Logs what a recorder reports about each operation and each save."""

    __slots__ = ("lines", "saves")
    asks = True

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.saves: list[Any] = []

    def produced(
        self, op: Operation, made: list[Value], region: Region, args: Any, kwargs: Any
    ) -> None:
        reads = [
            (ref.value.number if ref.value is not None else ref.blank, *geometry(ref))
            for ref in op.refs
        ]
        constants = [a for a in op.args if isinstance(a, bool | int | float | str)]
        writes = [(op.refs.index(ref), weak().number) for ref, weak in op.writes]  # type: ignore[union-attr]
        outputs = [(place, weak().number) for place, weak in op.outputs]  # type: ignore[union-attr]
        self.lines.append(
            (op.facts.name, op.sequence, op.grad_mode, op.ambient, op.default_dtype, op.threads,
             op.flushes, reads, constants, writes, outputs,
             [(v.number, v.nbytes) for v in made], len(op.draws), len(args), sorted(kwargs))
        )  # fmt: skip

    def packed(self, handle: Any, value: Value) -> None:
        self.saves.append((value.number, handle.sequence, *geometry(handle.ref)))


class Holding(Told):
    """The same, and holds whatever is saved."""

    __slots__ = ("gone",)

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[int] = []

    def saved(self, value: Value, region: Region) -> bool:
        return True

    def forgotten(self, value: Value) -> None:
        self.gone.append(value.number)


def geometry(ref: Any) -> tuple[Any, ...]:
    return (ref.dtype, tuple(ref.size), tuple(ref.stride), ref.offset)


def lists(x: Tensor) -> Tensor:
    a, b = x.chunk(2)
    pieces = torch.cat([a.sin(), b.cos(), a * 0.5]).split(3)
    index = torch.tensor([0, 2, 1])
    return (
        torch.stack([p[:3].exp() for p in pieces if len(p) == 3])[:, index].sum()
        + x[None, ::2].sum()
    )


def in_place(x: Tensor) -> Tensor:
    y = x.sin()
    y.mul_(2).add_(x)
    y[0].zero_()
    z = torch.zeros_like(y)
    z[:2] = y[:2]
    return (z.relu_() + y.clamp_(max=1.0)).sum()


def random(x: Tensor) -> Tensor:
    y = F.dropout(x.exp(), 0.3)
    noise = torch.randn_like(y) + torch.rand(y.shape) + torch.randn(y.shape[1:])
    noise = noise[torch.randperm(len(noise))] + torch.randint(9, (1,))
    noise = noise + torch.normal(0.0, 1.0, (1,)) + torch.rand(4, generator=torch.Generator())
    return (F.dropout(y * noise, 0.5).tanh() + torch.bernoulli(torch.full_like(y, 0.5))).sum()


def views(x: Tensor) -> Tensor:
    y = x.sin()
    z = y.t().reshape(-1)[1:7].view(2, 3)
    return (z.expand(2, 2, 3).contiguous() * y[0, 1]).unfold(0, 2, 1).exp().sum()


def in_bfloat16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return (y.float() + y.view(torch.int16).float() * 0).softmax(-1).sum()


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean().sqrt()
        hidden = torch.zeros(3) + 1
    return (x * scale).exp().sum() * hidden.sum()


def constants(x: Tensor) -> Tensor:
    """Some are saved, some are read, and some memory is filled as a whole before it is either."""
    with torch.no_grad():
        mask = torch.ones_like(x)
        twice = mask + mask
    filled = torch.empty(x.shape).copy_(twice).mul_(0.5)
    state = torch.zeros(x.shape)
    torch.add(twice, twice, out=filled)
    return (x * mask * torch.full((4,), 0.5) + state).exp().mul(filled).sum()


def outs(x: Tensor) -> Tensor:
    """`out=` of all kinds: memory known or not, a part of it, resized, read by the same call."""
    with torch.no_grad():
        scale, known, rows = torch.ones(4), x.exp(), torch.zeros(2, 4)
        torch.mul(scale, 2.0, out=scale)
        torch.sub(x, known, out=known)
        torch.add(x[0], x[1], out=rows[1])
        larger, empty, places = torch.zeros(5), torch.empty(0), torch.empty(4, dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a resized out= that is not empty is deprecated
            torch.sum(x, 0, out=larger)
            torch.sum(x, 1, out=empty)
        torch.max(known, 0, out=(rows[0], places))
        parameter = nn.Parameter(torch.zeros(4))
        torch.add(scale, larger, out=parameter)
    return (x * scale * known * rows[0] * larger).sum() + (rows.sum() * empty.sum() + x).exp().sum()


def turned(x: Tensor) -> Tensor:
    """Writes that change the shape of what they are given, and no content."""
    y = x.exp().transpose_(0, 1)
    spectrum = torch.stft(x.reshape(-1), 8, window=torch.ones(8), return_complex=True)
    z = x.sin().unsqueeze_(0).swapaxes_(1, 2).squeeze_(0)
    part = torch.as_strided_(z.tanh(), (2, 6), (2, 1))
    return (y * z.t_().mT.cos_()).exp().sum() + spectrum.abs().sum() + part.exp().sum()


def padded(x: Tensor) -> Tensor:
    """More lists of integers than the records of one operator share, and some of them again."""
    pieces = [F.pad(x, (n, 12 - n)).sin() for n in (*range(13), 3, 12, 3)]
    return torch.stack(pieces).sum()


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        lists,
        in_place,
        random,
        views,
        in_bfloat16,
        without_grad,
        constants,
        outs,
        turned,
        padded,
    )
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3), nn.ReLU(inplace=True)
    ),
    "frozen batch norm": lambda: nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Tanh()),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2), nn.ELU()),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(0, (1, 6)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    ),
    "lstm": lambda: nn.LSTM(4, 3, 2, dropout=0.2),
}


T = TypeVar("T", bound=Told)


def recorded(function: Callable[[Tensor], Any], told: T) -> tuple[T, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(6, 4, requires_grad=True)
    with Recording(told):
        out = function(x)
        out = (out[0] if isinstance(out, tuple) else out).sum()
    out.backward()
    assert x.grad is not None
    return told, x.grad


@pytest.mark.parametrize("way", ["python", pytest.param("compiled", marks=needs_compiler)])
def test_a_value_that_is_dropped_while_its_user_has_it_is_still_known(way: str) -> None:
    """An operation that reads it later can still be replayed."""
    x = torch.randn(64, requires_grad=True)
    with engine.use(way), Recording(Told()) as tape:
        recorder = tape.recorder
        assert recorder is not None
        y = x.exp()
        entry = recorder.entry_of(y)
        assert entry is not None
        value = recorder.value_in(entry)
        recorder._hold(entry, value, y)
        recorder.let_go(value)
        assert value.held is None
        del value
        assert recorder.value_in(entry).op is not None
        loss = y.sin().sum()
    del y
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cos(x.detach().exp()) * x.detach().exp())


@needs_compiler
@pytest.mark.parametrize("name", [*CASES, *MODULES])
def test_both_recorders_write_the_same(name: str) -> None:
    found = {}
    for way in ("python", "compiled"):
        torch.manual_seed(5)
        function = CASES[name] if name in CASES else MODULES[name]()
        with engine.use(way), counted() as replayed:
            told, grad = recorded(function, Told())
        found[way] = (told, grad, replayed.requests)
    (a, grad_a, replays_a), (b, grad_b, replays_b) = found["python"], found["compiled"]
    assert a.lines, "nothing was recorded"
    for mine, other in zip(b.lines, a.lines, strict=True):
        assert mine == other
    assert b.saves == a.saves
    assert replays_b == replays_a
    assert torch.equal(grad_a, grad_b)


LOOKS = ("run", "_reference", "pack_slowly")  # at an operation, an argument, a saved tensor


@needs_compiler
@pytest.mark.parametrize("name", sorted({*CASES, *MODULES} - {"outs"}))
def test_usual_layers_are_recorded_without_python(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    function = CASES[name] if name in CASES else MODULES[name]()
    left: list[str] = []

    def watched(x: Tensor) -> Any:
        cls = type(current_recorder())

        def noting(look: str) -> Callable[..., Any]:
            unnoted = getattr(cls, look)

            def noted(*call: Any) -> Any:
                left.append(look)
                return unnoted(*call)

            return noted

        with monkeypatch.context() as patch:
            for look in LOOKS:
                patch.setattr(cls, look, noting(look))
            return function(x)

    with engine.use("compiled"):
        recorded(watched, Told())
    assert left == []


def nested(x: Tensor) -> Tensor:
    inner = lowtide.checkpoint(lambda v: v.sin().exp().tanh(), x.cos())
    return lowtide.checkpoint(lambda v: v.cos().exp() * inner.sigmoid(), inner).sum()


@needs_compiler
def test_what_regions_retain_is_decided_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(nested(x), x)
    asked: list[Any] = []
    rule = RegionDecisions.retained

    def noted(*call: Any) -> bool:
        asked.append(call)
        return rule(*call)

    monkeypatch.setattr(RegionDecisions, "retained", noted)
    ran = {}
    for way in ("python", "compiled"):
        asked.clear()
        with engine.use(way), counted() as replayed:
            (grad,) = torch.autograd.grad(lowtide.checkpoint(nested, x), x)
        assert torch.equal(grad, expected)
        ran[way] = replayed.requests
        assert bool(asked) == (way == "python")
    assert ran["python"] == ran["compiled"]


def asking(x: Tensor) -> Tensor:
    """Computes a number with `item()` three times; the graphs of these numbers die."""
    first = x * 2  # value 0
    first.norm().item()  # 1, saved as a result
    rows = first[1:] + 1  # 2
    rows.square().sum().item()
    rows.mul_(2)  # 5
    kept = rows.cos()
    rows.tan().sum().item()  # 7, saved as a result; what it is of is still needed
    return kept.sum() + first.exp().sum()


@pytest.mark.parametrize("way", ["python", pytest.param("compiled", marks=needs_compiler)])
def test_what_only_graphs_that_died_have_saved_is_let_go_and_known(way: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(6, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(asking(x), x)
    with engine.use(way), counted() as replayed:
        told, grad = recorded(asking, Holding())
    assert torch.equal(grad, expected)
    assert sorted(told.gone) == [0, 1, 2, 7]
    outside = [line[0] for line in told.lines for number, *_ in line[7] if number == -1]
    assert outside == ["aten::mul"]  # reads `x`
    assert not replayed.requests


class Dropping(Holding):
    """Holds only the first value; a graph dies in the middle of a replay."""

    __slots__ = ("graphs",)

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[Tensor] = []

    def saved(self, value: Value, region: Region) -> bool:
        return value.number == 0

    def retained(self, value: Value, request: Any) -> bool:
        self.graphs.clear()
        return False


@pytest.mark.parametrize("way", ["python", pytest.param("compiled", marks=needs_compiler)])
def test_what_a_replay_in_the_forward_counts_on_stays(way: str) -> None:
    x, told = torch.randn(6, 4, requires_grad=True), Dropping()
    with engine.use(way), Recording(told), counted() as replayed:
        y = x * 2
        told.graphs.append(y.sin())
        made = ((y + 1) + y).exp()
        (grad,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    assert replayed.requests
    assert not told.graphs
    assert not told.gone
    y = x.detach() * 2
    assert torch.allclose(grad, 4 * ((y + 1) + y).exp())


def switched(x: Tensor) -> Tensor:
    y = x @ x.t()
    torch.backends.cudnn.benchmark = True
    try:
        return (y @ y).sum()
    finally:
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("way", ["python", pytest.param("compiled", marks=needs_compiler)])
def test_switches_of_cuda_are_recorded_once_cuda_was_used(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for used in (False, True):
        monkeypatch.setattr(devices, "accelerator_seen", used)
        with engine.use(way):
            told, _ = recorded(switched, Told())
        first, second = [line[3] for line in told.lines if line[0] == "aten::mm"]
        assert (first != second) is used


@needs_compiler
def test_an_operation_of_the_compiled_recorder_reads_as_one_of_python() -> None:
    """Reports and listeners inspect operations without knowing which recorder made them."""
    with engine.use("compiled"):
        seen: list[Any] = []
        lowtide.replay.listeners.append(seen.extend)
        try:
            x = torch.randn(4, 4, requires_grad=True)
            lowtide.checkpoint(lambda v: (v @ v).sin().add_(1).cos(), x).sum().backward()
        finally:
            lowtide.replay.listeners.remove(seen.extend)
    names = [op.facts.name for op in seen]
    assert "aten::mm" in names
    assert "aten::add_" in names
    for op in seen:
        assert len(op.values()) == sum(ref.value is not None for ref in op.refs)
        assert op.seconds == 0.0
        assert op.stream is None
        assert isinstance(op.args, list)
        assert isinstance(op.kwargs, dict)
        assert [ref for ref, _ in op.writes] == [
            r for r in op.refs if any(r is w for w, _ in op.writes)
        ]


@needs_compiler
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("penalty", [True, False])
def test_a_planned_backward_is_counted_without_asking_python(
    monkeypatch: pytest.MonkeyPatch, inside: bool, penalty: bool
) -> None:
    """Inside the budget too; a gradient penalty in the forward is not part of that backward."""
    told: list[int] = []
    original = StepDecisions.requested

    def requested(self: StepDecisions, handle: Any) -> None:
        told.append(self.event)
        original(self, handle)

    monkeypatch.setattr(StepDecisions, "requested", requested)
    layers = [nn.Linear(64, 64) if i % 2 else nn.Tanh() for i in range(12)]
    model = nn.Sequential(*layers)
    x = torch.randn(256, 64, requires_grad=True)

    def step(around: Any) -> list[Tensor | None]:
        model.zero_grad()
        with around:
            y = model(x)
            if penalty:
                (grad,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
                y = y + grad.square().mean()
            loss = y.sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad for p in model.parameters()]

    expected = step(nullcontext())
    with engine.use("compiled"):
        limit = lowtide.budget(0.8)
        for _ in range(4):
            told.clear()
            assert all(torch.equal(a, b) for a, b in zip(step(limit), expected, strict=True))  # type: ignore[arg-type]
    report = limit.report()
    assert report.planned
    assert report.replayed_operations > 0
    assert len([event for event in told if event >= 0]) == 0


@needs_compiler
def test_a_step_begun_on_one_engine_ends_on_the_other() -> None:
    x = torch.randn(5, 5, requires_grad=True)
    (plain,) = torch.autograd.grad(x.sin().exp().tanh().sum(), x)
    for first, second in (("python", "compiled"), ("compiled", "python")):
        with engine.use(first):
            y = lowtide.checkpoint(lambda v: v.sin().exp().tanh(), x)
        with engine.use(second):
            lowtide.checkpoint(lambda v: v.cos(), x).sum().backward()
            (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, plain)


@needs_compiler
@needs_compiler
def test_the_table_of_the_compiled_recorder_is_a_mapping_that_forgets() -> None:
    """It lists live storages, in the order in which they were first seen."""
    with engine.use("compiled"):
        core = engine.core()
    table, live = core.Table(), core.Box(0)
    forget = core.Forget(table, live)
    tensors = [torch.ones(4) for _ in range(20)]
    for tensor in tensors:
        entry = core.Entry(tensor.untyped_storage(), forget)
        entry.key, entry.counted = tensor.untyped_storage()._cdata, 16
        table[entry.key] = entry
        live[0] += 16
    keys = [tensor.untyped_storage()._cdata for tensor in tensors]
    assert list(table) == keys
    assert list(reversed(table)) == keys[::-1]
    assert [entry.key for entry in table.values()] == keys
    assert table.get(keys[3]).counted == 16
    assert table.get(1) is None
    assert 1 not in table
    del tensor, entry, tensors[3:19]
    assert list(table) == [*keys[:3], keys[19]]
    assert live[0] == 4 * 16
    with pytest.raises(TypeError, match="an entry of the other recorder"):
        table[1] = object()
    with pytest.raises(TypeError, match="leave a table with their storages"):
        del table[keys[0]]
    with pytest.raises(TypeError, match="a value holds a tensor, or None"):
        core.Value(None, 16, None).held = 3
    table.clear()
    assert len(table) == 0
    del tensors
    assert live[0] == 4 * 16  # nothing counts any more


@needs_compiler
def test_what_passes_the_compiled_recorder_by_are_views() -> None:
    """They go from autograd straight to their kernels, so none of them may need recording."""
    with engine.use("compiled"):
        assert engine.core() is not None
    passed = set()
    for name in torch._C._dispatch_get_all_op_names():
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Fake"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            passed.add(getattr(getattr(torch.ops.aten, base), overload or "default"))
    assert len(passed) >= 20
    for func in passed:
        facts = facts_of(func)
        assert facts.view, func
        assert not facts.lazy_bits, func
        assert not facts.writes, func


@needs_compiler
@pytest.mark.parametrize("way", ["python", "compiled"])
def test_views_that_nobody_sees_leave_all_as_it_was(way: str) -> None:
    """A view is identified by its storage, however it was made."""

    def through(x: Tensor) -> Tensor:
        y = x.sin().view(4, 6).t()[1:].unsqueeze(0).expand(2, 5, 4).permute(1, 0, 2)
        a, b = y.reshape(5, 8).split(4, 1)
        c, d = b.unbind(1)[:2]
        e = a.as_strided((2, 2), (1, 4), 3).diagonal().unfold(0, 1, 1).squeeze(1).detach()
        return (a.exp().sum(1) * c.cos() + d.sin()).sum() * e.sum()

    x = torch.randn(24, requires_grad=True)
    plain = through(x)
    (wanted,) = torch.autograd.grad(plain, x)
    with engine.use(way), counted() as replayed:
        loss = lowtide.checkpoint(through, x)
        (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(loss, plain)
    assert torch.equal(found, wanted)
    assert {"aten::sin", "aten::exp", "aten::cos"} & set(replayed.names())
    assert not {"aten::view", "aten::t", "aten::expand", "aten::split"} & set(replayed.names())


@pytest.mark.parametrize("way", ["python", "compiled"])
def test_a_higher_order_operator_runs_once_and_is_kept(way: str) -> None:
    """Such operators exist in Python only, and need a kernel for every active dispatch key."""
    from torch._higher_order_ops.wrap import wrap

    calls = []

    def body(v: Tensor) -> Tensor:
        calls.append(1)
        return v.sin().exp()

    x = torch.randn(6, requires_grad=True)
    (plain,) = torch.autograd.grad(x.cos().sin().exp().tanh().sum(), x)
    with engine.use(way), counted() as replayed:
        lowtide.checkpoint(lambda v: wrap(body, v.cos()).tanh(), x).sum().backward()
    assert len(calls) == 1
    assert replayed.operations > 0
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


@needs_compiler
def test_the_key_is_given_back_after_an_error() -> None:
    def fails(x: Tensor) -> Tensor:
        x.sin()
        raise KeyError("from the forward")

    with engine.use("compiled"):
        x = torch.randn(3, requires_grad=True)
        with pytest.raises(KeyError):
            lowtide.checkpoint(fails, x)
        with pytest.raises(RuntimeError, match=r"shapes cannot be|mismatch|must match"):
            lowtide.checkpoint(lambda v: v.sin() @ torch.randn(4, 4), x)
        y = lowtide.checkpoint(lambda v: v.sin().exp(), x)
        y.sum().backward()
    (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


# ------------------------------------------------------------------ which recorder runs


def test_an_unknown_engine_is_refused() -> None:
    with (
        pytest.raises(
            lowtide.UsageError, match="no engine 'fast': choose one of auto, python, compiled"
        ),
        engine.use("fast"),
    ):
        pass


def test_a_refused_engine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapper subclasses, once met, are recorded in Python: also after a misspelt engine."""
    monkeypatch.setattr("lowtide.engine._choice.wrappers", True)
    with pytest.raises(lowtide.UsageError), engine.use("fast"):
        pass
    assert engine.name() == "python"


def test_python_can_be_asked_for() -> None:
    with engine.use("python"):
        assert engine.name() == "python"
        assert engine.reason() == "the engine 'python' was asked for"


REPORT = (
    "import sys, time, logging, torch, lowtide\n"
    "from lowtide import engine\n"
    "x = torch.randn(3, requires_grad=True)\n"
    "def step():\n"
    "    lowtide.checkpoint(lambda v: v.sin().cos(), x).sum().backward()\n"
    "step()\n"
    "first = engine.name()\n"
    "if engine._choice.building is not None:\n"
    "    engine._choice.building.join()\n"
    "step()\n"
    "print(first, engine.name(), '|', engine.reason())\n"
    "if engine._choice.wanted == 'auto':\n"
    "    with engine.use('auto'):\n"  # chooses anew
    "        step()\n"
)


def report(cache: Path, **environment: str) -> tuple[str, str]:
    given = {"LOWTIDE_ENGINE": "auto", "LOWTIDE_CACHE": str(cache), **environment}
    done = ran_apart(REPORT, **given)
    return done.stdout.strip(), done.stderr


def assert_said_once(message: str, why: str) -> None:
    """A recorder that is many times slower, for a whole training, was told by nothing."""
    assert message.count("lowtide goes on without its compiled recorder: " + why) == 1
    assert message.count("`python -m lowtide.compiled`") == 1


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def extension() -> Iterator[Path]:
    with engine.use("compiled") if BUILDABLE else nullcontext():
        yield build.target()


@needs_compiler
def test_it_is_built_beside_training_and_then_used(tmp_path: Path, extension: Path) -> None:
    compiler = script(
        tmp_path / "compiler",
        'while [ "$1" != "-o" ]; do shift; done\n' + f'cp "{extension}" "$2"\n',
    )
    cache = tmp_path / "cache"
    said, message = report(cache, CXX=compiler)
    assert said == "python compiled | it has been built for this version of torch"
    assert "builds its compiled recorder in the background, once" in message
    again, silence = report(cache, CXX=compiler)
    assert again == "compiled compiled | it has been built for this version of torch"
    assert silence == ""


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    compiler = script(tmp_path / "compiler", "echo 'core.cpp:1: error: no such key' >&2; exit 1\n")
    said, message = report(tmp_path / "cache", CXX=compiler)
    assert said == ("python python | the C++ compiler failed: core.cpp:1: error: no such key")
    assert_said_once(message, "the C++ compiler failed: core.cpp:1: error: no such key. Steps are")


def test_without_a_compiler_python_records(tmp_path: Path) -> None:
    said, message = report(tmp_path, CXX="", PATH=str(tmp_path))
    assert said == ("python python | no C++ compiler was found (c++, g++, clang++ or $CXX)")
    assert_said_once(message, "no C++ compiler was found (c++, g++, clang++ or $CXX). Steps are")
    said, message = report(tmp_path, CXX="", PATH=str(tmp_path), LOWTIDE_ENGINE="python")
    assert (said, message) == ("python python | the engine 'python' was asked for", "")


def test_a_compiler_whose_message_is_no_text_is_named(tmp_path: Path) -> None:
    compiler = script(tmp_path / "compiler", "printf 'caf\\351: error: \\342' >&2; exit 1\n")
    said, message = report(tmp_path / "cache", CXX=compiler)
    assert said == r"python python | the C++ compiler failed: caf\xe9: error: \xe2"
    assert_said_once(message, "the C++ compiler failed: caf")


def test_a_compiler_that_is_no_command_ends_no_training(tmp_path: Path) -> None:
    said, message = report(tmp_path, CXX="g++ '-O2")
    why = """CXX="g++ '-O2" cannot be read as a command: No closing quotation"""
    assert said == f"python python | {why}"
    assert_said_once(message, why)
    assert build_now(tmp_path, CXX="g++ '-O2").stderr.endswith(f"{why}\n")


def test_a_user_without_a_home_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOWTIDE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", raise_that_there_is_none)
    with pytest.raises(build.BuildError, match="name a directory in LOWTIDE_CACHE"):
        build.target()
    assert engine._impossible() is not None
    assert not engine._is_built()


def raise_that_there_is_none() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_directory_that_nobody_may_look_into_has_no_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, stat_of = str(build.target()), os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path) == place:
            raise PermissionError(13, "Permission denied")
        return stat_of(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert not engine._is_built()


def build_now(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(lowtide.__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "lowtide.compiled"],
        env={**os.environ, "PYTHONPATH": source, "LOWTIDE_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_building_tells_a_compiler_that_fails_from_none(tmp_path: Path) -> None:
    """`make test` goes on without the compiled recorder only where there is no compiler."""
    compiler = script(tmp_path / "compiler", "echo 'core.cpp:1: error: no such key' >&2; exit 1\n")
    fails = build_now(tmp_path / "cache", CXX=compiler)
    assert fails.returncode == 1
    assert fails.stderr.endswith("the C++ compiler failed: core.cpp:1: error: no such key\n")
    none = build_now(tmp_path / "cache", CXX="", PATH=str(tmp_path))
    assert none.returncode == 2
    assert none.stderr.endswith("no C++ compiler was found (c++, g++, clang++ or $CXX)\n")


@needs_compiler
def test_a_damaged_build_is_not_used(tmp_path: Path) -> None:
    damaged = tmp_path / build.target().relative_to(build.cache_directory())
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not an extension")
    said, message = report(tmp_path)
    assert said.startswith("python python | the compiled recorder cannot be loaded: ")
    assert_said_once(message, "the compiled recorder cannot be loaded: ")


def test_what_cannot_be_built_is_said_when_it_is_asked_for(tmp_path: Path) -> None:
    code = (
        "import lowtide\n"
        "from lowtide import engine\n"
        "try:\n"
        "    engine.name()\n"
        "except lowtide.UsageError as error:\n"
        "    print(error)\n"
    )
    nothing = str(tmp_path)
    done = ran_apart(code, LOWTIDE_ENGINE="compiled", CXX="", LOWTIDE_CACHE=nothing, PATH=nothing)
    assert done.stdout.strip() == (
        "the compiled engine cannot be used here: no C++ compiler was found (c++, g++, clang++ or "
        "$CXX). Use the engine 'python' or 'auto': results are the same."
    )
