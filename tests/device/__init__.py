"""What only a device can show: checks and benchmarks that `check_device.py` runs in one call.

Problem: no test on a CPU proves what an accelerator does, the time on one is short, and a script
that has never run is broken when that time comes. Invariant: everything here asks
`torch.accelerator` and runs on any device; what one kind of device alone offers (a debug mode for
synchronisation, an allocator's history, CUDA graphs) is skipped elsewhere with a reason that is
said; the test suite runs all of it on the emulated device, at tiny sizes. Imports torch and
lowtide; knows no test. Rejected: tests of pytest's, whose results nobody could paste into the docs.
"""
