"""How many times as fast images are decoded and cropped with `data.decode=scaled`, by megapixels of the photographs.

Each photograph is made of those in `--photographs`, side by side in their own size so that their detail stays, or of
made-up pictures. It is decoded and cropped into ten views of DINO and into two of MoCo v3, on one thread, in turns:

full        as `data.decode=full` does
scaled      as `data.decode=scaled` does: at a half, a quarter or an eighth where every crop is reduced further
pil_draft   the same sizes by PIL's `draft`, as a loader without another package could do it
dali        with --dali, what NVIDIA DALI's CPU pipeline does: whole decoding, then random resized crops of its own

`speedup` is CPU time of full / scaled, `speedup_pil_draft` of full / pil_draft, `speedup_dali` of full / dali, which is
measured in a process and an environment of its own, after the others. `difference` is the mean and the largest
difference of the views' pixels from full decoding, in levels of 255.
"""

import io
import json
import math
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import common
import numpy as np
import synthetic
import torch
from PIL import Image
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data.costs import jpeg_size
from eagleray.data.decode_crops import decode_boxes, factor, reduced
from eagleray.views import sampling
from eagleray.views.crop import crop
from eagleray.views.sampling import Views

VIEWS = {"dino": Views.of(common.DINO), "mocov3": Views.of([View(size=224, scale=(0.08, 1.0), count=2)])}
DALI = "nvidia-dali-cuda120==2.4.0"
QUALITY = 90
SOURCES = 24  # photographs that a large one is made of, at most


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--photographs", type=Path, help="folder of JPEGs; default: made-up pictures")
    parser.add_argument("--megapixels", type=float, nargs="+", default=[0.2, 1, 2, 4, 12])
    parser.add_argument("--images", type=int, default=4, help="of each size in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dali", action="store_true", help=f"beside {DALI}, installed at the first use")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rival = common.environment(DALI, beside=()) if args.dali else None
    tiles = sources(args.photographs)
    result: dict[str, dict[str, object]] = {key: {} for key in ("speedup", "speedup_pil_draft", "ms", "difference")}
    for size in args.megapixels:
        files = [photograph(tiles, size, seed) for seed in range(args.images)]
        for name, views in VIEWS.items():
            ways: dict[str, Callable[..., object]] = {
                "full": partial(ours, False),
                "scaled": partial(ours, True),
                "pil_draft": pil_draft,
            }
            candidates = {w: partial(all_of, files, views, way) for w, way in ways.items()}
            times = common.alternate(candidates, range(args.rounds + 1))
            key = f"{size:g} MP {name}"
            result["speedup"][key] = round(times["full"].cpu / times["scaled"].cpu, 2)
            result["speedup_pil_draft"][key] = round(times["full"].cpu / times["pil_draft"].cpu, 2)
            result["ms"][key] = round(1000 * times["scaled"].cpu / len(files), 2)
            if rival:
                other = dali(rival, files, views, args.rounds)
                result.setdefault("speedup_dali", {})[key] = round(times["full"].cpu / len(files) / other, 2)
            result["difference"][key] = difference(files, views)
            common.note(f"{key}: {result['speedup'][key]} times as fast")
    common.show({**result, "images": args.images, "rounds": args.rounds}, as_json=args.json)


def sources(folder: Path | None) -> list[Image.Image]:
    """The pictures that photographs are made of."""
    if folder is None:
        return [Image.open(io.BytesIO(synthetic.picture(seed))) for seed in range(SOURCES)]
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise UserError(f"--photographs {folder}: has no JPEG")
    return [Image.open(path).convert("RGB") for path in files[:: math.ceil(len(files) / SOURCES)]]


def photograph(tiles: list[Image.Image], megapixels: float, seed: int) -> bytes:
    """A JPEG, four by three, of pictures side by side; every second row and column is mirrored so that edges fit."""
    height = round(math.sqrt(megapixels * 1e6 * 3 / 4))
    canvas, top, row = Image.new("RGB", (round(height * 4 / 3), height)), 0, 0
    while top < height:
        tile = tiles[(seed + row) % len(tiles)]
        tile = tile.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if row % 2 else tile
        for column in range(math.ceil(canvas.width / tile.width)):
            here = tile.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if column % 2 else tile
            canvas.paste(here, (column * tile.width, top))
        top, row = top + tile.height, row + 1
    buffer = io.BytesIO()
    canvas.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def all_of(files: list[bytes], views: Views, way: Callable[..., object], turn: int) -> None:
    for i, data in enumerate(files):
        way(data, views, turn * len(files) + i)


def dali(python: Path, files: list[bytes], views: Views, rounds: int) -> float:
    """The CPU seconds that DALI takes for an image with its views."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}.jpg") for i in range(len(files))]
        for path, data in zip(paths, files, strict=True):
            path.write_bytes(data)
        shapes = [{"size": v.size, "scale": list(v.scale)} for v in views.views]
        task = json.dumps({"files": list(map(str, paths)), "views": shapes, "rounds": rounds})
        command = [str(python), str(Path(__file__).parent / "decode_dali.py")]
        done = subprocess.run(command, input=task, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{DALI} failed: {(done.stderr.splitlines() or ['without a word'])[-1]}")
    return float(done.stdout)


def drawn(views: Views, sample: int) -> np.ndarray:
    return sampling.uniforms(len(views.views), seed=0, epoch=0, sample=sample)


def buffers(views: Views) -> list[Tensor]:
    return [torch.empty(3, v.size, v.size, dtype=torch.uint8) for v in views.views]


def ours(scaled: bool, data: bytes, views: Views, sample: int) -> list[Tensor]:
    out = buffers(views)
    image, boxes = decode_boxes(data, views, drawn(views, sample), scaled=scaled)
    crop(image, boxes, views.views, out)
    return out


def pil_draft(data: bytes, views: Views, sample: int) -> list[Tensor]:
    height, width, _ = jpeg_size(data)
    boxes = sampling.crops(views, drawn(views, sample), height, width)
    by, out = factor(boxes, views.size), buffers(views)
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (-(-width // by), -(-height // by)))
    crop(torch.from_numpy(np.array(image)).permute(2, 0, 1), reduced(boxes, by), views.views, out)
    return out


def difference(files: list[bytes], views: Views) -> dict[str, float]:
    """The mean and the largest over the views of some images."""
    means, largest = [], 0
    for i, data in enumerate(files):
        for a, b in zip(ours(False, data, views, i), ours(True, data, views, i), strict=True):
            gap = (a.int() - b.int()).abs()
            means.append(float(gap.float().mean()))
            largest = max(largest, int(gap.max()))
    return {"mean": round(statistics.mean(means), 2), "largest": largest}


if __name__ == "__main__":
    common.run(main)
