"""Four gloo ranks: FSDP2 in its variants, and budgets that plan and refuse alike (rule 14).

As in `test_distributed.py`, whose models and step are used here, every scenario is a step with
lowtide and the same step without, compared bit for bit on each rank.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from gloo import SHARDING, Outcome, Scenario, outcomes_of, run_ranks
from lowtide.errors import BudgetError, UsageError
from lowtide.learning.ranks import Known, merged, together
from lowtide.observing.observer import Observer
from lowtide.planner import Event, Graph, OpNode, ValueNode
from once import on_one_recorder
from test_distributed import Net, compare, ddp, scenario, shared, train

WORLD = 4

pytestmark = on_one_recorder  # FSDP2 has DTensors; groups agree on plans, whoever records


# ------------------------------------------------------------------------------------ FSDP2


def sharded(
    how: str,
    *,
    reshard: bool = True,
    nested: bool = False,
    mixed: bool = False,
    mesh2: bool = False,
    tensor: bool = False,
) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if mesh2:  # sharded over two ranks, replicated over two
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif tensor:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        mesh = both["shard"]
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = Net(lowtide.checkpoint if how == "checkpoint" else None)
    for block in model.blocks:
        if tensor:
            ways = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(block, both["tensor"], ways)
        if nested:
            fully_shard(block.first, **options)
            fully_shard(block.second, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    model.no_sync = no_sync
    if how == "fit":
        lowtide.fit(model, 0.7)
    return model


SETTINGS: dict[str, dict[str, Any]] = {
    "resharded": {"reshard": True},
    "nested": {"nested": True},
    "nested and kept": {"nested": True, "reshard": False},
    "mixed precision": {"mixed": True},
    "two meshes": {"mesh2": True},
    "tensor parallel": {"tensor": True},
    "tensor parallel and kept": {"tensor": True, "reshard": False},
}
HOWS = ("checkpoint", "budget", "fit")
ALIKE = "alike"  # a budget that was given the group


def around(how: str) -> Callable[[], Any]:
    if how == "budget":
        limit: Any = lowtide.budget(0.7)
    elif how == ALIKE:
        limit = lowtide.budget(0.7, group=True)
    else:
        limit = contextlib.nullcontext()
    return lambda: limit


def fsdp_scenarios() -> Iterator[tuple[str, Scenario]]:
    def trained(how: str, settings: dict[str, Any], accumulate: int = 1) -> list[Tensor]:
        return train(sharded(how, **settings), around(how), accumulate=accumulate)

    for name, settings in SETTINGS.items():
        plain = shared(trained, "", settings)
        for how in HOWS:
            yield f"{name} {how}", scenario(plain, partial(trained, how, settings))
    plain = shared(trained, "", {}, 2)
    for how in (*HOWS, ALIKE):
        yield f"accumulated {how}", scenario(plain, partial(trained, how, {}, 2))


def ddp_scenarios() -> Iterator[tuple[str, Scenario]]:
    def trained(how: str) -> list[Tensor]:
        model = Net(lowtide.checkpoint if how == "checkpoint" else None, batch_norm=True)
        if how == "fit":
            lowtide.fit(model, 0.8, group=True)
        return train(ddp(model), around(how), accumulate=2)

    plain = shared(trained, "")
    for how in (*HOWS, ALIKE):
        yield f"ddp {how}", scenario(plain, partial(trained, how))


# ------------------------------------------------------------------------------ planning alike


def steps(limit: Any, rows: list[int], model: nn.Module | None = None) -> list[Tensor]:
    """DDP training in which this rank's batches have these numbers of rows."""
    model = ddp(Net()) if model is None else model
    left = []
    for number, count in enumerate(rows):
        torch.manual_seed(10 * number + dist.get_rank())
        model.zero_grad()
        with limit:
            loss = model(torch.randn(count, 8)).square().mean()
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return left


def plans_alike() -> Outcome:
    """What each rank keeps and replays, although measured times differ widely between ranks."""
    limit = lowtide.budget(0.7, group=True)
    plain = steps(contextlib.nullcontext(), [256] * 5)
    with slowed():
        outcome = compare(plain, steps(limit, [256] * 5))
    prepared, report = limit._loop._plans.expected(0), limit.report()
    return {
        **outcome,
        "retain": prepared.plan.retain,
        "peak": prepared.peak,
        "replayed": report.replayed_operations,
        "limit": report.limit,
    }


