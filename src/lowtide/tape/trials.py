"""The warning that convolutions are kept because cuDNN tries its kernels out.

Problem: with `torch.backends.cudnn.benchmark`, each thread takes the kernel that was the fastest
when that thread met a shape. A replay runs on autograd's thread, so it may run another kernel than
the forward did and give other bits; what is kept instead takes memory that the user asked to save.
Invariant: it is said once in a process. Imports errors. Rejected: replaying them all the same, as
the gradient would be that of a slightly different forward; switching the trials off, as a kernel
that the forward's thread has chosen before stays chosen.
"""

from __future__ import annotations

import warnings

from lowtide.errors import KeptWarning, users_frame

said = False


def warn() -> None:
    """Say that convolutions are kept, unless it was said before."""
    global said
    if said:
        return
    said = True
    warnings.warn(
        "torch.backends.cudnn.benchmark is on, so what convolutions make is kept instead of "
        "recomputed, and more memory is needed: cuDNN chooses kernels by timing them on each "
        "thread, and backward's thread, on which lowtide recomputes, may have chosen another one, "
        "with other bits. To recompute them, set torch.backends.cudnn.benchmark = False "
        "(in Lightning, Trainer(benchmark=False)).",
        KeptWarning,
        stacklevel=users_frame(),
    )
