"""The planner: what to hold and what to recompute, as plain data.

Problem: find the cheapest recomputation under a byte limit. Invariant: nothing in this package
handles tensors; a recorded step comes in as a `Graph`, a plan goes out as a `Retention` inside a
`Solution`. Imports: `lowtide.errors` and the standard library. Rejected: planning inside the
engine, where it could not be tested without running a network.
"""

from __future__ import annotations

from lowtide.planner.auto import minimum, solve
from lowtide.planner.graph import Event, Graph, OpNode, ValueNode
from lowtide.planner.retention import HOLD, NEVER, Retention, keep_all
from lowtide.planner.simulate import Simulation, Simulator, plain_peak, simulate
from lowtide.planner.solution import Solution

__all__ = [
    "HOLD",
    "NEVER",
    "Event",
    "Graph",
    "OpNode",
    "Retention",
    "Simulation",
    "Simulator",
    "Solution",
    "ValueNode",
    "keep_all",
    "minimum",
    "plain_peak",
    "simulate",
    "solve",
]