@contextlib.contextmanager
def slowed() -> Iterator[None]:
    """On each rank another operator seems slow, so that each would make a different plan."""
    rank = dist.get_rank()
    slow = ["aten::gelu", "aten::addmm", "aten::native_layer_norm", "aten::sin"][rank]
    plain = Observer.operation

    def operation(self: Any, op: Any, *rest: Any) -> None:
        op.seconds = 1e-3 if op.facts.name == slow else 1e-5
        plain(self, op, *rest)

    Observer.operation = operation  # type: ignore[method-assign]
    try:
        yield
    finally:
        Observer.operation = plain  # type: ignore[method-assign]


def plans_apart() -> Outcome:
    """The same without a group: shows that the test above could fail."""
    limit = lowtide.budget(0.7)
    with slowed():
        steps(limit, [256] * 5)
    limit._loop._beside.wait()  # else its annealing would be counted in the next scenario
    return {"retain": limit._loop._plans.expected(0).plan.retain}


def engines_that_differ() -> Outcome:
    """Odd ranks have no compiled core. The first rank plans a step for all; each rank plans again
    by itself if its backward must allocate gradients that existed before."""
    from lowtide import engine
    from lowtide.planner import auto

    annealed: list[bool] = []
    polish = auto.polish

    def counted(*given: Any) -> None:
        annealed.append(True)
        polish(*given)

    auto.polish = counted
    block = (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Tanh())
    torch.manual_seed(0)
    model = ddp(nn.Sequential(nn.Linear(8, 16), *copy.deepcopy(block), *copy.deepcopy(block)))
    model(torch.randn(256, 8)).sum().backward()
    limit = lowtide.budget(0.7, group=True)
    plans = []
    try:
        with engine.use("python" if dist.get_rank() % 2 else "auto"):
            core = engine.annealing() is not None
            for number in range(6):
                torch.manual_seed(number)
                model.zero_grad(set_to_none=number > 3)
                with limit:
                    loss = model(torch.randn(256, 8)).square().mean()
                loss.backward()
                plans.append([prepared.plan.retain for prepared in limit._loop._plans])
    finally:
        auto.polish = polish
    return {"plans": plans, "annealed": len(annealed), "core": core}


def shapes_that_differ() -> Outcome:
    """Each rank has different batches: it plans by itself, and none waits for another."""
    rows = [128 + 32 * dist.get_rank()] * 4
    plain = steps(contextlib.nullcontext(), rows)
    return compare(plain, steps(lowtide.budget(0.7, group=True), rows))


def one_rank_cannot() -> Outcome:
    """Rank 2 has a batch too large for its limit, as the measurement of its first step shows."""
    rank = dist.get_rank()
    size = 512 if rank == 2 else 64
    peak = lowtide.measure(lambda: steps(contextlib.nullcontext(), [64]), device="cpu").peak_bytes
    limit = lowtide.budget(0.05 if rank == 2 else 1.0, group=True)
    began = time.monotonic()
    try:
        steps(limit, [size] * 4)
    except BudgetError as error:
        text = str(error)
        told = {"error": "", "text": text, "minimum": error.minimum}
        after = steps(contextlib.nullcontext(), [64])  # the ranks can still train together
        return {**told, "same": bool(after), "seconds": time.monotonic() - began, "peak": peak}
    return {"text": "nothing was refused"}


def one_rank_cannot_plan_its_example() -> Outcome:
    """`fit` refuses before the first step, and where one rank does, all of them do."""
    limit = "20 KB" if dist.get_rank() == 2 else "1 GB"
    try:
        lowtide.fit(Net(), limit, group=True, example=torch.randn(256, 8))
    except BudgetError as error:
        return {"text": str(error), "minimum": error.minimum}
    return {"text": "nothing was refused"}


