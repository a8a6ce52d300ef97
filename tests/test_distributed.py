"""DDP, FSDP2, tensor parallelism and collectives on two gloo ranks: right, or refused (rule 14).

Two processes run every scenario once, one after the other, and write down what came out; the tests
read that. Each scenario is a step with lowtide and the same step without, compared bit for bit:
losses, gradients, buffers and the state of the generator. Rules of docs/semantics.md are cited by
number; docs/status.md lists the combinations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from gloo import SHARDING, Outcome, Scenario, outcomes_of, run_ranks
from lowtide import _compat
from lowtide.errors import LowtideError, ReplayError
from once import FIRST_OF_TWO, on_one_recorder

WORLD = 2
STEPS = 3

Training = Callable[[], list[Tensor]]


# ---------------------------------------------------------------------------------- the models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inside = nn.functional.gelu(self.first(self.norm(x)))
        return x + self.drop(self.second(inside))


class Net(nn.Module):
    """Blocks, called through `call`; a BatchNorm if asked for, and a branch that is not used."""

    def __init__(self, call: Any = None, *, batch_norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 2)
        self.unused = nn.Linear(16, 2) if unused else None
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
            x = x.sin().square_()  # between two modules that are sharded
        out: Tensor = self.head(x)
        return out


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().clone()


def train(
    run: Any, around: Any = contextlib.nullcontext, *, accumulate: int = 1, steps: int = STEPS
) -> list[Tensor]:
    """Some steps of `run`; everything that they leave behind."""
    left: list[Tensor] = []
    optimizer = torch.optim.SGD(run.parameters(), 0.1)
    limit = around()
    for number in range(steps):
        torch.manual_seed(100 + number + 7 * dist.get_rank())
        optimizer.zero_grad()
        for micro in range(accumulate):
            x = torch.randn(256, 8)
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else run.no_sync():
                with limit:
                    loss = run(x).square().mean()
                loss.backward()
        left.append(loss.detach())
        left += [local(p.grad) for p in run.parameters() if p.grad is not None]
        left += [local(b) for b in run.buffers()]
        left.append(torch.get_rng_state())
        optimizer.step()
    return left


def compare(plain: list[Tensor], other: list[Tensor]) -> Outcome:
    same = len(plain) == len(other) and all(map(torch.equal, plain, other))
    return {"same": same, "tensors": len(plain)}


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The names of the operations that were replayed since."""
    from lowtide import replay

    names: list[str] = []

    def listener(operations: list[Any]) -> None:
        names.extend(op.facts.name for op in operations)

    replay.listeners.append(listener)
    try:
        yield names
    finally:
        replay.listeners.remove(listener)


def shared(plain: Callable[..., list[Tensor]], *args: Any) -> Training:
    """Plain steps that run when they are first asked for: several scenarios compare with them."""
    return functools.cache(functools.partial(plain, *args))


def against(plain: Training, other: Training) -> Outcome:
    """Run both; an error of lowtide's is an outcome, any other one a failure of the scenario."""
    expected = plain()
    with counted() as names:
        try:
            outcome = compare(expected, other())
        except LowtideError as error:
            outcome = {"error": type(error).__name__, "text": str(error)}
    return {**outcome, "replayed": len(names), "names": sorted(set(names))}


def scenario(plain: Training, other: Training) -> Scenario:
    return functools.partial(against, plain, other)


# ------------------------------------------------------------------------------------- DDP


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **options)


def ddp_scenarios() -> Iterator[tuple[str, Scenario]]:
    settings: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
        "plain": ({}, {}, 1),
        "batch_norm": ({"batch_norm": True}, {}, 1),
        "static_graph": ({}, {"static_graph": True}, 1),
        "find_unused": ({"unused": True}, {"find_unused_parameters": True}, 1),
        "no_sync": ({}, {}, 2),
    }

    def unchanged(net: dict[str, Any], options: dict[str, Any], micro: int) -> list[Tensor]:
        return train(ddp(Net(**net), **options), accumulate=micro)

    def changed(net: dict[str, Any], options: dict[str, Any], micro: int, how: str) -> Training:
        def other() -> list[Tensor]:
            if how == "checkpoint":
                return train(ddp(Net(lowtide.checkpoint, **net), **options), accumulate=micro)
            if how == "fit":
                inner = Net(**net)
                lowtide.fit(inner, 0.8)
                return train(ddp(inner, **options), accumulate=micro)
            limit = lowtide.budget(0.8)
            return train(ddp(Net(**net), **options), lambda: limit, accumulate=micro)

        return other

    for name, setting in settings.items():
        plain = shared(unchanged, *setting)
        for how in ("checkpoint", "budget", "fit"):
            yield f"ddp {name} {how}", scenario(plain, changed(*setting, how))


