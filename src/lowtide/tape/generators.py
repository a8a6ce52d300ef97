"""Random state: which generator an operation drew from, and in what state (rule 3).

Problem: a replayed dropout must draw the same mask and leave no trace in the user's generators.
Invariant: reading a state never synchronises a device (CUDA states are a seed and an offset that
live on the host). What is read, kept and put back is not in a tensor allocator's memory where that
can be helped: a step of a few kilobytes would exceed its limit by it. Imports `_compat`. Rejected:
saving every generator once per region, as checkpointing that re-runs Python does: that misses
explicit generators and draws between two operations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _compat

if TYPE_CHECKING:
    from lowtide.tape.values import Operation

State = torch.Generator | torch.Tensor
"""A copy of the CPU's generator, 2.5 KiB that no allocator of torch's counts; on other devices, the
state of the generator."""

Draw = tuple[torch.Generator, State]

lock = threading.Lock()
"""Held while a replay has put a generator into a recorded state: autograd has a thread for each
device, and two of them may replay draws from one generator, such as the CPU's."""


def states_before(
    args: Iterable[Any], kwargs: dict[str, Any], *, any_of_them: bool = False
) -> list[Draw] | None:
    """The states that an operation called with these arguments is about to draw from; None: its
    generator cannot be found out, so the operation cannot be replayed.

    Args:
        any_of_them: it is a function of the program's, which may draw from each that it is given,
            from its device's and from the CPU's (a seed for its kernel).
    """
    explicit = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
    if any_of_them:
        try:
            device = _compat.default_generator(_device_of(args, kwargs))
        except LookupError:
            return None
        default = [torch.default_generator, *([] if device is None else [device])]
        found = {id(generator): generator for generator in (*explicit, *default)}
        return [(generator, _state_of(generator)) for generator in found.values()]
    if explicit:
        return [(generator, _state_of(generator)) for generator in explicit]
    try:
        generator = _compat.default_generator(_device_of(args, kwargs))
    except LookupError:
        return None
    return [] if generator is None else [(generator, _state_of(generator))]


def _state_of(generator: torch.Generator) -> State:
    if generator.device.type == "cpu":
        return generator.clone_state()
    with _compat.disable_dispatch():  # a dry run must not count it
        state = generator.get_state()
        kept = torch.frombuffer(bytearray(state.numel()), dtype=torch.uint8)
        return kept.copy_(state)


_copy: Callable[[torch.Generator, torch.Generator], None] | None = None


def copy_with(copy: Callable[[torch.Generator, torch.Generator], None]) -> None:
    """Let the compiled core, once it is loaded, copy one CPU generator into another."""
    global _copy
    _copy = copy


def put(generator: torch.Generator, state: State) -> None:
    """Put a generator into a recorded state.

    From Python, torch copies a CPU generator only by way of a tensor, of 5 KiB, for a moment.
    """
    if isinstance(state, torch.Tensor):
        generator.set_state(state)
    elif _copy is not None:
        _copy(state, generator)
    else:
        with _compat.disable_dispatch():
            generator.set_state(state.get_state())


def copy_to_draw_from(op: Operation) -> torch.Generator | None:
    """A CPU generator in the recorded state, for an operation that can be given one; None if it
    cannot, or drew from another device's.

    Whoever draws from the program's generator in the meantime, on another thread, neither moves
    this one nor sees a state that was put back.
    """
    if op.facts.generator is None or len(op.draws) != 1:
        return None
    state = op.draws[0][1]
    return state.clone_state() if isinstance(state, torch.Generator) else None


def given(
    op: Operation, generator: torch.Generator, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """An operation's arguments, with this generator for `Facts.with_generator`."""
    place = op.facts.generator
    if isinstance(place, int) and place < len(args):
        return [*args[:place], generator, *args[place + 1 :]], kwargs
    return args, {**kwargs, "generator": generator}


def alone() -> bool:
    """Whether nobody can draw between the reading of a state and the draw. With other threads, and
    without the compiled core, to be safe from that costs a tensor of 5 KiB for a moment."""
    if _copy is not None:
        return False
    others = [each for each in threading.enumerate() if not each.name.startswith("lowtide-")]
    return len(others) <= 1


def _device_of(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.device:
    """The device that is drawn on: with `torch.rand_like(x, device=...)` it is not that of `x`. A
    default device of the program's is named by the time that an operator is called."""
    named = kwargs.get("device")
    if named is not None:
        return torch.device(named)
    return _compat.device_of(args) or torch.device("cpu")


@contextlib.contextmanager
def drawing(draws: list[Draw]) -> Iterator[None]:
    """Draw from the recorded states, and leave the generators as they were."""
    with lock:
        before = _swap(draws)
        try:
            yield
        finally:
            _swap(before)


def _swap(draws: list[Draw]) -> list[Draw]:
    """Put generators into the recorded states; returns the states they were in."""
    before = [(generator, _state_of(generator)) for generator, _ in draws]
    for generator, state in draws:
        put(generator, state)
    return before