class LateBias(nn.Module):
    """Its last parameter has a gradient before the backward asks for any activation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.bias  # type: ignore[no-any-return]


def wrapped_anew() -> Outcome:
    """A backward that is refused once DDP has begun to reduce: torch refuses the next forward, but
    not that of a new DDP."""

    def trained(inside: nn.Module, limit: Any) -> list[Tensor]:
        model = ddp(inside)
        torch.manual_seed(dist.get_rank())
        with limit:
            loss = model(torch.randn(256, 8)).sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain, inside = trained(LateBias(), contextlib.nullcontext()), LateBias()
    model, limit = ddp(inside), lowtide.budget("200 kB")
    try:
        with limit:
            loss = model(torch.randn(256, 8)).sum()
        loss.backward()
    except BudgetError as error:
        limit = lowtide.budget(error.minimum)
    begun, text = inside.bias.grad is not None, ""
    try:
        model(torch.randn(256, 8))
    except RuntimeError as error:
        text = str(error)
    del model  # its hooks are on the parameters as long as it is there
    inside.zero_grad()
    found = compare(plain, trained(inside, limit))
    return {**found, "begun": begun, "text": text, "replayed": limit.report().replayed_operations}


def collectives_sent() -> Outcome:
    """One number per step that went as planned, sent outside forward and backward."""
    from test_distributed import collectives_in

    counts = {}
    for name, group in (("alike", True), ("apart", None)):
        limit, model = lowtide.budget(0.6, group=group), ddp(Net())
        steps(limit, [64] * 6, model)
        counts[name] = collectives_in(lambda m=model, b=limit: steps(b, [64] * 3, m))
    return counts


def settling(backwards: int) -> Outcome:
    """In which steps the ranks gather what they learned, and what is planned and watched: with an
    accumulation of two backwards, or with so many inside one context."""
    from lowtide.learning.ranks import Ranks

    gather, gathered, contexts = Ranks.gather, [0], 14
    limit, model = lowtide.budget(0.75, group=True), ddp(Net())
    steps: list[tuple[bool, bool]] = []
    finish = limit._loop._finish

    def finished(decisions: Any) -> None:
        if decisions.ended:
            steps.append((decisions.prepared is not None, decisions.observer is not None))
        finish(decisions)

    def counted(self: Ranks, item: Any) -> list[Any]:
        gathered[0] += 1
        return gather(self, item)

    limit._loop._finish = finished
    Ranks.gather = counted  # type: ignore[method-assign]
    counts = []
    try:
        for number in range(contexts):
            torch.manual_seed(number)
            model.zero_grad(set_to_none=backwards > 1 or not number % 2)
            before = gathered[0]
            with limit:
                for _ in range(backwards):
                    model(torch.randn(256, 8)).square().mean().backward()
            counts.append(gathered[0] - before)
    finally:
        Ranks.gather = gather  # type: ignore[method-assign]
    last = steps[-4 * backwards :]
    planned, watched = ([step[i] for step in last] for i in (0, 1))
    return {"counts": counts, "planned": planned, "watched": watched}


def one_rank_was_not_watched() -> Outcome:
    """Rank 1 could not measure its second step, which the others plan once more."""
    limit, model = lowtide.budget(0.75, group=True), ddp(Net())
    rest = [256] * 4
    steps(limit, [256], model)
    with lowtide_is_deaf() if dist.get_rank() == 1 else contextlib.nullcontext():
        steps(limit, [256], model)
    steps(limit, rest, model)
    return {"retain": limit._loop._plans.expected(0).plan.retain}


def lowtide_is_deaf() -> Any:
    """A profiler of the program's own, beside which no step is measured."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def sync_batch_norm() -> Outcome:
    """torch has it on GPUs only: its own error comes through."""
    texts = []
    for call in (lambda f, x: f(x), lowtide.checkpoint):
        try:
            call(nn.SyncBatchNorm(4), torch.randn(8, 4))
        except ValueError as error:
            texts.append(str(error))
    return {"texts": texts}


def alike_scenarios() -> Iterator[tuple[str, Scenario]]:
    for function in (
        plans_alike, plans_apart, engines_that_differ, shapes_that_differ, one_rank_cannot,
        one_rank_cannot_plan_its_example, wrapped_anew, collectives_sent, one_rank_was_not_watched,
        sync_batch_norm,
    ):  # fmt: skip
        yield function.__name__, function
    for backwards in (1, 3):
        yield f"settling {backwards}", partial(settling, backwards)


# ------------------------------------------------------------------------- running the ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return outcomes_of(__file__, WORLD, tmp_path_factory)


