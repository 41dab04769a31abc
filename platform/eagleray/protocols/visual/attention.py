"""Show what the heads in the last block of a ViT or a Swin transformer attend to.

The maps are those of figures 1 and 3 of Caron et al. 2021 (DINO), arXiv:2104.14294. The entropies of the heads follow
appendix C of Li et al. 2021 (EsViT), arXiv:2106.09785."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from eagleray.base.contexts import replaced
from eagleray.base.errors import UserError
from eagleray.base.plotting import BLUE, DPI, GREY
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.catalogue import Attention
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import no_image_error, subset
from eagleray.protocols.image_batches import batches
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.visual import draw
from eagleray.views.photometric import normalise

PICTURES = 4  # largest number of images in a picture
MIDDLE = (0.5, 0.5)


Point = tuple[float, float]  # x and y, shares of the image's width and height


class Maps(NamedTuple):
    """The attention maps of B images with N patches. Each row of a map, the attention of one query, sums to one."""

    patches: Tensor  # (B, heads, N, N) row: patch as query; column: patch as key
    token: Tensor | None  # (B, heads, N) attention of the class token to the patches; None without one
    grid: tuple[int, int]


@torch.inference_mode()
@in_eval_mode
def attention(backbone: Backbone, index: Index, settings: Attention, workspace: Workspace) -> Outcome:
    """Measure and draw the attention of each head in the last block.

    Two numbers are measured: the entropy in bits of a patch's attention, for each head and as a mean over heads, and
    the percentage of patches that together hold `mass` of a map. They are means over the images. Four pictures are
    drawn: (1) the maps of `heads` heads, evenly spread from the highest entropy to the lowest; (2) the fewest patches
    that hold `mass` of each map; (3) the attention of the patches at `points`, as a mean over heads; (4) the entropies
    of all heads (EsViT, figures 6 and 10 to 12). A map is the attention of the patch at `query` or, by default, of the
    class token or, in a model without one, of the patch in the middle. Raises UserError when the attention of the
    backbone cannot be read, or no image decodes."""
    check_attention(backbone)
    size, mass = settings.size, settings.mass
    queries = points_of("points", settings.points)
    asked = query_of(settings.query)
    device = next(backbone.parameters()).device
    entropies, shares = list[Tensor](), list[float]()
    samples: list[Any] = []
    images = subset(np.arange(len(index)), settings.limit)
    for _, crops in batches(index, images, size, size, 1):  # one image at a time, to save memory: a map has N^2 numbers
        attended = maps(backbone, normalise(crops, device))
        entropies.append(entropy(attended.patches).mean(-1)[0].cpu())  # (heads,) mean over query patches
        shares.append(fewest_patches(head_maps(attended, asked)[0], mass).float().mean().item())
        if len(samples) < PICTURES:
            samples.append((crops[0], attended))
    if not samples:
        raise no_image_error(index)
    each = torch.stack(entropies)  # (images, heads) in bits
    bits = each.mean(0)
    numbers = {"attention/entropy": bits.mean().item(), "attention/patches_kept": 100 * float(np.mean(shares))}
    numbers |= {f"attention/entropy_head{i}": b for i, b in enumerate(bits.tolist())}
    grid = samples[0][1].grid
    workspace.note(f"attention: {len(entropies)} images, entropy {bits.min():.2f} to {bits.max():.2f} bits by head")
    details = {"size": size, "images": len(entropies), "mass": mass, "grid": f"{grid[0]} x {grid[1]}"}
    out = workspace.out
    order = bits.argsort(descending=True)
    picked = order[torch.linspace(0, len(order) - 1, min(settings.heads, len(order))).round().long()].tolist()
    drawn = *pictures(samples, bits, picked, asked, queries, mass, out), draw_entropies(each, order.tolist(), out)
    return Outcome(numbers, details, drawn)


def points_of(setting: str, points: Sequence[float]) -> tuple[Point, ...]:
    """Return the points (x, y) of a flat list of numbers. Raises UserError if it is empty or has an odd length."""
    if not points or len(points) % 2:
        raise UserError(f"attention: {setting}={list(points)}: expected x and y of each point, as shares of the sides")
    return tuple(zip(points[::2], points[1::2], strict=True))


def query_of(query: Sequence[float]) -> Point | None:
    """Return the point (x, y) of `query`, or None if it is empty. Raises UserError when it is not a single point."""
    if len(query) > 2:
        raise UserError(f"attention: query={list(query)}: expected x and y of one point; `points` takes several")
    return points_of("query", query)[0] if query else None


def pictures(
    samples: list[tuple[Tensor, Maps]],
    bits: Tensor,
    picked: Sequence[int],
    asked: Point | None,
    queries: Sequence[Point],
    mass: float,
    out: Path,
) -> tuple[Path, ...]:
    """Draw three sheets with a row for each image, and return their paths: the attention maps of the heads `picked`;
    the fewest patches that hold the share `mass` of each map; and the attention of the patches at `queries`. `bits`
    (heads,) are the entropies of the heads, in bits. See `head_maps` for `asked`."""
    names = [f"head {h}: {bits[h]:.1f} bits" for h in picked]
    heads: dict[str, list[draw.Tile]] = {}
    masked: dict[str, list[draw.Tile]] = {}
    points: dict[str, list[draw.Tile]] = {}
    for i, (image, attended) in enumerate(samples):
        row, point = head_maps(attended, asked)[0], () if (at := query_point(attended, asked)) is None else [at]
        start = draw.Tile(draw.pixels(image), "", point)
        each = [(name, row[h].view(attended.grid)) for name, h in zip(names, picked, strict=True)]
        heads[f"image {i}"] = [start, *(draw.Tile(draw.heat_overlay(image, m), n, point) for n, m in each)]
        masks = [(n, fewest_patches(m.flatten(), mass).view(attended.grid)) for n, m in each]
        masked[f"image {i}"] = [start, *(draw.Tile(draw.darken(image, k), n) for n, k in masks)]
        tiles = [(q, attended.patches[0, :, patch_at(q, attended.grid)].mean(0).view(attended.grid)) for q in queries]
        points[f"image {i}"] = [
            draw.Tile(draw.pixels(image), "query points", queries),
            *(draw.Tile(draw.heat_overlay(image, m), f"query {x:g}, {y:g}", [(x, y)]) for (x, y), m in tiles),
        ]
    who = "the class token" if query_point(samples[0][1], asked) is None else "the patch under the cross"
    title = f"Last block: attention of {who}, by head, with the entropy of all patches' attention"
    return (
        draw.sheet(heads, out / "attention-heads.png", title),
        draw.sheet(masked, out / "attention-kept.png", f"Fewest patches with {mass:.0%} of the attention of {who}"),
        draw.sheet(
            points,
            out / "attention-queries.png",
            "Last block: attention of the patches under the crosses, mean over heads",
        ),
    )


def draw_entropies(bits: Tensor, order: Sequence[int], out: Path) -> Path:
    """Draw a bar for each head, in this `order`: the mean of its entropies `bits` (images, heads), with their standard
    deviation."""
    from matplotlib.figure import Figure

    mean, deviation = bits.mean(0)[order], bits.std(0, correction=0)[order]
    figure = Figure(figsize=(max(4.0, 1.2 + 0.3 * len(order)), 2.6), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    places = range(len(order))
    axes.bar(places, mean.tolist(), color=BLUE, yerr=deviation.tolist(), error_kw={"ecolor": GREY, "elinewidth": 1})
    axes.set_xticks(places, [str(h) for h in order], fontsize=8)
    axes.set(xlabel="head of the last block", ylabel="entropy, bits")
    axes.set_title(f"Entropy of the attention, mean and deviation over {len(bits)} images", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path := out / "attention-entropy.png")
    return path


def maps(backbone: Backbone, images: Tensor) -> Maps:
    """Read the attention maps of normalised images (B, 3, H, W).

    Keys that are not patches, such as a class token, are left out, and the rows are rescaled to sum to one. Raises
    UserError for an architecture whose attention cannot be read."""
    check_attention(backbone)
    if isinstance(backbone.model, SwinTransformer):
        rows, grid = swin_attention(backbone, images)
        return Maps(rows, None, grid)
    ph, pw = backbone.model.patch_embed.patch_size
    grid = images.shape[2] // ph, images.shape[3] // pw
    rows = backbone.attention(images)[..., -grid[0] * grid[1] :]
    rows = rows / rows.sum(-1, keepdim=True)
    has_token = getattr(backbone.model, "cls_token", None) is not None
    return Maps(rows[:, :, -rows.shape[-1] :], rows[:, :, 0] if has_token else None, grid)


def check_attention(backbone: Backbone) -> None:
    """Raise UserError for a model whose attention cannot be read."""
    if not isinstance(backbone.model, VisionTransformer | SwinTransformer):
        name = type(backbone.model).__name__
        raise UserError(f"attention: {name} has no attention that can be read; expected a ViT or a Swin transformer")


def head_maps(attended: Maps, asked: Point | None = None) -> Tensor:
    """Return each head's map (B, heads, N): the attention of the patch at `asked`; None: as `query_point` chooses."""
    point = query_point(attended, asked)
    if point is None:
        assert attended.token is not None
        return attended.token
    return attended.patches[:, :, patch_at(point, attended.grid)]


