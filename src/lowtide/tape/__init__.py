"""Recording: what ran in the forward, as values and operations that can be run again.

Problem: a saved tensor can be dropped only if what made it is known, with all that it read.
Invariant: a tape holds facts, not decisions: what happened, in order, and what may be run again. A
value has one identity, however many tensors, views and saves refer to it. Its modules import
_compat, errors and policies. Rejected: recording autograd's graph, which starts above autocast and
does not know what runs inside a custom function.
"""
