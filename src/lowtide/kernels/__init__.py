"""What an operator takes while it runs: memory besides its results, and time.

Problem: a step that has not been run is planned by what its kernels will allocate, which no record
shows and torch does not tell. Invariant: formulas over shapes and the device's kind, as measured
(`benchmarks/workspace.py`), to the high side; no operator is run on real tensors. `workspace` is
asked for memory, `costs` for time; the others are the CPU's kernels, family by family: `unfolding`
for torch's own convolutions, `convolution`, `half` and `avx2` for oneDNN's, `promotion` for mixed
types. Its modules import `_compat`, errors, and the facts and values of the tape. Rejected: one
table of operators with a factor for each, which is wrong for most shapes.
"""
