"""Stand-ins for everything a step reads, so that it can be traced without memory.

Problem: a dry run calls the user's own function, which reaches its parameters through modules,
closures and globals. Invariant: while it runs, parameters, buffers and the tensors among the
arguments are fake; afterwards every module found is as it was, attributes included, and so are the
gradients and the random states of Python and NumPy. Imports `_compat`, found and putback. Rejected:
a deep copy of the model on the meta device, which would take other code paths than `cpu` or `cuda`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lowtide import _compat
from lowtide._compat import fakes
from lowtide.dryrun.found import Found
from lowtide.dryrun.putback import Saved


class StandIns:
    """Context manager: the found modules hold fake tensors; `fake` converts arguments."""

    def __init__(self, found: Found, device: torch.device, mode: Any) -> None:
        self.found = found
        self.device = device
        self.mode = mode
        self._made: dict[int, torch.Tensor] = {}
        self._real: dict[int, torch.Tensor] = {}
        self._read: list[torch.Tensor] = []
        self.originals: dict[int, torch.Tensor] = {}  # by the id of what stands for them
        self._saved = Saved(found)
        self._scripted: list[tuple[Any, str, torch.Tensor]] = []

    def __enter__(self) -> StandIns:
        self._saved.take()
        try:
            for module in self.found.modules():
                self._take(module)
            for tensor in self.found.tensors:  # torch fakes those of closures where they are read
                self._know(tensor)
            for module in self.found.modules():
                for name, part in vars(module).items():
                    # Lists of a module's own parameters, as in recurrent layers.
                    if type(part) is list and any(id(p) in self._made for p in part):
                        vars(module)[name] = [self._made.get(id(p), p) for p in part]
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _take(self, module: Any) -> None:
        for tensors in _compat.parameters_and_buffers(module):
            if _compat.is_script(module):  # not among its attributes
                self._scripted += [(tensors, *one) for one in tensors.items()]
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    tensors[name] = self.fake(tensor)

    def _restore(self) -> None:
        for tensors, name, tensor in self._scripted:
            tensors[name] = tensor
        self._scripted.clear()
        self._read.clear()
        self._saved.restore()

    def behind(self, storage: Any) -> torch.Tensor | None:
        """The real tensor that stands behind a fake storage."""
        return self._real.get(_compat.storage_id(storage))

    def fake(self, item: Any) -> Any:
        """Arguments in nested containers, with fake tensors in place of real ones."""
        if isinstance(item, torch.Tensor):
            made = self._made.get(id(item))
            if made is None:
                made = self._made[id(item)] = fakes.faked(self.mode, item, self.device)
                self.originals[id(made)] = item
                storage = _compat.storage_of(made)
                if storage is not None and made is not item and item.device.type != "meta":
                    self._real.setdefault(_compat.storage_id(storage), item)
            return made
        if type(item) in (list, tuple):
            return type(item)(map(self.fake, item))
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(self.fake, item))
        if type(item) is dict:
            return {key: self.fake(part) for key, part in item.items()}
        return item

    def _know(self, tensor: torch.Tensor) -> None:
        """What is in a tensor that the function reaches without being given it can be asked for,
        of itself and of what the mode makes of it wherever an operator reads it."""
        if tensor.requires_grad or fakes.is_fake(tensor) or tensor.device.type == "meta":
            return
        self._read.append(fakes.faked(self.mode, tensor, self.device))  # else torch makes another
        for one in (tensor, self._read[-1]):
            storage = _compat.storage_of(one)
            if storage is not None:
                self._real.setdefault(_compat.storage_id(storage), tensor)

    def made(self, result: Any) -> Any:
        """What an operator returned, with fake tensors in place of real ones. They are in memory
        as long as the program has them, and no longer."""
        if isinstance(result, torch.Tensor):
            fake = fakes.faked(self.mode, result, self.device)
            self.stands_for(fake, result)
            return fake
        if isinstance(result, tuple | list):
            return type(result)(map(self.made, result))
        return result

    def stands_for(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """As long as its storage is there, a fake tensor has the content of a real one."""
        storage = _compat.storage_of(fake)
        if storage is not None:
            key = _compat.storage_id(storage)
            self._real[key] = real
            weakref.finalize(storage, self._real.pop, key, None)
