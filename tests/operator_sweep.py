"""torch's own database of operators and modules, one program each, through a checkpoint.

Problem: torch's test-only packages permanently freeze its backends' flags and patch scripted
functions, so a process that imports them cannot run other tests. Invariant: run as a program, it
prints the results of each sweep as JSON, and judges nothing; with a device as its argument, and
names of sweeps after it, it does so there. The inputs of an operator have to be recomputed, and so
have its results, if they are saved. On the CPU both recorders are compared with one plain run. Left
out is what raises, has no gradient, or varies from run to run without lowtide. Shapes and arguments
come from torch's samples. Imports `against_plain`.
Rejected: a list of operators, which is out of date with the next release.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import lowtide
from against_plain import bits, counted, plainly, tape_records
from lowtide import engine

SAMPLES = 2  # samples per operator: the first and a later one
DEVICE = "cpu" if __name__ != "__main__" or len(sys.argv) < 2 else sys.argv[1]
WITHIN = 12  # the number of samples they are chosen from
# Not determined by their arguments, though two plain runs may happen to agree.
UNDETERMINED = {
    "linalg.lstsq",  # LAPACK's last bits depend on where in memory its matrices begin
}


def recorders() -> list[str]:
    """Both if they can be had; on a device, the one that is used."""
    if DEVICE != "cpu":
        return [engine.name()]
    try:
        with engine.use("compiled"):
            return ["python", "compiled"]
    except lowtide.UsageError:
        return ["python"]


RECORDERS = recorders()


def database(name: str) -> Any:
    """One of torch's lists. Importing it needs a base class of `expecttest`; a stub is enough."""
    if "expecttest" not in sys.modules:
        standing_in = types.ModuleType("expecttest")
        standing_in.TestCase = object  # type: ignore[attr-defined]
        sys.modules["expecttest"] = standing_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "module_db":
            from torch.testing._internal.common_modules import module_db

            found: Any = module_db
        else:
            from torch.testing._internal.common_methods_invocations import op_db

            found = op_db
    return found


