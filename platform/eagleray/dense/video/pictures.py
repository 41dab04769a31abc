"""Show where a backbone attends, and what its patches have in common, frame by frame of a video.

The maps are those of `attention` (figure 1 of Caron et al. 2021 (DINO), arXiv:2104.14294) and the colours those of
`components` (figure 1 of Oquab et al. 2023 (DINOv2), arXiv:2304.07193), with one basis for all frames."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.dense.catalogue import VideoPicture
from eagleray.dense.video.davis import read_frame, resize
from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import explain_failure, in_eval_mode
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.visual import draw
from eagleray.protocols.visual.attention import has_attention, head_maps, maps
from eagleray.protocols.visual.explore import coloured
from eagleray.views.photometric import normalise

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
COLUMNS = 6  # frames in the strip
QUALITY = 80  # of WebP


@torch.inference_mode()
@in_eval_mode
def video(backbone: Backbone, data: Path, settings: VideoPicture, workspace: Workspace) -> Outcome:
    """Draw the attention of the last block and the principal components of the patches for the frames of a video.

    `data` is a folder of frames, which are ordered by name. One basis of components serves all frames, so a colour
    means the same in all of them. The attention is the mean over the heads of what the class token attends to, or the
    patch in the middle of a model without one, on one scale for all frames; a backbone whose attention cannot be read
    has none. Six frames make a strip, and all of them an animated WebP with `rate` frames a second. Measured is the
    share of the variance of all patches, in percent, that three components hold.

    Raises UserError when there are fewer than two frames, one cannot be read, they differ in size, or the backbone
    cannot process them."""
    paths = frame_files(data, settings.limit)
    frames, heats, patches, grid = described(backbone, paths, settings.size)
    _, _, colours, variance = coloured(patches, grid)
    overlays = {"frame": [draw.pixels(x) for x in frames]}
    if heats:
        largest = torch.stack(heats).max()
        overlays["attention"] = [draw.heat_overlay(x, heat, largest) for x, heat in zip(frames, heats, strict=True)]
    overlays["components"] = [draw.colour_overlay(x, c) for x, c in zip(frames, colours, strict=True)]
    drawn = np.unique(np.linspace(0, len(frames) - 1, COLUMNS).round().astype(int))
    rows = {name: [draw.Tile(images[i], paths[i].stem) for i in drawn] for name, images in overlays.items()}
    out = workspace.out
    what = "Attention of the last block, and principal" if heats else "Principal"
    strip = draw.sheet(rows, out / "video.png", f"{what} components of the patches of {len(frames)} frames together")
    animation = animate(list(zip(*overlays.values(), strict=True)), out / "video.webp", settings.rate)
    workspace.note(
        f"video: {len(frames)} frames, three components hold {100 * variance:.1f} % of the variance of their patches"
    )
    details = {"size": settings.size, "frames": len(frames), "grid": f"{grid[0]} x {grid[1]}", "rate": settings.rate}
    return Outcome({"video/variance": 100 * variance}, details, (strip, animation))


def frame_files(folder: Path, limit: int) -> list[Path]:
    """Return at most `limit` frames of a folder, evenly spread, in the order of their names. Raises UserError for fewer
    than two."""
    if not folder.is_dir():
        raise UserError(f"--frames {folder}: no such folder; expected the frames of a video, ordered by name")
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)
    if len(files) < 2:
        raise UserError(f"--frames {folder}: found {len(files)} images ({' '.join(SUFFIXES)}); expected two or more")
    return [files[i] for i in np.unique(np.linspace(0, len(files) - 1, min(limit, len(files))).round().astype(int))]


def described(
    backbone: Backbone, paths: Sequence[Path], size: int
) -> tuple[list[Tensor], list[Tensor], Tensor, tuple[int, int]]:
    """Return the resized frames (3, H, W), uint8, the attention (h, w) of each, or none where it cannot be read, the
    patch tokens (T, N, D) of all T frames, and their grid (h, w)."""
    device = next(backbone.parameters()).device
    frames, heats, patches, grid = list[Tensor](), list[Tensor](), list[Tensor](), (0, 0)
    for path in paths:
        resized = resize(backbone, read_frame(path), size)
        shape = resized.shape[2:]
        if frames and shape != frames[0].shape[1:]:
            raise UserError(f"{path}: differs in size from the first frame, {paths[0].name}")
        frames.append(resized.round().clamp(0, 255).byte()[0])
        x = normalise(frames[-1][None], device)
        with explain_failure(backbone, f"cannot take frames of {shape[1]} x {shape[0]} pixels"):
            features = backbone(x)
            if has_attention(backbone):
                attended = maps(backbone, x)
                heats.append(head_maps(attended)[0].mean(0).view(attended.grid).float().cpu())
        patches.append(features.patches[0].float().cpu())
        grid = features.grid
    return frames, heats, torch.stack(patches), grid


def animate(rows: Sequence[Sequence[draw.Pixels]], path: Path, rate: int) -> Path:
    """Write an animated WebP with `rate` frames a second, each of which is a row of images side by side."""
    pages = [Image.fromarray((np.concatenate(row, 1).clip(0, 1) * 255).round().astype(np.uint8)) for row in rows]
    pages[0].save(path, save_all=True, append_images=pages[1:], duration=round(1000 / rate), loop=0, quality=QUALITY)
    return path
