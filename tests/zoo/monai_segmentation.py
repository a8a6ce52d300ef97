"""MONAI's segmentation nets, each at about the smallest shape that it accepts.

Problem: these are the nets of the project's first user; all that build on a CPU have to be here.
Invariant: dropout is on wherever the net has it. May import: `zoo.case`; MONAI only when built.
Not here, for they need packages that are not installed: DAF3D (torchvision), HyenaNDUNETR
(nvsubquadratic), CellSamWrapper (segment_anything).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from zoo.case import (
    SLOW,
    Case,
    in_channels_last,
    integers,
    keyword_loss,
    lookup,
    made,
    noise,
    quietly,
)

NETS = "monai.networks.nets:"
PYRAMID = {"channels": (4, 8, 8), "strides": (2, 2)}


def _net(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return made(NETS + name, **settings)


def _dints(space: str, **settings: Any) -> nn.Module:
    net = lookup(NETS + "DiNTS")(
        dints_space=lookup(NETS + space)(
            channel_mul=0.125, num_blocks=2, num_depths=2, spatial_dims=2, **settings
        ),
        in_channels=1,
        num_classes=2,
        use_downsample=True,
        spatial_dims=2,
    )
    return cast(nn.Module, net)


def _found_dints() -> nn.Module:
    every_path, operations = np.ones((2, 4)), np.array([[0, 1, 0, 1], [1, 0, 1, 0]])
    return _dints("TopologyInstance", arch_code=[every_path, operations])


def _hover_net() -> nn.Module:
    # The net insists on 256 x 256; pooling in front makes its inside an eighth of that.
    net = lookup(NETS + "HoVerNet")(
        mode="fast", out_classes=2, dropout_prob=0.1, decoder_padding=True
    )
    net.conv0 = nn.Sequential(nn.AvgPool2d(8), net.conv0)
    return cast(nn.Module, net)


def _vista_3d() -> nn.Module:
    width = 8
    net = lookup(NETS + "VISTA3D")(
        image_encoder=lookup(NETS + "SegResNetDS2")(
            in_channels=1, out_channels=width, init_filters=width, blocks_down=(1, 1), dsdepth=1
        ),
        class_head=lookup("monai.networks.nets.vista3d:ClassMappingClassify")(
            n_classes=4, feature_size=width, use_mlp=True
        ),
        point_head=lookup("monai.networks.nets.vista3d:PointMappingSAM")(
            feature_size=width, n_classes=4, last_supported=2
        ),
    )
    return cast(nn.Module, net)


UNET_3D = Case(
    "monai_unet_3d",
    _net(
        "UNet",
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        num_res_units=2,
        dropout=0.2,
        norm="BATCH",
        **PYRAMID,
    ),
    noise((1, 1, 8, 8, 8)),
)

CASES = [
    Case(
        "monai_unet_2d",
        _net("UNet", spatial_dims=2, in_channels=1, out_channels=2, dropout=0.2, **PYRAMID),
        noise((2, 1, 16, 16)),
    ),
    UNET_3D,
    UNET_3D.but("monai_unet_3d_autocast", autocast=True),
    UNET_3D.but("monai_unet_3d_penalty", gradient_penalty=True),
    Case(
        "monai_basic_unet",
        _net("BasicUNet", spatial_dims=2, features=(4, 4, 8, 8, 8, 4), dropout=0.1),
        noise((1, 1, 32, 32)),
    ),
    Case(
        "monai_basic_unet_plus_plus",
        _net(
            "BasicUNetPlusPlus",
            spatial_dims=2,
            features=(4, 4, 8, 8, 8, 4),
            deep_supervision=True,
            dropout=0.1,
        ),
        noise((1, 1, 32, 32)),
    ),
    Case(
        "monai_attention_unet",
        _net(
            "AttentionUnet", spatial_dims=2, in_channels=1, out_channels=2, dropout=0.1, **PYRAMID
        ),
        noise((1, 1, 16, 16)),
    ),
    Case(
        "monai_unetr",
        _net(
            "UNETR",
            in_channels=1,
            out_channels=2,
            img_size=32,
            feature_size=4,
            hidden_size=24,
            mlp_dim=32,
            num_heads=2,
            dropout_rate=0.1,
            spatial_dims=2,
        ),
        noise((1, 1, 32, 32)),
    ),
    Case(
        "monai_swin_unetr",
        _net(
            "SwinUNETR",
            norm_name="batch",
            in_channels=1,
            out_channels=2,
            depths=(1, 1, 1, 1),
            num_heads=(1, 2, 2, 2),
            feature_size=12,
            drop_rate=0.1,
            attn_drop_rate=0.1,
            dropout_path_rate=0.1,
            spatial_dims=2,
        ),
        noise((2, 1, 32, 32)),
    ),
    Case(
        "monai_swin_unetr_v2_own_checkpoint",
        _net(
            "SwinUNETR",
            norm_name="batch",
            in_channels=1,
            out_channels=2,
            depths=(2, 1, 1, 1),
            num_heads=(1, 2, 2, 2),
            feature_size=12,
            drop_rate=0.1,
            dropout_path_rate=0.1,
            spatial_dims=2,
            use_checkpoint=True,
            use_v2=True,
        ),
        noise((2, 1, 32, 32)),
    ),
    Case(
        "monai_seg_res_net",
        _net("SegResNet", dropout_prob=0.2, blocks_down=(1, 1), blocks_up=(1,)),
        noise((1, 1, 8, 8, 8)),
    ),
    Case(
        "monai_seg_res_net_vae",
        _net(
            "SegResNetVAE",
            input_image_size=(16, 16),
            vae_estimate_std=True,
            vae_nz=8,
            spatial_dims=2,
            dropout_prob=0.2,
            blocks_down=(1, 1),
            blocks_up=(1,),
        ),
        noise((1, 1, 16, 16)),
    ),
    Case(
        "monai_seg_res_net_ds",
        _net("SegResNetDS", spatial_dims=2, init_filters=4, blocks_down=(1, 1, 1), dsdepth=2),
        noise((1, 1, 16, 16)),
    ),
    Case(
        "monai_seg_res_net_ds2",
        _net("SegResNetDS2", spatial_dims=2, init_filters=4, blocks_down=(1, 1, 1), dsdepth=2),
        noise((1, 1, 16, 16)),
    ),
    Case(
        "monai_v_net",
        _net("VNet", spatial_dims=2, in_channels=1, out_channels=2, dropout_dim=2),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_high_res_net",
        _net(
            "HighResNet",
            spatial_dims=2,
            out_channels=2,
            dropout_prob=0.2,
            layer_params=(
                {"name": "conv_0", "n_features": 4, "kernel_size": 3},
                {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 2},
                {"name": "res_2", "n_features": 8, "kernels": (3, 3), "repeat": 1},
                {"name": "conv_1", "n_features": 8, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1},
            ),
        ),
        noise((2, 1, 16, 16)),
    ),
    Case(
        "monai_dyn_unet",
        _net(
            "DynUNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            kernel_size=(3, 3, 3, 3),
            strides=(1, 2, 2, 2),
            upsample_kernel_size=(2, 2, 2),
            filters=(4, 8, 8, 8),
            dropout=0.1,
            deep_supervision=True,
            res_block=True,
        ),
        noise((1, 1, 16, 16)),
    ),
    Case(
        "monai_flexible_unet",
        _net(
            "FlexibleUNet",
            in_channels=1,
            out_channels=2,
            backbone="resnet10",
            decoder_channels=(8, 8, 4, 4, 4),
            dropout=0.1,
        ),
        noise((2, 1, 32, 32)),
    ),
    Case("monai_dints_found", _found_dints, noise((1, 1, 32, 32))),
    Case("monai_dints_search", lambda: _dints("TopologySearch"), noise((1, 1, 32, 32))),
    Case(
        "monai_med_next",
        _net(
            "MedNeXt",
            spatial_dims=2,
            init_filters=4,
            kernel_size=3,
            deep_supervision=True,
            use_residual_connection=True,
            global_resp_norm=True,
            blocks_down=(1, 1, 1, 1),
            blocks_bottleneck=1,
            blocks_up=(1, 1, 1, 1),
        ),
        noise((1, 1, 32, 32)),
    ),
    Case(
        "monai_ah_net",
        _net("AHNet", layers=(1, 1, 1, 1), spatial_dims=2, psp_block_num=2),
        noise((2, 1, 64, 64)),
        tags=SLOW,
    ),
    Case("monai_hover_net", _hover_net, noise((1, 3, 256, 256)), tags=SLOW),
    Case(
        "monai_vista_3d",
        _vista_3d,
        lambda: (
            {
                "input_images": torch.randn(1, 1, 16, 16, 16),
                "class_vector": torch.tensor([[1], [2]]),
                "point_coords": integers(16, 2, 3, 3).float(),
                "point_labels": integers(2, 2, 3),
            },
        ),
        keyword_loss,
    ),
    Case(
        "monai_quicknat",
        _net("Quicknat", num_classes=2, num_filters=4, kernel_size=3, se_block="CSE", drop_out=0.1),
        noise((1, 1, 32, 32)),
    ),
    Case(
        "monai_reg_unet",
        _net("RegUNet", spatial_dims=2, in_channels=2, num_channel_initial=4, depth=2),
        noise((2, 2, 16, 16)),
    ),
    Case(
        "monai_voxel_morph",
        quietly(_net("VoxelMorph", spatial_dims=2, integration_steps=3)),
        noise((1, 1, 32, 32), (1, 1, 32, 32)),
    ),
    Case(
        "monai_unet_channels_last",
        lambda: in_channels_last(
            _net("UNet", spatial_dims=2, in_channels=2, out_channels=2, norm="BATCH", **PYRAMID)()
        ),
        lambda: (torch.randn(2, 2, 16, 16).contiguous(memory_format=torch.channels_last),),
    ),
]
