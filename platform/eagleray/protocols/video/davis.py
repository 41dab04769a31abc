"""Propagate the masks of a video's first frame from frame to frame by the similarity of patches alone, on DAVIS 2017
and 2016. Caron et al. 2021 (DINO), arXiv:2104.14294, section 4.2.1, after Jabri et al. 2020; with the last block's
tokens before the norm, as in SelfPatch, Yun et al. 2022."""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.data.decode import BadImage, decode
from eagleray.models.backbone import Backbone
from eagleray.models.stages import stage_outputs, stages
from eagleray.protocols.eval_mode import explain_failure, in_eval_mode
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.video.measures import boundary, region
from eagleray.protocols.visual import draw
from eagleray.views.photometric import normalise_

LISTS = ("2017", "2016", "480p")  # folders of ImageSets; what is not 2017's has one object, the foreground
MULTIPLE = 64  # the long side is cut down to one, in pixels
TEMPERATURE = 0.1
CHUNK = 512  # patches whose likeness to all others is in memory at a time
ROWS, BINS = 30, 4  # of the colour histograms: cells from top to bottom, as of a ViT/16 at 480p; bins of each colour
SHOWN = 5  # frames of a picture

Masks = NDArray[np.uint8]  # (H, W) numbers of objects, 0 for the background
Describe = Callable[[Tensor], tuple[Tensor, tuple[int, int]]]  # a frame (3, H, W), uint8, to (N, D) and its grid


class Video(NamedTuple):
    """T frames and a mask of each; with `binary`, all objects are one."""

    name: str
    frames: list[Path]
    masks: list[Path]
    binary: bool


@torch.inference_mode()
@in_eval_mode
def davis(
    backbone: Backbone,
    data: str | Path,
    *,
    out: Path,
    note: Callable[[str], None] = print,
    split: str = "val",
    size: PositiveInt = 480,
    n_last_frames: NonNegativeInt = 7,
    topk: PositiveInt = 5,
    size_mask_neighborhood: NonNegativeInt = 12,
) -> Outcome:
    """J, F and J&F in percent, per sequence and as means over objects, beside those of colour histograms in the
    backbone's place, and a picture of each sequence. `size` is the frames' short side in pixels. Raises UserError."""
    found = videos(Path(data), split)
    described: dict[str, Describe] = {"": functools.partial(tokens, backbone, size=size), "colours_": colours}
    walk = {"n_last_frames": n_last_frames, "topk": topk, "size_mask_neighborhood": size_mask_neighborhood}
    scores: dict[str, list[NDArray[np.float64]]] = {prefix: [] for prefix in described}
    numbers: dict[str, float] = {}
    pictures = []
    out.mkdir(parents=True, exist_ok=True)
    for video in found:
        rows: dict[str, list[draw.Tile]] = {}
        for prefix, describe in described.items():
            each, rows[prefix] = follow(describe, video, **walk)
            scores[prefix].append(each)
            numbers |= percent(f"davis/{video.name}/{prefix}", each)
        ours, plain = (numbers[f"davis/{video.name}/{prefix}J&F"] for prefix in described)
        note(f"davis {video.name}: J&F {ours:.1f}, colour histograms {plain:.1f}")
        labels = {"": f"backbone\nJ&F {ours:.1f}", "colours_": f"colours\nJ&F {plain:.1f}"}
        title = f"{video.name}: objects followed from the first frame on; the white line is the truth"
        pictures.append(draw.sheet({labels[p]: row for p, row in rows.items()}, out / f"davis-{video.name}.png", title))
    means = {
        k: v for prefix, parts in scores.items() for k, v in percent(f"davis/{prefix}", np.concatenate(parts)).items()
    }
    frames = sum(len(video.frames) for video in found)
    settings = {**walk, "temperature": TEMPERATURE, "size": size, "split": split}
    return Outcome(means | numbers, {**settings, "sequences": len(found), "frames": frames}, tuple(pictures))


def percent(prefix: str, scores: NDArray[np.float64]) -> dict[str, float]:
    """Means in percent over objects (n, 2), J before F."""
    j, f = (100 * scores.mean(0)).tolist()
    return {f"{prefix}J&F": (j + f) / 2, f"{prefix}J": j, f"{prefix}F": f}


