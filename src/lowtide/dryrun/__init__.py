"""A step traced on fake tensors: its graph, and which bytes belong to what, without running it.

Problem: what a limit would cost should be known before a step runs, or if it cannot run at all.
Invariant: the user's own forward runs, with the recorder and observer of real steps; only the
tensors have no memory, and no side effects remain. `run` traces the step: `standins` replaces what
it reads, `recorder` records it, `memory` counts its bytes, `shapes` is a fast path for torch's fake
tensors, `provenance` answers questions about data. `witness` writes the `ledger` of storages, with
the user's `lines`. Its modules import step and engine, tape, observing, running's `prepared`,
memory, kernels, `models.foreign` and the planner's values. Rejected: a separate tracer, which would
see a different step from the one that runs.
"""
