"""`eagleray data measure --columns json.NAME`: fields of the JSON beside each image, which may come from a stranger."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.commands import refused
from helpers.pictures import Member, jpeg, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st

import eagleray
from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.data import sample_table
from eagleray.data.columns import select
from eagleray.data.index import open_index
from eagleray.datasets import sidecars
from eagleray.datasets.sidecars import FAULT, LARGEST, LONGEST, MISSING

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
GOOD = {"nsfw": 0.5, "caption": "a dog", "safe": True}


def sample(key: str, data: bytes | None, *, before: bool = False) -> list[Member]:
    image, text = (f"{key}.jpg", jpeg(len(key))), [] if data is None else [(f"{key}.json", data)]
    return [*text, image] if before else [image, (f"{key}.txt", b"a caption"), *text]


def shards(folder: Path, documents: dict[str, bytes | None], each: int = 100) -> Path:
    members = [sample(key, data, before=i % 2 == 0) for i, (key, data) in enumerate(documents.items())]
    for start in range(0, len(members), each):
        write_tar(folder / f"{start:05d}.tar", [m for group in members[start : start + each] for m in group])
    return folder


def measured(folder: Path, columns: str) -> dict[str, list[Any]]:
    out = Path(eagleray.measure(folder, columns, workers=0))
    tables = [pa.parquet.read_table(part) for part in sorted(out.glob("part-*.parquet"))]
    return pa.concat_tables(tables).to_pydict()


@pytest.mark.parametrize("rows", [3, 7, 1000])
def test_fields_become_columns_whatever_the_parts_and_shards(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_table, "ROWS", rows)
    documents: dict[str, bytes | None] = {
        f"k{i:02d}": json.dumps({"nsfw": i / 20, "caption": f"Ä{i}", "safe": i % 2 == 0}).encode() for i in range(20)
    }
    documents["k04"] = None
    folder = shards(tmp_path / "x", documents, each=6)
    table = measured(folder, "json.nsfw,json.caption,json.safe,size")
    there = [i for i in range(20) if i != 4]
    assert table["key"] == list(documents)
    assert [table["nsfw"][i] for i in there] == [i / 20 for i in there]
    assert [table["caption"][i] for i in there] == [f"Ä{i}" for i in there]
    assert [table["safe"][i] for i in there] == [i % 2 == 0 for i in there]
    assert (table["nsfw"][4], table[FAULT][4]) == (None, MISSING)
    assert {table[FAULT][i] for i in there} == {None}
    assert None not in table["width"]
    index = open_index([Source(url=str(folder), where="nsfw < 0.5 and safe", weight="1 + nsfw")], note=lambda _: None)
    found = select(index)
    assert found is not None
    assert np.flatnonzero(found.weight).tolist() == [0, 2, 6, 8]
    assert found.weight[[2, 8]] == pytest.approx([1.1, 1.4])


def test_a_name_that_means_two_things_is_one_line(tmp_path: Path) -> None:
    """JSON says of what size an image was, and what is measured is what it has now."""
    documents: dict[str, bytes | None] = {f"k{i}": json.dumps({"width": 1000 + i}).encode() for i in range(4)}
    folder = shards(tmp_path / "x", documents)
    said = eagleray.measure(folder, "json.width", workers=0)

    def kept(where: str = "width > 1001", **more: Any) -> int:
        source = Source(url=str(folder), where=where, **more)
        found = select(open_index([source], note=lambda _: None))
        return 4 if found is None else int((found.weight > 0).sum())

    assert kept() == 2
    seen = eagleray.measure(folder, "size", workers=0)
    with pytest.raises(UserError) as e:
        kept()
    line = f"data.train.where: width > 1001: {said} and {seen} both have a column width; name the one that counts as "
    assert str(e.value) == f"{line}columns, such as {said}/part-*.parquet"
    with pytest.raises(UserError, match=r"^data\.train\.weight: width: "):
        kept(where="min_side > width_of_mine", weight="width")
    assert kept(columns=(f"{said}/part-*.parquet",)) == 2
    assert eagleray.measure(folder, "size,luma", workers=0) != seen
    with pytest.raises(UserError, match="leaves none of 4 samples"):
        kept(columns=(f"{seen}/part-*.parquet",))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "large": (b" " * LARGEST + b"{}", f"its .json has more than {LARGEST:,} bytes"),
    "deep": (b'{"nsfw":' + b"[" * 200_000, "its .json is not JSON, or nested too deeply"),
    "bytes": (b"\xff\xfe\xfd", "its .json is not JSON, or nested too deeply"),
    "digits": (b'{"nsfw": ' + b"9" * 10_000 + b"}", "its .json is not JSON, or nested too deeply"),
    "list": (b"[1, 2]", "its .json is not an object"),
    "nan": (b'{"nsfw": NaN}', "nsfw: expected a finite number"),
    "huge": (b'{"nsfw": 1e999}', "nsfw: expected a finite number"),
    "integer": (b'{"nsfw": 1' + b"0" * 400 + b"}", "nsfw: expected a finite number"),
    "text": (b'{"nsfw": "0.1"}', "nsfw: expected number"),
    "truth": (b'{"nsfw": true}', "nsfw: expected number"),
    "object": (b'{"nsfw": {"a": 1}}', "nsfw: expected number"),
    "long": (json.dumps({"caption": "x" * (LONGEST + 1)}).encode(), f"caption: expected at most {LONGEST} characters"),
    "surrogate": (b'{"caption": "\\ud800"}', f"caption: expected at most {LONGEST} characters of Unicode"),
}


def test_hostile_json_is_null_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecars, "LOOK", 5)
    documents = {f"good{i:02d}": json.dumps(GOOD).encode() for i in range(5)}
    folder = shards(tmp_path / "x", documents | {name: data for name, (data, _) in HOSTILE.items()})
    table = measured(folder, "json.nsfw,json.caption")
    rows = dict(zip(table["key"], zip(table["nsfw"], table["caption"], table[FAULT], strict=True), strict=True))
    assert rows["good00"] == (0.5, "a dog", None)
    for name, (_, reason) in HOSTILE.items():
        assert rows[name][:2] == (None, None), name
        assert rows[name][2].startswith(reason), (name, rows[name][2])
    assert "3 samples: nsfw: expected a finite number" in capsys.readouterr().out


@settings(max_examples=60, deadline=None)
@given(st.lists(ANY_JSON, min_size=1, max_size=5), st.sampled_from(sorted(sidecars.KINDS)))
def test_any_value_is_one_of_its_column_or_null_with_a_reason(values: list[Any], kind: str) -> None:
    for value in values:
        kept, wrong = sidecars.value_of(value, kind)
        assert (kept is None) == (value is None or bool(wrong))
        assert pa.array([kept], sidecars.KINDS[kind]).to_pylist() == [kept]


def test_a_damaged_tar_keeps_what_is_before_the_damage(tmp_path: Path) -> None:
    documents = {f"k{i:02d}": json.dumps(GOOD).encode() for i in range(8)}
    tar = shards(tmp_path / "x", documents) / "00000.tar"
    data = bytearray(tar.read_bytes())
    at = data.index(b"k05.json")
    data[at : at + 400] = b"\xff" * 400
    tar.write_bytes(data)
    table = measured(tmp_path / "x", "json.nsfw")
    assert table["key"] == [f"k{i:02d}" for i in range(6)]
    assert table["nsfw"] == [0.5] * 5 + [None]
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "00000.tar").write_bytes(data[: data.index(b"k05.jpg")])  # the last member is whole
    assert measured(tmp_path / "cut", "json.nsfw")["nsfw"] == [0.5] * 5


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("json.nswf", "no JSON of the first 1000 samples has it; they have nsfw, caption, safe, tags, mixed"),
        ("json.tags", "expected number, text, true or false; its values are lists or objects"),
        ("json.mixed", "its values are number and text"),
        ("json.label", "there is another column label"),
        ("json.nsfw,json.nsfw", "there is another column nsfw"),
        ("size,json.width", "there is another column width"),
        ("json.../../x", "expected the name of a field"),
        ("json.", "expected the name of a field"),
    ],
)
def test_a_field_that_cannot_be_a_column_is_one_line(
    columns: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [GOOD | {"tags": ["a"], "mixed": i if i else "none"} for i in range(3)]
    folder = shards(tmp_path / "x", {f"k{i}": json.dumps(d).encode() for i, d in enumerate(documents)})
    assert message in refused(capsys, "data", "measure", str(folder), "--columns", columns, "--workers", "0")
    assert not (folder / "columns").exists()


def test_a_folder_of_images_has_no_json_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    line = refused(capsys, "data", "measure", str(tmp_path), "--columns", "json.nsfw", "--workers", "0")
    assert "read from tars, not from a folder of images" in line
