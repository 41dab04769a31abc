"""`eagleray index` says what an index leaves out, and why."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers.pictures import jpeg, write_tar

import eagleray
from eagleray.base.errors import UserError
from eagleray.data.index_faults import EXAMPLES, REASONS, Faults, faults_of
from eagleray.data.index_file import NAME, PASSED, load
from eagleray.data.quarantine import BadSample
from eagleray.data.tar_scan import UNREAD


def test_images_that_share_a_sample_and_samples_without_one_are_named(tmp_path: Path) -> None:
    dotted = [(f"name.with.dots.{i}.jpg", jpeg(i)) for i in range(10)]
    write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(1)), *dotted, ("b.jxl", b"no format of ours"), ("c.jpg", b"")])
    [folder] = eagleray.index(tmp_path)
    assert (folder["images"], folder["bad"]) == (2, 1)
    assert folder["left_out"] == [
        "not used  1: no image: only jxl (b in x.tar)",
        "not used  1: the image has no bytes (c in x.tar)",
        "not read  9 images, as another of their sample is (most in x.tar); a sample is all files whose names are "
        "equal up to the first dot",
    ]
    write_tar(tmp_path / "y.tar", [("d.jpg", jpeg(2))])  # rows of x.tar are now copied from the old index
    [folder] = eagleray.index(tmp_path / "y.tar")
    assert faults_of(f"{tmp_path}/{NAME}").passed == {"x.tar": {UNREAD: 9}}


def test_an_index_of_before_says_nothing_of_what_is_passed_over(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(1)), ("a.small.jpg", jpeg(2))])
    eagleray.index(tmp_path)
    table = pq.read_table(tmp_path / NAME)
    old = {k: v for k, v in pq.read_metadata(tmp_path / NAME).metadata.items() if k in (b"shards",)}
    pq.write_table(table.replace_schema_metadata(old), tmp_path / NAME)
    assert load(f"{tmp_path}/{NAME}", again=False)["x.tar"].passed == {}


def test_many_reasons_and_samples_are_counted_not_listed() -> None:
    bad = [BadSample("s3://b/x.tar", f"k{i:02d}", 0, f"reason {min(i, REASONS + 1)}") for i in range(20)]
    lines = list(Faults(bad, {}).lines())
    assert len(lines) == REASONS + 1
    names = ", ".join(f"k{i:02d} in x.tar" for i in range(REASONS + 1, REASONS + 1 + EXAMPLES))
    assert lines[0] == f"not used  {20 - REASONS - 1}: reason {REASONS + 1} ({names}, ...)"
    assert lines[-1] == "not used  2: 2 other reasons"


@pytest.mark.parametrize("wrong", [{"x.tar": 9}, {"x.tar": {"image": "9"}}, {"x.tar": {"image": -9}}, [], 9, "x"])
def test_a_damaged_number_of_members_is_refused(tmp_path: Path, wrong: Any) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(1))])
    eagleray.index(tmp_path)
    table, meta = pq.read_table(tmp_path / NAME), dict(pq.read_metadata(tmp_path / NAME).metadata)
    kept = {b"shards": meta[b"shards"], PASSED.encode(): json.dumps(wrong).encode()}
    pq.write_table(table.replace_schema_metadata(kept), tmp_path / NAME)
    with pytest.raises(UserError, match=r"numbers? of members"):
        load(f"{tmp_path}/{NAME}", again=False)


def test_kinds_that_are_not_known_are_not_printed(tmp_path: Path) -> None:
    """An index of a stranger may say anything."""
    write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(1))])
    eagleray.index(tmp_path)
    table, meta = pq.read_table(tmp_path / NAME), dict(pq.read_metadata(tmp_path / NAME).metadata)
    kept = {b"shards": meta[b"shards"], PASSED.encode(): json.dumps({"x.tar": {"\x1b[31m": 1, "folder": 2}}).encode()}
    pq.write_table(table.replace_schema_metadata(kept), tmp_path / NAME)
    assert list(faults_of(f"{tmp_path}/{NAME}").lines()) == [
        "not read  2 folders, which are no samples (most in x.tar)"
    ]
