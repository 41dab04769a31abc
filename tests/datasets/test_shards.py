"""Samples made in memory become shards that webdataset reads."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset
from helpers.pictures import jpeg, picture
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.data.decode import decode
from eagleray.datasets.shards import Sample, write_shards
from eagleray.datasets.shards import encode as png


def rows(folder: Path) -> list[dict]:
    """What webdataset reads."""
    urls = [str(p) for p in sorted(folder.glob("*.tar"))]
    return list(webdataset.WebDataset(urls, shardshuffle=False))


def test_shards_are_as_large_as_asked(tmp_path: Path) -> None:
    data = [Sample(f"s{i}", "jpg", bytes(i * 10)) for i in range(1, 60)] + [Sample("huge", "jpg", bytes(5000))]
    write_shards(data, str(tmp_path), size=1000)
    sizes = [Counter() for _ in range(len(list(tmp_path.glob("*.tar"))))]
    for row in rows(tmp_path):
        sizes[int(row["__url__"][-10:-4])][row["__key__"]] = len(row["jpg"])
    totals = [sum(s.values()) for s in sizes]
    assert all(t <= 1000 or len(s) == 1 for t, s in zip(totals, sizes, strict=True))
    assert all(a + b > 1000 for a, b in itertools.pairwise(totals))


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


def test_a_place_where_nothing_can_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/file/out.*: (cannot be written|cannot be read): Not a directory"):
        write_shards([Sample("a", "jpg", jpeg(1))], str(tmp_path / "file" / "out"))


def test_a_drawn_picture_keeps_its_pixels() -> None:
    image = picture(3, 9, 14)
    assert np.array_equal(decode(png(Image.fromarray(image))).permute(1, 2, 0).numpy(), image)
