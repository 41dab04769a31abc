"""An index.parquet from a stranger is an index or one line that names it, in bounded time and memory."""

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from helpers import hostile_indexes
from helpers.fuzzing import counts, examples
from helpers.hostile_indexes import CASES, Content
from helpers.pictures import jpeg, sample, write_shards, write_tar
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.data import index_schema
from eagleray.data.index import open_index
from eagleray.data.index_file import NAME, SCHEMA


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of three samples, the second with a bad one, and their index."""
    folder = write_shards(tmp_path_factory.mktemp("intact"), 6, 2)
    write_tar(folder / "x-001.tar", [*sample(3), *sample(4), *sample(5), ("bad.cls", b"1")])
    read_all(folder)
    return folder


@pytest.fixture(scope="module")
def folder(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(intact, tmp_path_factory.mktemp("changed") / "x"))


def read_all(folder: Path) -> list[bytes]:
    """Read whatever an index has: its numbers, its keys and its blocks."""
    index = open_index(str(folder), note=lambda _: None)
    assert all(b.reason for b in index.bad)
    assert min(index.size.tolist()) > 0
    assert min(index.label.tolist()) >= -1
    assert len({index.key(i) for i in range(len(index))}) <= len(index)
    return [bytes(index.read(a, b)) for a, b in zip(index.starts[:-1].tolist(), index.starts[1:].tolist(), strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_true_is_refused(folder: Path, intact: Path, case: str) -> None:
    change, reason = CASES[case]
    content = hostile_indexes.read(intact)
    change(content)
    hostile_indexes.write(folder, content, SCHEMA)
    with pytest.raises(UserError, match=reason) as caught:
        read_all(folder)
    assert str(folder) in str(caught.value)
    assert "eagleray index" in str(caught.value)


@pytest.mark.parametrize("column", SCHEMA.names)
def test_a_column_twice_is_refused(folder: Path, intact: Path, column: str) -> None:
    twice = pa.schema([*SCHEMA, SCHEMA.field(column)])
    hostile_indexes.write(folder, hostile_indexes.read(intact), twice)
    with pytest.raises(UserError, match="two columns of one name"):
        read_all(folder)


def check(folder: Path, intact: Path) -> None:
    """The index is refused with its name, or the shards' own bytes are read."""
    try:
        blocks = read_all(folder)
    except UserError as e:
        if str(folder) not in str(e):
            raise
        return
    shards = [(intact / f"x-00{i}.tar").read_bytes() for i in range(2)]
    assert len(blocks) >= 2  # none of the shards is left out
    assert all(block in shards[0] or block in shards[1] for block in blocks)


@pytest.mark.parametrize("count", counts(30))
def test_changed_entries_and_rows(folder: Path, intact: Path, count: int | None) -> None:
    def run(content: Content) -> None:
        try:
            hostile_indexes.write(folder, content, SCHEMA)
        except (pa.ArrowException, OverflowError):  # Parquet has no such value
            return
        check(folder, intact)

    examples(hostile_indexes.changes(hostile_indexes.read(intact)), run, count, many=200)


@pytest.mark.parametrize("count", counts(60))
def test_changed_bytes(folder: Path, intact: Path, count: int | None) -> None:
    def run(data: bytes) -> None:
        (folder / NAME).write_bytes(data)
        check(folder, intact)

    whole = (intact / NAME).read_bytes()
    examples(hostile_indexes.spoiled(whole) | st.binary(max_size=200), run, count, many=200)


def test_a_block_is_no_larger_than_a_reader_expects(
    folder: Path, intact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(intact / NAME, folder / NAME)
    monkeypatch.setattr(index_schema, "LARGEST_BLOCK", 600)
    with pytest.raises(UserError, match="a block of more than 600 bytes"):
        read_all(folder)


def test_the_index_of_a_folder_of_images_stays_in_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("in/a.jpg", "in/b.jpg", "secret.jpg"):
        (tmp_path / name).write_bytes(jpeg(1))
    read_all(tmp_path / "in")
    content = hostile_indexes.read(tmp_path / "in")
    content.rows[0]["key"][0] = "../secret.jpg"
    hostile_indexes.write(tmp_path / "in", content, SCHEMA)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/in: its index has an image outside of the folder")):
        read_all(tmp_path / "in")
    content.rows[0]["key"][0] = "a.jpg"
    content.entries[0]["bad"] = 1
    for column in content.rows[0].values():
        column.append(None if column is not content.rows[0]["reason"] else "made up")
    content.rows[0]["key"][-1] = "c.jpg"
    hostile_indexes.write(tmp_path / "in", content, SCHEMA)
    with pytest.raises(UserError, match=r"is damaged \(3 images"):
        read_all(tmp_path / "in")
