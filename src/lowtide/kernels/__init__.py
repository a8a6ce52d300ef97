"""What an operator uses while it runs: memory besides its results, and time.

Problem: to plan a step that has not been run, one must know what its kernels will allocate, which
the tape does not record and torch does not report. Invariant: formulas over shapes and the type of
device, fitted to measurements (`benchmarks/workspace.py`) and erring to the high side; no operator
is run on real tensors. `workspace` answers for memory, `costs` for time, `results` for what a call
makes, with `shaping` where torch's shape functions are slow or refuse. The others describe kernels,
family by family: `cuda` those of NVIDIA's GPUs, and for the CPU `unfolding` torch's own
convolutions, `convolution`, `half` and `avx2` oneDNN's, `promotion` mixed dtypes, `formulas` what
is known by name. Its modules import `_compat`, errors, and the facts and values of the tape.
Rejected: one table of operators with a factor for each, which is wrong for most shapes.
"""
