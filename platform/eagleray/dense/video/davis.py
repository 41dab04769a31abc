"""Propagate the masks of a video's first frame by the similarity of patches alone, on DAVIS 2017 and 2016.

The protocol is that of Caron et al. 2021 (DINO), arXiv:2104.14294, section 4.2.1, after Jabri et al. 2020. The features
of patches are the tokens of the last block before the norm, as in SelfPatch, Yun et al. 2022, arXiv:2206.07990."""

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from eagleray.base import dist
from eagleray.base.errors import UserError, explained
from eagleray.base.progress import seconds_left
from eagleray.data.decode import BadImage, decode
from eagleray.data.pixels import decoding, open_allowed
from eagleray.dense.catalogue import Davis
from eagleray.dense.video.measures import boundary, region
from eagleray.models.backbone import Backbone
from eagleray.models.stages import stage_outputs, stages
from eagleray.protocols.eval_mode import explain_failure, in_eval_mode
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.visual import draw
from eagleray.views.photometric import normalise_

LISTS = ("2017", "2016", "480p")  # folders in ImageSets; in all but 2017, all objects of a mask count as one
MULTIPLE = 64  # the long side of a frame is rounded down to a multiple of this, in pixels
TEMPERATURE = 0.1
TILE = 12  # similarities are computed for tiles of TILE x TILE patches at a time
ROWS, BINS = 30, 4  # colour histograms: rows of cells (as for a ViT/16), bins per channel
COLUMNS = 5  # number of frames in the picture of a sequence

Masks = NDArray[np.uint8]  # (H, W) number of each pixel's object; 0: background
Area = tuple[slice, slice]  # rows and columns of a grid of patches
# A function that maps a frame (3, H, W), uint8, to the features (N, D) of its cells, and their grid (h, w).
Describe = Callable[[Tensor], tuple[Tensor, tuple[int, int]]]


class Video(NamedTuple):
    """The files of T frames and of their true masks.

    If `binary`, all objects in a mask count as a single object."""

    name: str
    frames: list[Path]
    masks: list[Path]
    binary: bool


class Measured(NamedTuple):
    """The scores and the picture of a sequence.

    `scores` has J and F of n objects (n, 2): under the key "" for the backbone's patches, and under "colours_" for
    colour histograms."""

    name: str
    scores: dict[str, NDArray[np.float64]]
    picture: Path


def davis(backbone: Backbone, data: Path, protocol: Davis, workspace: Workspace) -> Outcome:
    """Measure J, F and J&F in percent for each sequence, and their means over all objects.

    All are measured for the backbone's patches and, as a baseline, for colour histograms. A picture is drawn of each
    sequence. Several ranks share the sequences; rank 0 returns the outcome, and has all pictures. Raises UserError when
    the data are incomplete, or the backbone cannot process them."""
    sequences = videos(data, protocol.split)
    settings = protocol.model_dump(exclude={"split"})
    mine = sequences[dist.rank() :: dist.size()]
    measured: list[Measured] = []
    began = time.monotonic()
    for video in mine:
        measured.append(one := measure(backbone, video, workspace.out, **settings))
        ours, plain = (percent("", scores)["J&F"] for scores in one.scores.values())
        left = seconds_left(len(measured), len(mine), start=0, seconds=time.monotonic() - began)
        progress = f"sequence {len(measured)}/{len(mine)}, ETA {left:.0f} s"
        workspace.note(f"davis {one.name}: J&F {ours:.1f}, colour histograms {plain:.1f}  ({progress})")
    parts = dist.gather_at_zero([(one, one.picture.read_bytes()) for one in measured])
    if parts is None:
        return Outcome({})
    by_name = {one.name: (one, picture) for part in parts for one, picture in part}
    ordered = [by_name[video.name][0] for video in sequences]
    pictures = [workspace.out / one.picture.name for one in ordered]
    for path, video in zip(pictures, sequences, strict=True):
        path.write_bytes(by_name[video.name][1])
    numbers: dict[str, float] = {}
    for prefix in ordered[0].scores:
        numbers |= percent(f"davis/{prefix}", np.concatenate([one.scores[prefix] for one in ordered]))
    for one in ordered:
        for prefix, scores in one.scores.items():
            numbers |= percent(f"davis/{one.name}/{prefix}", scores)
    frames = sum(len(video.frames) for video in sequences)
    details = {**settings, "temperature": TEMPERATURE, "split": protocol.split}
    details |= {"sequences": len(sequences), "frames": frames}
    return Outcome(numbers, details, tuple(pictures))


