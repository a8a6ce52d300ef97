"""What only a device can show: checks and benchmarks that `check_device.py` runs in one call.

Problem: no test on a CPU proves what an accelerator does, time on one is short, and a script that
has never run will be broken when that time comes. Invariant: everything here uses
`torch.accelerator` and runs on any device; features of one kind of device (a debug mode for
synchronisation, an allocator's history, CUDA graphs) are skipped elsewhere, with the reason shown;
the test suite runs all of it on the emulated device, at tiny sizes. Imports torch and lowtide;
knows no test. Rejected: pytest tests, whose results could not be pasted into the docs.
"""
