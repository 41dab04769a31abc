"""The images of docs/proof.md, by one command: CIFAR-10's shards, Food-101 at 64 pixels and crops of photographs.

Crops are cut from photographs, CamVid's training frames and two sequences of DAVIS, whose other sequences are kept for
tests. SOURCE is a folder with cifar10/, transfer/food101_64/, imagenet_sample/, segmentation/CamVid/train/ and
video/DAVIS/. What is there is linked, not copied.
"""

import argparse
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import common
from PIL import Image

from eagleray.base.errors import UserError

SHORT, SIDE = 192, 96  # pixels: of the shorter side of a picture, and of a crop
PARTS = (
    "cifar10",
    "transfer/food101_64",
    "imagenet_sample",
    "segmentation/CamVid/train",
    "video/DAVIS/JPEGImages/480p",
)
TRAINED = ("car-shadow", "motocross-jump")  # sequences of DAVIS that crops are cut from
EVERY = 5  # frames of a sequence between two that are cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path("data/proof"))
    args = parser.parse_args()
    for part in PARTS:
        if not (args.source / part).is_dir():
            raise UserError(f"{args.source}: expected a folder {part} in it")
    args.out.mkdir(parents=True, exist_ok=True)
    for part in (*PARTS[:2], "video/DAVIS", "segmentation/CamVid"):
        link = args.out / Path(part).name
        if not link.exists():
            link.symlink_to((args.source / part).resolve(), target_is_directory=True)
    count = write(args.out / "crops", args.source)
    print(f"{args.out}: cifar10, food101_64 and {count} crops of {SIDE} pixels")


def pictures(source: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yield the name and the pixels of every photograph and frame."""
    for shard in sorted((source / PARTS[2]).glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith(".jpg") and (file := tar.extractfile(member)):
                    yield member.name.removesuffix(".jpg"), Image.open(io.BytesIO(file.read())).convert("RGB")
    frames = sorted((source / PARTS[3]).glob("*.png"))
    for name in TRAINED:
        frames += sorted((source / PARTS[4] / name).glob("*.jpg"))[::EVERY]
    for path in frames:
        yield f"{path.parent.name}-{path.stem}", Image.open(path).convert("RGB")


def crops(image: Image.Image) -> Iterator[Image.Image]:
    """Yield the crops of a picture, side by side, after it was reduced."""
    scale = SHORT / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    for top in range(0, image.height - SIDE + 1, SIDE):
        for left in range(0, image.width - SIDE + 1, SIDE):
            yield image.crop((left, top, left + SIDE, top + SIDE))


def write(folder: Path, source: Path) -> int:
    """Write one shard of crops without labels. Returns their number."""
    folder.mkdir(exist_ok=True)
    count = 0
    unfinished = folder / "unfinished"
    with tarfile.open(unfinished, "w") as tar:
        for name, image in pictures(source):
            for i, crop in enumerate(crops(image)):
                crop.save(buffer := io.BytesIO(), "JPEG", quality=95)
                member = tarfile.TarInfo(f"{name}-{i}.jpg")
                member.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(member, buffer)
                count += 1
    unfinished.rename(folder / "train-000000.tar")
    return count


if __name__ == "__main__":
    common.run(main)
