"""`lowtide.plan`: what a limit would cost, found without running anything.

Problem: whether a step fits, at what price, and what would be recomputed should be known before
the job starts, on a machine that need not be able to run it. Invariant: a `Plan` carries the graph
it is for; its peaks are simulated for exactly its decisions, also after loading; and a step that
turns out to differ is planned anew, never run on trust (rule 13). A file is data: loading one
executes nothing. Imports dryrun, planner, refusal. Rejected: a plan without its graph, which is
smaller but cannot be checked against anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lowtide import engine, planfile
from lowtide.dryrun.run import Dry, dry_run
from lowtide.errors import BudgetError, UsageError
from lowtide.files import replace_file
from lowtide.limits import format_bytes, meant_by_place, parse_limit
from lowtide.memory import margins
from lowtide.memory.margins import limit_for
from lowtide.planner import (
    HOLD,
    Graph,
    Retention,
    Simulation,
    Simulator,
    Solution,
    keep_all,
    minimum,
    plain_peak,
    solve,
)
from lowtide.plantext import format_plan
from lowtide.refusal import refusal
from lowtide.running.prepared import Prepared


@dataclass(frozen=True, slots=True)
class OperationDecision:
    """What a plan does with the results of one operation.

    Attributes:
        index: the operation's place in the forward, from 0.
        name: the operator, e.g. ``aten::convolution``.
        module: qualified name of the module that called it; "(model)" in the model's own forward,
            "" outside modules.
        nbytes: bytes of its results.
        choice: "keep": its results stay in memory until their last use; "recompute": they are
            recomputed when backward asks; "release": backward does not ask for them, or only a
            replay does.
        replays: how often it runs again.
        seconds: time of one run.
    """

    index: int
    name: str
    module: str
    nbytes: int
    choice: str
    replays: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ModuleDecision:
    """What a plan does with the results of one module's operations, without its children's.

    Attributes:
        module: as for `OperationDecision`.
        kept_bytes: bytes of the results that are kept.
        recomputed_bytes: bytes of the results that are recomputed.
        replayed_operations: operations that run again, each run counted.
        seconds: time of these replays.
    """

    module: str
    kept_bytes: int
    recomputed_bytes: int
    replayed_operations: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What to keep and what to recompute in one step. Made by `plan`, run by `lowtide.budget`.

    Attributes:
        step: the step that it is for, as the dry run saw it.
        retention: the decisions, one for each value of ``step.graph``.
        limit: the limit in bytes; None: nothing is recomputed.
        bound: the least replay time, in seconds, of any plan that leaves the same margin below the
            limit free; None: not proved.
        status: "plain" if nothing has to be recomputed, else "fits".
        solve_seconds: how long the search took.
    """

    step: Dry
    retention: Retention
    limit: int | None
    bound: float | None
    status: str
    solve_seconds: float

    def __hash__(self) -> int:
        # Equal plans have equal ones. The step is left out, as it cannot be hashed.
        return hash((self.step.graph.fingerprint, self.retention, self.limit))

    # ------------------------------------------------------------------ what it costs

    @cached_property
    def simulation(self) -> Simulation:
        """The step under this plan, moment by moment."""
        return Simulator(self.graph).run(self.retention.retain, trace=True)

    @property
    def graph(self) -> Graph:
        """The step as it runs under this plan; without a limit, as it runs without lowtide."""
        return self.step.graph.plain if self.limit is None else self.step.graph

    @property
    def peak(self) -> int:
        """Predicted peak of the step under this plan, in bytes."""
        return self.simulation.peak

    @cached_property
    def plain_peak(self) -> int:
        """Predicted peak with nothing recomputed, in bytes."""
        return plain_peak(self.step.graph)

    @cached_property
    def minimum_peak(self) -> int:
        """The smallest limit that the planner can keep, in bytes.

        0.2 % above the lowest peak that it reaches, because a prediction may be some bytes off;
        never above the plain peak. The search runs when this is first read.
        """
        return _smallest_limit(min(least_of(self.step).peak, self.peak), self.plain_peak)

    @property
    def overhead(self) -> float:
        """Time spent on replays, as a share of the plain step's time: 0.1 is 10 % more."""
        return self._share(self.simulation.seconds)

    @property
    def lower_bound(self) -> float | None:
        """The least overhead of any plan; None if no bound was proved.

        It holds for plans that leave the same margin below the limit free (2 % after a dry run on
        fake tensors, 0.5 % after a recorded step, less near the smallest limit).
        """
        return None if self.bound is None else self._share(self.bound)

    @property
    def gap(self) -> float | None:
        """How much of the overhead may be avoidable: 0.01 is 1 % of the plain step's time; None if
        no bound was proved."""
        bound = self.lower_bound
        return None if bound is None else max(0.0, self.overhead - bound)

    def _share(self, seconds: float) -> float:
        return seconds / self.step.seconds if self.step.seconds > 0 else 0.0

    @property
    def source(self) -> str:
        """Where the plan comes from: "fake" tensors, with nothing run, or one "recorded" step."""
        return self.step.source

    # ------------------------------------------------------------------ what it decides

    @cached_property
    def operations(self) -> tuple[OperationDecision, ...]:
        """One decision for each operation of the forward."""
        graph, trace = self.step.graph, self.simulation.trace
        assert trace is not None
        found = []
        for index, (op, module) in enumerate(zip(graph.ops, self.step.modules, strict=True)):
            choice = "release"
            for value in op.outputs:
                if self.retention.retain[value] == HOLD:
                    choice = "keep"
                elif graph.release[value] >= 0 and choice == "release":
                    choice = "recompute"
            nbytes = sum(graph.values[value].nbytes for value in op.outputs)
            found.append(
                OperationDecision(
                    index, op.name, module, nbytes, choice, trace.replays[index], op.seconds
                )
            )
        return tuple(found)

    @cached_property
    def modules(self) -> tuple[ModuleDecision, ...]:
        """The decisions summed by module, for each module that ran an operation, in the order of
        the forward."""
        rows: dict[str, list[float]] = {}
        for op in self.operations:
            row = rows.setdefault(op.module, [0, 0, 0, 0.0])
            row[0] += op.nbytes if op.choice == "keep" else 0
            row[1] += op.nbytes if op.choice == "recompute" else 0
            row[2] += op.replays
            row[3] += op.replays * op.seconds
        return tuple(
            ModuleDecision(name, int(kept), int(redone), int(times), seconds)
            for name, (kept, redone, times, seconds) in rows.items()
        )

    def prepared(self) -> Prepared:
        """For a budget: the object that follows the plan operation by operation."""
        return Prepared.of(
            self.retention, self.step.graph, self.peak, self.step.seen, self.source == "recorded"
        )

    # ------------------------------------------------------------------ files and text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as JSON, which `lowtide.load_plan` reads.

        Args:
            path: the file to write. An existing file is replaced, once all is written.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(
            planfile.document(
                self.step,
                {
                    "retain": planfile.retained(self.retention),
                    "limit": self.limit,
                    "bound": self.bound,
                    "status": self.status,
                    "torch": torch.__version__,
                },
            ),
            separators=(",", ":"),
        )
        replace_file(path, f"{text}\n".encode())

    def to_dict(self) -> dict[str, Any]:
        """Return what the plan costs, and what it decides for each module, as JSON types, by the
        names of the attributes: sizes in bytes, times in seconds."""
        names = ("source", "limit", "peak", "plain_peak", "overhead", "lower_bound", "status")
        return {
            "fingerprint": self.step.graph.fingerprint,
            "device": self.step.device,
            **{name: getattr(self, name) for name in names},
            "modules": [asdict(row) for row in self.modules],
        }

    def __str__(self) -> str:
        return format_plan(self)

    def _repr_html_(self) -> str:
        from lowtide.page.notebook import text_html

        return text_html(str(self))

    def __repr__(self) -> str:
        limit = "none" if self.limit is None else format_bytes(self.limit)
        return (
            f"<Plan for graph {self.step.graph.fingerprint[:12]}: peak {format_bytes(self.peak)}, "
            f"limit {limit}, overhead {self.overhead:.1%}>"
        )


