"""Every source, laid out as it is downloaded: what is found is what was put there."""

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.layouts import fill, run_prepare, tar_bytes, write_parquet
from helpers.pictures import encode, jpeg, picture, write_tar
from helpers.public_sets import (
    EXPECTED,
    IDS,
    WNIDS,
    devkit,
    imagenet,
    kaggle,
    openimages,
    packed_devkit,
    validation,
    webvision,
)
from helpers.sources import drop_reasons, find_source, read_source, source_error

from eagleray.api.data import prepare
from eagleray.datasets.catalogue import SOURCES

LAYOUTS = ["tar of tars", "class tars", "class folders", "train folder", "folder of the tar"]


@pytest.mark.parametrize(
    ("source", "layout"), [("imagenet-1k", x) for x in LAYOUTS] + [("imagenet-22k", x) for x in LAYOUTS[:3]]
)
def test_imagenet_is_the_same_in_every_layout(tmp_path: Path, source: str, layout: str):
    listing, found = read_source(source, imagenet(tmp_path / "in", layout))
    assert {key: (data, item.label) for key, (data, item) in found.items()} == EXPECTED
    assert list(listing.classes) == WNIDS
    assert {item.extension for _, item in found.values()} == {"jpeg"}


def test_images_in_tars_of_tars_are_addressed_in_the_outer_file(tmp_path: Path):
    outer = imagenet(tmp_path, "tar of tars")
    for data, item in read_source("imagenet-22k", outer)[1].values():
        assert item.url == str(outer)
        assert outer.read_bytes()[item.offset : item.offset + item.size] == data


@pytest.mark.parametrize("labels", [devkit, packed_devkit, kaggle])
def test_validation_classes_are_numbered_as_those_of_training(tmp_path: Path, labels: Any):
    tar, expected = validation(tmp_path)
    listing, found = read_source("imagenet-1k", tar, split="val", labels=str(labels(tmp_path / "labels")))
    assert {key: (data, item.label) for key, (data, item) in found.items()} == expected
    assert list(listing.classes) == WNIDS


@pytest.fixture(autouse=True)
def _labels(tmp_path: Path) -> None:
    (tmp_path / "labels").mkdir()


def test_imagenet_that_cannot_be_used_is_refused(tmp_path: Path):
    tar, _ = validation(tmp_path / "val")
    assert "give --labels ILSVRC2012_devkit_t12.tar.gz" in source_error("imagenet-1k", tar, split="val")
    assert "expected a tar of class tars" in source_error("imagenet-1k", tar)
    assert "expected a tar of class tars" in source_error("imagenet-1k", tmp_path / "labels")
    imagenet(tmp_path / "unpacked", "train folder")
    line = source_error("imagenet-1k", tmp_path / "unpacked", split="val")
    assert line == f"{tmp_path}/unpacked: expected val/ beside the other splits"
    assert source_error("imagenet-1k", tmp_path / "none") == f"{tmp_path}/none: no such file or folder"
    assert source_error("imagenet-1k", tmp_path / "none.tar") == f"{tmp_path}/none.tar: no such file"
    wrong = {"labels": str(tmp_path / "val"), "split": "val"}
    assert "expected the development kit of ILSVRC 2012" in source_error("imagenet-1k", tar, **wrong)
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    wrong = {"labels": str(tmp_path / "x.csv"), "split": "val"}
    assert "columns ImageId and PredictionString" in source_error("imagenet-1k", tar, **wrong)
    (tmp_path / "x.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001")
    assert "image ILSVRC2012_val_00000001 has no class; the file may be cut off" in source_error(
        "imagenet-1k", tar, **wrong
    )
    (tmp_path / "x.tar.gz").write_bytes(b"no archive")
    wrong = {"labels": str(tmp_path / "x.tar.gz"), "split": "val"}
    assert "x.tar.gz: cannot be unpacked" in source_error("imagenet-1k", tar, **wrong)


