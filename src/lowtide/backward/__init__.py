"""A model of a backward that has not run: what it allocates, and when, from its forward alone.

Problem: the first step has to stay inside its limit, and a dry run has only shapes; at that point
nothing about backward was measured. Invariant: the result is events as the planner reads them,
estimated too high rather than too low where something is not known; no tensor is kept. `modelled`
puts them together: `operation` runs one backward on the meta device; `reads`, `gradients` and
`accumulation` say how long gradients live, `places` which operation saved what, `functions` and
`deadgraphs` what the forward hides or abandons. Its modules import `_compat`, tape, memory,
kernels, and the planner's graph. Rejected: estimates inside the observer, which does not need them
for a step that was measured.
"""
