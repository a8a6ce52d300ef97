"""What type checkers infer for the code of users: mypy checks this file, and nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

import lowtide
from lowtide.policies import KeepNamed, KeepProducts, OperationInfo


class Block(nn.Module):
    def __init__(self, level: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scale = 2.0
        self.level2 = lowtide.ActivationCheckpointing(2, level)

    def encode(self, x: Tensor, times: int) -> tuple[Tensor, int]:
        return self.first(x), times

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        assert_type(self.level2(self.encode, x, 2), tuple[Tensor, int])
        assert_type(self.level2(fn=self.encode, x=x, times=2), tuple[Tensor, int])
        return {"x": self.encode(x, 1)[0] * self.scale}


def scaled(x: Tensor, times: int, *, flag: bool = True) -> dict[str, Tensor]:
    return {"x": x * times} if flag else {}


def large(operation: OperationInfo) -> bool:
    return operation.nbytes > 1000


x = torch.ones(3, 8)

# A wrapped block is the block, and assigned to its own name.
block = Block(3)
block = lowtide.ActivationCheckpointWrapper(block)
assert_type(lowtide.ActivationCheckpointWrapper(Block(3), policy=KeepProducts()), Block)
assert_type(block.scale, float)
assert_type(isinstance(block, lowtide.ActivationCheckpointWrapper), bool)
lowtide.ActivationCheckpointWrapper.remove(block)
lowtide.ActivationCheckpointWrapper(Block)  # type: ignore[type-var]

assert_type(lowtide.checkpoint(scaled, x, 2, flag=False), dict[str, Tensor])
assert_type(lowtide.checkpoint(scaled, x, 2, use_reentrant=False, policy=large), dict[str, Tensor])
assert_type(lowtide.name(x, "x"), Tensor)
lowtide.checkpoint(x, scaled)  # type: ignore[call-overload]


@lowtide.checkpoint(policy=KeepProducts() | KeepNamed("x"))
def decorated(x: Tensor, times: int) -> Tensor:
    return x * times


assert_type(decorated(x, 2), Tensor)
decorated(2, x)  # type: ignore[arg-type]

budget = lowtide.budget("6 GiB")
with budget as entered:
    assert_type(entered, lowtide.Budget)
assert_type(budget.report().measured_peak, int | None)
lowtide.budget(None)  # type: ignore[arg-type]

fitted = lowtide.fit(block, 0.5)
assert_type(fitted, lowtide.FittedBudget)
fitted(x)  # type: ignore[operator]
fitted.train()  # type: ignore[attr-defined]

with lowtide.checkpoint_modules(block, [nn.Linear, "first"]) as handle:
    assert_type(handle.names, tuple[str, ...])
lowtide.checkpoint_modules(block, {nn.Linear})
lowtide.checkpoint_modules(block, nn.Linear | nn.Conv2d)
lowtide.checkpoint_modules(block, lambda name, module: "first" in name)
lowtide.checkpoint_modules(block, lowtide.every(2, "*"))
lowtide.checkpoint_modules(block, 3)  # type: ignore[arg-type]
lowtide.ActivationCheckpointing("2", 3)  # type: ignore[arg-type]

plan = lowtide.plan(block, x, limit="6 GiB")
assert_type(plan.minimum_peak, int)
lowtide.budget(plan)
assert_type([point.peak for point in lowtide.curve(block, x)], list[int])
assert_type(lowtide.verify(block, x).same, bool)
assert_type(lowtide.measure(block, x).peak_bytes, int)