def query_point(attended: Maps, asked: Point | None) -> Point | None:
    """Return the point (x, y) of the patch that is the query; None if the class token is the query.

    It is `asked` if given. Otherwise it is the class token or, in a model without one, the middle of the image."""
    return asked if asked is not None or attended.token is not None else MIDDLE


def patch_at(point: Point, grid: tuple[int, int]) -> int:
    """Return the row-major index of the patch at a point (x, y), given as fractions of the image's width and height."""
    x, y = (min(int(share * n), n - 1) for share, n in zip(point, reversed(grid), strict=True))
    return y * grid[1] + x


def entropy(rows: Tensor) -> Tensor:
    """Return the entropy in bits (...,) of distributions (..., N)."""
    return torch.special.entr(rows).sum(-1) / np.log(2)


def fewest_patches(rows: Tensor, mass: float) -> Tensor:
    """Return a mask (..., N) of the fewest patches that together hold at least `mass` of each distribution (..., N)."""
    values, order = rows.sort(dim=-1, descending=True, stable=True)
    before = F.pad(values.double().cumsum(-1)[..., :-1], (1, 0))  # summed attention of all patches with more attention
    return torch.zeros_like(rows, dtype=torch.bool).scatter(-1, order, before < mass * values.double().sum(-1, True))


