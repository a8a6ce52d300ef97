"""Dry runs: the graph from fake tensors equals that of the real step, and nothing is changed."""

from __future__ import annotations

import functools
import logging
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from by_hand import same
from lowtide import engine
from lowtide.dryrun.found import Found
from lowtide.dryrun.putback import RealState
from lowtide.dryrun.recorder import Adding
from lowtide.dryrun.run import Dry, dry_run
from lowtide.dryrun.watching import loss_of
from lowtide.errors import DryRunWarning, UsageError
from lowtide.measure import measure
from lowtide.planner import Simulator, keep_all


def plain_peak(step: Dry) -> int:
    return Simulator(step.graph).run(keep_all(step.graph).retain).peak


def real_step(function: Callable[..., Any], *args: Any) -> Dry:
    """The same step, recorded from a real run."""

    def asks(*inner: Any) -> Any:
        sum(p.detach().sum() for p in Found(function, args, {}).state()).item()
        return function(*inner)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DryRunWarning)
        return dry_run(asks, args, {})


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 3, padding=1, stride=2)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.first(x))))
        return self.head(F.gelu(self.second(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        heads = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def convolutions() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = Convolutions()
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 4, (4,))
    return lambda x, y: F.cross_entropy(model(x), y), (images, labels)


def attention() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = nn.Sequential(*[Attention() for _ in range(3)])
    return lambda x: model(x).square().mean(), (torch.randn(4, 96, 64),)


def recurrent() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    cell, head = nn.GRUCell(48, 64), nn.Linear(64, 8)

    def unrolled(x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 64)
        for part in x.unbind(1):
            state = cell(part, state)
        return head(state).logsumexp(-1).sum()

    return unrolled, (torch.randn(32, 12, 48),)


def tied() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    table = nn.Embedding(200, 64)
    body, head = nn.Linear(64, 64), nn.Linear(64, 200, bias=False)
    head.weight = table.weight

    def language(ids: Tensor) -> Tensor:
        logits = head(torch.tanh(body(table(ids))))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return language, (torch.randint(0, 200, (8, 32)),)


STEPS = {make.__name__: make for make in (convolutions, attention, recurrent, tied)}


def test_an_operator_that_fails_on_shapes_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):  # and without a warning
        dry_run(nn.Linear(4, 4), (torch.randn(2, 5),), {})
    assert caplog.records == []
    assert not log.disabled


@pytest.mark.parametrize("name", STEPS)
def test_the_graph_is_that_of_the_real_step(name: str) -> None:
    function, args = STEPS[name]()
    dry, real = dry_run(function, args, {}), real_step(function, *args)
    assert (dry.source, real.source) == ("fake", "recorded")
    first = len(real.graph.ops) - len(dry.graph.ops)  # what reads the content of a parameter
    assert [op.name for op in dry.graph.ops] == [op.name for op in real.graph.ops[first:]]
    sizes = [[dry.graph.values[v].nbytes for v in op.outputs] for op in dry.graph.ops]
    assert sizes == [
        [real.graph.values[v].nbytes for v in o.outputs] for o in real.graph.ops[first:]
    ]
    assert len(dry.graph.events) == len(real.graph.events)


@pytest.mark.parametrize("name", STEPS)
def test_the_plain_peak_is_that_of_the_real_step(name: str) -> None:
    function, args = STEPS[name]()

    def step() -> None:
        function(*args).backward()

    step()  # oneDNN allocates some workspaces once
    for parameter in Found(function, args, {}).state():
        parameter.grad = None
    measured = lowtide.measure(step, device="cpu").peak_bytes
    for parameter in Found(function, args, {}).state():
        parameter.grad = None
    assert plain_peak(dry_run(function, args, {})) == pytest.approx(measured, rel=0.02)


def test_nothing_is_executed_and_nothing_is_left_behind() -> None:
    function, args = convolutions()
    model = next(iter(Found(function, args, {}).roots.values()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = dict(model.named_parameters()) | dict(model.named_buffers())
    torch.manual_seed(3)
    random.seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    dry_run(function, args, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in objects.items())
    assert all(torch.equal(model.state_dict()[name], bits) for name, bits in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_seeds_the_generators_leaves_them_as_they_were() -> None:
    """As reversible nets do, which draw the same numbers again in backward."""
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        torch.manual_seed(random.randint(0, 1 << 30))
        return F.dropout(model(x)).sum()

    torch.manual_seed(3)
    random.seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    assert dry_run(step, (torch.ones(2, 4),), {}).source == "fake"
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("place", ["closure", "attribute"])
def test_generators_of_the_program_are_put_back(place: str, real: bool) -> None:
    """And a tensor of the program's that a real step writes is told."""
    model, count = nn.Linear(4, 4), torch.zeros(3)
    generator = torch.Generator().manual_seed(5)
    model.noise = generator if place == "attribute" else None

    def step(x: Tensor) -> Tensor:
        drawn = generator if place == "closure" else model.noise
        if real:
            count[0] += float(torch.rand((), generator=drawn))
        else:
            drawn.manual_seed(7)
        return (model(x) * torch.rand(4, generator=drawn)).sum()

    state = generator.get_state()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert dry_run(step, (torch.ones(2, 4),), {}).source == ("recorded" if real else "fake")
    assert torch.equal(generator.get_state(), state)
    assert ["or other tensors (1 of them)" in str(w.message) for w in told] == [True] * real


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["negated", "quantized", "large"])
def test_a_real_step_may_reach_any_tensors(kind: str) -> None:
    """And to look whether one was written takes little memory, however large it is."""
    if kind == "negated":
        other = torch.ones(3, dtype=torch.complex64).conj().imag
    elif kind == "quantized":
        other = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)
    else:
        other = torch.zeros(2, 1 << 23, dtype=torch.uint8)
    x = torch.ones(3, requires_grad=True)

    def step() -> Tensor:
        return x.sin().sum() + float(x.detach().sum()) * len(other)

    def plan() -> None:
        with pytest.warns(DryRunWarning, match="one real forward"):
            assert dry_run(step, (), {}).source == "recorded"

    assert measure(plan).peak_bytes < 80_000_000  # a copy of the large one as int64 takes 134 MB
    with RealState(Found(step, (), {})) as state:
        other.zero_() if kind == "large" else x.detach().zero_()
    assert state.moved == 1


def test_no_memory_is_allocated_for_a_step_that_would_not_fit() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(4)], nn.ReLU())
    batch = torch.empty(1 << 20, 8192, device="meta")
    taken = lowtide.measure(lambda: dry_run(model, (batch,), {}), device="cpu").peak_bytes
    step = dry_run(model, (batch,), {})
    assert plain_peak(step) > 4 * (1 << 20) * 8192 * 4
    assert taken < 1 << 20
    assert step.device  # of a known kind


