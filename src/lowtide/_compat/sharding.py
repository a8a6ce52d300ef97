"""What FSDP2 has in memory for a module.

Problem: the parameters of a module that `fully_shard` was called for are gathered before its
forward, which what is inside the forward does not see. Unnecessary when FSDP2 tells which
parameters it has gathered. Invariant: as in `lowtide._compat`; where the names are others, nothing
is counted. Imports torch. Rejected: comparing the module's parameters before and in its forward,
where those that FSDP2 was told to ignore look the same.
"""

from __future__ import annotations

import sys

import torch


def gathered_for(model: torch.nn.Module | None) -> int:
    """Bytes of the parameters that FSDP2 has gathered for this module, whose forward has begun, and
    not for those inside of it; and of what it received for that from other ranks."""
    module = sys.modules.get("torch.distributed.fsdp")  # imported by whoever has sharded it
    kind = getattr(module, "FSDPModule", None)
    if kind is None or not isinstance(model, kind):
        return 0
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and later
    if groups is None:
        groups = [state._fsdp_param_group]
    found = {
        id(gathered): gathered
        for group in groups
        for parameter in getattr(group, "fsdp_params", ())
        for gathered in parameter.all_gather_outputs
    }
    # What they were copied from stays until the next module is gathered.
    for group in groups:
        last = getattr(getattr(group, "comm_ctx", None), "all_gather_state", None)
        received = getattr(getattr(last, "all_gather_result", None), "all_gather_output", None)
        if isinstance(received, torch.Tensor):
            found[id(received)] = received
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
