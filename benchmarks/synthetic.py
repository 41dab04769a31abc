"""Shards of made-up photographs, for where no data is given: the right sizes in pixels and bytes, and no meaning."""

import argparse
import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

QUALITY = 93  # with GRAIN, a 500 x 375 picture takes the 110 kB that an ImageNet photograph takes on average
GRAIN = 0.87  # amplitude of each octave over that of the next coarser one


def picture(seed: int, *, width: int = 500, height: int = 375) -> bytes:
    """JPEG bytes of coloured noise in octaves, so that the codec finds coarse and fine structure as in a photograph."""
    draw = np.random.default_rng(seed)
    canvas = np.zeros((height, width, 3), np.float32)
    amplitude, cells = 60.0, 3
    while cells < max(width, height):
        noise = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), np.uint8))
        canvas += (
            amplitude / 128 * (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32) - 128)
        )
        amplitude, cells = amplitude * GRAIN, cells * 2
    buffer = io.BytesIO()
    Image.fromarray((canvas + 128).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def write(
    folder: Path,
    *,
    images: int,
    distinct: int = 64,
    width: int = 500,
    height: int = 375,
    each: int = 1000,
    classes: int = 0,
) -> None:
    """Write shards of `each` images, every one of the `distinct` pictures in its turn.

    Readers keep no picture, so one that comes back costs what a new one does. With `classes`, each image has a label,
    the number of its picture modulo `classes`.
    """
    pictures = [picture(seed, width=width, height=height) for seed in range(min(distinct, images))]
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, images, each):
        with tarfile.open(folder / f"shard-{first // each:06d}.tar", "w") as tar:
            for i in range(first, min(first + each, images)):
                files = {"jpg": pictures[i % len(pictures)]}
                if classes:
                    files["cls"] = str(i % len(pictures) % classes).encode()
                for kind, data in files.items():
                    member = tarfile.TarInfo(f"{i:08d}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


@contextmanager
def shards(data: str | None, **sizes: int) -> Iterator[tuple[str, Path]]:
    """The given shards, or synthetic ones for as long as they are needed; and a folder that may be written to."""
    with TemporaryDirectory() as spare:
        if not data:
            write(Path(spare), **sizes)
        yield data or spare, Path(spare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=64, help="different pictures among them")
    parser.add_argument("--width", type=int, default=500, help="pixels")
    parser.add_argument("--height", type=int, default=375, help="pixels")
    parser.add_argument("--classes", type=int, default=0, help="labels among them; 0: none")
    write(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
