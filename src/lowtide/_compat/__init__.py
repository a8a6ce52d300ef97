"""Every use of a torch-private name, in one place.

What the engine needs is exported here: layers of the dispatcher (`dispatch`), what tensors consist
of (`tensors`), autograd's graph (`autograd`), torch.compile (`dynamo`), autocast inside kernels
(`casting`), the accelerator (`devices`), modules (`modules`). What few files need is imported from
its own file: tensors without memory (`fakes`), global state that operators read (`switches`),
allocations (`profiling`), compiled code (`partitioner`).

Problem: an engine below autograd needs names that torch does not promise to keep. Invariant: no
other file in the package uses one; each is here with its reason, and with what would make it
unnecessary. A name that is rebound while the program runs is not exported here, where it would keep
its first value. Imports torch only. Rejected: `getattr` guards scattered where the names are used,
which hide how much of torch the library depends on.
"""

from __future__ import annotations

import torch

from lowtide._compat.autograd import (
    Way,
    backward_retains_graph,
    first_view,
    frozen_parameter,
    gradient_of_part,
    in_backward,
    in_functorch,
    is_view,
    leaf_of,
    leaves_behind,
    newest_node,
    node_in_backward,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    queue_after_backward,
    refuses_hooks,
    set_grad_mode,
    take_off_saved_tensor_hooks,
    wanted_bytes,
    way_to_leaf,
)
from lowtide._compat.casting import Casting, cast_as, casting_now
from lowtide._compat.devices import (
    Given,
    accelerator_in_use,
    allocated,
    available,
    counts_bytes,
    current_device,
    current_stream,
    default_generator,
    device_of,
    free_memory,
    is_accelerator,
    on_stream,
    record_stream,
    reset_peak,
    stream_of,
    synchronize,
)
from lowtide._compat.dispatch import (
    Mode,
    below_autograd,
    called,
    compiled_before_modes,
    disable_dispatch,
    disable_torch_function_subclass,
    each_higher_order_operator,
    is_operator,
    kernel_at_key,
    modes_of_users,
    schema_of,
    skips_autograd,
    take_off_mode,
    under_modes,
    use_recorder_key,
)
from lowtide._compat.dynamo import (
    constant_while_compiling,
    is_compiled_module,
    never_compiled,
    run_compiled_eagerly,
)
from lowtide._compat.kernels import (
    onednn_instructions,
    onednn_is_on,
    onednn_takes,
    second_cache,
)
from lowtide._compat.modules import (
    CHECKPOINT_WRAPPER_HOME,
    COMPOSABLE_CHECKPOINT_HOME,
    forward_pre_hooks,
    is_script,
    parameters_and_buffers,
    selective_policy,
)
from lowtide._compat.tensors import (
    Counter,
    awaited,
    detached_alias,
    dry_run,
    has_own_dispatch,
    hollow,
    inner_tensors,
    is_wrapper,
    put_together,
    shares_counter,
    storage_holders,
    storage_id,
    storage_key,
    storage_of,
    taken_apart,
    version_of,
)

__all__ = [
    "CHECKPOINT_WRAPPER_HOME",
    "COMPOSABLE_CHECKPOINT_HOME",
    "Casting",
    "Counter",
    "Given",
    "Mode",
    "Way",
    "accelerator_in_use",
    "allocated",
    "available",
    "awaited",
    "backward_retains_graph",
    "below_autograd",
    "called",
    "cast_as",
    "casting_now",
    "compiled_before_modes",
    "constant_while_compiling",
    "counts_bytes",
    "current_device",
    "current_stream",
    "default_generator",
    "detached_alias",
    "device_of",
    "disable_dispatch",
    "disable_torch_function_subclass",
    "dry_run",
    "each_higher_order_operator",
    "first_view",
    "forward_pre_hooks",
    "free_memory",
    "frozen_parameter",
    "gradient_of_part",
    "has_own_dispatch",
    "hollow",
    "in_backward",
    "in_functorch",
    "inner_tensors",
    "is_accelerator",
    "is_compiled_module",
    "is_operator",
    "is_script",
    "is_view",
    "is_wrapper",
    "kernel_at_key",
    "leaf_of",
    "leaves_behind",
    "modes_of_users",
    "never_compiled",
    "newest_node",
    "node_in_backward",
    "on_stream",
    "onednn_instructions",
    "onednn_is_on",
    "onednn_takes",
    "parameters_and_buffers",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "put_together",
    "queue_after_backward",
    "record_stream",
    "refuses_hooks",
    "reset_peak",
    "run_compiled_eagerly",
    "schema_of",
    "second_cache",
    "selective_policy",
    "set_grad_mode",
    "shares_counter",
    "skips_autograd",
    "storage_holders",
    "storage_id",
    "storage_key",
    "storage_of",
    "stream_of",
    "synchronize",
    "take_off_mode",
    "take_off_saved_tensor_hooks",
    "taken_apart",
    "torch_has",
    "under_modes",
    "use_recorder_key",
    "version_of",
    "wanted_bytes",
    "way_to_leaf",
]


def torch_has(release: tuple[int, int]) -> bool:
    """Whether torch is of this release or later."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= release
