"""Random training programs, compared bit for bit between plain PyTorch and lowtide.

The problem: hand-written tests hold the cases their author thought of; the engine's mistakes are
in the combinations (a view written in place after a draw, inside a region, under autocast).

The invariant: one program is one text of Python. What a test runs and what a failure prints are
the same text, so a reproduction cannot differ from the failure.

Imports run one way: verdict, functions, modules, tools <- driver, source <- assemble <- operations,
layers, writes, aliases, blocks, endings <- programs <- test_programs, run. Only the driver touches
lowtide, through its public API.

Rejected: an interpreter over operation codes with a printer beside it. Two readings of one
program drift apart, and the printed one is the one a person debugs.
"""
