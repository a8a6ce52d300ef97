"""Where the memory of a step goes, and what would lower it: the figures behind every picture.

Problem: sentences, tables, the page and traces describe one step and must agree about it.
Invariant: numbers and names from one dry run (`study`); a `timeline` adds up to the simulator's
bytes at each moment, `options` and `advice` are simulated for this very step. Nothing here formats
text for display. Its modules import dryrun, plans, saved, frontier, levels, policies, tape's facts
and the planner. Rejected: computing figures where they are shown, each in its own way.
"""
