"""MAE predicts the pixels of three quarters of an image's patches from the other quarter (He et al. 2021,
arXiv:2111.06377, section 3).

B images, N patches of p x p pixels of 3 channels (or another number), n visible patches, P prefix tokens of the
encoder, such as the class token, D channels of the encoder, d channels of the decoder."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.autocast import in_float32
from eagleray.base.errors import UserError
from eagleray.base.rng import step_generator
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.models import variants
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.checkpointing import micro_batched
from eagleray.models.tokens import drops_patches, take


class MAE(Method):
    """The encoder sees only the visible patches; a light decoder sees all positions and predicts pixels."""

    views = (1, 1)

    def __init__(
        self,
        backbone: Backbone,
        *,
        mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75,  # share of the patches that are predicted
        decoder_dim: PositiveInt = 512,
        decoder_depth: PositiveInt = 8,
        decoder_heads: PositiveInt = 16,
    ) -> None:
        super().__init__()
        model: Any = backbone.model
        if not drops_patches(model):
            raise UserError(
                f"backbone.name: {type(model).__name__} cannot leave patches out for mae, or has a layer after its "
                "pooling; expected a plain vision transformer of timm, such as vit_base_patch16_224"
            )
        if decoder_dim % 4 or decoder_dim % decoder_heads:
            raise UserError(
                f"method.decoder_dim={decoder_dim}: expected a multiple of 4 and of method.decoder_heads="
                f"{decoder_heads}"
            )
        self.grid, self.patch_size = model.patch_embed.grid_size, model.patch_embed.patch_size
        self.patches = self.grid[0] * self.grid[1]  # N
        self.visible = int(self.patches * (1 - mask_ratio))  # n
        if not 0 < self.visible < self.patches:
            raise UserError(
                f"method.mask_ratio={mask_ratio}: leaves {self.visible} of {self.patches} patches visible; expected at "
                "least one visible and one masked patch"
            )
        self.encoder = Encoder(backbone, nn.Identity())
        self.decoder = _Decoder(backbone, decoder_dim, decoder_depth, decoder_heads)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        [x], backbone = batch.views, self.encoder.backbone
        shuffled = shuffle(self.patches, batch.rows, at.draw, x.device)  # (B, N)
        visible, restore = shuffled[:, : self.visible], shuffled.argsort(1)
        pooled, latent = backbone.visible(x, visible)  # (B, D), (B, P + n, D)
        self.encoder.head(pooled)  # an identity, through which the run's monitor reads the features
        size = backbone.micro_batch if self.training else None
        pixels = micro_batched(self.decoder, latent, size, restore)  # (B, N, 3 p p)
        return {"loss": mae_loss(pixels, patchify(x, self.patch_size), restore >= self.visible)}

    def check_views(self, views: Sequence[Tensor]) -> None:
        height, width = (n * p for n, p in zip(self.grid, self.patch_size, strict=True))
        if (got := tuple(views[0].shape[2:])) != (height, width):
            raise UserError(
                f"views: {got[0]} pixels, but the decoder of mae has positions for {height} x {width} alone, the size "
                f"of the backbone; expected views of that size, or backbone.options.img_size={got[0]}"
            )

    def export(self) -> Backbone:
        return self.encoder.backbone


class _Decoder(nn.Module):
    """Predicts the pixels of every patch from the encoder's tokens of the visible patches."""

    def __init__(self, backbone: Backbone, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        model: Any = backbone.model
        norm: Any = partial(nn.LayerNorm, eps=1e-6)  # Any, as timm's type annotation does not allow a partial
        patch = model.patch_embed.patch_size
        self.prefix = model.num_prefix_tokens
        self.embed = nn.Linear(model.embed_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = variants.sincos(model.patch_embed.grid_size, dim, prefix=self.prefix)
        self.blocks = nn.Sequential(*(Block(dim, heads, qkv_bias=True, norm_layer=norm) for _ in range(depth)))
        self.norm = norm(dim)
        self.pred = nn.Linear(dim, backbone.channels * patch[0] * patch[1])
        variants.init_mae(self)

    def forward(self, latent: Tensor, restore: Tensor) -> Tensor:
        """Return the pixels (B, N, 3 p p) of all patches in the order of the image.

        `latent` (B, P + n, D) are the encoder's tokens; `restore` (B, N) is the index of each patch in the list of
        visible patches followed by masked ones."""
        x, (b, n) = self.embed(latent), restore.shape
        masked = self.mask_token.expand(b, n + self.prefix - x.shape[1], -1)
        patches = take(torch.cat([x[:, self.prefix :], masked], 1), restore)
        x = torch.cat([x[:, : self.prefix], patches], 1) + self.pos_embed
        pixels: Tensor = self.pred(self.norm(self.blocks(x)))[:, self.prefix :]
        return pixels


def shuffle(n: int, rows: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Draw an order (B, n) of n patches for each image of this rank. It does not depend on the number of ranks."""
    noise = torch.rand(sum(rows), n, generator=step_generator(seed, device), device=device)
    return dist.own(noise, rows).argsort(stable=True)  # stable, as equal numbers would have no fixed order


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return the patches of images (B, 3, H, W) as pixels (B, N, 3 p p): row by row, a pixel's channels together."""
    x = images.unflatten(3, (-1, patch[1])).unflatten(2, (-1, patch[0]))  # (B, 3, h, p, w, p)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


@in_float32
def mae_loss(pixels: Tensor, target: Tensor, removed: Tensor) -> Tensor:
    """Return the mean squared error of `pixels` (B, N, 3 p p) over the patches for which `removed` (B, N) is true.

    The `target` pixels of each patch are normalised by their own mean and standard deviation, as for the published
    results (table 1d)."""
    var, mean = torch.var_mean(target, 2, keepdim=True)
    target = (target - mean) / (var + 1e-6).sqrt()
    return ((pixels - target).square().mean(2) * removed).sum() / removed.sum()
