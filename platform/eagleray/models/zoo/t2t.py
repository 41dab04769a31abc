"""T2T-ViT-14, a tokens-to-token vision transformer (Yuan et al. 2021, arXiv:2101.11986), with performer layers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from eagleray.base.autocast import in_float32
from eagleray.models.pyramid import drop_rates, init

default_cfgs = generate_default_cfgs({"t2t_vit_14": {}})


class T2TViT(nn.Module):
    """A ViT whose tokens come from a tokens-to-token module. B images, a class token and N patches, D channels."""

    num_prefix_tokens = 1

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        token_dim: int = 64,
        kernel_ratio: float = 0.5,
        qkv_bias: bool = False,
        drop_path_rate: float = 0.0,
    ) -> None:
        """Build the network. Performers have `token_dim` channels and `kernel_ratio` random features per channel."""
        super().__init__()
        self.num_features = self.embed_dim = embed_dim
        self.dims = [embed_dim] * depth
        self.patch_embed = TokensToToken(token_dim, embed_dim, kernel_ratio)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.blocks = nn.Sequential(
            *(
                Block(embed_dim, num_heads, mlp_ratio, qkv_bias, drop_path=rate, norm_layer=nn.LayerNorm)
                for rate in drop_rates(drop_path_rate, [depth])[0]
            )
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(init)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's description of the layers, first to last: the stem, then each block."""
        return {"stem": "^cls_token|^patch_embed", "blocks": [(r"^blocks\.(\d+)", None), ("^norm", (99999,))]}

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last tokens (B, 1 + N, D) of images (B, 3, H, W), the class token first."""
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], 1)
        position = sinusoids(x.shape[1], self.embed_dim, x.device).to(x.dtype)
        return self.norm(self.blocks(x + position))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the class scores of tokens (B, 1 + N, D) or, with `pre_logits`, their class token (B, D)."""
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class TokensToToken(nn.Module):
    """The tokens-to-token module: three splits into overlapping patches, with a performer after the first two.

    A split turns each patch into a token; the next split treats these tokens as pixels. The last split is followed by a
    linear projection."""

    patch_size = (16, 16)

    def __init__(self, token_dim: int, embed_dim: int, kernel_ratio: float) -> None:
        super().__init__()
        self.attention1 = Performer(3 * 7 * 7, token_dim, kernel_ratio)
        self.attention2 = Performer(token_dim * 3 * 3, token_dim, kernel_ratio)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the patches' tokens (B, N, D) of images (B, 3, H, W). Raises ValueError unless 16 divides H and W."""
        height, width = x.shape[2:]
        if height % 16 or width % 16:
            raise ValueError(f"T2T-ViT: images of {height} x {width} pixels; both must be multiples of 16")
        x = self.attention1(F.unfold(x, 7, stride=4, padding=2).mT)
        x = x.mT.unflatten(2, (height // 4, width // 4))
        x = self.attention2(F.unfold(x, 3, stride=2, padding=1).mT)
        x = x.mT.unflatten(2, (height // 8, width // 8))
        return self.project(F.unfold(x, 3, stride=2, padding=1).mT)


class Performer(nn.Module):
    """A transformer block with one head of linear attention (Choromanski et al. 2021, arXiv:2009.14794).

    It narrows tokens from `dim` to C = `out` channels, so the residual connection adds the attention's output to the
    values. The attention has M random features."""

    w: Tensor  # (M, C) random features, never trained

    def __init__(self, dim: int, out: int, kernel_ratio: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(out)
        self.kqv, self.proj = nn.Linear(dim, 3 * out), nn.Linear(out, out)
        # The paper mentions no dropout; the authors' code, and DRLoc's, has it here and nowhere else.
        self.dropout = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(out, out), nn.GELU(), nn.Linear(out, out), nn.Dropout(0.1))
        # Rows have the authors' length, sqrt(M); for an unbiased softmax it would be sqrt(C).
        features = int(out * kernel_ratio)
        self.register_buffer("w", nn.init.orthogonal_(torch.empty(features, out)) * math.sqrt(features))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (B, N, C) of tokens x (B, N, dim)."""
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        x = v + self.dropout(self.proj(linear_attention(q, k, v, self.w)))
        return x + self.mlp(self.norm2(x))


@in_float32  # exponentials, and sums of thousands of them, need float32
def linear_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Approximate softmax(q k^T) v, for (B, N, C) each, with the positive random features w (M, C)."""
    phi_q, phi_k = (torch.exp(t @ w.T - t.square().sum(-1, keepdim=True) / 2) / len(w) ** 0.5 for t in (q, k))
    total = phi_q @ phi_k.sum(1).unsqueeze(2)  # (B, N, 1)
    return phi_q @ (phi_k.mT @ v) / (total + 1e-8)


def sinusoids(n: int, dim: int, device: torch.device) -> Tensor:
    """Return fixed positions (n, dim) for n tokens, the class token's first (Vaswani et al. 2017, section 3.5)."""
    frequency = 10000 ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angle = torch.arange(n, device=device).unsqueeze(1) * frequency
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)


def checkpoint_filter_fn(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the authors' weights to the names used here; their table of fixed positions stays unused."""
    return {name.replace("tokens_to_token", "patch_embed"): value for name, value in state.items()}


@register_model
def t2t_vit_14(pretrained: bool = False, **options: Any) -> nn.Module:
    return build_model_with_cfg(
        T2TViT,
        "t2t_vit_14",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        kwargs_filter=("in_chans",),
        **options,
    )