def test_attributes_written_by_a_forward_are_put_back() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = 0
            self.last: Tensor | None = None
            self.by_shape: dict[object, Tensor] = {}
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.layer(x).tanh()
            self.by_shape[x.shape] = self.last.detach()
            self.seen.append(self.last.detach())
            self.register_buffer("cache", self.last.detach())
            return self.last

    model = Remembering()
    dry_run(model, (torch.ones(2, 4),), {})
    assert (model.calls, model.last, list(model.buffers())) == (0, None, [])
    assert (model.by_shape, model.seen) == ({}, [])


def test_a_leaf_that_no_module_owns_gets_no_gradient() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    holder = [weight * 1.0 for _ in range(1)]
    step = dry_run(
        lambda x: (x @ weight).tanh() + holder[0].sum().detach(), (torch.ones(4, 8),), {}
    )
    assert weight.grad is None
    assert step.graph.events


def test_modules_are_found_and_named() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    class Trainer:
        def __init__(self) -> None:
            self.model = inner

        def step(self, x: Tensor, scale: float) -> Tensor:
            return self.model(x).sum() * scale

    trainer = Trainer()
    x = torch.ones(2, 4)
    for function, args in (
        (inner, (x,)),
        (trainer.step, (x, 2.0)),
        (functools.partial(trainer.step, scale=2.0), (x,)),
        (lambda x, scale=2.0: trainer.step(x, scale), (x,)),
    ):
        assert dry_run(function, args, {}).modules[:2] == ("0", "1"), function
    two = {"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)}
    step = dry_run(lambda x: two["left"](x) + two["right"](x), (torch.ones(2, 4),), {})
    assert set(step.modules) == {"left", "right", ""}


def test_questions_about_data_are_answered() -> None:
    layer = nn.Linear(4, 4)
    met = []

    def step(x: Tensor, labels: Tensor) -> Tensor:
        met.append((int(labels.max()), bool((labels == 1).all()), torch.unique(labels).tolist()))
        hidden = layer(x)
        return hidden[labels > 0].sum() if met[-1][0] > 1 else hidden.sum()

    labels = torch.tensor([0, 2, 1, 2])
    with pytest.warns(DryRunWarning, match="one real forward"):
        # Indexing with a mask has a shape that depends on data through the activation.
        assert dry_run(step, (torch.ones(4, 4), labels.clone()), {}).source in ("fake", "recorded")
    met.clear()
    assert dry_run(step, (torch.ones(4, 4), torch.ones(4).long()), {}).source == "fake"
    assert met == [(1, True, [1])]


def test_masks_of_labels_choose_what_is_computed() -> None:
    """`labels[labels >= 0]`, `edges[:, mask]`: the mask comes in a list, and a kernel that is given
    a fake tensor there reads memory that is not there."""
    layer = nn.Linear(8, 8)
    sizes = []

    def step(x: Tensor, labels: Tensor, edges: Tensor) -> Tensor:
        kept = labels[labels >= 0]
        found, places, counts = torch.unique(kept, return_inverse=True, return_counts=True)
        ends = edges[:, edges[0] != edges[1]]
        sizes.append((len(kept), found.tolist(), len(places), counts.tolist(), ends.tolist()))
        hidden = layer(x)
        return hidden[ends[0]].sum() + hidden[kept].sum() + hidden[places].sum()

    edges = torch.tensor([[0, 1, 2, 3, 3, 1], [0, 2, 2, 1, 3, 1]])
    data = torch.ones(4, 8), torch.tensor([0, -100, 2, 2, -100, 1]), edges
    dry = dry_run(step, data, {})
    step(*data)
    assert dry.source == "fake"
    assert sizes[0] == sizes[1]


def test_what_an_answer_made_is_in_memory_as_long_as_the_program_has_it() -> None:
    layer = nn.Linear(4, 4)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        for _ in range(8):
            torch.masked_select(labels, labels >= 0)
        return layer(x).sum()

    data = torch.ones(4, 4), torch.arange(4096)
    real = lowtide.measure(lambda: step(*data).backward(), device="cpu").peak_bytes
    dry = dry_run(step, data, {})
    assert dry.source == "fake"
    assert plain_peak(dry) <= 1.1 * real


def test_a_real_step_that_moves_parameters_is_said_to_have() -> None:
    layer = nn.Linear(4, 4)
    layer.tied = layer.weight  # one parameter, however many names it has
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().sum()
        if loss.item() > 0:
            loss.backward()
            optimizer.step()
        return layer(x).sum()

    with pytest.warns(DryRunWarning, match=r"tensors \(2 of them\), and that was not"):
        dry_run(step, (torch.ones(2, 4),), {})


def test_a_parameter_that_a_real_step_writes_behind_its_version_is_said_to_have_moved() -> None:
    """Variational Gaussian processes set their means so, in their first forward."""
    layer = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().sum()
        if loss.item() > 0:
            layer.bias.data.copy_(torch.ones(4))
        return loss

    with pytest.warns(DryRunWarning, match=r"tensors \(1 of them\)"):
        dry_run(step, (torch.ones(2, 4),), {})


@pytest.mark.filterwarnings("ignore::lowtide.errors.DryRunWarning")
def test_what_a_real_step_adds_to_parameters_is_put_back() -> None:
    """As Opacus does: gradients of each sample, which the next backward would add to."""
    layer = nn.Linear(4, 4)
    layer.weight.samples = [0]

    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().sum()
        layer.bias.seen = loss.item()
        layer.weight.samples.append(1)
        return loss

    assert dry_run(step, (torch.ones(2, 4),), {}).source == "recorded"
    assert not hasattr(layer.bias, "seen")
    assert layer.weight.samples == [0]


def test_a_step_that_asks_for_an_activation_is_recorded_for_real() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def step(x: Tensor) -> Tensor:
        out = model(x)
        return out.sum() if out.sum().item() > 0 else out.square().sum()

    model(torch.ones(4, 4)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    batch = torch.randn(4, 4)
    buffers, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    with pytest.warns(DryRunWarning, match="cannot run on fake tensors") as said:
        found = dry_run(step, (batch,), {})
    why = r"\(it asks for the content of a tensor that .*, at \S+:(\d+)\)"
    line = re.search(why, str(said[0].message))
    assert line is not None
    assert int(line[1]) == step.__code__.co_firstlineno + 2
    assert found.source == "recorded"
    assert found.graph.seconds > 0
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert same(after, gradients)
    assert same(model.buffers(), buffers)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_meta_model_that_asks_for_data_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="no memory of its own"):
        dry_run(lambda x: model(x) * model(x).sum().item(), (torch.ones(2, 4),), {})


def test_errors_of_the_step_come_through() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dry_run(model, (torch.ones(2, 5),), {})


@pytest.mark.parametrize(
    "way", [lowtide.plan, lowtide.curve, lowtide.saved_tensors, lowtide.explain]
)
def test_the_warning_is_of_the_callers_line(way: Callable[..., Any]) -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        out: Tensor = model(x).sum() * float(x.numpy().sum())  # fake tensors have no `numpy()`
        return out

    with pytest.warns(DryRunWarning) as told:
        way(step, torch.ones(2, 4))
    assert {warning.filename for warning in told} == {__file__}


def test_a_dry_run_needs_a_backward_to_plan_for() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad(), pytest.raises(UsageError, match="grad disabled"):
        dry_run(model, (torch.ones(2, 4),), {})
    with lowtide.budget(1 << 30), pytest.raises(UsageError, match="inside a budget"):
        dry_run(model, (torch.ones(2, 4),), {})


def test_a_function_may_do_its_own_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    assert len(dry_run(step, (torch.ones(2, 4),), {}).graph.events) >= 2
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_backward_starts_from() -> None:
    a = torch.ones(2, requires_grad=True)
    nested = {"loss": a * 2, "rest": [a * 3, (torch.ones(2), "text")]}
    total = loss_of(nested)
    assert total is not None
    assert total.item() == 10
    assert loss_of([torch.ones(2), None]) is None


def test_repeated_layers_are_recorded_like_the_first() -> None:
    # The fast path for repeated shapes must recognise a view that is not declared as one.
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(8)])
    step = dry_run(model, (torch.ones(2, 4, 16),), {})
    made = {op.name: {len(op.outputs)} for op in step.graph.ops}
    for op in step.graph.ops:
        made[op.name].add(len(op.outputs))
    assert made == {"aten::mm": {1}}


