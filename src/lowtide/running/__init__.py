"""A step under a budget, decision by decision: what is held, and what is dropped.

Problem: whether a step is the planned one shows only as it runs; until then it must follow the plan
at no cost, and without a plan it must be kept inside the limit. Invariant: no decision changes a
result, only memory and time (rule 13), and none is final before backward begins. `decide` is what
the tape asks, and `forward` its first half: `prepared` is a plan to follow, `follower` lets the
compiled recorder follow it, `anchors` are values held only for it; `room` and `online` work without
a plan. `where`, `earlier` and `shortage` know the device and what is left on it. Its modules import
engine, tape, observing, kernels, limits, measure, memory, and the planner's values. Rejected:
making plans here: a step follows a plan in the same way however it was made.
"""