def videos(data: Path, split: str) -> list[Video]:
    """The sequences that a list names, such as val, or 2016/val where several have that name. Raises UserError."""
    if not data.is_dir():
        raise UserError(f"{data}: no such folder; expected DAVIS's, with JPEGImages/, Annotations/ and ImageSets/")
    places = [data / "ImageSets" / part / f"{split}.txt" for part in ("", *LISTS)]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        known = sorted(str(p.relative_to(data / "ImageSets").with_suffix("")) for p in data.glob("ImageSets/*/*.txt"))
        raise UserError(f"{data}: no ImageSets/*/{split}.txt; there are: {', '.join(known) or 'none'}")
    lines = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    names = dict.fromkeys(Path(x).parent.name if "/" in x else x for x in lines)  # 2016's own list names every frame
    if not names:
        raise UserError(f"{path}: names no sequence")
    return [video(data, name, binary=path.parent.name != "2017") for name in names]


def video(data: Path, name: str, *, binary: bool) -> Video:
    """Raises UserError when frames or masks are not all there."""
    frames = sorted((data / "JPEGImages" / "480p" / name).glob("*.jpg"))
    masks = [data / "Annotations" / "480p" / name / f"{frame.stem}.png" for frame in frames]
    if len(frames) < 3:
        raise UserError(f"{data}/JPEGImages/480p/{name}: {len(frames)} frames; the first and last do not count")
    if missing := [m for m in masks if not m.is_file()]:
        raise UserError(f"{missing[0]}: no such mask ({len(missing)} of {len(masks)} are missing)")
    return Video(name, frames, masks, binary)


def follow(describe: Describe, video: Video, **settings: int) -> tuple[NDArray[np.float64], list[draw.Tile]]:
    """J and F of each object (n, 2), means over all frames but the first, which is given, and the last; and some frames
    with what was found there. Raises UserError."""
    truth = read_mask(video.masks[0], video.binary)
    objects = np.unique(truth[truth > 0])
    if not len(objects):
        raise UserError(f"{video.masks[0]}: no object to follow in the first frame")
    shown = np.linspace(0, len(video.frames) - 1, SHOWN).round().astype(int)
    scores, tiles = [], []
    found = propagate_masks(describe, video, truth, objects, **settings)
    for at, mask in enumerate(found):
        truth = read_mask(video.masks[at], video.binary)
        if mask.shape != truth.shape:
            sizes = " and ".join(f"{w} x {h}" for h, w in (truth.shape, mask.shape))
            raise UserError(f"{video.masks[at]}: the mask and its frame have {sizes} pixels; expected the same")
        if 0 < at < len(video.frames) - 1:
            pairs = [(mask == o, truth == o) for o in objects]
            scores.append([(region(*pair), boundary(*pair)) for pair in pairs])
        if at in shown:
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
    """Masks of all frames, the given one first. The first frame and the last n are kept, and no others."""
    numbers = np.concatenate([[0], objects]).astype(np.uint8)
    x, grid = describe(read_frame(video.frames[0]))
    near = neighbourhood(grid, size_mask_neighborhood).to(x.device)
    small = np.array(Image.fromarray(first).resize(grid[::-1], Image.Resampling.NEAREST))
    start = x, torch.from_numpy(small == numbers[:, None, None]).float().to(x.device)  # (C, h, w)
    last: deque[tuple[Tensor, Tensor]] = deque(maxlen=n_last_frames)
    yield first
    for path in video.frames[1:]:
        image = read_frame(path)
        x, now = describe(image)
        if now != grid:
            raise UserError(f"{path}: is of another size than the first frame of {video.name}")
        context, labels = (torch.stack(part) for part in zip(start, *last, strict=True))
        soft = propagate(x, context, labels, near, topk=topk)
        last.append((x, soft))
        # The protocol enlarges to the resized frame, and to the frame itself by the nearest pixel: less than one apart.
        large = F.interpolate(soft[None], image.shape[1:], mode="bilinear")[0]
        yield numbers[min_max(large).argmax(0).cpu().numpy()]


