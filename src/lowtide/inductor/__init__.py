"""lowtide as the planner of compiled code.

Problem: `torch.compile` decides what to save by a ratio for each graph, but a step has to stay
within a number of bytes. Invariant: nothing here imports Dynamo or Inductor before a graph is
compiled, and all torch-private names are in `_compat`. The flow: Dynamo calls `backend` with a
graph; `joint` reads the joint graph that AOTAutograd makes of it; `search` chooses what to save,
with the planner (`stepgraph`) and `schedule`; `generated` reads the code that results; `ledger`
knows what other graphs of the step hold; `sharing` chooses for all graphs together. Rejected:
recording compiled code from outside, since the recorder does not see what its kernels write.
"""

from lowtide.inductor.backend import CompileBudget
from lowtide.inductor.report import CompileReport, GraphReport

__all__ = ["CompileBudget", "CompileReport", "GraphReport"]
