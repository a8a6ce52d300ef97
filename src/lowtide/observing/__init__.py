"""A step that is watched: from what is seen of it to the graph that plans are made of.

Problem: a plan needs to know of each operation what it made, read, took and cost, in which order
backward asks, and what the program itself holds. Invariant: numbers and weak references, never a
tensor; real steps and dry ones are seen by the same `observer`. `names` and `leaves` see what stays
in memory besides, `rebuild` makes the `Graph`, `seen` is what remains of the step beside it. Its
modules import `_compat`, tape, memory, kernels, backward, the planner's graph; whether a step has a
plan they are told. Rejected: a recorder that writes graphs: most steps are recorded and never
planned.
"""
