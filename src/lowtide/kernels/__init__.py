"""What an operator uses while it runs: memory besides its results, and time.

Problem: to plan a step that has not been run, one must know what its kernels will allocate, which
the tape does not record and torch does not report. Invariant: formulas over shapes and the type of
device, fitted to measurements (`benchmarks/workspace.py`) and erring to the high side; no operator
is run on real tensors. `workspace` answers for memory, `costs` for time; the others describe the
CPU's kernels, family by family: `unfolding` torch's own convolutions, `convolution`, `half` and
`avx2` oneDNN's, `promotion` mixed dtypes, `formulas` what is known by name. Its modules import
`_compat`, errors, and the facts and values of the tape. Rejected: one table of operators with a
factor for each, which is wrong for most shapes.
"""
