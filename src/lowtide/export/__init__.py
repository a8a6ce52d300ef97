"""A step in formats for other tools, and its predictions checked on real steps.

Problem: a page, torch's memory viewer and a shell pipeline each want a step in their own format,
and users want to know how accurate its predictions are. Invariant: figures are those of `analysis`
and `explain`, to the byte; only `trials` runs anything: real steps, measured against their
predictions. `document` is everything as JSON, `snapshot` a file for memory_viz. Its modules import
explain, analysis, plans, saved, frontier, dryrun, budget, measure and the planner. Rejected: a
writer next to each figure, which would know only its own figure's format.
"""