def check_same(outcomes: list[dict[str, Outcome]], name: str) -> None:
    for rank, outcome in enumerate(found[name] for found in outcomes):
        assert "error" not in outcome, f"rank {rank}: {outcome['text']}"
        assert outcome["same"], f"rank {rank}: other bits than the plain step"
        assert outcome["replayed"] > 0, f"rank {rank}: nothing was recomputed"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("setting", [*SETTINGS, "accumulated"])
def test_fsdp2(outcomes: list[dict[str, Outcome]], setting: str, how: str) -> None:
    check_same(outcomes, f"{setting} {how}")


def test_fsdp2_of_a_group_that_plans_alike(outcomes: list[dict[str, Outcome]]) -> None:
    check_same(outcomes, f"accumulated {ALIKE}")


@pytest.mark.parametrize("how", [*HOWS, ALIKE])
def test_ddp(outcomes: list[dict[str, Outcome]], how: str) -> None:
    check_same(outcomes, f"ddp {how}")


def test_ranks_of_a_group_plan_alike(outcomes: list[dict[str, Outcome]]) -> None:
    check_same(outcomes, "plans_alike")
    alike = [found["plans_alike"] for found in outcomes]
    for key in ("retain", "replayed", "peak", "limit"):
        assert all(outcome[key] == alike[0][key] for outcome in alike), key
    apart = [found["plans_apart"]["retain"] for found in outcomes]
    assert any(retain != apart[0] for retain in apart), "the times made no difference"


def test_ranks_of_a_group_plan_alike_where_not_all_have_the_core(
    outcomes: list[dict[str, Outcome]],
) -> None:
    found = [outcome["engines_that_differ"] for outcome in outcomes]
    assert all("error" not in outcome for outcome in found), found
    assert all(outcome["plans"] == found[0]["plans"] for outcome in found)
    assert len(found[0]["plans"][-1]) > len(found[0]["plans"][3])  # for the gradients to allocate
    assert not any(outcome["annealed"] for outcome in found[1:])
    assert not found[1]["core"]


def test_ranks_with_steps_of_their_own_plan_by_themselves(
    outcomes: list[dict[str, Outcome]],
) -> None:
    for found in outcomes:
        assert found["shapes_that_differ"].get("same"), found["shapes_that_differ"]


def test_a_limit_that_one_rank_refuses_is_refused_on_all(
    outcomes: list[dict[str, Outcome]],
) -> None:
    told = [found["one_rank_cannot"] for found in outcomes]
    assert all(outcome.get("same") for outcome in told), told
    assert len({outcome["text"] for outcome in told}) == 1
    assert told[0]["text"].startswith(
        "1 of 4 ranks cannot keep their limit, so all of them stop here. Rank 2 needs most: "
    )
    assert "The smallest limit known to suffice is" in told[0]["text"]
    assert len({outcome["minimum"] for outcome in told}) == 1


def test_an_example_that_one_rank_refuses_is_refused_on_all(
    outcomes: list[dict[str, Outcome]],
) -> None:
    told = [found["one_rank_cannot_plan_its_example"] for found in outcomes]
    assert told[0]["text"].startswith("1 of 4 ranks cannot keep their limit, so all of them stop")
    assert all(outcome == told[0] for outcome in told)


def test_ddp_that_had_begun_to_reduce_is_made_anew_after_a_refusal(
    outcomes: list[dict[str, Outcome]],
) -> None:
    check_same(outcomes, "wrapped_anew")
    for found in outcomes:
        assert found["wrapped_anew"]["begun"]
        assert "Expected to have finished reduction" in found["wrapped_anew"]["text"]


def test_what_is_sent(outcomes: list[dict[str, Outcome]]) -> None:
    for found in outcomes:
        sent, apart = found["collectives_sent"]["alike"], found["collectives_sent"]["apart"]
        assert sum(apart.values()) > 0
        assert sum(sent.values()) == sum(apart.values()) + 3  # steps