def test_functions_that_add_in_place_may_call_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    linear = F.linear

    def of_two(*args: Any) -> Tensor:
        out: Tensor = F.linear(*args)
        seen.append(adding.in_place)  # still inside
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", of_two)
    x = torch.ones(2, 2)
    with engine.use("compiled"), Adding() as adding:
        F.scaled_dot_product_attention(x, x)
        seen.append(adding.in_place)
    assert seen == [True, False]
    assert F.linear is linear
    assert F.scaled_dot_product_attention is of_two


def test_a_function_that_the_step_replaces_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that installs its kernel in the first forward."""
    usual = F.linear
    monkeypatch.setattr(F, "linear", usual)  # to put it back after the test

    def own(*args: Any) -> Tensor:
        return usual(*args)

    def step(x: Tensor) -> Tensor:
        F.linear = own
        return F.linear(x, x).sin().sum()

    assert dry_run(step, (torch.ones(4, 4, requires_grad=True),), {}).source == "fake"
    assert F.linear is own


unsized = nn.LazyLinear(2)


def test_a_global_variable_with_the_name_of_an_attribute_is_no_part_of_the_step() -> None:
    """It may have no size, no memory, or another device."""

    class Holder:
        unsized = nn.Linear(4, 4)

    holder = Holder()

    def step(x: Tensor) -> Tensor:
        return holder.unsized(x).sum()

    def part(x: Tensor) -> Tensor:
        return unsized(x).sum()

    assert unsized not in Found(step, (), {}).modules()
    assert unsized in Found(part, (), {}).modules()
    assert dry_run(step, (torch.ones(2, 4),), {}).source == "fake"
