"""From the steps that a budget has seen to the plan of the next one.

Problem: shapes, branches and gradients change from step to step; planning each would take longer
than training, planning none would replay too much or refuse what fits. Invariant: decisions made
here cost or save time; the limit holds either way. `lowtide.loop` has one of each
part, and they share a `knowledge`: `choosing` says which plan a step follows, `planning` learns
from a step that is over, with `resizing` for other sizes, `settling` plans or refuses the rest of a
step that does not go as planned, `unwatched` and `unrecorded` leave steps alone, `reported` has
what a report tells. Of what they share, `allowance` is what a step may take, `known_plans` and
`refusals` remember, `effort` says which steps are worth a plan, `beside` searches on a thread. Its
modules import running, observing, engine, the planner, margins and report. Rejected: doing this in
`lowtide.loop`, which opens and closes recordings and has enough to do.
"""