def test_archives_that_are_compressed_cut_off_or_none_are_refused(tmp_path: Path):
    whole = imagenet(tmp_path, "tar of tars").read_bytes()
    (tmp_path / "zipped.tar").write_bytes(gzip.compress(whole))
    assert "zipped.tar: compressed with gzip" in source_error("imagenet-22k", tmp_path / "zipped.tar")
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    assert "cut.tar: cut off or damaged after" in source_error("imagenet-22k", tmp_path / "cut.tar")
    (tmp_path / "text.tar").write_text("no tar" * 500)
    assert "text.tar: not a tar archive" in source_error("imagenet-22k", tmp_path / "text.tar")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "fall11.tar.gz").write_bytes(gzip.compress(whole))
    assert source_error("imagenet-22k", tmp_path / "packed").endswith("; fall11.tar.gz must be unpacked first")


def test_openimages_joins_the_list_with_the_files(tmp_path: Path):
    path, mirror, data = openimages(tmp_path)
    found = read_source("openimages", path, images=str(mirror))[1]
    assert {key: d for key, (d, _) in found.items()} == {name: data[f"{name}.jpg"] for name in IDS[:3]}
    assert all(item.label == -1 for _, item in found.values())
    said = json.loads(found[IDS[0]][1].meta or "")
    assert said["License"] == "https://creativecommons.org/licenses/by/2.0/"
    assert said["Title"] == 'A title, "quoted"\nin two lines'
    assert "Thumbnail300KURL" not in said
    assert drop_reasons("openimages", path, images=str(mirror)) == {IDS[3]: "listed, but not among the images"}
    assert set(read_source("openimages", path, images=str(mirror), split="validation")[1]) == {"0009"}


def test_a_list_of_boxes_names_each_image_once(tmp_path: Path):
    _, mirror, _ = openimages(tmp_path)
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("ImageID,Source,LabelName\n" + "".join(f"{i},xclick,/m/0k4j\n" for i in (IDS[0], IDS[0], IDS[1])))
    assert set(read_source("openimages", boxes, images=str(mirror))[1]) == set(IDS[:2])


def test_openimages_that_cannot_be_used_is_refused(tmp_path: Path):
    path, mirror, _ = openimages(tmp_path)
    assert "expected a CSV of image ids" in source_error("openimages", tmp_path)
    assert (
        source_error("openimages", path, images=str(tmp_path / "x"))
        == f"--images {tmp_path}/x: contains no image files"
    )
    assert "lists no image of --split test" in source_error("openimages", path, images=str(mirror), split="test")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "expected a column ImageID, found a, b" in source_error(
        "openimages", tmp_path / "other.csv", images=str(mirror)
    )


def test_webvision_follows_its_lists(tmp_path: Path):
    data = webvision(tmp_path / "in")
    listing, found = read_source("webvision", tmp_path / "in")
    assert {key: (d, item.label) for key, (d, item) in found.items()} == {
        "google/q0001/a1": (data["google/q0001/a1.jpg"], 0),
        "google/q0002/b2": (data["google/q0002/b2.jpg"], 2),
        "flickr/q0001/12_3": (data["flickr/q0001/12_3.jpg"], 1),
    }
    assert list(listing.classes) == WNIDS
    assert drop_reasons("webvision", tmp_path / "in") == {"google/q0002/gone": "listed, but not among the files"}
    [(d, item)] = read_source("webvision", tmp_path / "in", split="val")[1].values()
    assert (d, item.label) == (data["val_images_256/val000001.jpg"], 2)


def test_webvision_that_cannot_be_used_is_refused(tmp_path: Path):
    webvision(tmp_path / "in")
    (tmp_path / "in" / "info" / "train_filelist_flickr.txt").write_text("flickr/q0001/12_3.jpg\n")
    assert "line 1: expected a path and a class number" in source_error("webvision", tmp_path / "in")
    assert "expected info/test_filelist.txt in it" in source_error("webvision", tmp_path / "in", split="test")