def limit_of(limit: int | float | str | Plan) -> int | float:
    """What a budget of this limit keeps: a plan's own limit, or its peak if it has none.

    Raises:
        UsageError: the limit cannot be read.
    """
    return parse_limit((limit.limit or max(1, limit.peak)) if isinstance(limit, Plan) else limit)


def _smallest_limit(least: int, plain: int) -> int:
    """The smallest limit to ask for: at the plain peak no margin is needed."""
    return min(limit_for(least), plain)


# ---------------------------------------------------------------------------- making one


def plan(
    fn: Callable[..., Any],
    /,
    *args: Any,
    limit: int | float | str | None = None,
    on: str | None = None,
    **kwargs: Any,
) -> Plan:
    """Plan a training step under a memory limit, without running it.

    Nothing is computed and no tensor is allocated: ``fn(*args, **kwargs)`` and its backward run on
    fake tensors instead of parameters, buffers and arguments, so even a step that fits on no
    machine can be planned. The Python code of `fn` does run: what it prints or counts is printed or
    counted here too. Bytes come from sizes, times from a model of the device; a budget that
    runs the plan replaces them by what it measures.

    If the forward reads the contents of a tensor that depends on parameters or random numbers, one
    real step is recorded instead, with a `DryRunWarning`. Gradients, buffers and random state are
    restored after it, and ``plan.source`` is "recorded".

    Args:
        fn: the forward and the loss: a module, or any callable that reaches its modules through
            arguments, closures, globals that it names, bound methods or ``functools.partial``.
            Backward starts from the sum of everything that it returns, in any nesting of tuples,
            lists, dicts and dataclasses, that requires grad. If it returns nothing of the kind but
            has saved something for a backward, a `DryRunWarning` says so.
        args: its positional arguments.
        kwargs: its keyword arguments.
        limit: as for `lowtide.budget`: bytes, text or a fraction of the plain peak. None: nothing
            is recomputed, which tells the plain peak.
        on: the device whose times to model, for instance "H100". Default: the one that the model
            is on.

    Returns:
        The plan: its price, what it keeps and recomputes, and what `lowtide.budget` follows.

    Raises:
        BudgetError: no plan keeps the limit. The error names the smallest limit that can be kept.
        UsageError: ``fn`` cannot be called; the limit cannot be read; no rates are known of the
            device that `on` names; or called inside a budget or region, or with grad disabled.

    Examples:
        >>> import torch
        >>> layers = [torch.nn.Linear(64, 64) if i % 2 else torch.nn.Tanh() for i in range(12)]
        >>> model, batch = torch.nn.Sequential(*layers), torch.ones(512, 64)
        >>> plan(model, batch, limit=0.6).peak < plan(model, batch).plain_peak
        True
    """
    wanted = None if limit is None else parse_limit(limit)
    with meant_by_place("lowtide.plan", limit, args):
        step = dry_run(fn, args, kwargs, on)
    return plan_step(step, wanted)


