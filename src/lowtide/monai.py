"""MONAI's checkpointed U-Net, on lowtide's regions.

Problem: MONAI's `CheckpointUNet` wraps every part of every connection block. Its weights do not
load into a plain `UNet`, the deepest convolution runs once for each level of the net and its
BatchNorm counts each time, and evaluation with gradients recomputes too. Invariant: the same net,
the same keys as `UNet` in both directions, one forward. Imports MONAI, which no other file does,
modules, errors and `models.keys`. Rejected: regions around the nested sub-blocks too, unless they
are asked for: what is in them is small in most U-Nets, and replayed once for each level above.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from lowtide.errors import UsageError
from lowtide.models.keys import without_wrapper_keys
from lowtide.modules import ActivationCheckpointWrapper, is_checkpointed

try:
    from monai.networks.layers.simplelayers import SkipConnection
    from monai.networks.nets.unet import UNet
except ImportError as error:
    raise ImportError(
        "lowtide.monai needs MONAI, which is not installed or does not import: "
        "pip install 'monai>=1.5'"
    ) from error

__all__ = ["CheckpointUNet"]


class CheckpointUNet(UNet):  # type: ignore[misc, unused-ignore]
    """MONAI's `UNet`, with its connection blocks checkpointed in training.

    Arguments, parameter names and results are those of `monai.networks.nets.UNet`, in 2D and 3D,
    and weights load in both directions; weights of MONAI's own `CheckpointUNet` load too. Every
    block on the way down, the bottom and every block on the way up is a region of its own: only
    their inputs are kept, and each operation is replayed at most once. In eval, or with grad
    disabled, it is a plain `UNet`.

    `nested=True` has the regions of MONAI's own, which are around all that is deeper too: up to a
    tenth less is in memory, and the deepest block is replayed once for each level above it.

    Raises:
        UsageError: `nested` is not a bool.
    """

    def __init__(self, *args: Any, nested: bool = False, **kwargs: Any) -> None:
        if not isinstance(nested, bool):
            raise UsageError(f"CheckpointUNet: nested is True or False, not {nested!r}")
        self._nested = nested  # the blocks are made in there
        super().__init__(*args, **kwargs)
        # Copies and unpickled nets get the same regions. TorchScript would not understand the type
        # if it were annotated in the class.
        self._regions = tuple(name for name, m in self.named_modules() if is_checkpointed(m))

    def _get_connection_block(
        self, down_path: nn.Module, up_path: nn.Module, subblock: nn.Module
    ) -> nn.Module:
        # MONAI's own hook: a subclass that makes other blocks gets those checkpointed too.
        ActivationCheckpointWrapper(down_path)
        ActivationCheckpointWrapper(up_path)
        bottom = not any(isinstance(part, SkipConnection) for part in subblock.modules())
        if bottom or self._nested:
            ActivationCheckpointWrapper(subblock)
        block: nn.Module = super()._get_connection_block(down_path, up_path, subblock)
        return block

    def __getstate__(self) -> dict[str, Any]:
        # A region that was switched off, or whose module was replaced, is none in a copy either.
        named: dict[str, nn.Module] = dict(self.named_modules())
        regions = [n for n in self._regions if n in named and is_checkpointed(named[n])]
        return {**super().__getstate__(), "_regions": tuple(regions)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        for name in self._regions:
            ActivationCheckpointWrapper(self.get_submodule(name))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        without_wrapper_keys(state_dict, prefix, functools.partial(self.state_dict, keep_vars=True))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