# ------------------------------------------------------------------------------------ FSDP2


def fsdp(call: Any = None, *, reshard: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = Net(call)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def fsdp_scenarios() -> Iterator[tuple[str, Scenario]]:
    def unchanged(reshard: bool) -> list[Tensor]:
        return train(fsdp(reshard=reshard))

    def changed(reshard: bool, how: str) -> Training:
        def other() -> list[Tensor]:
            if how == "checkpoint":
                return train(fsdp(lowtide.checkpoint, reshard=reshard))
            limit = lowtide.budget(0.6)
            return train(fsdp(reshard=reshard), lambda: limit)

        return other

    for reshard in (False, True):
        plain = shared(unchanged, reshard)
        for how in ("checkpoint", "budget"):
            yield f"fsdp2 reshard={reshard} {how}", scenario(plain, changed(reshard, how))
    yield "fsdp2 region over groups", fsdp_region_over_groups
    yield "fsdp2 region over groups of one rank", lambda: fsdp_region_over_groups(of_one=True)
    for alone in (False, True):
        for how in ("checkpoint", "budget"):
            twice = functools.partial(fsdp_twice, of_one=alone, how=how)
            yield f"fsdp2 twice alone={alone} {how}", twice
    yield "fsdp2 by hand", fsdp_by_hand
    for name, given in FSDP_PEAKS.items():
        yield f"fsdp2 peaks {name}", functools.partial(fsdp_peaks, **given)


FSDP_PEAKS: dict[str, dict[str, bool]] = {
    "resharded": {"of_one": True, "reshard": True},
    "nested": {"of_one": True, "reshard": True, "nested": True},
    "fit": {"of_one": True, "reshard": True, "fit": True},
    "fit on ranks": {"of_one": False, "reshard": True, "fit": True},
    "not resharded": {"of_one": False, "reshard": False},
}


def mesh_of(*, of_one: bool) -> Any:
    """All ranks, or this one alone."""
    from torch.distributed.device_mesh import init_device_mesh

    if not of_one:
        return init_device_mesh("cpu", (WORLD,))
    return init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("apart", "alone"))["alone"]


