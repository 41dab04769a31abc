"""Make small images and tars for the tests of the data plane."""

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

torch.set_num_threads(1)  # so that a sum is the same in this process and in a loader process

Member = tuple[str, bytes]


def picture(seed: int, height: int = 32, width: int = 32) -> NDArray[np.uint8]:
    """Draw a smooth coloured image (H, W, 3) that survives JPEG compression and differs for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encode(image: NDArray[np.uint8] | Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(seed: int) -> bytes:
    """Encode a JPEG whose height and width depend on the seed."""
    return encode(picture(seed, 20 + seed % 17, 20 + seed % 23), quality=80)


def spoiled(seed: int) -> bytes:
    """Return as many bytes as the JPEG of this seed has, but not an image."""
    return b"\0" * 4 + jpeg(seed)[4:]


def truncated_header() -> bytes:
    return jpeg(0)[:20]


def write_tar(path: Path, members: Iterable[Member], kind: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: int, data: bytes | None = None) -> list[Member]:
    """Make the image and label of a sample such as `s0007`, whose class is its number modulo 10."""
    return [(f"s{key:04d}.jpg", jpeg(key) if data is None else data), (f"s{key:04d}.cls", b"%d" % (key % 10))]


def write_shards(folder: Path, samples: int, shards: int, broken: Sequence[int] = ()) -> Path:
    """Write shards `x-000.tar` ... of numbered samples, of which the `broken` ones are not images."""
    for i, keys in enumerate(np.array_split(np.arange(samples), shards)):
        members = [m for k in keys.tolist() for m in sample(k, spoiled(k) if k in broken else None)]
        write_tar(folder / f"x-{i:03d}.tar", members)
    return folder


def write_copies(folder: Path) -> Path:
    """Write shards of 128 images into a folder, and return it: one does not decode, and every eighth is a copy of the
    one before it."""
    from eagleray.cli.demo import pictures
    from eagleray.datasets.shards import Sample, write_shards

    samples = list(pictures(0, 128))
    for i in range(7, 128, 8):
        samples[i] = Sample(samples[i].key, samples[i].extension, samples[i - 1].data, samples[i].label)
    samples[20] = Sample(samples[20].key, "jpg", b"no image", 0)
    write_shards(samples, str(folder), size=60_000)
    return folder
