"""A backward before it ran: what it allocates, and when, from its forward alone.

Problem: the first step has to stay inside its limit, and a dry run has only shapes; what backward
takes is then known of no operation. Invariant: what comes out are events as the planner reads them,
to the high side where something could not be found out; no tensor is kept. `modelled` puts them
together: `operation` runs one backward on the meta device; `reads`, `gradients` and `accumulation`
say how long gradients live, `functions` and `deadgraphs` what the forward hides or lets go of. Its
modules import `_compat`, tape, memory, kernels, and the planner's graph. Rejected: estimates inside
of the observer, which a step once measured has no use for.
"""
