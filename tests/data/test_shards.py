"""Folders of images become shards that webdataset reads, the same bytes every time."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from data.pictures import encode, jpeg, picture, truncated_header
from PIL import Image

from eagleray.data.decode import decode
from eagleray.data.index import NAME, open_index
from eagleray.data.shards import Images, Sample, write_shards
from eagleray.data.shards import encode as png
from eagleray.errors import UserError


def fill(folder: Path, names: Iterable[str]) -> Path:
    """A folder of images, each its own, in the format that its name says."""
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {".png": "PNG", ".webp": "WEBP", ".jpg": "JPEG", ".jpeg": "JPEG"}[path.suffix.lower()]
        path.write_bytes(encode(picture(i, 12, 12), kind))
    return folder


def samples(images: Images) -> list[Sample]:
    skipped: list[Path] = []
    out = list(images.read(lambda path, reason: skipped.append(path)))
    assert skipped == []
    return out


def rows(folder: Path) -> list[dict]:
    """What webdataset reads."""
    urls = [str(p) for p in sorted(folder.glob("*.tar"))]
    return list(webdataset.WebDataset(urls, shardshuffle=False))


def refuse(path: Path, reason: str) -> None:
    pytest.fail(f"{path} was skipped: {reason}")


CLASSES = [f"{c}/{i:02d}.{e}" for c in ("wolf", "ant", "Bee") for i, e in enumerate(("jpg", "PNG", "webp", "jpeg") * 3)]


def test_written_shards_hold_the_files_as_they_are(tmp_path: Path) -> None:
    """Bytes, keys and classes, for webdataset and for the index."""
    folder = fill(tmp_path / "in", CLASSES)
    images = Images.below(folder)
    assert images.classes == ["Bee", "ant", "wolf"]
    shards, written = write_shards(images.read(refuse), str(tmp_path / "out"), size=3000)
    assert written == len(CLASSES) == len(images)
    assert shards == len(list((tmp_path / "out").glob("shard-*.tar"))) > 3
    got = {}
    for row in rows(tmp_path / "out"):
        [extension] = [e for e in row if e in ("jpg", "jpeg", "png", "webp")]
        got[row["__key__"]] = (row[extension], int(row["cls"]))
    expected = {
        str(Path(n).with_suffix("")): ((folder / n).read_bytes(), images.classes.index(n.partition("/")[0]))
        for n in CLASSES
    }
    assert got == expected
    assert (tmp_path / "out" / NAME).exists()
    index = open_index(str(tmp_path / "out"), note=lambda _: pytest.fail("is indexed again"))
    assert dict(zip(index.keys.to_pylist(), index.label.tolist(), strict=True)) == {
        k: c for k, (_, c) in expected.items()
    }


def test_shards_are_as_large_as_asked(tmp_path: Path) -> None:
    data = [Sample(f"s{i}", "jpg", bytes(i * 10)) for i in range(1, 60)] + [Sample("huge", "jpg", bytes(5000))]
    write_shards(data, str(tmp_path), size=1000)
    sizes = [Counter() for _ in range(len(list(tmp_path.glob("*.tar"))))]
    for row in rows(tmp_path):
        sizes[int(row["__url__"][-10:-4])][row["__key__"]] = len(row["jpg"])
    totals = [sum(s.values()) for s in sizes]
    assert all(t <= 1000 or len(s) == 1 for t, s in zip(totals, sizes, strict=True))
    assert all(a + b > 1000 for a, b in itertools.pairwise(totals))


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever, and in whatever order the file system lists it; another seed gives another order."""
    fill(tmp_path / "one", CLASSES)
    honest = Path.rglob
    written = []
    for name, step in (("first", 1), ("second", -1)):
        monkeypatch.setattr(Path, "rglob", lambda path, pattern, step=step: sorted(honest(path, pattern))[::step])
        write_shards(Images.below(tmp_path / "one").read(refuse), str(tmp_path / name), size=4000)
        written.append({p.name: p.read_bytes() for p in sorted((tmp_path / name).glob("*.tar"))})
        for path in honest(tmp_path / "one", "*"):
            os.utime(path, (1, 1))
    assert written[0] == written[1]
    assert len(written[0]) > 1
    keys = [[s.key for s in samples(Images.below(tmp_path / "one", seed=s))] for s in (0, 1)]
    assert sorted(keys[0]) == sorted(keys[1])
    assert keys[0] != keys[1]


