"""Convolutions are kept once cuDNN has tried its kernels out.

Problem: with `torch.backends.cudnn.benchmark`, each thread takes the kernel that was the fastest
when that thread met a shape, and goes on with it when the setting is off again. A replay runs on
autograd's thread, so it may run another kernel than the forward did and give other bits; what is
kept instead takes memory that the user asked to save. Invariant: what was seen on once counts as on
for the rest of the process, which is said once. Imports errors. Rejected: replaying them all the
same, as the gradient would be that of a slightly different forward; switching the trials off, as
that does not take back what a thread has chosen.
"""

from __future__ import annotations

import warnings

from lowtide.errors import KeptWarning, users_frame

seen = False
"""Whether cuDNN was seen to try kernels out. The C++ core reads it too."""


def begin() -> None:
    """cuDNN was seen to try kernels out for the first time: say what follows from it."""
    global seen
    seen = True
    warnings.warn(
        "torch.backends.cudnn.benchmark is on, so what convolutions make is kept instead of "
        "recomputed, and more memory is needed: cuDNN chooses kernels by timing them on each "
        "thread, and backward's thread, on which lowtide recomputes, may have chosen another one, "
        "with other bits. To have them recomputed, set torch.backends.cudnn.benchmark = False "
        "before the first step of the process (in Lightning, Trainer(benchmark=False)): what a "
        "thread has chosen stays chosen.",
        KeptWarning,
        stacklevel=users_frame(),
    )