def fsdp_peaks(*, of_one: bool, reshard: bool, nested: bool = False, fit: bool = False) -> Outcome:
    """Peaks of plain steps, and of steps under a limit."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh, model = mesh_of(of_one=of_one), nn.Sequential(*(Block(64) for _ in range(5)))
    model.append(nn.Linear(64, 64))  # the root's own, gathered before its forward
    for block in model[:5]:
        if nested:
            fully_shard(block.first, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def peak(around: Any) -> int:
        x = torch.randn(128, 64)

        def step() -> None:
            with around:
                loss = model(x).square().mean()
            loss.backward()

        found = lowtide.measure(step, device="cpu").peak_bytes
        model.zero_grad()
        return found

    plain = [peak(contextlib.nullcontext()) for _ in range(3)]
    limit = int((0.9 if nested else 0.7) * max(plain))
    budget: Any = lowtide.fit(model, limit) if fit else lowtide.budget(limit)
    peaks, known, planned = [], [], []
    for _ in range(5):
        peaks.append(peak(contextlib.nullcontext() if fit else budget))
        known.append(budget.report().plain_peak)
        planned.append(budget.report().planned_peak)
    for _ in range(0 if of_one or not fit else 4):  # a budget measures its first steps only
        budget.remove()
        budget = lowtide.fit(model, limit)
        for _ in range(3):
            peak(contextlib.nullcontext())
        known.append(budget.report().plain_peak)
    return {
        "plain": max(plain),
        "least": min(plain),
        "limit": limit,
        "peaks": peaks,
        "known": known,
        "planned": planned[1:],
    }


def fsdp_region_over_groups(*, of_one: bool = False) -> Outcome:
    """One region around all groups: each is resharded long before its backward. In a group of one
    rank FSDP2 gathers nothing, but frees and fills its parameters all the same."""

    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = lowtide.checkpoint(super().forward, x)
            return out

    def sharded(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        mesh = mesh_of(of_one=of_one)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        return fully_shard(model, mesh=mesh, reshard_after_forward=False)

    return against(lambda: train(sharded(Net())), lambda: train(sharded(Whole())))


def fsdp_twice(*, of_one: bool, how: str) -> Outcome:
    """The blocks are called twice in one forward, and gathered again for that."""
    from torch.distributed.fsdp import fully_shard

    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            out: Tensor = super().forward(nn.functional.pad(x, (0, 6)))
            return out

    def sharded(call: Any = None) -> nn.Module:
        mesh, model = mesh_of(of_one=of_one), Twice(call)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def other() -> list[Tensor]:
        if how == "checkpoint":
            return train(sharded(lowtide.checkpoint))
        limit = lowtide.budget(0.6)
        return train(sharded(), lambda: limit)

    return against(lambda: train(sharded()), other)


def fsdp_by_hand() -> Outcome:
    """Modules of one rank that are unsharded by hand, which has no label."""
    from torch.distributed.fsdp import fully_shard

    class ByHand(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                block.unshard()
                x = block(x).tanh()
                block.unshard()
                block.reshard()
            out: Tensor = self.head(x)
            return out

    def sharded() -> nn.Module:
        model, mesh = ByHand(), mesh_of(of_one=True)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    limit = lowtide.budget(0.5)
    return against(lambda: train(sharded()), lambda: train(sharded(), lambda: limit))


# -------------------------------------------------------------------------- tensor parallelism

HOWS = ("checkpoint", "budget", "fit")


def parallel(call: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (WORLD,))
    model = Net(call)
    for block in model.blocks:
        parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return model


class Sequence(Net):
    """Between its blocks a rank has a part of the rows only."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = self.blocks[0].norm.weight.device_mesh  # type: ignore[union-attr]
        x = DTensor.from_local(self.stem(x), mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
            x = x.sin().square_()
        out: Tensor = self.head(x.full_tensor())  # type: ignore[attr-defined]
        return out


def sequence_parallel(call: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = Sequence(call)
    rows, whole = Shard(0), {"use_local_output": False}
    for block in model.blocks:
        ways = {
            "norm": SequenceParallel(sequence_dim=0),
            "first": ColwiseParallel(input_layouts=rows, **whole),
            "second": RowwiseParallel(output_layouts=rows, **whole),
            "drop": SequenceParallel(sequence_dim=0),
        }
        parallelize_module(block, init_device_mesh("cpu", (WORLD,)), ways)
    return model


PARALLEL = {"dtensor": parallel, "sequence": sequence_parallel}


def parallel_scenarios() -> Iterator[tuple[str, Scenario]]:
    def unchanged(build: Callable[..., nn.Module]) -> list[Tensor]:
        return train(build())

    def changed(build: Callable[..., nn.Module], how: str) -> Training:
        def other() -> list[Tensor]:
            if how == "checkpoint":
                return train(build(lowtide.checkpoint))
            model, limit = build(), lowtide.budget(0.7)
            if how == "budget":
                return train(model, lambda: limit)
            lowtide.fit(model, 0.7)
            return train(model)

        return other

    for name, build in PARALLEL.items():
        plain = shared(unchanged, build)
        for how in HOWS:
            yield f"{name} {how}", scenario(plain, changed(build, how))


# -------------------------------------------------------------------------------- collectives


class Talking(nn.Module):
    """Two layers with something sent between them."""

    def __init__(self, talk: Callable[[Tensor], Tensor], call: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.talk = talk
        self.call = call

    def inside(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(x)).sin().exp().tanh().cos().exp().sin()
        x = nn.functional.gelu(self.second(self.talk(x).sigmoid()))
        return x.sin().exp().tanh().cos().exp().sin()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x) if self.call is None else self.call(self.inside, x)
        return out


def in_place(x: Tensor) -> Tensor:
    x = x * 2
    dist.all_reduce(x)
    return x


def in_place_on_a_copy(x: Tensor) -> Tensor:
    mean = x.detach().mean(0)
    dist.all_reduce(mean)
    return x - mean / WORLD


def functional(x: Tensor) -> Tensor:
    import torch.distributed._functional_collectives as collectives

    out: Tensor = collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    return out[: len(x)] + x


def differentiable(x: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_gather, all_reduce

    gathered = torch.stack(list(all_gather(x))).mean(0)
    out: Tensor = gathered + all_reduce(x * 0.5)
    return out


def local_part_in_place(x: Tensor) -> Tensor:
    """Written through a DTensor over the same memory, which leaves no mark on `x` itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    x = x * 2
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = DTensor.from_local(x.detach(), mesh, [Replicate()], run_check=False)
    with torch.no_grad():
        whole.mul_(3)
    return x


TALKS = {f.__name__: f for f in (in_place, in_place_on_a_copy, functional, differentiable)}


def collectives_in(run: Callable[[], object]) -> dict[str, int]:
    """The collectives that the backend carries out during `run`, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
        dist.barrier()  # a thread of the backend writes the last event after the wait
    names = {event.key: event.count for event in profile.key_averages()}
    return {k: n for k, n in names.items() if k.startswith("gloo:") and k != "gloo:barrier"}


def collective_scenarios() -> Iterator[tuple[str, Scenario]]:
    def make(talk: Callable[[Tensor], Tensor], how: str) -> Scenario:
        def plain() -> list[Tensor]:
            return train(Talking(talk))

        def other() -> list[Tensor]:
            if how == "checkpoint":
                return train(Talking(talk, lowtide.checkpoint))
            limit = lowtide.budget(0.9)  # what was sent and received is kept
            return train(Talking(talk), lambda: limit)

        def counts() -> Outcome:
            if how == "budget":  # its own measurement is a profile too
                return {}
            return {"plain": collectives_in(plain), "other": collectives_in(other)}

        return lambda: {**against(plain, other), **counts()}

    for name, talk in {**TALKS, "local_part_in_place": local_part_in_place}.items():
        for how in ("checkpoint", "budget"):
            yield f"{name} {how}", make(talk, how)


# ------------------------------------------------------------------------- compiled code


COMPILED = ("around ddp", "inside ddp", "fsdp2 blocks")


def compiled_scenarios() -> Iterator[tuple[str, Scenario]]:
    """The split is that of Inductor's code; without generating it, it is quick to compile."""

    def arranged(how: str, backend: Any) -> Any:
        torch._dynamo.reset()
        if how == "fsdp2 blocks":
            sharded = fsdp(reshard=True)
            for block in sharded.blocks:  # type: ignore[union-attr]
                block.compile(backend=backend)
            return sharded
        model = Net()
        if how == "inside ddp":
            model.compile(backend=backend)
            return ddp(model)
        return torch.compile(ddp(model), backend=backend)

    def make(how: str) -> Scenario:
        def scenario() -> Outcome:
            expected = train(arranged(how, "aot_eager"))
            several = how == "fsdp2 blocks"
            budget = lowtide.CompileBudget(0.8, several_calls=several, compiler="aot_eager")
            found = compare(expected, train(arranged(how, budget)))
            report = budget.report()
            recomputed = sum(graph.recomputed for graph in report.graphs)
            peaks = {"planned": report.planned_peak, "limit": report.limit}
            return {**found, "recomputed": recomputed, **peaks}

        return scenario

    for how in COMPILED:
        yield f"compiled {how}", make(how)


# ------------------------------------------------------------------------- verified


def verified_scenarios() -> Iterator[tuple[str, Scenario]]:
    def make(build: Callable[[], nn.Module]) -> Scenario:
        def scenario() -> Outcome:
            model = build()
            torch.manual_seed(dist.get_rank())
            x = torch.randn(256, 8)
            found = lowtide.verify(lambda: model(x).square().mean(), limit=0.95, steps=2)
            return {"same": found.same, "replayed": found.replayed, "tensors": found.compared}

        return scenario

    yield "verified ddp", make(lambda: ddp(Net()))
    yield "verified fsdp2", make(lambda: fsdp(reshard=True))
    yield "foreseen ddp", lambda: foreseen(lambda: ddp(Net(), static_graph=True))
    yield "foreseen fsdp2", lambda: foreseen(lambda: fsdp(reshard=True))


def foreseen(build: Callable[[], nn.Module]) -> Outcome:
    """A step is planned and verified before the first one, and then trained with that plan."""
    model, x = build(), torch.randn(256, 8)

    def step(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    plan = lowtide.plan(step, x, limit=0.8)
    verified = lowtide.verify(step, x, limit=0.9, steps=2)
    limit = lowtide.budget(plan)
    found = against(lambda: train(build()), lambda: train(model, lambda: limit))
    planned = limit.report().planned
    return {**found, "source": plan.source, "verified": verified.same, "planned": planned}


# ------------------------------------------------------------------------- running the ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return outcomes_of(__file__, WORLD, tmp_path_factory)


def check_same(outcomes: list[dict[str, Outcome]], name: str) -> list[Outcome]:
    found = [rank[name] for rank in outcomes]
    for rank, outcome in enumerate(found):
        assert "error" not in outcome, f"rank {rank}: {outcome['text']}"
        assert outcome["same"], f"rank {rank}: other bits than the plain step"
        assert outcome["replayed"] > 0, f"rank {rank}: nothing was recomputed"
    return found


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "setting", ["plain", "batch_norm", "static_graph", "find_unused", "no_sync"]
)
def test_ddp(outcomes: list[dict[str, Outcome]], setting: str, how: str) -> None:
    check_same(outcomes, f"ddp {setting} {how}")


@on_one_recorder
@pytest.mark.parametrize("how", ["checkpoint", "budget"])
@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp2(outcomes: list[dict[str, Outcome]], reshard: bool, how: str) -> None:
    check_same(outcomes, f"fsdp2 reshard={reshard} {how}")


@on_one_recorder
@pytest.mark.parametrize("how", ["checkpoint", "budget"])
@pytest.mark.parametrize("alone", [False, True])
def test_fsdp2_modules_that_are_called_twice(
    outcomes: list[dict[str, Outcome]], alone: bool, how: str
) -> None:
    """What is gathered again is no new content: there is none to copy before."""
    check_same(outcomes, f"fsdp2 twice alone={alone} {how}")


@on_one_recorder
def test_fsdp2_modules_that_are_unsharded_by_hand(outcomes: list[dict[str, Outcome]]) -> None:
    check_same(outcomes, "fsdp2 by hand")


@on_one_recorder
@pytest.mark.skipif(not _compat.torch_has((2, 13)), reason="refused on this torch")
@pytest.mark.parametrize("how", COMPILED)
def test_compiled_code_under_a_limit(outcomes: list[dict[str, Outcome]], how: str) -> None:
    for rank in outcomes:
        found = rank[f"compiled {how}"]
        assert "error" not in found, found["text"]
        assert found["same"]
        assert found["recomputed"] > 0
        assert found["planned"] <= found["limit"]


@on_one_recorder
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_verify_on_each_rank(outcomes: list[dict[str, Outcome]], kind: str) -> None:
    """Of a DTensor, the part that the rank has is compared."""
    for found in check_same(outcomes, f"verified {kind}"):
        assert found["tensors"]["gradient"] == found["tensors"]["parameter"] > 4


def check_foreseen(outcomes: list[dict[str, Outcome]], name: str) -> None:
    """The step runs with memory: a wrapper that initializes itself, or counts, on fake tensors is
    of no use afterwards."""
    for found in check_same(outcomes, name):
        assert found["verified"]
        assert found["planned"]
        assert found["source"] == "recorded"


@on_one_recorder
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_wrapper_is_planned_before_its_first_step(
    outcomes: list[dict[str, Outcome]], kind: str
) -> None:
    check_foreseen(outcomes, f"foreseen {kind}")


@on_one_recorder
def test_fsdp2_region_over_groups(outcomes: list[dict[str, Outcome]]) -> None:
    check_same(outcomes, "fsdp2 region over groups")


@on_one_recorder
@pytest.mark.parametrize("name", ["resharded", "nested", "fit"])
def test_what_fsdp2_has_resharded_is_made_by_no_replay(
    outcomes: list[dict[str, Outcome]], name: str
) -> None:
    """What a later module reads of a resharded one is in memory under every plan (rule 5). In a
    group of one rank, no thread of a collective frees memory when it gets to it."""
    for rank in outcomes:
        found = rank[f"fsdp2 peaks {name}"]
        assert max(found["peaks"]) <= found["limit"]
        assert found["known"][1:] == pytest.approx([found["plain"]] * 4, rel=0.001)
        assert found["planned"] == pytest.approx(found["peaks"][1:], rel=0.005)


@on_one_recorder
def test_what_fsdp2_gathers_counts_in_the_first_step(outcomes: list[dict[str, Outcome]]) -> None:
    for rank in outcomes:
        found = rank["fsdp2 peaks not resharded"]
        assert found["peaks"][0] <= found["limit"]


@on_one_recorder
def test_what_fsdp2_has_received_counts_as_there_before(
    outcomes: list[dict[str, Outcome]],
) -> None:
    """Until the next module is gathered. A step in which a thread of a collective's frees memory
    late takes more, as most do where other work keeps the machine busy."""
    for rank in outcomes:
        found = rank["fsdp2 peaks fit on ranks"]
        assert min(found["known"][1:]) == found["least"]


@on_one_recorder
def test_fsdp2_region_over_groups_of_one_rank(outcomes: list[dict[str, Outcome]]) -> None:
    check_same(outcomes, "fsdp2 region over groups of one rank")


@on_one_recorder
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", PARALLEL)
def test_tensor_parallel(outcomes: list[dict[str, Outcome]], kind: str, how: str) -> None:
    for outcome in check_same(outcomes, f"{kind} {how}"):
        if how == "checkpoint":  # else the plan chooses
            assert "aten::gelu" in outcome["names"]  # on the local part of a DTensor


@on_one_recorder
def test_a_region_of_tensor_parallel_blocks_is_run_again(
    outcomes: list[dict[str, Outcome]],
) -> None:
    for kind in PARALLEL:
        for outcome in check_same(outcomes, f"{kind} checkpoint"):
            products = {"aten::linear", "aten::mm", "aten::addmm"}
            assert products & set(outcome["names"])
            assert not any("c10d" in name for name in outcome["names"])


@pytest.mark.parametrize("how", ["checkpoint", "budget"])
def test_a_write_through_a_dtensor(outcomes: list[dict[str, Outcome]], how: str) -> None:
    check_same(outcomes, f"local_part_in_place {how}")


def test_freed_parameters_are_refused() -> None:
    """What FSDP2 does, out of turn: the memory is gone when a replay reads it (rule 4)."""
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    y = lowtide.checkpoint(lambda: (x @ weight).sin().cos())
    weight.untyped_storage().resize_(0)
    with pytest.raises(ReplayError, match=r"has 0 of 256 bytes\. FSDP2 does that"):
        y.sum().backward()


def test_a_kept_subclass_changed_before_backward_is_refused() -> None:
    """A tensor that the tape cannot name is kept as it is; its version is checked (rule 4)."""
    sparse = torch.eye(4).to_sparse()
    x = torch.randn(4, 4, requires_grad=True)
    y = lowtide.checkpoint(torch.sparse.mm, sparse, x)
    sparse.mul_(2)
    with pytest.raises(ReplayError, match="modified by an in-place operation"):
        y.sum().backward()


@pytest.mark.parametrize("how", ["checkpoint", "budget"])
@pytest.mark.parametrize("talk", list(TALKS))
def test_a_collective_runs_once(outcomes: list[dict[str, Outcome]], talk: str, how: str) -> None:
    for outcome in check_same(outcomes, f"{talk} {how}"):
        assert not [name for name in outcome["names"] if "c10d" in name]  # rule 5
        if how == "checkpoint":
            assert outcome["plain"], "no collective was seen"
            assert outcome["plain"] == outcome["other"]


if __name__ == "__main__":
    # From the first DTensor on, the Python recorder alone records.
    with_dtensors = (parallel_scenarios, fsdp_scenarios, compiled_scenarios, verified_scenarios)
    groups, needs = ((), ()) if FIRST_OF_TWO else (with_dtensors, SHARDING)
    run_ranks(ddp_scenarios, collective_scenarios, *groups, needs=needs)