def test_coco_has_no_labels(tmp_path: Path):
    names = ["train2017/000000000009.jpg", "train2017/000000000025.jpg", "val2017/000000000139.jpg"]
    data = fill(tmp_path / "coco", names)
    (tmp_path / "coco" / "annotations").mkdir()
    found = read_source("coco", tmp_path / "coco")[1]
    assert {key: (d, item.label) for key, (d, item) in found.items()} == {
        "000000000009": (data[names[0]], -1),
        "000000000025": (data[names[1]], -1),
    }
    assert set(read_source("coco", tmp_path / "coco", split="val2017")[1]) == {"000000000139"}
    assert "expected a folder test2017/ with images" in source_error("coco", tmp_path / "coco", split="test2017")


def test_a_folder_has_classes_where_every_image_is_in_one(tmp_path: Path):
    hidden = ["a/._2.jpg", "a/.@__thumb/2.jpg", ".Trash-1000/files/3.jpg"]
    data = fill(tmp_path / "in", ["b/1.jpg", "a/x/v1.0.JPG", "a/2.jpg", *hidden])
    listing, found = read_source("folder", tmp_path / "in")
    assert {key: (d, item.label) for key, (d, item) in found.items()} == {
        "a/2": (data["a/2.jpg"], 0),
        "a/x/v1_0": (data["a/x/v1.0.JPG"], 0),
        "b/1": (data["b/1.jpg"], 1),
    }
    assert list(listing.classes) == ["a", "b"]
    fill(tmp_path / "in", ["top.jpg"])
    listing, found = read_source("folder", tmp_path / "in")
    assert not listing.classes
    assert {item.label for _, item in found.values()} == {-1}