@pytest.mark.parametrize("backwards", [1, 3])
def test_ranks_plan_every_step_of_a_context_and_then_only_follow(
    outcomes: list[dict[str, Outcome]], backwards: int
) -> None:
    """After two plans for each step, and one measurement more, nothing is gathered or watched."""
    for found in outcomes:
        outcome = found[f"settling {backwards}"]
        assert "error" not in outcome, outcome["text"]
        assert sum(outcome["counts"]) > 0
        assert not any(outcome["counts"][-4:]), outcome["counts"]
        assert all(outcome["planned"]), outcome
        assert not any(outcome["watched"]), outcome


def test_a_rank_that_was_not_watched_plans_with_the_others(
    outcomes: list[dict[str, Outcome]],
) -> None:
    plans = [found["one_rank_was_not_watched"]["retain"] for found in outcomes]
    assert all(plan == plans[0] for plan in plans)


def test_sync_batch_norm_is_refused_by_torch_itself(outcomes: list[dict[str, Outcome]]) -> None:
    for found in outcomes:
        plain, ours = found["sync_batch_norm"]["texts"]
        assert plain.startswith("SyncBatchNorm expected input tensor to be on GPU")
        assert plain == ours


# ------------------------------------------------------------------------- without processes


def graph(seconds: float, memory: int, pinned: bool = False, named: int = -1) -> Graph:
    return Graph(
        (ValueNode(8, 0, pinned, named=named),),
        (OpNode("aten::sin", seconds, (), (0,), memory, True, memory + 1, memory + 2),),
        (Event(0, memory + 3, memory + 4, (0,)),),
    )


def test_merged_graphs_hold_the_largest_of_every_rank() -> None:
    found = merged([graph(1.0, 100, True), graph(3.0, 50), graph(2.0, 200, True)])
    assert found == graph(2.0, 200)
    assert found.fingerprint == graph(1.0, 100).fingerprint
    # A value counts from the moment when the first rank's user code no longer holds it.
    named = merged([graph(1.0, 1, named=0), graph(1.0, 1), graph(1.0, 1, named=0)])
    assert named == graph(1.0, 1)
    assert merged([graph(1.0, 1, named=0)] * 2) == graph(1.0, 1, named=0)


def test_what_is_cut_off_on_one_rank_is_on_all() -> None:
    whole = graph(1.0, 1)
    cut = replace(whole, values=(replace(whole.values[0], cut=0), *whole.values[1:]))
    assert merged([whole, cut]) == merged([cut, whole]) == cut


def test_what_only_the_record_has_on_one_rank_counts_on_all() -> None:
    """As after a step that one rank has not watched: graphs of one structure can be merged."""
    values = (ValueNode(8, 0), ValueNode(100, -1, named=1, owned=True))
    ops = (OpNode("aten::sin", 1.0, (1,), (0,), 0, True, 1, 2),)
    owning = Graph(values, ops, (Event(0, 3, 4, (0, 1)),))
    without = Graph(values[:1], (replace(ops[0], inputs=()),), (Event(0, 3, 4, (0,)),))
    larger = replace(owning, values=(values[0], replace(values[1], nbytes=200, named=0)))
    assert merged([without, owning]) == merged([owning, without]) == owning
    assert merged([owning, larger]) == larger
    assert merged([without, without]) == without


def test_a_step_that_one_rank_has_modelled_counts_as_modelled() -> None:
    one, two = Known(graph(1.0, 100), True, 2, 0), Known(graph(3.0, 50), False, 0, 8)
    assert together([one, two]) == Known(graph(2.0, 100), False, 0, 8)


def test_a_group_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"torch.distributed is not initialized: call"):
        lowtide.budget(0.5, group=True)
    with pytest.raises(UsageError, match="or leave group= out"):
        lowtide.fit(nn.Linear(2, 2), 0.5, group=True)


def test_a_group_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration says `group: false`, or has a name where a group should be."""
    model = nn.Linear(2, 2)
    for budget in (lowtide.budget(0.5, group=False), lowtide.fit(model, 0.5, group=False)):
        assert "Budget" in repr(budget)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lowtide.budget(0.5, group=False)
        for wrong in ("default", 0, ["default"]):
            with pytest.raises(UsageError, match=r"which is no process group\. Pass what torch"):
                lowtide.budget(0.5, group=wrong)
        assert lowtide.budget(0.5, group=dist.group.WORLD).limit == 0.5
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(alike_scenarios, ddp_scenarios, fsdp_scenarios, needs=SHARDING)
