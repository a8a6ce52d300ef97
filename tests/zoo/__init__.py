"""The catalogue of small models that every way of applying lowtide is held to.

Problem: "the same bits for any model" needs many models, with every construct that has ever broken
rematerialization, small enough to run on one core.

Invariant: `CASES` maps unique names to cases; each one's plain step is deterministic, finite and
has gradients, which `test_zoo.py` checks before anything is compared with it.

May import: `zoo` and torch. Rejected: one file for all, which nobody would read.
"""

from __future__ import annotations

from zoo import (
    monai_networks,
    monai_segmentation,
    torch_layers,
    transformers_more,
    transformers_text,
    transformers_vision,
    traps_aliasing,
    traps_autograd,
    traps_random,
    traps_state,
)
from zoo.case import Case

_FILES = (
    torch_layers,
    traps_random,
    traps_state,
    traps_aliasing,
    traps_autograd,
    monai_segmentation,
    monai_networks,
    transformers_text,
    transformers_vision,
    transformers_more,
)


def _catalogue() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for file in _FILES:
        for case in file.CASES:
            if case.name in cases:
                raise ValueError(f"two cases are called {case.name!r}; rename one in {file}")
            cases[case.name] = case
    return cases


CASES: dict[str, Case] = _catalogue()

LIBRARIES = ("monai_", "hf_")

# Where the way of applying lowtide goes by modules, these stand for their kinds.
BY_MODULE = (
    "torch_lstm_packed",
    "torch_transformer",
    "torch_mlp_penalty",
    "random_own_generator",
    "state_shared_batch_norm",
    "state_gan_spectral_norm",
    "state_top_two_experts",
    "aliasing_growing_concatenation",
    "autograd_frozen_stem_with_adapter",
    "autograd_torch_checkpoint_inside",
    "monai_unet_3d",
    "monai_swin_unetr",
    "monai_dense_net",
    "hf_gpt2_sdpa",
    "hf_llama_autocast",
    "hf_mixtral",
    "hf_t5",
    "hf_swin",
)


def one_of_many(case: Case) -> bool:
    """Whether it is a network of a library that does not stand for its kind."""
    return case.name.startswith(LIBRARIES) and case.name not in BY_MODULE
