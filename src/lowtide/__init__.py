"""lowtide: train within the memory you have.

``with lowtide.budget("6 GiB"):`` around forward and loss keeps a training step inside a memory
limit by rematerializing activations, with the same bits in every gradient, buffer and random
number as in the plain step.

Problem: users should find everything in one place, and pay for what they use only. Invariant: what
is exported here is the public interface, and importing it loads torch and nothing else heavy.
Imports the public modules; those that need another package (`lowtide.transformers`,
`lowtide.lightning`, `lowtide.monai`) are imported on first use. Rejected: importing integrations
if their package is there, which takes seconds that most programs do not need.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from lowtide import engine, policies
from lowtide.budget import Budget, budget
from lowtide.checkpoint import checkpoint, checkpoint_sequential, name
from lowtide.cpu_allocator import CPUAllocator, use_cpu_allocator
from lowtide.errors import (
    BudgetError,
    CompiledWarning,
    DeviceWarning,
    DryRunWarning,
    KeptWarning,
    LowtideError,
    LowtideWarning,
    PlanWarning,
    ReplayError,
    UncountedWarning,
    UnsupportedError,
    UsageError,
)
from lowtide.explain import Explanation, explain, format_explanation, print_explanation
from lowtide.fitting import FittedBudget, fit
from lowtide.frontier import Curve, curve
from lowtide.inductor import CompileBudget, CompileReport
from lowtide.largest import LargestBatch, largest_batch
from lowtide.levels import Levels, checkpoint_levels, find_levels
from lowtide.measure import Measurement, measure
from lowtide.modules import (
    ActivationCheckpointWrapper,
    CheckpointedModules,
    checkpoint_modules,
)
from lowtide.plans import Plan, load_plan, plan
from lowtide.replayable import replayable
from lowtide.report import BudgetReport
from lowtide.saved import (
    SavedTensors,
    format_saved_tensors,
    print_saved_tensors,
    saved_tensors,
)
from lowtide.selection import every
from lowtide.training_level import ActivationCheckpointing
from lowtide.verify import verify
from lowtide.verifying.verification import Verification

if TYPE_CHECKING:  # of what `__getattr__` gives, a type checker knows no more than a module
    from lowtide import lightning as lightning
    from lowtide import monai as monai
    from lowtide import tracing as tracing
    from lowtide import transformers as transformers

__version__ = "0.1.0.dev0"

_ON_DEMAND = ("lightning", "monai", "tracing", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _ON_DEMAND:
        return importlib.import_module(f"lowtide.{name}")
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a prompt completes: no part of the package that is not meant to be used."""
    return sorted({*__all__, *_ON_DEMAND, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "ActivationCheckpointWrapper",
    "ActivationCheckpointing",
    "Budget",
    "BudgetError",
    "BudgetReport",
    "CPUAllocator",
    "CheckpointedModules",
    "CompileBudget",
    "CompileReport",
    "CompiledWarning",
    "Curve",
    "DeviceWarning",
    "DryRunWarning",
    "Explanation",
    "FittedBudget",
    "KeptWarning",
    "LargestBatch",
    "Levels",
    "LowtideError",
    "LowtideWarning",
    "Measurement",
    "Plan",
    "PlanWarning",
    "ReplayError",
    "SavedTensors",
    "UncountedWarning",
    "UnsupportedError",
    "UsageError",
    "Verification",
    "__version__",
    "budget",
    "checkpoint",
    "checkpoint_levels",
    "checkpoint_modules",
    "checkpoint_sequential",
    "curve",
    "engine",
    "every",
    "explain",
    "find_levels",
    "fit",
    "format_explanation",
    "format_saved_tensors",
    "largest_batch",
    "load_plan",
    "measure",
    "name",
    "plan",
    "policies",
    "print_explanation",
    "print_saved_tensors",
    "replayable",
    "saved_tensors",
    "use_cpu_allocator",
    "verify",
]
