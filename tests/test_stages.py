"""Two gloo ranks: FSDP1, and models of which each rank has a stage.

As in `test_distributed.py`, whose models and step are used here, every scenario is a step with
lowtide and the same step without, compared bit for bit on each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from gloo import SHARDING, Outcome, Scenario, outcomes_of, run_ranks
from once import on_one_recorder
from test_distributed import (
    HOWS,
    STEPS,
    WORLD,
    Block,
    Net,
    against,
    check_foreseen,
    check_same,
    foreseen,
    scenario,
    shared,
    train,
)

pytestmark = on_one_recorder  # as FSDP2's, see `test_ranks`

# ------------------------------------------------------------------------------------ FSDP1

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def fsdp1(how: str, strategy: str, *, orig: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": orig,
        "device_id": torch.device("cpu"),
    }
    model = Net(lowtide.checkpoint if how == "checkpoint" else None)
    for at, block in enumerate(model.blocks):
        model.blocks[at] = FullyShardedDataParallel(block, **options)
    whole: nn.Module = FullyShardedDataParallel(model, **options)
    if how == "fit":
        lowtide.fit(whole, 0.7)
    return whole


def fsdp1_scenarios() -> Iterator[tuple[str, Scenario]]:
    def trained(how: str, strategy: str, orig: bool) -> list[Tensor]:
        limit: Any = lowtide.budget(0.7) if how == "budget" else contextlib.nullcontext()
        return train(fsdp1(how, strategy, orig=orig), lambda: limit)

    for strategy in STRATEGIES:
        for orig in (True, False):
            plain = shared(trained, "", strategy, orig)
            for how in HOWS:
                name = f"{strategy} {'own' if orig else 'flat'} {how}"
                yield name, scenario(plain, partial(trained, how, strategy, orig))


def fsdp1_region_over_groups(orig: bool) -> Outcome:
    """One region around all of them, each of which has lost its parameters before its backward."""

    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = lowtide.checkpoint(super().forward, x)
            return out

    def trained(model: nn.Module) -> list[Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        options = {"use_orig_params": orig, "device_id": torch.device("cpu")}
        for at, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[at] = FullyShardedDataParallel(block, **options)  # type: ignore[index, operator]
        return train(FullyShardedDataParallel(model, **options))

    return against(lambda: trained(Net()), lambda: trained(Whole()))


def fsdp1_foreseen(orig: bool) -> Outcome:
    """Planned and verified before its first step, in which FSDP1 initializes itself."""
    return foreseen(lambda: fsdp1("", "FULL_SHARD", orig=orig))


def more_fsdp1_scenarios() -> Iterator[tuple[str, Scenario]]:
    for orig in (True, False):
        own = "own" if orig else "flat"
        yield f"fsdp1 region over groups {own}", partial(fsdp1_region_over_groups, orig)
        yield f"fsdp1 foreseen {own}", partial(fsdp1_foreseen, orig)


# -------------------------------------------------------------------------------- pipelines

MICRO = 4


def trained(schedule: str, how: str) -> list[Tensor]:
    """Some steps of a pipeline; each rank has every second of four blocks, or one half of them."""
    from torch.distributed import pipelining

    torch.manual_seed(0)
    blocks = [Block(16) for _ in range(8)]
    rank, looped = dist.get_rank(), schedule == "ScheduleInterleaved1F1B"
    count = 2 * WORLD if looped else WORLD
    size = len(blocks) // count
    stages, models = [], []
    for number in range(rank, count, WORLD):
        model = nn.Sequential(*blocks[number * size : (number + 1) * size])
        if how == "checkpoint":
            lowtide.checkpoint_modules(model, [Block])
        if how == "fit":
            lowtide.fit(model, 0.7)
        stages.append(pipelining.PipelineStage(model, number, count, torch.device("cpu")))
        models.append(model)
    run = getattr(pipelining, schedule)(
        stages if looped else stages[0], MICRO, loss_fn=nn.functional.mse_loss
    )
    around: Any = lowtide.budget(0.7) if how == "budget" else contextlib.nullcontext()
    return steps(nn.ModuleList(models), run, around)


def steps(models: nn.Module, run: Any, around: Any) -> list[Tensor]:
    left: list[Tensor] = []
    optimizer = torch.optim.SGD(models.parameters(), 0.1)
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        batch, target = torch.randn(2, 64 * MICRO, 16)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        with around:
            if dist.get_rank() == 0:
                run.step(batch)
            else:
                run.step(target=target, losses=losses)
        left += [loss.detach() for loss in losses]
        left += [p.grad.clone() for p in models.parameters() if p.grad is not None]
        left.append(torch.get_rng_state())
        optimizer.step()
    return left


SCHEDULES = {
    "ScheduleGPipe": HOWS,
    "Schedule1F1B": HOWS,
    "ScheduleInterleaved1F1B": ("checkpoint",),
}


def pipeline_scenarios() -> Iterator[tuple[str, Scenario]]:
    for schedule, hows in SCHEDULES.items():
        plain = shared(trained, schedule, "")
        for how in hows:
            yield f"{schedule} {how}", scenario(plain, partial(trained, schedule, how))


# ------------------------------------------------------------------------- running the ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return outcomes_of(__file__, WORLD, tmp_path_factory)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("parameters", ["own", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fsdp1(
    outcomes: list[dict[str, Outcome]], strategy: str, parameters: str, how: str
) -> None:
    check_same(outcomes, f"{strategy} {parameters} {how}")


@pytest.mark.parametrize("parameters", ["own", "flat"])
def test_what_fsdp1_has_resharded_is_made_by_no_replay(
    outcomes: list[dict[str, Outcome]], parameters: str
) -> None:
    for outcome in check_same(outcomes, f"fsdp1 region over groups {parameters}"):
        assert "aten::gelu" in outcome["names"]


@pytest.mark.parametrize("parameters", ["own", "flat"])
def test_fsdp1_is_planned_before_its_first_step(
    outcomes: list[dict[str, Outcome]], parameters: str
) -> None:
    check_foreseen(outcomes, f"fsdp1 foreseen {parameters}")


@pytest.mark.parametrize(
    ("schedule", "how"), [(name, how) for name, hows in SCHEDULES.items() for how in hows]
)
def test_pipeline(outcomes: list[dict[str, Outcome]], schedule: str, how: str) -> None:
    for outcome in check_same(outcomes, f"{schedule} {how}"):
        if how == "checkpoint":
            assert "aten::gelu" in outcome["names"]


if __name__ == "__main__":
    needs = (*SHARDING, "torch.distributed.pipelining")
    run_ranks(fsdp1_scenarios, more_fsdp1_scenarios, pipeline_scenarios, needs=needs)