def propagate(
    target: Tensor, context: Tensor, labels: Tensor, near: Tensor, *, topk: int, temperature: float = TEMPERATURE
) -> Tensor:
    """Soft labels (C, h, w) of a frame of tokens (N, D), from T others' tokens (T, N, D) and labels (T, C, h, w): each
    patch takes the mean of its `topk` likest in all of them together, weighed by exp(cosine / temperature), among those
    that `near` (N, N) allows. Ties with the last of them are kept."""
    frames, classes, h, w = labels.shape
    known = labels.transpose(0, 1).reshape(classes, -1)  # (C, T * N)
    bank = F.normalize(context, dim=-1).flatten(0, 1)  # (T * N, D)
    parts = []
    for rows in torch.arange(len(target), device=target.device).split(CHUNK):
        cosine = F.normalize(target[rows], dim=-1) @ bank.T  # (n, T * N)
        cosine.masked_fill_(~near[rows].repeat(1, frames), -torch.inf)
        least = cosine.topk(min(topk, cosine.shape[1]), dim=1).values[:, -1:]
        weight = (cosine.masked_fill_(cosine < least, -torch.inf) / temperature).softmax(1)
        parts.append(weight @ known.T)  # (n, C)
    return torch.cat(parts).T.reshape(classes, h, w)


def neighbourhood(grid: tuple[int, int], reach: int) -> Tensor:
    """Which patches (N, N) lie at most `reach` rows and columns apart; all do where it is 0."""
    rows, columns = (x.flatten() for x in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    apart = torch.maximum((rows[:, None] - rows).abs(), (columns[:, None] - columns).abs())
    return apart <= reach if reach else torch.ones_like(apart, dtype=torch.bool)


def min_max(soft: Tensor) -> Tensor:
    """Labels (C, H, W), each class from 0 to 1; a class that is nowhere stays so."""
    low, high = soft.amin((1, 2), keepdim=True), soft.amax((1, 2), keepdim=True)
    scaled = (soft - low) / (high - low).where(high > low, 1.0)
    return torch.where(high > 0, scaled, soft)


def tokens(backbone: Backbone, frame: Tensor, *, size: int) -> tuple[Tensor, tuple[int, int]]:
    """Patches (N, D) of a frame resized as the protocol says: a ViT's last block's before the norm, others' as they
    are."""
    device = next(backbone.parameters()).device
    step = getattr(getattr(backbone.model, "patch_embed", None), "patch_size", (1,))[0]
    h, w = frame.shape[1:]
    resized = F.interpolate(frame[None].float(), frame_shape(h, w, size, step), mode="bilinear", antialias=True)
    lacks = f"cannot take frames of {resized.shape[3]} x {resized.shape[2]} pixels"
    with explain_failure(backbone, lacks), stage_outputs(stages(backbone.model)[-1:]) as seen:
        features = backbone(normalise_(resized.clamp_(0, 255).div_(255).to(device)))
    n = features.patches.shape[1]
    return (seen[-1][0, -n:] if seen[-1].ndim == 3 else features.patches[0]).float(), features.grid


def frame_shape(height: int, width: int, size: int, step: int) -> tuple[int, int]:
    """Height and width: the short side `size`, the long one cut down to a multiple of 64; both to one of the patch
    size `step`, in pixels."""
    long = max(size * max(height, width) // min(height, width) // MULTIPLE * MULTIPLE, size)
    short, long = (x // step * step for x in (size, long))
    return (short, long) if height <= width else (long, short)


def colours(frame: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Square roots of the colour histograms (N, D) of a frame's cells: their cosine is Bhattacharyya's coefficient."""
    _, height, width = frame.shape
    grid = ROWS, round(ROWS * width / height)
    red, green, blue = (frame.long() * BINS) >> 8
    colour = (red * BINS + green) * BINS + blue  # (H, W)
    row, column = (torch.arange(n) * cells // n for n, cells in zip((height, width), grid, strict=True))
    cell = row[:, None] * grid[1] + column
    counts = torch.bincount((cell * BINS**3 + colour).flatten(), minlength=grid[0] * grid[1] * BINS**3)
    return counts.view(-1, BINS**3).float().sqrt(), grid


def read_frame(path: Path) -> Tensor:
    """(3, H, W), uint8. Raises UserError."""
    try:
        return decode(path.read_bytes())
    except BadImage as e:
        raise UserError(f"{path}: cannot be read ({e})") from None


def read_mask(path: Path, binary: bool) -> Masks:
    """Numbers of objects: a palette's, or grey values. Raises UserError."""
    try:
        with Image.open(path) as image:
            mask = np.array(image if image.mode in ("P", "L") else image.convert("L"))
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({type(e).__name__})") from None
    return (mask > 0).astype(np.uint8) if binary else mask
