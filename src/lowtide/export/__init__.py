"""What was found out about a step, for others to draw, and to check on real steps.

Problem: a page, torch's memory viewer and a shell pipeline each want a step in a form of their own,
and whoever reads one wants to know how far its predictions are right. Invariant: figures are those
of `analysis` and `explain`, to the byte; only `trials` runs anything, real steps measured against
their predictions. `document` is all of it as JSON, `snapshot` a file for memory_viz. Its modules
import explain, analysis, plans, saved, frontier, dryrun, budget, measure and the planner. Rejected:
writers beside each figure, which know one format and not the others' marks.
"""
