"""Watching a step: from what is observed to the graph that plans are made from.

Problem: a plan needs to know what each operation made, read and cost, in time and memory, in which
order backward requests values, and what the program itself holds. Invariant: numbers and weak
references, never a tensor; real steps and dry runs are watched by the same `observer`. `names` and
`leaves` see what else stays in memory, `rebuild` makes the `Graph`, `seen` is what is kept of the
step next to it. Its modules import `_compat`, tape, memory, kernels, backward, the planner's graph;
they are told whether a step has a plan. Rejected: a recorder that writes graphs: most steps are
recorded and never planned.
"""
