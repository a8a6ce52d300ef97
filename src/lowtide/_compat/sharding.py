"""What torch's wrappers for several processes have and do for a module.

Problem: the parameters of a module that `fully_shard` was called for are gathered before its
forward, which what is inside the forward does not see; and a wrapper keeps a state outside of the
module's attributes, which a step on fake tensors moves or is at odds with. Unnecessary when FSDP2
tells which parameters it has gathered, and a wrapper what it counts. Invariant: as in
`lowtide._compat`; where the names are others, nothing is counted, and a wrapper is taken for an
ordinary module. Imports torch. Rejected: comparing the module's parameters before and in its
forward, where those that FSDP2 was told to ignore look the same; finding out that a step cannot run
on fake tensors by running it, after which FSDP takes itself for initialized.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

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


def only_real(modules: Iterable[torch.nn.Module]) -> str | None:
    """Why a step through these modules cannot run on fake tensors, if one of them is a wrapper of
    which that is known: FSDP initializes itself in its first forward, and DDP with a static graph
    counts in C++ what its first backward does."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    second = getattr(fsdp, "FSDPModule", ())
    first = getattr(fsdp, "FullyShardedDataParallel", ())
    static = getattr(ddp, "DistributedDataParallel", ())
    for module in modules:
        if isinstance(module, second):
            return "FSDP2 gathers its parameters from all ranks"
        if isinstance(module, first):
            return "FSDP1 gathers its parameters from all ranks"
        if isinstance(module, static) and getattr(module, "static_graph", False):
            return "DDP with static_graph=True learns from its first backward"
    return None


def counted_outside(module: torch.nn.Module) -> tuple[str, ...]:
    """Attributes of this module that go with a state which nobody can put back: if they were put
    back alone, DDP would enqueue for a second time what belongs to its first backward."""
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    if isinstance(module, getattr(ddp, "DistributedDataParallel", ())):
        return ("_static_graph_delay_allreduce_enqueued",)
    return ()