@pytest.mark.parametrize("source", ["folder", "coco"])
def test_files_that_are_no_images_are_counted(tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "in" / "train2017"
    fill(folder, ["1.jpg", "a/2.jpg", "a/._2.jpg"])
    for name in ("3.jxl", "a/4.JXL", ".hidden/5.jxl", "notes"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    prepare(source, tmp_path / "in", tmp_path / "out", workers=0)
    assert "not read: 2 .jxl, 1 without extension" in " ".join(capsys.readouterr().out.split())


def test_webdataset_keeps_labels_and_metadata(tmp_path: Path):
    said = {"punsafe": 0.01, "pwatermark": 0.9, "caption": "größer"}
    a, b = jpeg(1), encode(picture(2), "PNG")
    first = [("x/a.JPG", a), ("x/a.cls", b"7"), ("x/a.json", json.dumps(said).encode()), ("x/a.txt", b"words")]
    second = [("b.seg.png", b), ("c.cls", b"1"), ("d.jpg", jpeg(3)), ("d.cls", b"one")]
    write_tar(tmp_path / "in" / "s-0.tar", first)
    write_tar(tmp_path / "in" / "s-1.tar", second)
    cut = tar_bytes({"e.jpg": a})[: len(a)]
    (tmp_path / "in" / "s-2.tar").write_bytes(cut)
    found = read_source("webdataset", tmp_path / "in")[1]
    assert {k: (d, i.label, i.extension) for k, (d, i) in found.items()} == {
        "x/a": (a, 7, "jpg"),
        "b": (b, -1, "png"),
        "d": (jpeg(3), -1, "jpg"),
    }
    assert json.loads(found["x/a"][1].meta or "") == said
    assert drop_reasons("webdataset", tmp_path / "in") == {
        "c": "no image: only cls",
        "s-2": "cut off or damaged after 1 members: its last member ends at byte 1536 of 844",
    }


def test_webdataset_counts_what_belongs_to_no_sample(tmp_path: Path):
    members = [*((f"a.{i}.jpg", jpeg(i)) for i in range(3)), ("._a.jpg", b"x"), ("README", b"x")]
    path = write_tar(tmp_path / "in" / "x.tar", members)
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.0.jpg"
        tar.addfile(link)
    path.write_bytes(2 * path.read_bytes())  # two archives, as `cat` joins them
    listing = find_source("webdataset", tmp_path / "in").listing()
    assert [item.reason for item in listing.items] == [None, None]
    assert list(listing.found()) == [
        f"not read  4 images, as another of their sample is (most in {path});"
        " a sample is all files whose names are equal up to the first dot",
        f"not read  2 extensionless files, 2 hard links, 2 hidden files, which are no samples (most in {path})",
        f"joined    1 archives behind the end of another one, read as well (most in {path})",
    ]


def test_webdataset_where_an_expression_is_true(tmp_path: Path):
    for shard in range(2):
        members = [(f"{shard}{i}.{e}", d) for i in range(6) for e, d in (("jpg", jpeg(i)), ("cls", str(i).encode()))]
        write_tar(tmp_path / "in" / f"s-{shard}.tar", members)
    (tmp_path / "t.csv").write_text("key,score\n01,5\n02,1\n12,9\n13,7\n")
    chosen = {"where": "label < 3 and score > 2", "columns": str(tmp_path / "t.csv")}
    found = read_source("webdataset", tmp_path / "in", **chosen)[1]
    assert {key: item.label for key, (_, item) in found.items()} == {"01": 1, "12": 2}
    assert found["12"][0] == jpeg(2)
    dropped = drop_reasons("webdataset", tmp_path / "in", **chosen)
    assert set(dropped.values()) == {"--where is not true"}
    assert len(dropped) == 10
    assert source_error("webdataset", tmp_path / "in", where="label > 9") == (
        "--where: label > 9: leaves none of 12 samples"
    )
    said = source_error("webdataset", tmp_path / "in", where="nsfw > 1")
    assert said.startswith("--where: nsfw > 1: ")
    assert said.endswith("there are key, shard, label, bytes")
    assert source_error("webdataset", tmp_path / "in", columns=str(tmp_path / "t.csv")).endswith(
        "t.csv: is for --where, which is missing"
    )
    assert source_error("folder", tmp_path, where="label > 0") == "--where label > 0: folder does not take this option"


def test_parquet_of_hugging_face(tmp_path: Path):
    scores = pa.array([i / 10 for i in range(8)])
    data = write_parquet(tmp_path / "in" / "train-00000-of-00002.parquet", 0, 8, punsafe=scores)
    data += write_parquet(tmp_path / "in" / "train-00001-of-00002.parquet", 8, 4, punsafe=scores[:4])
    found = read_source("parquet", tmp_path / "in")[1]
    assert {k: (d, i.label) for k, (d, i) in found.items()} == {
        f"img_{i}": (d, (i if i < 8 else i - 8) % 4) for i, d in enumerate(data)
    }
    assert json.loads(found["img_3"][1].meta or "") == {"punsafe": 0.3}
    about = sum(item.size for _, item in found.values()) / sum(len(d) for d in data)
    assert 1 <= about < 2.5, "of tiny images; what Parquet adds to a value does not grow with it"


def test_parquet_of_plain_bytes_where_some_are_missing(tmp_path: Path):
    data = [jpeg(1), None, jpeg(3)]
    path = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"jpg": pa.array(data, pa.large_binary()), "thumb": pa.array(data, pa.binary())}), path)
    assert (
        source_error("parquet", path)
        == f"{path}: expected one column of bytes, found jpg, thumb; name one with --column"
    )
    found = read_source("parquet", path, column="jpg")[1]
    assert [d for d, _ in found.values()] == [jpeg(1), b"", jpeg(3)]
    assert list(found) == ["plain-000000000", "plain-000000001", "plain-000000002"]
    assert (
        source_error("parquet", path, column="x")
        == f"--column x: not a column of bytes in {path}; expected one of: jpg, thumb"
    )
    pq.write_table(pa.table({"url": ["a"]}), tmp_path / "urls.parquet")
    assert "expected one column of bytes, found none among url" in source_error("parquet", tmp_path / "urls.parquet")
    (tmp_path / "no.parquet").write_text("text")
    assert "no.parquet: not a Parquet file" in source_error("parquet", tmp_path / "no.parquet")


