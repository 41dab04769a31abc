"""`eagleray data measure`: what the columns say of planted faults, and that a recipe chooses by them."""

import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pandas
import pytest
from helpers.commands import refused
from PIL import Image

import eagleray
from eagleray.cli import main
from eagleray.config.source import Source
from eagleray.data import sample_table
from eagleray.data.columns import select
from eagleray.data.index import Index, open_index
from eagleray.datasets import measure as measuring
from eagleray.datasets.shards import Sample, write_shards

KINDS = ("good", "dark", "bright", "blurred", "tiny", "grey", "flat", "long", "recompressed", "broken")


def photograph(seed: int) -> np.ndarray:
    """Something like a photograph: smooth shapes, and fine texture."""
    draw = np.random.default_rng(seed)
    coarse = cv2.resize(draw.uniform(0, 255, (6, 8, 3)).astype(np.float32), (320, 240), interpolation=cv2.INTER_CUBIC)
    return (coarse + draw.normal(0, 12, (240, 320, 3))).clip(0, 255).astype(np.uint8)


def fault(kind: str, image: np.ndarray) -> np.ndarray:
    if kind == "dark":
        return (image * 0.08).astype(np.uint8)
    if kind == "bright":
        return (255 - (255 - image) * 0.08).astype(np.uint8)
    if kind == "blurred":
        return cv2.GaussianBlur(image, (0, 0), 6)
    if kind == "tiny":
        return np.ascontiguousarray(image[:20, :30])
    if kind == "grey":
        return np.repeat(image.mean(2, keepdims=True).astype(np.uint8), 3, 2)
    if kind == "flat":
        return np.full_like(image, 120)
    if kind == "long":
        return np.ascontiguousarray(np.tile(image, (1, 4, 1))[:100])
    return image


def jpeg(image: np.ndarray, quality: int = 92) -> bytes:
    Image.fromarray(image).save(buffer := io.BytesIO(), "JPEG", quality=quality)
    return buffer.getvalue()


def samples(count: int) -> Iterator[Sample]:
    """Eight photographs of each kind; those that are recompressed are of the first good ones, at half the size."""
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        if kind == "recompressed":
            data = jpeg(cv2.resize(photograph(i - i % len(KINDS)), (160, 120), interpolation=cv2.INTER_AREA), 60)
        else:
            data = b"no image" if kind == "broken" else jpeg(fault(kind, photograph(i)))
        yield Sample(f"{i:03d}-{kind}", "jpg", data, i % 10)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given") / "shards"
    write_shards(samples(80), str(folder), size=400_000)
    return folder


@pytest.fixture
def shards(given: Path, tmp_path: Path) -> Path:
    import shutil

    without = shutil.ignore_patterns("columns")  # which another test may have measured
    return Path(shutil.copytree(given, tmp_path / "shards", ignore=without))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_table, "ROWS", 32)


def chosen(index: Index, **source: Any) -> set[str]:
    found = select(index)
    assert found is not None
    return {index.key(i) for i in np.flatnonzero(found.weight).tolist()}


def kept(shards: Path, where: str) -> set[str]:
    index = open_index([Source(url=str(shards), where=where)], note=lambda _: None)
    return chosen(index)


def of(*kinds: str) -> set[str]:
    return {f"{i:03d}-{kind}" for i in range(80) if (kind := KINDS[i % len(KINDS)]) in kinds}


@pytest.mark.parametrize(
    ("where", "kinds"),
    [
        ("luma_p99 < 60", {"dark"}),
        ("luma_p05 > 200", {"bright"}),
        ("sharpness < 30 and entropy > 3 and luma between 40 and 215 and min_side > 200", {"blurred"}),
        ("min_side < 64", {"tiny"}),
        ("colour < 5 and entropy > 1 and luma between 40 and 215", {"grey"}),
        ("entropy < 1", {"flat"}),
        ("aspect > 4", {"long"}),
        ("width is null", {"broken"}),
        ("bytes_per_pixel < 0.05", {"flat"}),
    ],
)
def test_planted_faults_are_found_by_their_columns(
    where: str, kinds: set[str], given: Path, tmp_path_factory: pytest.TempPathFactory
):
    if not (given / "columns").exists():
        eagleray.measure(given, workers=0)
    found, wanted = kept(given, where), of(*kinds)
    assert len(found & wanted) >= 0.9 * len(wanted), where
    assert len(found & wanted) >= 0.9 * len(found), where


