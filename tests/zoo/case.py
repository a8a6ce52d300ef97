"""What a case of the model catalogue is, and the small words that cases are written with.

Problem: over a hundred models have to be listed so that each reads in a line or two, loads nothing
before it is built, and runs the same from the same seed.

Invariant: a case holds functions only. Whatever it draws, it draws from the default generators when
called, and it keeps nothing between calls.

May import: torch and the standard library. Model libraries are imported by name when a case is
built, so that collecting the tests does not wait for them.

Rejected: pytest fixtures for models; the benchmarks and the fuzzers want the same catalogue.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

Batch = tuple[Any, ...]


def tensors_in(tree: object) -> Iterator[Tensor]:
    """All tensors inside nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def smooth(tree: object) -> Tensor:
    """A bounded-slope loss over every differentiable tensor of an output.

    Not a plain sum or square: after a normalization those have no gradient to compare.
    """
    total = torch.zeros(())
    for leaf in tensors_in(tree):
        if leaf.requires_grad and leaf.numel():
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            # Unequal weights, so that a constant mean does not cancel the gradient.
            weight = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).reshape(real.shape)
            total = total + (torch.tanh(real) * weight).mean()
    return total


def forward_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Call the model with the batch as positional arguments."""
    return smooth(model(*batch))


def labelled_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Call the model with the batch's one dict as keywords; the model computes its own loss."""
    return cast(Tensor, model(**batch[0]).loss)


def keyword_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Call the model with the batch's one dict as keywords."""
    return smooth(model(**batch[0]))


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One model, its batches and its loss.

    name: unique in the catalogue, in lower case with underscores.
    build: makes the model, in the mode it trains in.
    batch: makes the inputs of one step.
    loss: forward and loss.
    autocast: run forward and loss under bfloat16 autocast.
    gradient_penalty: add the squared gradient with respect to the floating-point inputs.
    tags: `slow` (a plain step over a second), `dynamic` (shapes change from step to step).
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = forward_loss
    autocast: bool = False
    gradient_penalty: bool = False
    tags: frozenset[str] = frozenset()

    def but(self, name: str, **changes: Any) -> Case:
        """The same case under another name with some fields changed."""
        return dataclasses.replace(self, name=name, **changes)


class Apply(nn.Module):
    """Modules, parameters, buffers and a function `(self, *inputs)` of them: a small net.

    Floating-point tensors become parameters, the others buffers.
    """

    def __init__(self, function: Callable[..., object], /, **modules: nn.Module | Tensor) -> None:
        super().__init__()
        self._function = function
        for name, item in modules.items():
            if isinstance(item, nn.Module):
                self.add_module(name, item)
            elif item.is_floating_point() or item.is_complex():
                self.register_parameter(name, nn.Parameter(item))
            else:
                self.register_buffer(name, item)

    def forward(self, *inputs: Tensor) -> object:
        return self._function(self, *inputs)


SLOW = frozenset({"slow"})
DYNAMIC = frozenset({"dynamic"})


def lookup(path: str) -> Any:
    """The object named by `package.module:attribute`, imported now."""
    module, _, attribute = path.partition(":")
    state = random.getstate()
    try:
        return getattr(importlib.import_module(module), attribute)
    finally:
        # The first import of a library may draw, and only the first.
        random.setstate(state)


def made(path: str, /, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """A builder that imports the class when called."""
    # Copied, because some constructors change the lists that they are given.
    return lambda: cast(nn.Module, lookup(path)(*copy.deepcopy(args), **copy.deepcopy(kwargs)))


def in_channels_last(model: nn.Module) -> nn.Module:
    """The model with its four-dimensional weights laid out channels last."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def quietly(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same builder without the warnings that the model's own library gives about itself."""

    def built() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()

    return built


def awake(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same builder with its zero-initialized weights drawn, so that gradients reach all."""

    def built() -> nn.Module:
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and not parameter.any():
                    parameter.normal_(std=0.1)
        return model

    return built


def noise(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], Batch]:
    """A batch of normal tensors, one of each shape."""
    return lambda: tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def integers(high: int, *shape: int) -> Tensor:
    """Random integers in [0, high)."""
    return torch.randint(0, high, shape)