@torch.inference_mode()
@in_eval_mode
def measure(backbone: Backbone, video: Video, out: Path, *, size: int, **settings: int) -> Measured:
    """Return J and F of one sequence for the backbone and for colour histograms, and draw its picture into `out`.

    Raises UserError when the first mask has no object, or a mask and its frame differ in size."""
    descriptors: dict[str, Describe] = {"": functools.partial(tokens, backbone, size=size), "colours_": colours}
    scores: dict[str, NDArray[np.float64]] = {}
    rows: dict[str, list[draw.Tile]] = {}
    for (prefix, describe), what in zip(descriptors.items(), ("backbone", "colours"), strict=True):
        scores[prefix], tiles = evaluate_video(describe, video, **settings)
        rows[f"{what}\nJ&F {percent('', scores[prefix])['J&F']:.1f}"] = tiles
    title = f"{video.name}: masks propagated from the first frame; the white line is the truth"
    return Measured(video.name, scores, draw.sheet(rows, out / f"davis-{video.name}.png", title))


def percent(prefix: str, scores: NDArray[np.float64]) -> dict[str, float]:
    """Return the means of J, F and J&F in percent by name, from J and F of n objects: `scores` (n, 2)."""
    j, f = (100 * scores.mean(0)).tolist()
    return {f"{prefix}J&F": (j + f) / 2, f"{prefix}J": j, f"{prefix}F": f}


def videos(data: Path, split: str) -> list[Video]:
    """Return the sequences of a split, such as val, or 2016/val if several folders of ImageSets have a list val.txt.

    Raises UserError when the list, frames or masks are missing."""
    if not data.is_dir():
        raise UserError(f"--davis {data}: no such folder; expected DAVIS with JPEGImages/, Annotations/ and ImageSets/")
    lists = [data / "ImageSets" / part / f"{split}.txt" for part in ("", *LISTS)]
    path = next((p for p in lists if p.is_file()), None)
    if path is None:
        known = sorted(str(p.relative_to(data / "ImageSets").with_suffix("")) for p in data.glob("ImageSets/*/*.txt"))
        raise UserError(
            f"--split {split}: {data} has no ImageSets/*/{split}.txt; its splits are {', '.join(known) or 'none'}"
        )
    lines = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    names = dict.fromkeys(Path(x).parent.name if "/" in x else x for x in lines)  # the list of 2016 names every frame
    if not names:
        raise UserError(f"{path}: expected names of sequences, found none")
    return [video(data, name, binary=path.parent.name != "2017") for name in names]


def video(data: Path, name: str, *, binary: bool) -> Video:
    """Return the frames and masks of a sequence. With `binary`, all objects count as one.

    Raises UserError when the sequence has fewer than three frames or a mask is missing."""
    frames = sorted((data / "JPEGImages" / "480p" / name).glob("[!.]*.jpg"))  # not macOS's `._NAME.jpg`
    masks = [data / "Annotations" / "480p" / name / f"{frame.stem}.png" for frame in frames]
    if len(frames) < 3:
        raise UserError(f"{data}/JPEGImages/480p/{name}: expected three frames or more, found {len(frames)}")
    if missing := [m for m in masks if not m.is_file()]:
        raise UserError(f"{missing[0]}: no such file; {len(missing)} of {len(masks)} masks are missing")
    return Video(name, frames, masks, binary)


def evaluate_video(describe: Describe, video: Video, **settings: int) -> tuple[NDArray[np.float64], list[draw.Tile]]:
    """Return J and F of each object (n, 2), means over all frames but the first and the last, and tiles for a picture.

    The tiles show some frames with the predicted masks. Raises UserError when the first frame has no object, or a mask
    and its frame differ in size."""
    truth = read_mask(video.masks[0], video.binary)
    objects = np.unique(truth[truth > 0])
    if not len(objects):
        raise UserError(f"{video.masks[0]}: the mask of the first frame has no object")
    drawn = np.linspace(0, len(video.frames) - 1, COLUMNS).round().astype(int)
    scores, tiles = [], []
    masks = propagate_masks(describe, video, truth, objects, **settings)
    for at, mask in enumerate(masks):
        truth = read_mask(video.masks[at], video.binary)
        if mask.shape != truth.shape:
            sizes = " and ".join(f"{w} x {h}" for h, w in (truth.shape, mask.shape))
            raise UserError(f"{video.masks[at]}: the mask and its frame have {sizes} pixels; expected equal sizes")
        if 0 < at < len(video.frames) - 1:
            pairs = [(mask == o, truth == o) for o in objects]
            scores.append([(region(*pair), boundary(*pair)) for pair in pairs])
        if at in drawn:
            tiles.append(
                draw.Tile(draw.paint_objects(read_frame(video.frames[at]), mask), f"frame {at}", outline=truth > 0)
            )
    return np.mean(scores, 0), tiles


