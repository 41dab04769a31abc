"""What counts as an image is what can be decoded: in shards, in folders, and where shards are made."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.fuzzing import counts, examples, generators
from helpers.pictures import Member, encode, jpeg, picture, write_shards, write_tar
from PIL import Image

import eagleray
from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data.image_folder import list_images, said
from eagleray.data.image_list import image_list
from eagleray.data.index import Index, open_index
from eagleray.data.labels import check_labels
from eagleray.data.pixels import FORMATS, image_extensions
from eagleray.data.quarantine import Quarantine, broken
from eagleray.data.reader import Stream
from eagleray.data.tar_scan import UNLABELLED, UNREAD
from eagleray.datasets.sources.item import is_image
from eagleray.views.sampling import Views

# Some of those whose extension a plug-in of Pillow registers, and that nothing here decodes.
OTHERS = (
    "h5",
    "hdf",
    "iim",
    "ico",
    "grib",
    "fits",
    "psd",
    "eps",
    "ps",
    "mpg",
    "tga",
    "dds",
    "pcx",
    "icns",
    "im",
    "wmf",
)
IMAGES = ("jpg", "png", "webp", "bmp", "gif", "tif", "avif", "jp2", "ppm", "jpeg", "jpe", "jfif")


def opened(path: Path) -> Index:
    return open_index(str(path), note=lambda _: None)


def read(index: Index) -> list[bytes]:
    return [bytes(index.read(i, i + 1)) for i in range(len(index))]


def steps(index: Index, batch: int = 4) -> Any:
    views = Views.of([View(size=16)])
    return Stream(index, views, seed=0, lanes=1, batch=batch).parts(range(1), start=0)


def test_every_extension_is_that_of_a_format_that_is_read() -> None:
    kinds = Image.registered_extensions()
    assert {kinds[f".{e}"] for e in image_extensions()} <= set(FORMATS)
    assert set(IMAGES) <= image_extensions()
    assert not set(OTHERS) & image_extensions()


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_beside_an_image_is_not_the_image(other: str, tmp_path: Path) -> None:
    members = [
        m
        for i in range(8)
        for m in ((f"{i}.{other}", b"\x89HDF"), (f"{i}.jpg", jpeg(i)), (f"{i}.cls", b"%d" % (i % 4)))
    ]
    index = opened(write_tar(tmp_path / "x.tar", members))
    assert read(index) == [jpeg(i) for i in range(8)]
    assert not next(steps(index)).bad
    card = eagleray.prepare("webdataset", tmp_path, tmp_path / "out", workers=0)
    assert (card["images"], card["classes"], card["dropped"]) == (8, 4, {})


@pytest.mark.parametrize("spoiled", [b"", b"<html>404</html>", b"\0" * 100])
@pytest.mark.parametrize("names", ["gif jpg", "thumb.png jpg", "png webp"])
def test_of_several_images_the_one_that_is_an_image_is_read(spoiled: bytes, names: str, tmp_path: Path) -> None:
    first, second = names.split()
    good = encode(picture(1), {"jpg": "JPEG", "webp": "WEBP"}[second])
    index = opened(write_tar(tmp_path / "x.tar", [(f"a.{first}", spoiled), (f"a.{second}", good)]))
    assert read(index) == [good]
    assert index.files[0].passed == {"x.tar": {UNREAD: 1}}
    eagleray.prepare("webdataset", tmp_path, tmp_path / "out", workers=0)
    assert read(opened(tmp_path / "out")) == [good]


def test_of_several_intact_images_the_first_is_read(tmp_path: Path) -> None:
    both = [("a.mask.png", encode(picture(1), "PNG")), ("a.jpg", jpeg(1))]
    assert read(opened(write_tar(tmp_path / "x.tar", both))) == [both[0][1]]


@pytest.mark.parametrize("name", ["a.jpg", "a.left.PNG"])
def test_a_failed_image_names_its_shard_its_key_and_its_member(name: str, tmp_path: Path) -> None:
    index = opened(write_tar(tmp_path / "x.tar", [(name, b"<html>"), *((f"b{i}.jpg", jpeg(i)) for i in range(7))]))
    [bad] = [b for part, _ in zip(steps(index, batch=8), range(1), strict=False) for b in part.bad]
    extension = name.lower().partition(".")[2]
    assert (bad.shard, bad.key) == (f"{tmp_path}/x.tar", "a")
    assert bad.reason == f"cannot identify image file (its .{extension})"


def test_a_failed_image_of_a_folder_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"<html>")
    (tmp_path / "b.jpg").write_bytes(jpeg(1))
    [bad] = next(steps(opened(tmp_path), batch=2)).bad
    assert (bad.key, bad.reason) == ("a.jpg", "cannot identify image file")


def test_the_extensions_stay_when_a_shard_is_added(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.png", b"no image"), ("a.cls", b"cat")])
    opened(tmp_path)
    write_tar(tmp_path / "b.tar", [("b.jpg", jpeg(1)), ("b.cls", b"1.0")])
    index = opened(tmp_path)
    assert index.bad_sample(0, "why").reason == "why (its .png)"
    assert index.files[0].passed == {"a.tar": {UNLABELLED: 1}, "b.tar": {UNLABELLED: 1}}
    card = eagleray.prepare("webdataset", tmp_path / "b.tar", tmp_path / "out", workers=0)
    assert opened(tmp_path / "out").bad_sample(0, "why").reason == "why (its .jpg)"
    assert card["images"] == 1


def failed_downloads(folder: Path, images: int, failed: int) -> Path:
    members: list[Member] = []
    for i in range(images + failed):
        members += [(f"{i:04d}.jpg", jpeg(i))] * (i < images) + [(f"{i:04d}.json", b"{}"), (f"{i:04d}.txt", b"a cat")]
    write_tar(folder / "00000.tar", members)
    return folder


def test_metadata_without_an_image_is_counted_and_breaks_nothing(tmp_path: Path) -> None:
    [folder] = eagleray.index(failed_downloads(tmp_path, 24, 8))
    assert (folder["images"], folder["bad"]) == (24, 0)
    left_out = "not used  8: no image: only json, txt (0024 in 00000.tar, 0025 in 00000.tar, 0026 in 00000.tar, ...)"
    assert folder["left_out"] == [left_out]
    index = opened(tmp_path)
    assert (len(index.bad), broken(index.bad)) == (8, 0)
    quarantine = Quarantine(tmp_path / "quarantine.jsonl", samples=24, limit=0)
    quarantine.add(index.bad)
    assert len(quarantine) == 0
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 8  # each is used or listed
    with pytest.raises(UserError, match="1 of 24 samples are broken"):
        quarantine.add([index.bad_sample(0, "cannot identify image file")])


def test_a_loader_reads_the_images_between_failed_downloads(tmp_path: Path) -> None:
    index = opened(failed_downloads(tmp_path, 8, 8))
    assert sorted(next(steps(index, batch=8)).index.tolist()) == list(range(8))


@pytest.mark.parametrize("text", [b"3.0", b"\xef\xbb\xbf3", b"cat", b"", b"-1", b"\xff\xfe3\0"])
def test_an_unreadable_label_leaves_its_image(text: bytes, tmp_path: Path) -> None:
    members = [m for i in range(8) for m in ((f"{i}.jpg", jpeg(i)), (f"{i}.cls", text))]
    [folder] = eagleray.index(write_tar(tmp_path / "x.tar", members).parent)
    assert (folder["images"], folder["bad"]) == (8, 0)
    line = "no label  8 images, as their .cls is not a whole number from 0 on (most in x.tar)"
    assert folder["left_out"] == [line]
    index = opened(tmp_path)
    assert (index.label.tolist(), index.labelled, index.bad) == ([-1] * 8, False, [])
    assert not next(steps(index, batch=8)).bad
    why = r"has no labels, which the method needs; 8 of 8 images have a .cls that is not a whole number from 0 on"
    with pytest.raises(UserError, match=why):
        check_labels("data.train", index, 4, every=True)
    card = eagleray.prepare("webdataset", tmp_path, tmp_path / "out", workers=0)
    assert (card["images"], card["classes"], card["dropped"]) == (8, 0, {})


def test_preparing_says_how_many_labels_were_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(tmp_path / "a", 6, 2)
    write_tar(tmp_path / "a" / "y.tar", [("a.jpg", jpeg(1)), ("a.cls", b"2.5")])
    card = eagleray.prepare("webdataset", tmp_path / "a", tmp_path / "out", workers=0)
    assert (card["images"], card["classes"]) == (7, 6)
    said = capsys.readouterr()
    line = "no label 1 images, as their .cls is not a whole number from 0 on"
    assert line in " ".join((said.out + said.err).split())


def test_a_folder_of_a_camera_and_an_editor_has_its_photographs(tmp_path: Path) -> None:
    for i in range(6):
        for name in ("a", "b"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{i}.jpg").write_bytes(jpeg(i))
    for name in ("a/MOV1.MPG", "a/layers.psd", "b/favicon.ico", "b/x.ps", "b/deep.h5"):
        (tmp_path / name).write_text("no image")
    with image_list(str(tmp_path), pytest.fail) as images:
        list_images(str(tmp_path), images)
        assert (images.count, said(images.others)) == (12, "1 .h5, 1 .ico, 1 .mpg, 1 .ps, 1 .psd")
    index = opened(tmp_path)
    assert (len(index), index.bad, sorted(set(index.label.tolist()))) == (12, [], [0, 1])
    card = eagleray.prepare("folder", tmp_path, tmp_path.parent / "out", workers=0)
    assert (card["images"], card["dropped"]) == (12, {})


@pytest.mark.parametrize("count", counts(100))
def test_a_sample_is_its_image_whatever_lies_beside_it(
    count: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Samples of a drawn number of members in a drawn order, of which some are images, some texts and some labels."""
    folder = tmp_path_factory.mktemp("drawn")
    kinds = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP"}

    def check(rng: Random) -> None:
        members, images, labels, unread = list[Member](), dict[str, bytes](), dict[str, int](), 0
        for i in range(rng.randint(1, 5)):
            key = f"{i}"
            label = rng.choice([b"7", b"7\n", b"7.0", b"seven", b"\xef\xbb\xbf7"])
            parts = [
                (e, b"x" * rng.randint(0, 40)) for e in rng.sample([*OTHERS, "json", "txt", "npy"], rng.randint(0, 3))
            ]
            parts += [("cls", label)] * (rng.random() < 0.7)
            if rng.random() < 0.8:
                extension = rng.choice(list(kinds))
                spoiled = [e for e in ("gif", "tif") if rng.random() < 0.3]
                parts += [(extension, encode(picture(i), kinds[extension])), *((e, b"no image") for e in spoiled)]
                images[key] = encode(picture(i), kinds[extension])
                has = [data for e, data in parts if e == "cls"]
                labels[key] = 7 if has and has[0].strip() == b"7" else -1
                unread += bool(has) and labels[key] < 0
            rng.shuffle(parts)
            members += [(f"{key}.{e}", data) for e, data in parts]
        if not images:
            return
        write_tar(folder / "x.tar", members)
        [found] = eagleray.index(folder)
        index = opened(folder)
        assert dict(zip(index.keys(0, len(index)), read(index), strict=True)) == images
        assert dict(zip(index.keys(0, len(index)), index.label.tolist(), strict=True)) == labels
        assert index.files[0].passed.get("x.tar", Counter())[UNLABELLED] == unread
        assert (found["images"], found["bad"]) == (len(images), 0)
        assert {b.key for b in index.bad} == {name.partition(".")[0] for name, _ in members} - images.keys()

    examples(generators(count), check, count, many=400)


def test_names_of_images_are_those_of_the_index_and_of_prepare() -> None:
    for name in (*IMAGES, *OTHERS):
        assert is_image(f"a.{name}") is (name in image_extensions())