def labels_of(folder: Path, *files: pa.Array) -> tuple[list[int], list[dict[str, Any]], str]:
    """The labels, the metadata and the note of Parquet files with these columns `label`."""
    for number, labels in enumerate(files):
        write_parquet(folder / f"{number}.parquet", 10 * number, len(labels), label=labels)
    listing, found = read_source("parquet", folder)
    items = [item for _, item in found.values()]
    return [i.label for i in items], [json.loads(i.meta or "{}") for i in items], listing.note


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (pa.array([3.0, None, float("nan"), 0.0]), [3, -1, -1, 0]),
        (pa.array([2, -1, None], pa.int32()), [2, -1, -1]),
        (pa.array([True, False]), [1, 0]),
        (pa.array([5, 7]).dictionary_encode(), [5, 7]),
        (pa.nulls(2), [-1, -1]),
    ],
)
def test_whole_numbers_of_any_type_are_classes(labels: pa.Array, classes: list[int], tmp_path: Path):
    assert labels_of(tmp_path, labels) == (classes, [{}] * len(classes), "")
    done = run_prepare("parquet", tmp_path, tmp_path / "out")
    assert done["classes"] == len(set(classes) - {-1})


@pytest.mark.parametrize(
    ("labels", "kept", "said"),
    [
        (pa.array(["cat", "dog"]), ["cat", "dog"], "values of the type string"),
        (pa.array([1.0, 0.5]), [1.0, 0.5], "0.5"),
        (pa.array([1.0, float("inf")]), [1.0, "inf"], "inf"),
    ],
)
def test_labels_that_are_no_classes_are_kept_with_a_note(
    labels: pa.Array, kept: list[Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    classes, meta, note = labels_of(tmp_path / "in", pa.array([1, 2]), labels)
    assert classes == [-1] * 4, "one file does not mean something else by its labels than another"
    assert meta == [{"label": label} for label in [1, 2, *kept]]
    assert note == (
        f"{tmp_path}/in/1.parquet: the column label holds {said}; expected whole numbers, so it is kept in the .json "
        "of the images and no class is set"
    )
    prepare("parquet", tmp_path / "in", tmp_path / "out", workers=0)
    assert note in " ".join(capsys.readouterr().out.split())


def test_lists_of_labels_are_left_out_with_a_note(tmp_path: Path):
    classes, meta, note = labels_of(tmp_path, pa.array([[1], [2]]))
    assert (classes, meta) == ([-1, -1], [{}, {}])
    assert "; expected whole numbers, so it is left out and no class is set" in note


def test_cells_that_are_no_json_become_text_or_nothing(tmp_path: Path):
    scores = pa.array([0.5, float("nan"), float("-inf")])
    write_parquet(tmp_path / "a.parquet", 0, 3, score=scores)
    found = read_source("parquet", tmp_path / "a.parquet")[1]
    assert [i.meta for _, i in found.values()] == ['{"score": 0.5}', None, '{"score": "-inf"}']


@pytest.mark.parametrize("source", SOURCES)
def test_a_place_that_holds_nothing_is_one_line(tmp_path: Path, source: str):
    assert str(tmp_path / "labels") in source_error(source, tmp_path / "labels")
    assert str(tmp_path / "none") in source_error(source, tmp_path / "none")


def test_options_that_a_source_does_not_take_are_refused(tmp_path: Path):
    assert source_error("imagenet", tmp_path).startswith("SOURCE imagenet: unknown; expected one of imagenet-1k,")
    assert source_error("folder", tmp_path, split="val") == "--split val: folder has no splits"
    assert source_error("coco", tmp_path, split="train") == (
        "--split train: expected train2017, val2017, test2017, unlabeled2017"
    )
    assert source_error("folder", tmp_path, labels="/x") == "--labels /x: folder does not take this option"
