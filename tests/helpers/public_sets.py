"""Lay out ImageNet, OpenImages and WebVision as they are downloaded, with a few images each."""

import csv
import io
import tarfile
from pathlib import Path

import numpy as np
from helpers.layouts import fill, tar_bytes
from helpers.pictures import jpeg, write_tar
from scipy.io import savemat

WNIDS = ["n01440764", "n01443537", "n02119789"]

TRAIN = {w: {f"{w}_{i}.JPEG": jpeg(10 * c + i) for i in range(4)} for c, w in enumerate(WNIDS)}
EXPECTED = {
    f"{w}/{name.removesuffix('.JPEG')}": (data, c)
    for c, (w, images) in enumerate(TRAIN.items())
    for name, data in images.items()
}


def imagenet(folder: Path, layout: str) -> Path:
    """The training images in every layout that they are known in; class tars in an order that is not theirs."""
    tars = {f"{w}.tar": tar_bytes(TRAIN[w]) for w in (WNIDS[1], WNIDS[2], WNIDS[0])}
    folder.mkdir(exist_ok=True)
    if layout == "tar of tars":
        return write_tar(folder / "fall11_whole.tar", tars.items())
    if layout == "folder of the tar":
        return write_tar(folder / "ILSVRC2012_img_train.tar", tars.items()).parent
    if layout == "class tars":
        for name, data in tars.items():
            (folder / name).write_bytes(data)
        (folder / "ReadMe.txt").touch()
    for w, images in TRAIN.items() if layout in ("class folders", "train folder") else ():
        place = folder / "train" / w if layout == "train folder" else folder / w
        place.mkdir(parents=True)
        for name, data in images.items():
            (place / name).write_bytes(data)
    return folder


TRUTH = [2, 0, 1, 1, 2, 0]  # classes of six validation images


def validation(folder: Path) -> tuple[Path, dict[str, tuple[bytes, int]]]:
    data = {f"ILSVRC2012_val_{i:08d}": jpeg(50 + i) for i in range(1, 7)}
    tar = write_tar(folder / "ILSVRC2012_img_val.tar", [(f"{name}.JPEG", d) for name, d in data.items()])
    return tar, {name: (d, label) for (name, d), label in zip(data.items(), TRUTH, strict=True)}


def devkit(folder: Path) -> Path:
    """Its numbers are not those of the sorted classes, and synsets that are no classes follow the others."""
    kind = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("num_children", "f8")]
    numbers = {WNIDS[2]: 1, WNIDS[0]: 2, WNIDS[1]: 3}
    rows = [(n, w, f"word of {w}", 0) for w, n in numbers.items()] + [(4, "n00001740", "entity", 3)]
    place = folder / "ILSVRC2012_devkit_t12" / "data"
    place.mkdir(parents=True)
    savemat(place / "meta.mat", {"synsets": np.array(rows, kind).reshape(-1, 1)})
    truth = "".join(f"{numbers[WNIDS[c]]}\n" for c in TRUTH)
    (place / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    return place.parent


def packed_devkit(folder: Path) -> Path:
    path = folder / "ILSVRC2012_devkit_t12.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(devkit(folder), "ILSVRC2012_devkit_t12")
    return path


def kaggle(folder: Path) -> Path:
    path = folder / "LOC_val_solution.csv"
    rows = [f"ILSVRC2012_val_{i:08d},{WNIDS[c]} 85 1 499 272 {WNIDS[c]} 3 4 5 6 " for i, c in enumerate(TRUTH, 1)]
    path.write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]) + "\n")
    return path


HEADER = (
    "ImageID,Subset,OriginalURL,OriginalLandingURL,License,AuthorProfileURL,Author,Title,OriginalSize,OriginalMD5,"
    "Thumbnail300KURL,Rotation"
)
IDS = ["000002b66c9c498e", "000002b97e5471a0", "000002c707c9895e", "0000048549557964"]


def openimages(folder: Path) -> tuple[Path, Path, dict[str, bytes]]:
    """The list of all splits, and a mirror without one of its images."""
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    for i, name in enumerate([*IDS, "0009"]):
        url, license = f"https://farm.example/{name}_o.jpg", "https://creativecommons.org/licenses/by/2.0/"
        split = "train" if i < 4 else "validation"
        title = 'A title, "quoted"\nin two lines' if i == 0 else f"Title {i}"
        rows.writerow([name, split, url, url, license, url, "An Author", title, 211079, "0Sad+xMj==", "", "90.0"])
    path = folder / "image_ids_and_rotation.csv"
    path.write_text(HEADER + "\n" + buffer.getvalue())
    data = fill(folder / "mirror", [f"{name}.jpg" for name in [*IDS[:3], "0009", "not-listed"]])
    return path, folder / "mirror", data


def webvision(folder: Path) -> dict[str, bytes]:
    names = ["google/q0001/a1.jpg", "google/q0002/b2.jpg", "flickr/q0001/12_3.jpg"]
    data = fill(folder, [*names, "flickr/q0001/unlisted.jpg", "val_images_256/val000001.jpg"])
    (folder / "info").mkdir()
    (folder / "info" / "train_filelist_google.txt").write_text(f"{names[0]} 0\n{names[1]} 2\ngoogle/q0002/gone.jpg 1\n")
    (folder / "info" / "train_filelist_flickr.txt").write_text(f"{names[2]} 1\n")
    (folder / "info" / "val_filelist.txt").write_text("val000001.jpg 2\n")
    (folder / "info" / "synsets.txt").write_text("".join(f"{w} name of {w}, other\n" for w in WNIDS))
    return data
