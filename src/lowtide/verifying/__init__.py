"""Running one step with and without lowtide, from one state, and comparing what it leaves behind.

Problem: a wrong gradient gives no error, so whoever wants to be sure has to compare. Invariant:
what is compared has run for real, and nothing that the program can see has changed afterwards. Its
modules import what runs steps: budget, checkpoint, dryrun, export, measure and step. Rejected: a
test utility, which users do not have.
"""
