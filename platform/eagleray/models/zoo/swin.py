"""Swin transformers that pad the grid before they shift it, as EsViT does; timm shifts first.

Swin: Liu et al. 2021, arXiv:2103.14030; EsViT: Li et al. 2022, arXiv:2106.09785, appendix A. The weights have the same
names and shapes as timm's. Where whole windows fill the grid of every shifted block, the outputs too are timm's, up to
the epsilon of the layer norms. That is so for images of 224 pixels, but not of 96.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, checkpoint_filter_fn
from torch import Tensor, nn

TINY = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
SMALL = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
BASE = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}

# There are no weights to load, but timm warns about a model that has no entry here.
default_cfgs = generate_default_cfgs({f"esvit_swin_{s}_w{w}": {} for s in ("tiny", "small", "base") for w in (7, 14)})


class PadFirst(SwinTransformerBlock):
    """A Swin block that pads the grid at the bottom and the right to whole windows, before any shift.

    The padding is not masked: padding tokens take part in the attention of their region of the shifted grid. B images,
    a grid of h x w tokens, C channels.
    """

    def _attn(self, x: Tensor) -> Tensor:
        """Return the attention's output (B, h, w, C) for tokens x (B, h, w, C)."""
        h, w = x.shape[1:3]
        wh, ww = self.window_size
        out: Tensor = super()._attn(F.pad(x, (0, 0, 0, -w % ww, 0, -h % wh)))  # timm's has nothing left to pad
        return out[:, :h, :w]


class EsViTSwin(SwinTransformer):
    """timm's Swin transformer with `PadFirst` blocks, for images of any size.

    If the grid of a stage fits into one window for images of `img_size`, this stage never shifts its window, whatever
    the size of later images. The smaller grid of a smaller image is padded to the window.
    """

    def __init__(self, **options: Any) -> None:
        norm = partial(nn.LayerNorm, eps=1e-6)
        super().__init__(**{"strict_img_size": False, "norm_layer": norm, "drop_path_rate": 0.0, **options})
        for block in self.modules():
            if isinstance(block, SwinTransformerBlock):
                block.__class__ = PadFirst  # the same parameters and buffers, another forward


def create(name: str, pretrained: bool, **options: Any) -> EsViTSwin:
    """Build a model through timm, which also renames the authors' weights."""
    model: EsViTSwin = build_model_with_cfg(
        EsViTSwin, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, **options
    )
    return model


@register_model
def esvit_swin_tiny_w7(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_tiny_w7", pretrained, **TINY | {"window_size": 7} | options)


@register_model
def esvit_swin_tiny_w14(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_tiny_w14", pretrained, **TINY | {"window_size": 14} | options)


@register_model
def esvit_swin_small_w7(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_small_w7", pretrained, **SMALL | {"window_size": 7} | options)


@register_model
def esvit_swin_small_w14(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_small_w14", pretrained, **SMALL | {"window_size": 14} | options)


@register_model
def esvit_swin_base_w7(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_base_w7", pretrained, **BASE | {"window_size": 7} | options)


@register_model
def esvit_swin_base_w14(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_base_w14", pretrained, **BASE | {"window_size": 14} | options)