def swin_attention(backbone: Backbone, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the attention maps (B, heads, N, N) of a Swin transformer's last block, and the grid of its N patches.

    Attention is computed within windows, so it is 0 between patches of different windows."""
    block = backbone.model.layers[-1].blocks[-1]
    rows: list[Tensor] = []
    hook = block.attn.softmax.register_forward_hook(lambda _, __, result: rows.append(result))
    # The hook reads the output of the softmax, which fused attention, timm's or ours, would bypass.
    with hook, replaced(block.attn, "__class__", WindowAttention), replaced(block.attn, "fused_attn", False):
        h, w = backbone(images).grid
    window = windows(block, (h, w)).to(images.device)  # (W, T) patches, numbered from 1; 0: padding
    within = rows[-1].unflatten(0, (len(images), len(window))).transpose(1, 2)  # (B, heads, W, T, T)
    n = h * w
    position = (window[:, :, None] * (n + 1) + window[:, None, :]).flatten()
    full = within.new_zeros(*within.shape[:2], (n + 1) ** 2)
    full.index_add_(2, position, within.flatten(2))
    full = full.unflatten(2, (n + 1, n + 1))[:, :, 1:, 1:]
    return full / full.sum(-1, keepdim=True), (h, w)


def windows(block: Any, grid: tuple[int, int]) -> Tensor:
    """Return which patches are in each window of a block: (W, T) for W windows of T patches.

    Patches are numbered from 1, row by row; 0 stands for padding. To find out, the block is run on these numbers
    instead of features, because models differ in the order in which they pad and shift."""
    recorded: list[Tensor] = []

    class Recorder(nn.Module):
        """Replaces the attention layer, and records its input."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            recorded.append(x)
            return x

    with replaced(block, "attn", Recorder()):
        block._attn(torch.arange(1.0, 1 + grid[0] * grid[1]).view(1, *grid, 1))
    return recorded[0].squeeze(-1).round().long()
