"""The recorder's hot path in C++; see `recorder.h`. Optional: it only makes lowtide faster.

Problem: recording costs Python time for each operation, which small operations do not hide.
Invariant: its records are those of the Python recorder (`tests/test_engine.py`), and lowtide works
without it. It is built where it runs, by `build`, for the torch that is there; `recorder` puts it
in place of the Python one. Its modules import _compat and tape. Rejected: wheels for each version
of torch and of Python, whose binary interfaces differ.
"""