def propagate_masks(
    describe: Describe,
    video: Video,
    first: Masks,
    objects: NDArray[np.uint8],
    *,
    n_last_frames: int,
    topk: int,
    size_mask_neighborhood: int,
) -> Iterator[Masks]:
    """Yield the mask of every frame, beginning with `first`, the given mask of the first frame.

    Masks are propagated from the first frame and the `n_last_frames` frames before; only their features are in memory.
    Raises UserError when the frames differ in size."""
    numbers = np.concatenate([[0], objects]).astype(np.uint8)
    x, grid = describe(read_frame(video.frames[0]))
    small = np.array(Image.fromarray(first).resize(grid[::-1], Image.Resampling.NEAREST))
    start = x, torch.from_numpy(small == numbers[:, None, None]).float().to(x.device)  # (C, h, w)
    last: deque[tuple[Tensor, Tensor]] = deque(maxlen=n_last_frames)
    yield first
    for path in video.frames[1:]:
        image = read_frame(path)
        x, now = describe(image)
        if now != grid:
            raise UserError(f"{path}: differs in size from the first frame of {video.name}")
        context, labels = (torch.stack(part) for part in zip(start, *last, strict=True))
        soft = propagate(x, context, labels, reach=size_mask_neighborhood, topk=topk)
        last.append((x, soft))
        # The protocol enlarges soft labels to the resized frame first. Without this, edges move by less than a pixel.
        large = F.interpolate(soft[None], image.shape[1:], mode="bilinear")[0]
        yield numbers[min_max(large).argmax(0).cpu().numpy()]


def propagate(
    target: Tensor, context: Tensor, labels: Tensor, *, reach: int, topk: int, temperature: float = TEMPERATURE
) -> Tensor:
    """Return the soft labels (C, h, w) of a frame with tokens `target` (N, D), from those of T other frames.

    The other frames have tokens `context` (T, N, D) and soft labels `labels` (T, C, h, w). The label of a patch is a
    mean over its `topk` most similar patches of all T frames together, weighted by exp(cosine / temperature); patches
    that tie with the last of them are included. Only patches at most `reach` rows and columns apart are compared, or
    all if `reach` is 0."""
    frames, classes, *grid = labels.shape
    reach = reach or max(grid)
    ours = F.normalize(target, dim=-1).unflatten(0, grid)  # (h, w, D)
    theirs = F.normalize(context, dim=-1).unflatten(1, grid)  # (T, h, w, D)
    soft = labels.new_empty(classes, *grid)
    for tile, area in tiles(grid, reach):
        near = neighbourhood(tile, area, reach, target.device)
        cosine = ours[tile].flatten(0, 1) @ theirs[:, *area].flatten(0, 2).T  # (n, T * m)
        cosine.unflatten(1, (frames, -1)).masked_fill_(~near[:, None], -torch.inf)
        least = cosine.topk(min(topk, cosine.shape[1]), dim=1).values[:, -1:]
        weight = (cosine.masked_fill_(cosine < least, -torch.inf) / temperature).softmax(1)
        known = labels[:, :, *area].transpose(0, 1).flatten(1)  # (C, T * m)
        soft[:, *tile] = (known @ weight.T).view_as(soft[:, *tile])
    return soft


def tiles(grid: Sequence[int], reach: int) -> Iterator[tuple[Area, Area]]:
    """Yield the tiles of a grid of patches, each with the area of all patches within `reach` rows and columns of it."""
    spans = [
        [(slice(a, min(a + TILE, n)), slice(max(a - reach, 0), min(a + TILE + reach, n))) for a in range(0, n, TILE)]
        for n in grid
    ]
    for (rows, high), (columns, wide) in itertools.product(*spans):
        yield (rows, columns), (high, wide)