def test_copies_of_other_size_and_compression_have_the_hash_of_the_original(shards: Path):
    table = pandas.read_parquet(eagleray.measure(shards, "phash", workers=0))
    hashes = dict(zip(table["key"], table["phash"], strict=True))
    pairs = [(f"{i:03d}-recompressed", f"{i - i % 10:03d}-good") for i in range(8, 80, 10)]
    distance = [bin(int(hashes[a], 16) ^ int(hashes[b], 16)).count("1") for a, b in pairs]
    assert max(distance) <= 6
    others = [hashes[f"{i:03d}-good"] for i in range(0, 80, 10)]
    assert min(bin(int(a, 16) ^ int(b, 16)).count("1") for a in others for b in others if a != b) > 12


def test_what_was_killed_ends_with_the_same_bytes(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def files(folder: str) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in Path(folder).iterdir()}

    whole = files(eagleray.measure(shards, "size,luma", tmp_path / "whole", workers=0))
    honest, calls = measuring.measure_part, []

    def dies(part: measuring.Part) -> int:
        calls.append(part.number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return honest(part)

    monkeypatch.setattr(measuring, "measure_part", dies)
    with pytest.raises(KeyboardInterrupt):
        eagleray.measure(shards, "size,luma", tmp_path / "out", workers=0)
    assert files(eagleray.measure(shards, "size,luma", tmp_path / "out", workers=0)) == whole
    assert calls == [0, 1, 1, 2]


def test_a_part_without_an_image_that_decodes_and_a_shard_without_one_that_can_be_used(tmp_path: Path):
    folder, images = tmp_path / "s", [*([jpeg(photograph(0)[:24, :32])] * 32), b"no image"]
    write_shards([Sample(f"{i:02d}", "jpg", data) for i, data in enumerate(images)], str(folder))
    with tarfile.open(folder / "shard-empty.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("empty.jpg"))
    eagleray.index(folder)
    eagleray.measure(folder, "size", workers=0)
    assert kept(folder, "width = 32") == {f"{i:02d}" for i in range(32)}
    assert kept(folder, "width is null") == {"32"}


def test_samples_that_changed_are_measured_again(shards: Path):
    eagleray.measure(shards, "size", workers=0)
    last = sorted(shards.glob("*.tar"))[-1]
    write_shards(list(samples(80))[:7], str(shards.parent / "new"), size=10**6)
    last.write_bytes(next((shards.parent / "new").glob("*.tar")).read_bytes())
    eagleray.index(shards)
    with pytest.raises(eagleray.UserError, match=rf"columns/size: was measured before {last.name} changed; delete it"):
        kept(shards, "width > 100")


def test_samples_in_another_order_are_measured_again(shards: Path):
    """The number of samples of each shard stays what it was."""
    folder = Path(eagleray.measure(shards, "size", workers=0))
    before = kept(shards, "width > 200")
    about = json.loads((folder / "_table.json").read_text())
    moved = about | {"shards": {name: ["1 s3:etag", crc] for name, (_, crc) in about["shards"].items()}}
    (folder / "_table.json").write_text(json.dumps(moved))
    assert kept(shards, "width > 200") == before, "a copy in another store has the same samples"
    first = min(shards.glob("*.tar"))
    with tarfile.open(first) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]
    pairs = [list(of) for _, of in itertools.groupby(members, lambda each: each[0].name.partition(".")[0])]
    with tarfile.open(first, "w") as tar:
        for member, data in itertools.chain(*reversed(pairs)):
            tar.addfile(member, io.BytesIO(data))
    eagleray.index(shards)
    with pytest.raises(eagleray.UserError, match=rf"columns/size: was measured before {first.name} changed; delete it"):
        kept(shards, "width > 200")


def test_an_unfinished_table_is_named_with_the_command_that_continues_it(
    shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    honest = measuring.measure_part

    def dies(part: measuring.Part) -> int:
        if part.number == 1:
            raise KeyboardInterrupt
        return honest(part)

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "measure_part", dies)
        with pytest.raises(KeyboardInterrupt):
            eagleray.measure(shards, "size,luma", workers=0)
    with pytest.raises(
        eagleray.UserError, match=r"there are key, shard, label, bytes; .*columns/size-luma is not"
    ) as e:
        kept(shards, "width > 200")
    command = str(e.value).partition("is not finished: eagleray ")[2].partition(" continues it")[0]
    main.app([*command.split(), "--workers", "0"], standalone_mode=False)
    assert kept(shards, "width > 200")
    assert "8 of 80 images did not decode, such as " in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--columns", "sharpnes"), "--columns sharpnes: unknown; did you mean 'sharpness'?"),
        (("elsewhere",), "elsewhere: expected out=FOLDER"),
        (("out=/proc/no",), "out=/proc/no: cannot be written"),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], line: str, shards: Path, capsys: pytest.CaptureFixture[str]):
    assert line in refused(capsys, "data", "measure", str(shards), "--workers", "0", *words)
