"""Bytes, counted: what a program allocates, when, and how high it stands.

Problem: budgets, measurements and dry runs speak of one peak, which is to be the same number on the
CPU, on an accelerator, and on tensors that have no memory. Invariant: bytes come from the allocator
(`profiler`, `events`, and `marks` in their stream) or from each storage that an operator makes
(`counting`), never from the resident size of a process; what stays free for what counts may miss
stands in `margins`. Its modules import `_compat`, the tape's facts, and what kernels take.
Rejected: counters beside each of those who count, which would not agree about what a byte is.
"""