def neighbourhood(tile: Area, area: Area, reach: int, device: torch.device | None = None) -> Tensor:
    """Return a mask (n, m) of which of the m patches of an area are within `reach` of each of the n patches of a
    tile."""

    def close(one: slice, other: slice) -> Tensor:
        ours, theirs = (torch.arange(s.start, s.stop, device=device) for s in (one, other))
        return (ours[:, None] - theirs).abs() <= reach

    rows, columns = map(close, tile, area)
    return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(2).flatten(0, 1)


def min_max(soft: Tensor) -> Tensor:
    """Scale the soft labels (C, H, W) of each class to the range from 0 to 1. A class that is 0 everywhere stays 0."""
    low, high = soft.amin((1, 2), keepdim=True), soft.amax((1, 2), keepdim=True)
    scaled = (soft - low) / (high - low).where(high > low, 1.0)
    return torch.where(high > 0, scaled, soft)


def tokens(backbone: Backbone, frame: Tensor, *, size: int) -> tuple[Tensor, tuple[int, int]]:
    """Resize a frame (3, H, W), uint8, as the protocol does, and return its patch tokens (N, D) and their grid (h, w).

    A ViT's tokens are those of the last block, before the norm. Raises UserError when the backbone cannot process
    frames of this size."""
    device = next(backbone.parameters()).device
    resized = resize(backbone, frame, size)
    lacks = f"cannot take frames of {resized.shape[3]} x {resized.shape[2]} pixels"
    with explain_failure(backbone, lacks), stage_outputs(stages(backbone.model)[-1:]) as seen:
        features = backbone(normalise_(resized.clamp_(0, 255).div_(255).to(device)))
    n = features.patches.shape[1]
    return (seen[-1][0, -n:] if seen[-1].ndim == 3 else features.patches[0]).float(), features.grid


def resize(backbone: Backbone, frame: Tensor, size: int) -> Tensor:
    """Return a frame (3, H, W), uint8, as a batch (1, 3, h, w) of one float image; see `frame_shape` for its size."""
    step = getattr(getattr(backbone.model, "patch_embed", None), "patch_size", (1,))[0]
    height, width = frame.shape[1:]
    shape = frame_shape(height, width, size, step)
    return F.interpolate(frame[None].float(), shape, mode="bilinear", antialias=True)


def frame_shape(height: int, width: int, size: int, step: int) -> tuple[int, int]:
    """Return the height and width of a resized frame in pixels.

    The short side becomes `size`, and the long side is rounded down to a multiple of 64. Then both are rounded down to
    a multiple of the patch size `step`."""
    long = max(size * max(height, width) // min(height, width) // MULTIPLE * MULTIPLE, size)
    short, long = (x // step * step for x in (size, long))
    return (short, long) if height <= width else (long, short)


def colours(frame: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the square roots of the colour histograms (N, D) of a frame's N cells, and the grid (h, w) of the cells.

    The cosine of two such vectors is the Bhattacharyya coefficient of the two histograms."""
    _, height, width = frame.shape
    grid = ROWS, round(ROWS * width / height)
    red, green, blue = (frame.long() * BINS) >> 8
    colour = (red * BINS + green) * BINS + blue  # (H, W) index of each pixel's bin
    row, column = (torch.arange(n) * cells // n for n, cells in zip((height, width), grid, strict=True))
    cell = row[:, None] * grid[1] + column
    counts = torch.bincount((cell * BINS**3 + colour).flatten(), minlength=grid[0] * grid[1] * BINS**3)
    return counts.view(-1, BINS**3).float().sqrt(), grid


def read_frame(path: Path) -> Tensor:
    """Read a frame (3, H, W), uint8.

    Raises UserError when the image does not decode."""
    with explained(f"{path}: cannot be read", BadImage):
        return decode(path.read_bytes())


def read_mask(path: Path, binary: bool) -> Masks:
    """Read the number of each pixel's object (H, W), uint8, 0 for the background, from a mask's palette or grey values.

    If `binary`, all objects become object 1. Raises UserError when the mask does not decode."""
    with explained(f"{path}: cannot be read", BadImage), decoding(), open_allowed(path.read_bytes()) as image:
        mask = np.array(image if image.mode in ("P", "L") else image.convert("L"))
    return (mask > 0).astype(np.uint8) if binary else mask
