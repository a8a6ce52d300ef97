"""A step under a budget, decision by decision: what is held, and what is let go.

Problem: whether a step is the planned one is known only as it goes; until then it must follow the
plan at no cost, and be kept inside the limit where there is none. Invariant: no decision changes a
result, only memory and time (rule 13), and none is final before backward begins. `decide` is what
the tape asks and `forward` its first half: `prepared` is a plan to follow, `follower` has the
compiled recorder follow it, `anchors` are held for it; `room` and `online` do without. `where`,
`earlier` and `shortage` know the device and what is left on it. Its modules import engine, tape,
observing, kernels, limits, measure, and the planner's values. Rejected: looking for plans here:
they are followed alike, however they were come to.
"""
