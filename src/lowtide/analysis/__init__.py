"""Where the memory of a step goes, and what would lower it: the figures of every picture.

Problem: sentences, tables, the page and traces are about one step and must say the same of it.
Invariant: numbers and names from one dry run (`study`); `timeline` adds up to the simulator's bytes
at each moment, `options` and `advice` were simulated for this very step. Nothing here writes text
for a reader. Its modules import dryrun, plans, saved, frontier, levels, policies, tape's facts and
the planner. Rejected: figures made where they are shown, each in its own way.
"""
