"""From the steps that a budget has seen to the plan of the next one.

Problem: shapes, branches and gradients change from step to step; planning each would take longer
than training, planning none would replay too much or refuse what fits. Invariant: decisions made
here cost or save time; the limit holds either way. `lowtide.loop` calls `planning` between steps
and when the backward of an unknown one begins: `allowance` is what a step may take, `learned` a
watched step and the plan made from it, `known_plans` and `refusals` remember, `effort` says which
steps are worth a plan, `beside` searches on a thread, `ranks` makes a process group agree. Its
modules import running, observing, engine, the planner, margins and report. Rejected: doing this in
`lowtide.loop`, which opens and closes recordings and has enough to do.
"""
