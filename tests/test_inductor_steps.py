"""Compiled code under a limit, in the ways that training loops call it.

Blocks that are compiled one by one, micro-batches, an optimizer that is compiled too, checkpoints
inside, compiled autograd: what is right, inside the limit, and what is said where it is not kept.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from by_hand import same
from compiling import compiles
from lowtide.errors import BudgetError, CompiledWarning

pytestmark = compiles

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu()).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    call(X).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def peak(model: nn.Module, call: Callable[[Tensor], Tensor]) -> int:
    model.zero_grad()
    return lowtide.measure(lambda: call(X).backward(), device="cpu").peak_bytes


def test_a_refusal_of_a_later_call_names_several_calls() -> None:
    """Blocks that are compiled one by one were refused at a limit that they keep with it, and the
    error said nothing of it."""

    def by_block(*, several: bool) -> tuple[Net, lowtide.CompileBudget]:
        torch._dynamo.reset()
        model = Net()
        budget = lowtide.CompileBudget(130_000, several_calls=several, compiler="aot_eager")
        for block in model.blocks:
            block.compile(backend=budget)
        return model, budget

    model, _ = by_block(several=False)
    with pytest.raises(BudgetError, match=r"several_calls=True, each leaves as much room"):
        gradients(model, model)
    model, budget = by_block(several=True)
    gradients(model, model)
    gradients(model, model)
    report = budget.report()
    assert report.planned_peak is not None
    assert report.planned_peak <= 130_000 < (report.plain_peak or 0)


def test_a_backward_of_compiled_autograd_is_said() -> None:
    """It holds what the forward has saved until the whole backward is over: the step took 1.3 times
    its limit, and nothing said so."""
    plain, model = Net(), Net()
    expected = gradients(plain, torch.compile(plain, backend="aot_eager"))
    torch._dynamo.reset()
    backend = lowtide.CompileBudget(0.8, compiler="aot_eager")
    compiled = torch.compile(model, backend=backend)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        with pytest.warns(CompiledWarning, match="was run by compiled autograd"):
            assert same(expected, gradients(model, compiled))
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompiledWarning)
            assert same(expected, gradients(model, compiled))
    assert backend._ledger.held == 0


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DDP's first bucket of gradients has 1 MiB otherwise, and so would be the only one."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 2_000)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_buckets(backend: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.003)
    return model, torch.compile(model, backend=backend)


@pytest.mark.usefixtures("small_buckets")
def test_the_parts_that_ddp_splits_a_graph_into() -> None:
    """Dynamo calls each on fake tensors to learn what the next is given. That counted as a call of
    the step, and a refusal came as an error of Dynamo's; compiled again in the second step, a
    backward asserted that all parts had been compiled."""
    plain, usual = by_buckets("aot_eager")
    expected = [gradients(plain, usual) for _ in range(3)]
    backend = lowtide.CompileBudget(150_000, compiler="aot_eager")
    model, compiled = by_buckets(backend)
    assert all(same(one, gradients(model, compiled)) for one in expected)
    report = backend.report()
    assert len(report.graphs) > 1
    assert sum(graph.recomputed for graph in report.graphs) > 0
    assert peak(model, compiled) <= 150_000 < peak(plain, usual)
    model, compiled = by_buckets(lowtide.CompileBudget(50_000, compiler="aot_eager"))
    with pytest.raises(BudgetError, match="does not fit in"):
        gradients(model, compiled)


def test_micro_batches_and_an_optimizer_that_is_compiled_too() -> None:
    """Each micro-batch is a step of its own, beside the gradients that were there before it. What
    has no backward, as the optimizer's step, is compiled as torch compiles it."""

    def train(backend: Any) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        loss = torch.compile(model, backend=backend)
        update = torch.compile(optimizer.step, backend=backend)
        most = 0
        for _ in range(2):
            for rows in X.chunk(2):
                part = rows.clone()
                taken = lowtide.measure(lambda: loss(part).backward(), device="cpu")  # noqa: B023
                most = max(most, taken.peak_bytes)
            update()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], most

    expected, plain = train("aot_eager")
    budget = lowtide.CompileBudget(limit := int(0.8 * plain), compiler="aot_eager")
    found, _ = train(budget)
    assert same(expected, found)
    (graph,) = budget.report().graphs
    assert graph.recomputed > 0
    assert graph.peak <= limit < graph.plain_peak


def test_a_backward_that_is_called_in_compiled_code() -> None:
    """Dynamo ends the graph at the backward, so it is not known in the first step that none
    follows: it saved as little as it could in all steps."""

    def train(backend: Any) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        model = Net()
        call = torch.compile(lambda x: model(x).backward(), backend=backend)
        for _ in range(2):
            model.zero_grad()
            taken = lowtide.measure(lambda: call(X), device="cpu").peak_bytes
        return [p.grad for p in model.parameters() if p.grad is not None], taken

    expected, plain = train("aot_eager")
    budget = lowtide.CompileBudget(plain, compiler="aot_eager")
    found, taken = train(budget)
    assert same(expected, found)
    assert taken == plain
    (graph,) = budget.report().graphs
    assert graph.recomputed == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoints_inside(reentrant: bool) -> None:
    """They are hints. A limit that the step keeps as torch splits it changes nothing."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.square().mean()

    plain, model = Checkpointed(), Checkpointed()
    usual = torch.compile(plain, backend="aot_eager", fullgraph=True)
    expected, most = gradients(plain, usual), peak(plain, usual)
    torch._dynamo.reset()
    backend = lowtide.CompileBudget(most + 8192, compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert same(expected, gradients(model, compiled))
    assert peak(model, compiled) <= most + 8192


def test_a_refusal_names_what_a_policy_inside_keeps() -> None:
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)

    class Selective(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(
                    lambda x, b=block: b.second(b.first(x).sin()).sin(),
                    x, use_reentrant=False, context_fn=contexts,
                )  # fmt: skip
            return x.square().mean()

    model = Selective()
    backend = lowtide.CompileBudget("40 KB", compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.raises(BudgetError, match=r"gradients\. [0-9.]+ KiB must be saved, as the policy"):
        gradients(model, compiled)