@dataclass
class Program:
    """Activations, a call, and something that saves what it returns."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    gaps: bool  # whether the activations have gaps between their elements
    module: Callable[[], nn.Module] | None = None

    def __call__(self, way: Callable[..., Any]) -> tuple[list[Any], set[str]]:
        """Everything to compare of one step: result, gradients, buffers and random state; and the
        warnings, some of which torch gives once per process."""
        flat, form = tree_flatten(self.arguments)
        leaves = [t.detach().clone().requires_grad_() for t in flat if _wants_gradient(t)]
        torch.manual_seed(1)
        module = self.module() if self.module is not None else None
        torch.manual_seed(2)

        def forward(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            given = iter(leaves)
            filled = [self.activation(next(given)) if _wants_gradient(t) else t for t in flat]
            function = self.call if module is None else module
            args, kwargs = tree_unflatten(filled, form)
            outputs = tree_flatten(function(*args, **kwargs))[0]
            tensors = [t for t in outputs if isinstance(t, Tensor)]
            losses = [_saved(t) for t in tensors if _differentiable(t)]
            return sum(losses, torch.zeros((), dtype=torch.float64)), tensors

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss, outputs = way(forward, *leaves)
            loss.backward()
        state = [] if module is None else [*module.buffers()]
        gradients = [leaf.grad for leaf in leaves]
        if module is not None:
            gradients += [parameter.grad for parameter in module.parameters()]
        strides = [t.stride() for t in gradients if t is not None and t.layout == torch.strided]
        tensors = [loss, *outputs, *gradients, *state, torch.get_rng_state()]
        return [*map(bits, tensors), strides], {str(w.message) for w in said}

    def activation(self, leaf: Tensor) -> Tensor:
        """An activation that can be recomputed and has the bits of the leaf, so that it satisfies
        what an operator requires of its arguments (positive, symmetric, sorted)."""
        made = (leaf * 2) * 0.5
        return torch.stack((made, made), -1).select(-1, 0) if self.gaps and made.dim() else made


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _differentiable(tensor: Tensor) -> bool:
    floats = tensor.is_floating_point() or tensor.is_complex()
    return tensor.requires_grad and floats and tensor.layout == torch.strided


def _saved(output: Tensor) -> Tensor:
    again = output * 1.25
    total = (again.tanh() * again).sum()
    return (total.real + total.imag if total.is_complex() else total).double()


@dataclass
class Swept:
    """The results of all programs."""

    same: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    before: int = field(default_factory=tape_records)

    def run(
        self, name: str, program: Program, way: Callable[..., Any] = lowtide.checkpoint
    ) -> None:
        """Compare with the plain program, on each recorder."""
        try:
            expected, warned = program(plainly)
            determined = program(plainly)[0] == expected
        except Exception:  # no gradient, or not for an activation
            determined = False
        if not determined:
            self.left_out.add(name)
            return
        for recorder in RECORDERS:
            with engine.use(recorder):
                wrong = _compared(program, way, expected, warned)
            if wrong is not None:
                self.wrong.append(f"{name}: {wrong}")
                return
        self.same.add(name)

    def told(self) -> dict[str, Any]:
        gc.collect()
        left = tape_records() - self.before
        same, left_out = sorted(self.same), sorted(self.left_out)
        return {"same": same, "left out": left_out, "wrong": self.wrong, "records left": left}


def _compared(
    program: Program, way: Callable[..., Any], expected: list[Any], warned: set[str]
) -> str | None:
    """What differs from the plain program."""
    try:
        with counted() as replayed:
            found, said = program(way)
    except Exception as error:  # the plain step has none
        return f"{type(error).__name__}: {error}"
    if found != expected:
        places = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
        return f"{places} of {len(expected)} differ"
    if said - warned:
        return f"{sorted(said - warned)}"
    return None if replayed.operations else "nothing was made again"


def spread(samples: Iterator[Any]) -> list[Any]:
    found = list(itertools.islice(samples, WITHIN))
    return found[:: max(1, len(found) - 1)][:SAMPLES]


def operators(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """The operators with gradients of this dtype and deterministic results."""
    for operator in database("op_db"):
        has_gradient = operator.supports_autograd and operator.supported_backward_dtypes(DEVICE)
        if has_gradient and dtype in has_gradient and operator.name not in UNDETERMINED:
            yield f"{operator.name} {operator.variant_test_name}".strip(), operator


def sweep_operators(dtype: torch.dtype, *, in_place: bool = False) -> Swept:
    swept = Swept()
    for name, operator in operators(dtype):
        call = operator.inplace_variant if in_place else operator.op
        if call is None:
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sparse tensors, while samples are made
            samples = spread(operator.sample_inputs(DEVICE, dtype, requires_grad=True))
        for place, sample in enumerate(samples):
            arguments = ((sample.input, *sample.args), sample.kwargs)
            swept.run(name, Program(call, arguments, gaps=place > 0))
    return swept


def sweep_modules() -> Swept:
    swept = Swept()
    for info in database("module_db"):
        if torch.float32 not in info.dtypes or "Lazy" in info.name:  # the same once they have run
            continue
        torch.manual_seed(0)
        options = {"device": DEVICE, "dtype": torch.float32, "requires_grad": True}
        inputs = info.module_inputs_func(info, **options, training=True)
        for place, given in enumerate(spread(iter(inputs))):
            if given.forward_input is None:
                continue
            made = given.constructor_input

            def build(made: Any = made, kind: Any = info.module_cls) -> nn.Module:
                return kind(*made.args, **made.kwargs).to(DEVICE, torch.float32).train()

            arguments = (given.forward_input.args, given.forward_input.kwargs)
            swept.run(info.name, Program(plainly, arguments, place > 0, build))
    return swept


def sweep_what_differs() -> Swept:
    """Programs that are wrong by design: a working sweep must report them."""
    swept, calls = Swept(), itertools.count()
    x = torch.rand(4, requires_grad=True)
    swept.run("counts", Program(lambda t: t + (next(calls) > 1), ((x,), {}), gaps=False))
    swept.run("keeps", Program(torch.sin, ((x,), {}), gaps=False), plainly)
    return swept


SWEEPS: dict[str, Callable[[], Swept]] = {
    "float32": lambda: sweep_operators(torch.float32),
    "complex64": lambda: sweep_operators(torch.complex64),
    "in place": lambda: sweep_operators(torch.float32, in_place=True),
    "modules": sweep_modules,
    "what differs": sweep_what_differs,
}


def main() -> None:
    torch.set_num_threads(1)
    for name in ("op_db", "module_db"):
        database(name)
    gc.collect()
    gc.freeze()
    wanted = sys.argv[2:] or SWEEPS
    sys.stdout.write(json.dumps({name: SWEEPS[name]().told() for name in wanted}) + "\n")


if __name__ == "__main__":
    main()
