"""From the steps that a budget has seen to the plan of the next one.

Problem: shapes, branches and gradients change from step to step; planning each would take longer
than training, planning none would replay too much or refuse what fits. Invariant: what is decided
here costs time or saves it; the limit holds all the same. `planning` is what a budget asks, between
steps and where the backward of an unknown one begins: `learned` is a watched step and the plan that
follows, `known_plans` and `refusals` remember, `effort` says what is worth a plan, `beside`
searches on a thread, `ranks` has a process group agree. Its modules import running, observing,
engine, the planner, margins and report. Rejected: in `lowtide.budget`, which opens and closes
recordings and has enough to do.
"""
