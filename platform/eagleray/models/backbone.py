"""One face for every timm backbone: a pooled vector and a grid of patch vectors."""

import difflib
import math
import types
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import timm
import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn

from eagleray.errors import UserError
from eagleray.models.parts import by_parts

Head = TypeVar("Head", bound=nn.Module)

# What lets the models of a timm module take any crop size.
ANY_SIZE = {"vision_transformer": {"dynamic_img_size": True}, "deit": {"dynamic_img_size": True}}
ANY_SIZE |= {"swin_transformer": {"strict_img_size": False}}
# Backbones that the tests run forward, backward and through an export.
TESTED = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "deit_small_patch16_224",
    "swin_tiny_patch4_window7_224",
    "resnet50",
)


class Features(NamedTuple):
    """B images, D channels, N = h * w patches."""

    pooled: Tensor  # (B, D) the class token, or the mean patch where the model has none
    patches: Tensor  # (B, N, D) row-major
    grid: tuple[int, int]  # (h, w)


class Backbone(nn.Module):
    """A timm model without its classifier. Raises UserError for a name or an option that timm does not know."""

    model: Any  # whatever timm made
    micro_batch: int | None = None  # images that go through together while training; None: all

    def __init__(
        self,
        name: str = "vit_small_patch16_224",
        *,
        drop_path: float = 0.0,
        init: str = "timm",
        position: str = "timm",
        freeze_patch: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = create(name, drop_path, init, options or {})
        self.dim: int = self.model.num_features
        if position != "timm" and getattr(self.model, "pos_embed", None) is None:
            raise UserError(f"backbone.position={position}: {name} has no position table")
        if freeze_patch and not hasattr(self.model, "patch_embed"):
            raise UserError(f"backbone.freeze_patch=true: {name} has no patch projection")
        if position == "sincos":
            set_sincos(self.model)
        elif position == "dino":
            self.model._pos_embed = types.MethodType(_dino_position, self.model)
        if init == "moco":
            init_patch(self.model.patch_embed)
        if freeze_patch:
            self.model.patch_embed.requires_grad_(False)

    def forward(self, images: Tensor) -> Features:
        """(B, 3, H, W) to features."""
        return Features(*by_parts(self._features, images, self.micro_batch if self.training else None))

    def pooled(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, D), for those who need no patches: they are not kept."""
        out: Tensor = by_parts(lambda x: self._features(x).pooled, images, self.micro_batch if self.training else None)
        return out

    def _features(self, images: Tensor) -> Features:
        out: Tensor = self.model.forward_features(images)
        pooled = self.model.forward_head(out, pre_logits=True)
        if out.ndim == 4:
            if getattr(self.model, "output_fmt", "NCHW") != "NHWC":
                out = out.permute(0, 2, 3, 1)
            return Features(pooled, out.flatten(1, 2), (out.shape[1], out.shape[2]))
        ph, pw = self.model.patch_embed.patch_size
        patches = out[:, self.model.num_prefix_tokens :]
        return Features(pooled, patches, (images.shape[2] // ph, images.shape[3] // pw))

    def last_blocks(self, images: Tensor, n: int) -> list[Tensor]:
        """The outputs of a ViT's last n blocks, each through the final norm: n x (B, 1 + N, D), class token first."""
        out = self.model.forward_intermediates(
            images, indices=n, norm=True, return_prefix_tokens=True, intermediates_only=True, output_fmt="NLC"
        )
        return [torch.cat([prefix, patches], 1) for patches, prefix in out]

    def attention(self, images: Tensor) -> Tensor:
        """A ViT's last block's attention (B, heads, 1 + N, 1 + N), queries before keys; rows sum to one."""
        seen: list[Tensor] = []
        attn = self.model.blocks[-1].attn
        hook = attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            self.model.forward_features(images)
        finally:
            hook.remove()
        b, n, _ = seen[0].shape
        q, k, _ = attn.qkv(seen[0]).view(b, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        return (attn.q_norm(q) @ attn.k_norm(k).mT * attn.scale).softmax(-1)


class Encoder(nn.Module, Generic[Head]):
    """A backbone and a head on its pooled vector: what the papers call f, or the student and the teacher."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """V x (B, 3, S, S) to (V * B, C), view-major; neighbouring views of one size share a forward of the backbone,
        and all share the head's, so that batch norm in it sees them together."""
        same: list[list[Tensor]] = []
        for x in views:
            if same and same[-1][0].shape == x.shape:
                same[-1].append(x)
            else:
                same.append([x])
        out: Tensor = self.head(torch.cat([self.backbone.pooled(torch.cat(xs)) for xs in same]))
        return out


def create(name: str, drop_path: float, init: str, options: dict[str, Any]) -> Any:
    base = name.partition(".")[0]
    if not timm.is_model(base):
        close = difflib.get_close_matches(base, timm.list_models(), 1)
        raise UserError(
            f"backbone.name={name}: timm has no such model" + (f"; did you mean {close[0]}?" if close else "")
        )
    family = timm.model_entrypoint(base).__module__.rpartition(".")[2]
    given: dict[str, Any] = {**ANY_SIZE.get(family, {}), **options}
    if init == "moco":
        given["weight_init"] = "moco"
    try:
        model = timm.create_model(base, num_classes=0, drop_path_rate=drop_path, **given)
    except (TypeError, ValueError, AssertionError, RuntimeError) as e:
        raise UserError(f"backbone.name={name} backbone.options={options}: {' '.join(str(e).split())}") from None
    return model


def set_sincos(model: Any) -> None:
    """Fixed 2-D sine-cosine positions, as MoCo v3: not trained, zero for the class token."""
    grid, prefix = model.patch_embed.grid_size, model.num_prefix_tokens
    table = build_sincos2d_pos_embed(grid, model.embed_dim, interleave_sin_cos=True)
    table = torch.cat([torch.zeros(prefix, model.embed_dim), table])
    model.pos_embed = nn.Parameter(table.unsqueeze(0), requires_grad=False)


def init_patch(patch_embed: Any) -> None:
    """Uniform, bounded as for a linear layer on flat patches (MoCo v3); timm's `moco` leaves the convolution out."""
    weight = patch_embed.proj.weight
    bound = math.sqrt(6 / (math.prod(weight.shape[1:]) + weight.shape[0]))
    nn.init.uniform_(weight, -bound, bound)
    nn.init.zeros_(patch_embed.proj.bias)


def _dino_position(self: Any, x: Tensor) -> Tensor:
    """Class token and positions as DINO adds them (B, h, w, D) -> (B, 1 + h * w, D)."""
    table = resample(self.pos_embed, self.patch_embed.grid_size, (x.shape[1], x.shape[2]))
    tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), x.flatten(1, 2)], 1)
    return self.pos_drop(tokens + table)


def resample(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A position table (1, 1 + N, D) for another grid, bicubic without antialias. DINO's 0.1, added against rounding,
    moves the sampling points, so weights trained with it want it."""
    if new == old:
        return table
    grid = table[:, 1:].unflatten(1, old).permute(0, 3, 1, 2)
    scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]
    grid = F.interpolate(grid, scale_factor=scale, mode="bicubic")
    return torch.cat([table[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)
