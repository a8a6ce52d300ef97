"""A step gone through on fake tensors: its graph, and whose bytes they are, without running it.

Problem: what a limit would cost should be known before a step is run, or where it cannot be.
Invariant: it is the user's own forward, the recorder and the observer of real steps; only the
tensors have no memory, and afterwards nothing is left behind. `run` goes through the step:
`standins` are what it reads, `recorder` what records it, `memory` counts its bytes, `shapes` is a
short way through torch's fake tensors, `provenance` answers what data is asked for. `witness` keeps
the book (`ledger`) of storages, with the user's `lines`. Its modules import step and engine, tape,
observing, running's `prepared`, memory, kernels, `models.foreign` and the planner's values.
Rejected: a tracer of its own, which would see another step than the one that runs.
"""
