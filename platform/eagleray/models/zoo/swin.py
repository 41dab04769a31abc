"""Swin transformers that pad before they shift: Liu et al. 2021, arXiv:2103.14030, as in EsViT (Li et al. 2021,
arXiv:2106.09785, appendix A). timm's shift first. The weights are timm's, key for key; the outputs are too, but for a
layer norm's epsilon, wherever the grid of every shifted block divides into windows: at 224 px, not at 96."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, checkpoint_filter_fn
from torch import Tensor, nn

TINY = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
SMALL = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
BASE = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}

# Without weights to load, but timm warns of a model that has no entry.
default_cfgs = generate_default_cfgs({f"esvit_swin_{s}_w{w}": {} for s in ("tiny", "small", "base") for w in (7, 14)})


class PadFirst(SwinTransformerBlock):
    """A block whose padding lies at the bottom and the right of the image, where the mask of a shifted block ends a
    region. Padding is never masked as such: it attends and is attended to within its region."""

    def _attn(self, x: Tensor) -> Tensor:
        """(B, h, w, C) to the same."""
        h, w = x.shape[1:3]
        wh, ww = self.window_size
        out: Tensor = super()._attn(F.pad(x, (0, 0, 0, -w % ww, 0, -h % wh)))  # which finds nothing left to pad
        return out[:, :h, :w]


class EsViTSwin(SwinTransformer):
    """timm's, with such blocks. A stage whose grid at `img_size` is no larger than the window has one window and no
    shift, at any other size too; a smaller image is padded to it."""

    def __init__(self, **options: Any) -> None:
        norm = partial(nn.LayerNorm, eps=1e-6)
        super().__init__(**{"strict_img_size": False, "norm_layer": norm, "drop_path_rate": 0.0, **options})
        for block in self.modules():
            if isinstance(block, SwinTransformerBlock):
                block.__class__ = PadFirst  # the same parameters and buffers, another forward


def create(name: str, pretrained: bool, **options: Any) -> EsViTSwin:
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
