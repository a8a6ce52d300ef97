"""MONAI's other nets: classifiers, autoencoders, diffusion, registration, generators, transformers.

Problem: they hold constructs that segmentation nets lack (drawn latents, codebooks that update in
forward, masked patches, squeeze-and-excitation, labels as input).
Invariant: dropout is on wherever the net has it. May import: `zoo.case`; MONAI only when built.
Not here: TorchVisionFCModel and NetAdapter, which need torchvision; ResNet's and EfficientNet's
feature extractors, which are the same nets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.case import (
    SLOW,
    Batch,
    Case,
    awake,
    integers,
    keyword_loss,
    lookup,
    made,
    noise,
    quietly,
    smooth,
)

NETS = "monai.networks.nets:"
TINY_VIT: dict[str, Any] = {"hidden_size": 16, "mlp_dim": 24, "num_layers": 2, "num_heads": 2}
LATENT: dict[str, Any] = {
    "spatial_dims": 2,
    "num_res_blocks": 1,
    "channels": (4, 8),
    "attention_levels": (False, True),
    "norm_num_groups": 4,
}


def _net(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return made(NETS + name, **settings)


def _quantized(model: nn.Module, batch: Batch) -> Tensor:
    reconstruction, quantization_loss = model(*batch)
    loss: Tensor = smooth(reconstruction) + quantization_loss
    return loss


def _mil() -> nn.Module:
    backbone = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
    )
    model: nn.Module = lookup(NETS + "MILModel")(
        num_classes=2,
        mil_mode="att_trans",
        backbone=nn.Sequential(backbone, nn.Flatten()),
        backbone_num_features=8,
        trans_blocks=1,
        trans_dropout=0.1,
    )
    return model


def _diffusion_inputs() -> Batch:
    return (
        {
            "x": torch.randn(2, 1, 8, 8),
            "timesteps": integers(100, 2),
            "context": torch.randn(2, 3, 6),
            "class_labels": integers(3, 2),
        },
    )


def _labels_as_image(classes: int, *shape: int) -> Tensor:
    label = integers(classes, shape[0], *shape[1:])
    return nn.functional.one_hot(label, classes).movedim(-1, 1).float()


CASES = [
    Case(
        "monai_dense_net",
        _net(
            "DenseNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            init_features=8,
            growth_rate=4,
            block_config=(3, 4, 3),
            dropout_prob=0.1,
        ),
        noise((2, 1, 32, 32)),
    ),
    Case(
        "monai_dense_net_121",
        _net(
            "DenseNet121",
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            init_features=8,
            growth_rate=4,
            dropout_prob=0.1,
        ),
        noise((2, 1, 32, 32)),
    ),
    Case(
        "monai_se_net",
        _net(
            "SENet",
            spatial_dims=2,
            in_channels=1,
            block="se_resnetxt_bottleneck",
            layers=(1, 1, 1, 1),
            groups=4,
            reduction=4,
            inplanes=8,
            num_classes=2,
        ),
        noise((2, 1, 32, 32)),
        tags=SLOW,
    ),
    Case(
        "monai_efficient_net",
        _net(
            "EfficientNet",
            blocks_args_str=[
                "r1_k3_s11_e1_i32_o8_se0.25",
                "r2_k3_s22_e6_i8_o8_se0.25",
                "r2_k5_s22_e6_i8_o16_se0.25",
            ],
            in_channels=1,
            num_classes=2,
            dropout_rate=0.2,
        ),
        noise((2, 1, 32, 32)),
    ),
    Case(
        "monai_efficient_net_b0",
        _net("EfficientNetBN", model_name="efficientnet-b0", pretrained=False, in_channels=1),
        noise((2, 1, 32, 32)),
    ),
    Case(
        "monai_res_net_3d",
        _net(
            "ResNet",
            block="bottleneck",
            layers=[1, 1, 1, 1],
            block_inplanes=[4, 4, 8, 8],
            n_input_channels=1,
            conv1_t_size=3,
            num_classes=2,
        ),
        noise((2, 1, 16, 16, 16)),
    ),
    Case(
        "monai_vit",
        _net(
            "ViT",
            in_channels=1,
            img_size=16,
            patch_size=4,
            classification=True,
            dropout_rate=0.1,
            spatial_dims=2,
            **TINY_VIT,
        ),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_vit_autoencoder",
        _net(
            "ViTAutoEnc",
            in_channels=1,
            img_size=16,
            patch_size=4,
            dropout_rate=0.1,
            spatial_dims=2,
            **TINY_VIT,
        ),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_masked_autoencoder",
        quietly(
            _net(
                "MaskedAutoEncoderViT",
                in_channels=1,
                img_size=16,
                patch_size=4,
                dropout_rate=0.1,
                spatial_dims=2,
                decoder_hidden_size=16,
                decoder_mlp_dim=16,
                decoder_num_layers=1,
                decoder_num_heads=2,
                **TINY_VIT,
            )
        ),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_na_vit",
        _net(
            "NaViT",
            image_size=16,
            patch_size=4,
            num_classes=2,
            dropout_rate=0.1,
            emb_dropout_rate=0.1,
            token_dropout_prob=0.2,
            spatial_dims=2,
            **TINY_VIT,
        ),
        lambda: ([[torch.randn(1, 16, 8), torch.randn(1, 8, 8)], [torch.randn(1, 16, 16)]],),
    ),
    Case(
        "monai_diffusion_unet",
        awake(
            _net(
                "DiffusionModelUNet",
                in_channels=1,
                out_channels=1,
                num_head_channels=4,
                with_conditioning=True,
                cross_attention_dim=6,
                num_class_embeds=3,
                dropout_cattn=0.1,
                **LATENT,
            )
        ),
        _diffusion_inputs,
        keyword_loss,
    ),
    Case(
        "monai_spade_diffusion_unet",
        awake(
            _net(
                "SPADEDiffusionModelUNet",
                in_channels=1,
                out_channels=1,
                label_nc=3,
                num_head_channels=4,
                spade_intermediate_channels=4,
                **LATENT,
            )
        ),
        lambda: (torch.randn(2, 1, 8, 8), integers(100, 2), _labels_as_image(3, 2, 8, 8)),
    ),
    Case(
        "monai_control_net",
        awake(
            _net(
                "ControlNet",
                in_channels=1,
                num_head_channels=4,
                conditioning_embedding_num_channels=(4, 8),
                **LATENT,
            )
        ),
        lambda: (torch.randn(2, 1, 8, 8), integers(100, 2), torch.randn(2, 1, 16, 16)),
    ),
    Case("monai_autoencoder_kl", _net("AutoencoderKL", **LATENT), noise((2, 1, 8, 8))),
    Case(
        "monai_autoencoder_kl_own_checkpoint",
        _net("AutoencoderKL", use_checkpoint=True, **LATENT),
        noise((2, 1, 8, 8)),
    ),
    Case(
        "monai_spade_autoencoder_kl",
        _net("SPADEAutoencoderKL", label_nc=3, spade_intermediate_channels=4, **LATENT),
        lambda: (torch.randn(2, 1, 8, 8), _labels_as_image(3, 2, 8, 8)),
    ),
    Case(
        "monai_spade_net",
        _net(
            "SPADENet",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            label_nc=3,
            input_shape=[32, 32],
            channels=[4, 8],
            z_dim=4,
            spade_intermediate_channels=4,
        ),
        lambda: (_labels_as_image(3, 2, 32, 32), torch.randn(2, 1, 32, 32)),
    ),
    Case(
        "monai_vq_vae",
        _net(
            "VQVAE",
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(4, 8),
            num_res_layers=1,
            num_res_channels=(4, 8),
            downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
            upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
            num_embeddings=8,
            embedding_dim=4,
            dropout=0.1,
        ),
        noise((2, 1, 16, 16)),
        _quantized,
    ),
    Case(
        "monai_var_autoencoder",
        _net(
            "VarAutoEncoder",
            spatial_dims=2,
            in_shape=(1, 16, 16),
            out_channels=1,
            latent_size=4,
            channels=(4, 8),
            strides=(2, 2),
            dropout=0.1,
        ),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_global_net",
        quietly(
            _net(
                "GlobalNet",
                image_size=[16, 16],
                spatial_dims=2,
                in_channels=2,
                num_channel_initial=4,
                depth=2,
            )
        ),
        noise((2, 2, 16, 16)),
    ),
    Case(
        "monai_local_net",
        _net(
            "LocalNet",
            spatial_dims=2,
            in_channels=2,
            num_channel_initial=4,
            extract_levels=(0, 1, 2),
            out_channels=2,
        ),
        noise((2, 2, 16, 16)),
    ),
    Case(
        "monai_generator",
        _net(
            "Generator",
            latent_shape=(6,),
            start_shape=(4, 4, 4),
            channels=(8, 4, 1),
            strides=(2, 2, 1),
            dropout=0.1,
        ),
        noise((2, 6)),
    ),
    Case(
        "monai_discriminator_penalty",
        _net("Discriminator", in_shape=(1, 16, 16), channels=(4, 8), strides=(2, 2)),
        noise((2, 1, 16, 16)),
        gradient_penalty=True,
    ),
    Case(
        "monai_critic",
        _net("Critic", in_shape=(1, 16, 16), channels=(4, 8), strides=(2, 2)),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_patch_discriminator",
        _net("PatchDiscriminator", spatial_dims=2, channels=4, in_channels=1, dropout=0.1),
        noise((2, 1, 32, 32)),
    ),
    Case(
        "monai_multi_scale_discriminator",
        _net(
            "MultiScalePatchDiscriminator",
            num_d=2,
            num_layers_d=1,
            spatial_dims=2,
            channels=4,
            in_channels=1,
            minimum_size_im=16,
        ),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_decoder_transformer",
        _net(
            "DecoderOnlyTransformer",
            num_tokens=11,
            max_seq_len=8,
            attn_layers_dim=8,
            attn_layers_depth=2,
            attn_layers_heads=2,
            with_cross_attention=True,
            embedding_dropout_rate=0.1,
        ),
        lambda: (integers(11, 2, 8), torch.randn(2, 3, 8)),
    ),
    Case(
        "monai_restormer",
        made(
            "monai.networks.nets.restormer:Restormer",
            in_channels=1,
            out_channels=1,
            dim=8,
            num_blocks=(1, 1),
            heads=(1, 1),
            num_refinement_blocks=1,
        ),
        noise((2, 1, 16, 16)),
    ),
    Case("monai_mil", quietly(_mil), noise((2, 3, 1, 8, 8))),
    Case(
        "monai_fully_connected",
        _net(
            "VarFullyConnectedNet",
            in_channels=6,
            out_channels=6,
            latent_size=3,
            encode_channels=(8, 8),
            decode_channels=(8,),
            dropout=0.2,
        ),
        noise((4, 6)),
    ),
]
