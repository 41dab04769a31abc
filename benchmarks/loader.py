"""Images per second and core of the CPU side, beside the official-style pipeline of PIL and torchvision transforms.

DINO's ten views (2 x 224, 8 x 96) of the same images, one thread, in alternating rounds. `*_per_core` is images per
second of CPU time, all threads counted; `*_images_per_s` is by the clock on the wall.

decode          bytes to pixels
crop            random boxes known, ten resized crops
ours            what a reader of ours does: fetch, decode, draw parameters, crop
photometric     colour jitter to normalise for all ten views, on the GPU where there is one; `_cpu`: as readers do it
official        PIL decode, ten views with torchvision.transforms and PIL: everything, as the authors' loaders do
official_cpu_part   of that, what `ours` does: PIL decode and ten resized crops

ratio_per_core      ours / official
ratio_decode_crop   ours / official_cpu_part: the same work
ratio_all_on_cpu    ours and photometric_cpu together / official: the same work, nothing on the device
"""

import io
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import common
import numpy as np
import synthetic
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision import transforms as T

from eagleray.base.errors import UserError
from eagleray.data.decode import decode
from eagleray.data.index import open_index
from eagleray.data.reader import StepPart, Stream
from eagleray.views import photometric, photometric_cpu, sampling
from eagleray.views.colours import MEAN, STD
from eagleray.views.crop import crop
from eagleray.views.sampling import Views


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder or URL of shards; default: synthetic 500 x 375 photographs")
    parser.add_argument("--images", type=int, default=64, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with one_lane(args.data, args.images) as stream:
        common.show(measure(stream, args.rounds), as_json=args.json)


@contextmanager
def one_lane(data: str | None, images: int) -> Iterator[Stream]:
    """A stream of one lane with DINO's views, whose batch is so many of the given images, or of synthetic ones."""
    with synthetic.shards(data, images=images) as (url, spare):
        index = open_index(url, spare, note=common.note)
        yield Stream(index, Views.of(common.DINO), seed=0, lanes=1, batch=min(images, len(index)))


def measure(stream: Stream, rounds: int) -> dict[str, object]:
    parts = stream.parts(range(1), start=0)
    part, device = read(parts), common.device()
    views, everything, crops = stream.views.views, official(), official_crops()
    candidates: dict[str, Callable[[Round], object]] = {
        "decode": lambda r: drain(map(decode, r.data)),
        "crop": lambda r: drain(map(partial(crop, views=views, out=r.out), r.images, r.boxes)),
        "ours": lambda _: read(parts),
        "photometric": photometrics(part, device),
        "photometric_cpu": photometrics_of_readers(part),
        "official": lambda r: drain([view(p) for view in everything] for p in map(opened, r.data)),
        "official_cpu_part": lambda r: drain([view(p) for view in crops] for p in map(opened, r.data)),
    }
    times = common.alternate(candidates, (Round.of(stream, step + 1) for step in range(rounds + 1)))
    wall = {f"{n}_images_per_s": stream.batch / s.wall for n, s in times.items()}
    core = {f"{n}_per_core": stream.batch / s.cpu for n, s in times.items() if n != "photometric"}
    ours, photo = times["ours"].cpu, times["photometric_cpu"].cpu
    ratios = {
        "ratio_per_core": times["official"].cpu / ours,
        "ratio_decode_crop": times["official_cpu_part"].cpu / ours,
        "ratio_all_on_cpu": times["official"].cpu / (ours + photo),
    }
    return ratios | core | wall | {"photometric_device": device.type, "images": stream.batch, "rounds": rounds}


def read(parts: Iterator[StepPart]) -> StepPart:
    part = next(parts)
    if part.error:
        raise UserError(part.error)
    return part


def drain(work: Iterable[object]) -> None:
    """Do the work and keep nothing of it, as memory that is new every time has its price too."""
    deque(work, maxlen=0)


class Round(NamedTuple):
    """What the parts of the pipeline get: the images that the reader gives in this step."""

    data: list[memoryview]  # bytes of the files
    images: list[Tensor]
    boxes: list[np.ndarray]  # (V, 4) each
    out: list[Tensor]  # V x (3, S, S)

    @classmethod
    def of(cls, stream: Stream, step: int) -> "Round":
        torch.manual_seed(step)
        random.seed(step)
        epoch = step // stream.steps_per_epoch
        samples, data = zip(*itertools.islice(stream.samples(range(1), start=step), stream.batch), strict=True)
        images = [decode(d) for d in data]
        v = stream.views
        u = [sampling.uniforms(len(v.views), seed=stream.seed, epoch=epoch, sample=sample) for sample in samples]
        boxes = [sampling.crops(v, row, *image.shape[1:]) for row, image in zip(u, images, strict=True)]
        out = [torch.empty(3, view.size, view.size, dtype=torch.uint8) for view in v.views]
        return cls(list(data), images, boxes, out)


def photometrics(part: StepPart, device: torch.device) -> Callable[[object], None]:
    """All views of a part, from uint8 on the device to normalised."""
    pixels = [group.flatten(0, 1).to(device) for group in part.pixels]
    params = part.params.split([len(group) for group in part.pixels])

    def run(_: object) -> None:
        for images, group in zip(pixels, params, strict=True):
            photometric.apply(images, group.flatten(0, 1))
        common.wait(device)

    return run


def photometrics_of_readers(part: StepPart) -> Callable[[object], None]:
    """All views of a part, from uint8 to normalised, as where there is no accelerator."""
    views = [view for group in part.pixels for view in group]

    def run(_: object) -> None:
        for crops, params in zip(views, part.params, strict=True):
            done = crops.clone()
            photometric_cpu.apply_(done, params)
            photometric.finish(done, params)

    return run


def opened(data: memoryview) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def official() -> list[Callable[[Image.Image], Tensor]]:
    """Ten views as in DINO's main_dino.py."""
    colour = [T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8), T.RandomGrayscale(p=0.2)]
    last = [T.ToTensor(), T.Normalize(MEAN, STD)]
    out = []
    for view, resized in zip(Views.of(common.DINO).views, official_crops(), strict=True):
        late = [chance(blurred, view.blur)] + [chance(solarized, view.solarize)] * (view.solarize > 0)
        out.append(T.Compose([resized, T.RandomHorizontalFlip(p=0.5), *colour, *late, *last]))
    return out


def official_crops() -> list[Callable[[Image.Image], Image.Image]]:
    bicubic = T.InterpolationMode.BICUBIC
    return [T.RandomResizedCrop(v.size, scale=v.scale, interpolation=bicubic) for v in Views.of(common.DINO).views]


def chance(function: Callable[[Image.Image], Image.Image], p: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: function(image) if random.random() < p else image


def blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))


def solarized(image: Image.Image) -> Image.Image:
    return ImageOps.solarize(image)


if __name__ == "__main__":
    common.run(main)