def test_classes_are_mixed_in_the_order_of_writing(tmp_path: Path) -> None:
    """A block holds neighbours, so neighbours must not be of one class."""
    fill(tmp_path, [f"{c}/{i}.png" for c in "ab" for i in range(100)])
    labels = np.array([s.label for s in samples(Images.below(tmp_path))])
    assert 60 < (np.diff(labels) != 0).sum() < 140


@pytest.mark.parametrize(
    "names", [["a.jpg", "b.png"], ["a/1.jpg", "b.jpg"], ["a/1.jpg", "a/2.jpg"], ["a/1.jpg", "a/b/2.jpg", "c.png"]]
)
def test_where_folders_are_no_classes_there_are_no_labels(tmp_path: Path, names: list[str]) -> None:
    images = Images.below(fill(tmp_path / "in", names))
    assert images.classes == []
    assert all(s.label is None for s in samples(images))
    write_shards(samples(images), str(tmp_path / "out"))
    assert all("cls" not in row for row in rows(tmp_path / "out"))


def test_a_class_is_the_folder_at_the_top(tmp_path: Path) -> None:
    images = Images.below(fill(tmp_path, ["a/x/1.jpg", "a/y/z/2.jpg", "b/x/3.jpg"]))
    assert images.classes == ["a", "b"]
    assert {s.key: s.label for s in samples(images)} == {"a/x/1": 0, "a/y/z/2": 0, "b/x/3": 1}


COLLIDING = [
    "a.jpg",
    "a.png",
    "a.webp",
    "a~2.JPG",
    "a.b.jpg",
    "a_b.jpg",
    "v1.0/c.d.jpg",
    "v1_0/c_d.png",
    "v1.0/c_d.jpg",
]


@pytest.mark.parametrize("seed", range(6))
def test_every_file_has_a_key_of_its_own_without_dots(tmp_path: Path, seed: int) -> None:
    """Equal stems, dots in names, and names that look like our way out of them: no two samples melt into one."""
    folder = fill(tmp_path / "in", COLLIDING)
    found = samples(Images.below(folder, seed=seed))
    keys = [s.key for s in found]
    assert {s.extension for s in found} == {"jpg", "png", "webp"}
    assert len(set(keys)) == len(COLLIDING)
    assert not any("." in k for k in keys)
    write_shards(found, str(tmp_path / "out"))
    data = [v for row in rows(tmp_path / "out") for k, v in row.items() if k in ("jpg", "png", "webp")]
    assert sorted(data) == sorted((folder / n).read_bytes() for n in COLLIDING)


def test_broken_files_are_skipped_and_reported(tmp_path: Path) -> None:
    fill(tmp_path, ["a/1.jpg", "b/2.jpg"])
    (tmp_path / "a" / "text.jpg").write_text("no image")
    (tmp_path / "a" / "empty.png").touch()
    (tmp_path / "b" / "header.jpg").write_bytes(truncated_header())
    (tmp_path / "b" / "notes.txt").write_text("no image by its name")
    skipped: dict[str, str] = {}
    images = Images.below(tmp_path)
    got = list(images.read(lambda path, reason: skipped.update({str(path.relative_to(tmp_path)): reason})))
    assert sorted(s.key for s in got) == ["a/1", "b/2"]
    assert skipped.keys() == {"a/text.jpg", "a/empty.png", "b/header.jpg"}
    assert all("cannot identify image file" in r and "\n" not in r for r in skipped.values())


def test_a_destination_with_shards_is_refused_and_left_alone(tmp_path: Path) -> None:
    write_shards([Sample("a", "jpg", jpeg(1))], str(tmp_path / "out"))
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match=f"{tmp_path}/out: holds shards already"):
        write_shards([Sample("b", "jpg", jpeg(2))], f"{tmp_path}/out/")
    assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_a_folder_that_holds_something_else_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "README").touch()
    assert write_shards([Sample("a", "jpg", jpeg(1))], str(tmp_path)) == (1, 1)


def test_nothing_to_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no image to write"):
        write_shards([], str(tmp_path / "out"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/in: no image files below it"):
        Images.below(tmp_path / "in")
    with pytest.raises(UserError, match=f"{tmp_path}/none: no such folder"):
        Images.below(tmp_path / "none")


def test_a_place_where_nothing_can_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/file/out.*: (cannot be written|cannot be read): Not a directory"):
        write_shards([Sample("a", "jpg", jpeg(1))], str(tmp_path / "file" / "out"))


def test_a_drawn_picture_keeps_its_pixels() -> None:
    image = picture(3, 9, 14)
    assert np.array_equal(decode(png(Image.fromarray(image))).permute(1, 2, 0).numpy(), image)
