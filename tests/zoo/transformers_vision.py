"""Vision, audio and multimodal models of the transformers library, from small configurations.

Problem: windowed and deformable attention, matching losses, masking by numpy's generator, and
convolutional stems that text models lack.
Invariant: nothing is downloaded; no backbone of another package. May import: `zoo.case`;
transformers only when built.
"""

from __future__ import annotations

from typing import Any

import torch

from zoo.case import DYNAMIC, Batch, Case, integers, keyword_loss, labelled_loss
from zoo.transformers_text import SMALL, VOCABULARY, net, tokens

PATCHES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
AUDIO: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.3,
    "mask_time_prob": 0.2,
    "mask_time_length": 2,
    "mask_feature_prob": 0.2,
    "mask_feature_length": 2,
}


def _picture(labels: bool = True, size: int = 16) -> Batch:
    pictures = {"pixel_values": torch.randn(2, 3, size, size)}
    return ({**pictures, "labels": integers(2, 2)},) if labels else (pictures,)


def _picture_and_map() -> Batch:
    return ({"pixel_values": torch.randn(2, 3, 32, 32), "labels": integers(2, 2, 32, 32)},)


def _picture_and_text() -> Batch:
    return (
        {
            "pixel_values": torch.randn(2, 3, 16, 16),
            "input_ids": 3 + integers(VOCABULARY - 3, 2, 6),
            "return_loss": True,
        },
    )


BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
}
DETECTOR = {
    "num_queries": 5,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "auxiliary_loss": True,
}


def picture_and_boxes() -> Batch:
    labels = [
        {"class_labels": integers(2, count), "boxes": torch.rand(count, 4) * 0.3 + 0.3}
        for count in (2, 1)
    ]
    return ({"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels},)


def _sound() -> Batch:
    return ({"input_values": torch.randn(2, 320), "labels": 3 + integers(VOCABULARY - 3, 2, 3)},)


def _spectrogram() -> Batch:
    return ({"input_features": torch.randn(2, 8, 16), "labels": 3 + integers(20, 2, 5)},)


def _case(name: str, model: str, configuration: str, /, batch: Any = _picture, **more: Any) -> Case:
    return Case(f"hf_{name}", net(model, configuration, **more), batch, labelled_loss)


def _small_text() -> dict[str, Any]:
    return {**SMALL, "attention_dropout": 0.1}


CASES = [
    _case("vit", "ViTForImageClassification", "ViTConfig", **PATCHES),
    _case("deit", "DeiTForImageClassification", "DeiTConfig", **PATCHES),
    _case(
        "vit_mae",
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        lambda: _picture(labels=False),
        **PATCHES,
        decoder_hidden_size=16,
        decoder_intermediate_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
    ),
    _case("beit", "BeitForImageClassification", "BeitConfig", **{**PATCHES, "drop_path_rate": 0.2}),
    _case(
        "dinov2",
        "Dinov2ForImageClassification",
        "Dinov2Config",
        **{**PATCHES, "drop_path_rate": 0.2},
    ),
    _case(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.2,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    ).but("hf_swin", batch=lambda: _picture(size=32)),
    _case(
        "swinv2",
        "Swinv2ForImageClassification",
        "Swinv2Config",
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.2,
    ).but("hf_swinv2", batch=lambda: _picture(size=32)),
    _case(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="bottleneck",
    ),
    _case(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        patch_size=2,
        num_stages=2,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        drop_path_rate=0.2,
    ),
    _case(
        "mobilenet_v2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        depth_multiplier=0.35,
        classifier_dropout_prob=0.2,
    ).but("hf_mobilenet_v2", batch=lambda: _picture(size=32)),
    _case(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        _picture_and_map,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.2,
    ),
    _case(
        "yolos",
        "YolosForObjectDetection",
        "YolosConfig",
        picture_and_boxes,
        **{**PATCHES, "image_size": [32, 32], "patch_size": 8},
        num_detection_tokens=4,
    ).but("hf_yolos", tags=DYNAMIC),
    _case(
        "detr",
        "DetrForObjectDetection",
        "DetrConfig",
        picture_and_boxes,
        backbone_config={**BACKBONE, "out_features": ["stage2"]},
        d_model=16,
        **DETECTOR,
    ).but("hf_detr", tags=DYNAMIC),
    Case(
        "hf_clip",
        net(
            "CLIPModel",
            "CLIPConfig",
            text_config=_small_text(),
            vision_config={**PATCHES, "attention_dropout": 0.1},
            projection_dim=8,
        ),
        _picture_and_text,
        labelled_loss,
    ),
    _case(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _sound,
        **AUDIO,
        ctc_zero_infinity=True,
    ).but("hf_wav2vec2", tags=DYNAMIC),
    _case("hubert", "HubertForCTC", "HubertConfig", _sound, **AUDIO, ctc_zero_infinity=True).but(
        "hf_hubert", tags=DYNAMIC
    ),
    _case(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _spectrogram,
        vocab_size=VOCABULARY,
        d_model=16,
        num_mel_bins=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=8,
        max_target_positions=16,
        attention_dropout=0.1,
        dropout=0.1,
        activation_dropout=0.1,
        encoder_layerdrop=0.3,
        decoder_layerdrop=0.3,
        apply_spec_augment=True,
        mask_time_prob=0.2,
        mask_time_length=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    ).but("hf_whisper", tags=DYNAMIC),
    _case(
        "vision_text_llava",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        lambda: (
            {
                **tokens(8)[0],
                "input_ids": torch.cat([torch.full((2, 4), 30), 3 + integers(20, 2, 4)], 1),
                "pixel_values": torch.randn(2, 3, 8, 8),
            },
        ),
        text_config={"model_type": "llama", **SMALL, "num_key_value_heads": 1},
        vision_config={"model_type": "clip_vision_model", **PATCHES, "image_size": 8},
        image_token_index=30,
        image_token_id=30,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=4,
    ).but("hf_llava"),
    Case(
        "hf_patchtst",
        net(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            num_input_channels=2,
            context_length=16,
            prediction_length=4,
            patch_length=4,
            patch_stride=4,
            d_model=8,
            num_attention_heads=2,
            num_hidden_layers=2,
            ffn_dim=16,
            attention_dropout=0.1,
            ff_dropout=0.1,
        ),
        lambda: ({"past_values": torch.randn(3, 16, 2), "future_values": torch.randn(3, 4, 2)},),
        labelled_loss,
    ),
    Case(
        "hf_vit_hidden_states",
        net("ViTModel", "ViTConfig", **PATCHES, output_hidden_states=True),
        lambda: _picture(labels=False),
        keyword_loss,
    ),
]
