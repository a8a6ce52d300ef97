"""Compiled code under a limit, called with inputs of other sizes.

Dynamo makes a size a symbol once it has seen two, and all later calls run the code compiled then.
Whatever the order of the sizes, each call is inside the limit or refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from by_hand import same
from compiling import compiles
from lowtide.errors import BudgetError, CompiledWarning
from lowtide.inductor import compiled as compiled_graph

pytestmark = compiles

X = torch.randn(1024, 16, generator=torch.Generator().manual_seed(3))
Call = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(nn.functional.gelu(self.wide(x)))
        return out


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x).square().mean()
        return out


def gradients(model: nn.Module, call: Call, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = call(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def peak(model: nn.Module, call: Call, rows: int) -> int:
    model.zero_grad()
    return lowtide.measure(lambda: call(X[:rows]).backward(), device="cpu").peak_bytes


def plain_peak(rows: int) -> int:
    model = Net()
    return peak(model, torch.compile(model, backend="aot_eager", dynamic=False), rows)


def compiled_for(rows: int, share: float) -> tuple[nn.Module, Call, lowtide.CompileBudget]:
    """A model whose limit is a share of the plain peak of so many rows."""
    backend = lowtide.CompileBudget(int(share * plain_peak(rows)), compiler="aot_eager")
    torch._dynamo.reset()
    model = Net()
    return model, torch.compile(model, backend=backend), backend


def inside(model: nn.Module, call: Call, backend: lowtide.CompileBudget, rows: int) -> bool:
    return peak(model, call, rows) <= int(backend.limit)


def test_full_batches_after_a_smaller_one_are_inside_the_limit() -> None:
    """The last batch of an epoch. A warning would be an error here."""
    model, call, backend = compiled_for(512, 0.7)
    for rows in (512, 512, 300, 512, 512, 300, 512):
        assert inside(model, call, backend, rows)
    assert len(backend.report().graphs) == 2
    assert backend.report().graphs[1].recomputed > 0


def test_batches_that_grow_are_planned_for_as_they_come() -> None:
    model, call, backend = compiled_for(512, 0.9)
    recomputed = []
    for rows in (300, 400, 512, 400, 600, 512):
        assert inside(model, call, backend, rows)
        recomputed.append(backend.report().graphs[-1].recomputed)
    assert recomputed[0] == recomputed[1] == 0 < recomputed[2] == recomputed[3] < recomputed[4]
    assert recomputed[5] == recomputed[4]
    assert len(backend.report().graphs) == 2


def test_what_is_planned_again_has_the_bits_of_the_plain_step() -> None:
    model, call, _ = compiled_for(512, 0.7)
    plain = Net()
    usual = torch.compile(plain, backend="aot_eager")
    for rows in (512, 300, 512, 600):
        assert same(gradients(plain, usual, X[:rows]), gradients(model, call, X[:rows]))


def test_a_batch_that_does_not_fit_is_refused_and_smaller_ones_go_on() -> None:
    model, call, backend = compiled_for(512, 0.6)
    for rows in (512, 300):
        assert inside(model, call, backend, rows)
    for _ in range(2):
        with pytest.raises(BudgetError, match="does not fit in") as refused:
            call(X)
    least = refused.value.minimum
    assert least is not None
    assert least > int(backend.limit)
    with pytest.raises(BudgetError):
        call(X[:1000])
    for rows in (512, 520, 300):
        assert inside(model, call, backend, rows)


def test_a_smaller_batch_runs_after_the_first_was_refused() -> None:
    model, call, backend = compiled_for(512, 0.6)
    with pytest.raises(BudgetError, match="does not fit in"):
        call(X)
    for rows in (512, 300, 512):
        assert inside(model, call, backend, rows)


def test_blocks_that_share_their_code_are_planned_for_the_largest() -> None:
    """Each call is another block's, of the same function. The loss outside is not counted."""
    model = Net(blocks=3)
    backend = lowtide.CompileBudget("400 KB", several_calls=True, compiler="aot_eager")
    for block in model.blocks:
        block.compile(backend=backend)
    for rows in (256, 256, 100, 256, 300, 300):
        assert inside(model, model, backend, rows)
    assert len(backend.report().graphs) == 4  # with a gradient for their inputs, and without


def test_sizes_that_never_stop_growing_are_reported_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_graph, "_SIZES", 2)
    model, call, backend = compiled_for(512, 0.9)
    for rows in (300, 400, 500, 600):
        assert inside(model, call, backend, rows)
    with pytest.warns(CompiledWarning, match="compiled for 2 larger calls .* dynamic=False"):
        call(X[:700]).backward()
    call(X[:700]).backward()  # warned of once


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inside(x.unflatten(0, (4, -1))).chunk(3, -1)
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (query, key, value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2)).tanh().flatten(0, 1)


def of_attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention(), Attention())


def test_attention_over_any_number_of_words() -> None:
    """What its kernels take is asked of tensors with the sizes that are counted."""
    model, plain = of_attention(), of_attention()
    usual = torch.compile(lambda x: plain(x).square().mean(), backend="aot_eager", dynamic=True)
    limit = int(0.9 * peak(plain, usual, 512))
    backend = lowtide.CompileBudget(limit, compiler="aot_eager")
    call = torch.compile(lambda x: model(x).square().mean(), backend=backend, dynamic=True)
    for rows in (256, 512, 128):
        assert same(gradients(plain, usual, X[:rows]), gradients(model, call, X[:rows]))
        assert inside(model, call, backend, rows)
    assert backend.report().graphs[0].recomputed > 0
