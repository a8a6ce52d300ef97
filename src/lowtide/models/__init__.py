"""What a model is made of, found without running it and without leaving a trace in it.

Problem: regions and budgets have to find their place in models that others wrote, and to leave them
as they were (rule 11). Invariant: nothing is executed, and no library is imported to find out.
`override` wraps a module's forward, `foreign` finds checkpointing that somebody else switched on,
`levels` tells layers, blocks and stages apart. Its modules import `_compat` and errors. Rejected: a
table of model classes, out of date with the next model.
"""
