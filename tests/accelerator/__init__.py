"""An accelerator without hardware, built from `device.cpp` beside this file.

Problem: no machine that tests lowtide has a GPU, and what breaks there does not break on the CPU:
autograd runs on device threads, work is ordered by streams, memory comes from an allocator that
reuses it, random numbers from the device's own generator. Invariant: `install()` changes the
process permanently (torch allows one such device per process), so its users run in a process of
their own, see `tests/test_accelerator.py`. Imports torch and lowtide's way of calling a compiler.
Rejected: a package that has to be installed; fakes of `torch.cuda`, which torch's C++ code does not
call.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lowtide.compiled import build

NAME = "emulated"
_MODULE = "_emulated_accelerator"
_SOURCE = Path(__file__).with_name("device.cpp")


def compiled() -> Path:
    """The device's library, next to lowtide's builds; building it takes half a minute."""
    return build.library(_SOURCE, _MODULE)


def install() -> ModuleType:
    """Register the device `"emulated"` with torch.

    Returns its module. `races()` returns the unordered conflicting accesses since its last call;
    `counts()` how many kernels ran, and how often host and streams waited;
    `set_capacity(device, nbytes)` sets when the device is out of memory; `fail(kernel, count)` lets
    the next calls of a kernel run out of memory whatever is free: before it runs, or, with ", late"
    after its name, once it has run.
    """
    found = sys.modules.get(_MODULE)
    if found is not None:
        return found
    spec = importlib.util.spec_from_file_location(_MODULE, compiled())
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    sys.modules[_MODULE] = core
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(core))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return core


def _module(core: Any) -> ModuleType:
    """What torch requires of the module `torch.emulated`."""
    generators = tuple(core.default_generator(index) for index in range(2))

    def index_of(device: Any) -> int:
        if device is None:
            return int(core.device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(core.device()) if index is None else index

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module: Any = ModuleType(f"torch.{NAME}")
    module.default_generators = generators
    module.manual_seed_all = manual_seed_all
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: len(generators)
    module.current_device = core.device
    module.set_device = lambda device: core.set_device(index_of(device))
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda device=NAME: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=NAME: generators[index_of(device)].set_state(state)
    return module
