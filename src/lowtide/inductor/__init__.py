"""lowtide as the planner of compiled code.

Problem: `torch.compile` decides what to save by a ratio for each graph; a step has to stay within
bytes. Invariant: nothing here imports Dynamo or Inductor before a graph is compiled, and all names
that torch keeps private are in `_compat`. The way: `backend` is called by Dynamo with a graph,
`joint` reads what AOTAutograd makes of it, `search` chooses with the planner (`stepgraph`) and
`schedule`, `generated` reads what came of it, `ledger` knows what other graphs of the step hold,
and `sharing` chooses for all of them. Rejected: recording compiled code from outside, whose kernels
write to memory unseen.
"""

from lowtide.inductor.backend import CompileBudget
from lowtide.inductor.report import CompileReport, GraphReport

__all__ = ["CompileBudget", "CompileReport", "GraphReport"]
