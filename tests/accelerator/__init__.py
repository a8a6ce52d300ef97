"""An accelerator without hardware, built from `device.cpp` beside this file.

Problem: no machine that tests lowtide has a GPU, and what breaks there does not break on the CPU:
autograd runs on threads of the device, work is ordered by streams, memory comes from an allocator
that hands it on, random numbers from the device's own generator. Invariant: `install()` changes the
process for good (torch knows one such device a process), so what uses it runs in a process of its
own, see `tests/test_accelerator.py`. Imports torch and lowtide's way of calling a compiler.
Rejected: a package that has to be installed; fakes of `torch.cuda`, which the C++ of torch does not
ask.
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
    """The library of the device, beside lowtide's builds; takes half a minute the first time."""
    return build.library(_SOURCE, _MODULE)


def install() -> ModuleType:
    """Make torch know the device `"emulated"`.

    Returns its module. `races()` are the conflicting accesses that nothing has ordered since it was
    last asked; `counts()` how many kernels ran, and how often host and streams have waited;
    `set_capacity(device, nbytes)` says when the device is out of memory, and
    `fail(kernel, count)` that it is for the next calls of a kernel, whatever is free; with
    ", late" after its name, when it has run.
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
    """What torch asks of `torch.emulated`."""
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