def plan_step(step: Dry, limit: int | float | None, prove: bool = True) -> Plan:
    """Plan a step that a dry run saw already; without `prove`, a better bound is not looked for."""
    graph = step.graph
    plain = Plan(step, keep_all(graph), None, 0.0, "plain", 0.0)
    if limit is None:
        return plain
    if isinstance(limit, float):
        limit = int(limit * plain.plain_peak)
    if plain.plain_peak <= limit:
        return replace(plain, limit=limit)
    free = margins.PREDICTED[step.source]
    least = least_of(step, margins.roomy(limit, free))
    # What is found to need more than the limit may still be found to fit, by the search for it.
    room = margins.room_near(limit, free, min(least.peak, limit))
    solution = solve(
        graph,
        limit,
        margin=limit - room,
        prove=prove,
        polish_with=engine.annealing(),
        cut_with=engine.cutting(),
        price_with=engine.pricing(),
    )
    if solution.peak > room:
        if least.peak > limit:
            raise refusal(
                graph,
                limit,
                least.plan.retain,
                measured=step.source == "recorded",
                modules=step.modules,
                named=_smallest_limit(least.peak, plain.plain_peak),
            )
        solution = least
    return from_solution(step, limit, solution)


def least_of(step: Dry, enough: int = 0) -> Solution:
    """The plan with the lowest peak; another call that records the same step finds it too."""
    return minimum(step.graph, enough, by_sizes=step.source == "recorded")


def plan_alone(step: Dry, limit: int | float) -> Plan:
    """Plan a model's forward alone, that a dry run saw: with room for a loss that is to come or, as
    that is a guess, with as much of it as a plan can leave."""
    if not step.guessed:
        return plan_step(step, limit)
    bare = replace(step, graph=replace(step.graph, turn=0))
    if isinstance(limit, float):
        limit = int(limit * plain_peak(bare.graph))
    try:
        return plan_step(step, limit)
    except BudgetError:
        usual, least = plan_step(bare, limit), least_of(step)
    roomy = replace(usual, retention=least.plan, bound=None, status="fits")
    return roomy if roomy.peak <= limit else usual


def from_solution(step: Dry, limit: int, solution: Solution) -> Plan:
    return Plan(
        step,
        solution.plan,
        limit,
        solution.lower_bound,
        "fits" if solution.peak < solution.plain_peak else "plain",
        solution.solve_seconds,
    )


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `Plan.save` wrote. Nothing is executed; costs are simulated anew.

    Args:
        path: the file to read.

    Returns:
        The plan that was saved.

    Raises:
        UsageError: the file is damaged, is not a plan, or was written by another version.
        OSError: there is no such file, or it cannot be read.
    """
    try:
        step, rest = planfile.read(Path(path).read_text(encoding="utf-8"))
        plan = Plan(
            step,
            planfile.retention(step.graph, rest),
            planfile.optional(rest, "limit", int),
            planfile.optional(rest, "bound", float),
            planfile.status(rest),
            0.0,
        )
        planfile.check_digest(rest)  # last, as the others say more
        return plan
    except (UnicodeDecodeError, RecursionError, UsageError) as error:
        raise UsageError(f"cannot read the plan in {os.fspath(path)}: {error}") from error
