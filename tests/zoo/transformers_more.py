"""Models of the transformers library that bring operators which the other cases lack.

Problem: most architectures are one more BERT or Llama; these are not. They bring overlapping and
deformable attention, a gated delta rule, layers of several kinds, Fourier transforms,
distributions, and positions that are computed from the tokens.
Invariant: as in `transformers_text` and `transformers_vision`. May import: those and `zoo.case`;
transformers only when built. Rejected: Reformer, which seeds torch's generator with the clock.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo.case import DYNAMIC, Batch, Case, integers, labelled_loss
from zoo.transformers_text import DECODER, ENCODER, ROUTED, SMALL, net, tokens, unpadded
from zoo.transformers_vision import BACKBONE, DETECTOR, picture_and_boxes

IMAGE, VISION_START, VISION_END = 28, 29, 30
LOOK_BACK, AHEAD, LAG = 12, 4, 2


def _case(name: str, model: str, configuration: str, batch: Any, /, **more: Any) -> Case:
    return Case(f"hf_{name}", net(model, configuration, **more), batch, labelled_loss)


def _image_in_text() -> Batch:
    """Two rows with an image of four by four patches each, which are merged to four tokens."""
    ids = 3 + integers(IMAGE - 3, 2, 10)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = VISION_START, IMAGE, VISION_END
    return (
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids.masked_fill(ids >= IMAGE, -100),
            "mm_token_type_ids": (ids == IMAGE).int(),
            "pixel_values": torch.randn(32, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        },
    )


def _series() -> Batch:
    past = LOOK_BACK + LAG
    return (
        {
            "past_values": torch.randn(2, past),
            "past_time_features": torch.randn(2, past, 1),
            "past_observed_mask": torch.ones(2, past),
            "future_values": torch.randn(2, AHEAD),
            "future_time_features": torch.randn(2, AHEAD, 1),
        },
    )


CASES = [
    _case(
        "longformer",
        "LongformerForMaskedLM",
        "LongformerConfig",
        tokens,
        **{**ENCODER, "attention_window": [4, 4], "max_position_embeddings": 40},
    ),
    _case("fnet", "FNetForMaskedLM", "FNetConfig", unpadded, **ENCODER),
    _case(
        "jamba",
        "JambaForCausalLM",
        "JambaConfig",
        tokens,
        **{
            **ROUTED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 2,
        },
    ),
    _case(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        tokens,
        **{
            **ROUTED,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 8,
        },
    ),
    _case(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        _image_in_text,
        text_config={
            **DECODER,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            },
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": SMALL["hidden_size"],
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
        image_token_id=IMAGE,
        video_token_id=0,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    ),
    _case(
        "deformable_detr",
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        picture_and_boxes,
        backbone_config={**BACKBONE, "out_features": ["stage1", "stage2"]},
        d_model=32,
        num_feature_levels=2,
        **DETECTOR,
    ).but("hf_deformable_detr", tags=DYNAMIC),
    _case(
        "informer",
        "InformerForPrediction",
        "InformerConfig",
        _series,
        prediction_length=AHEAD,
        context_length=LOOK_BACK,
        lags_sequence=[1, LAG],
        num_time_features=1,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        sampling_factor=1,
    ),
]
