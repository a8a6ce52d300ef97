"""Counting bytes: what a program allocates, when, and its peak.

Problem: budgets, measurements and dry runs all speak of a peak, which has to be the same number on
the CPU, on an accelerator, and on tensors without memory. Invariant: bytes come from the allocator
(`profiler`, `events`, and `marks` in their stream) or from each storage that an operator makes
(`counting`), never from the resident size of a process; `margins` has the shares of a limit left
free for what counting may miss. Its modules import `_compat`, the tape's facts, and what kernels
take. Rejected: a counter in each place that needs one: they would disagree about what to count.
"""
