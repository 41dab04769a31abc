"""`eagleray prepare` after a loss of power, beside a second command, and from files of strangers."""

import errno
import fcntl
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.hostile_tars import CASES, END, member, pax
from helpers.layouts import fill, prepare_error, read_tree, run_prepare
from helpers.pictures import jpeg, spoiled, write_tar
from helpers.sources import drop_reasons, source_error

from eagleray.base.errors import UserError
from eagleray.base.files import lock_folder
from eagleray.data.index import open_index
from eagleray.datasets import pack
from eagleray.datasets import prepare as preparing
from eagleray.datasets.pack import NOTES
from eagleray.datasets.prepare import prepare
from eagleray.datasets.sources.source import PrepareOptions
from eagleray.storage import store
from eagleray.storage.store import LocalStore


def interrupted(origin: Path, destination: Path, **options: Any) -> None:
    """Prepare a folder up to the card, which is not written."""

    def stops(*_: Any, **__: Any) -> None:
        raise UserError("no power")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagleray.datasets.prepare.MIB", 2000)
        patch.setattr(preparing, "_finish", stops)
        assert prepare_error("folder", origin, destination, size=3, **options) == "no power"


def finished(origin: Path, destination: Path, **options: Any) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagleray.datasets.prepare.MIB", 2000)
        run_prepare("folder", origin, destination, size=3, **options)
    return read_tree(destination)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    fill(tmp_path / "in", [f"{c}/{i:02d}.jpg" for c in ("ant", "bee") for i in range(10)])
    return tmp_path / "in"


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("harm", [zeroed, Path.unlink])
@pytest.mark.parametrize("name", ["shard-000001.tar", f"{NOTES}/shard-000001.parquet", f"{NOTES}/hash-000000.parquet"])
def test_what_is_not_as_it_was_noted_is_written_again(photos: Path, tmp_path: Path, name: str, harm: Any) -> None:
    """As a loss of power can leave a file whose name was on the disk before its bytes."""
    expected = finished(photos, tmp_path / "whole", dedup=True)
    interrupted(photos, tmp_path / "out", dedup=True)
    harm(tmp_path / "out" / name)
    assert finished(photos, tmp_path / "out", dedup=True) == expected


@pytest.mark.parametrize("name", ["plan.json", "items-*.parquet"])
def test_a_damaged_plan_is_named(photos: Path, tmp_path: Path, name: str) -> None:
    interrupted(photos, tmp_path / "out")
    [path] = (tmp_path / "out" / NOTES).glob(name)
    zeroed(path)
    line = prepare_error("folder", photos, tmp_path / "out", size=3)
    assert line.startswith(f"{path}: damaged; delete {tmp_path}/out")


def test_every_file_is_on_the_disk_before_its_name_and_the_next_file(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    flush, replace, link = os.fsync, Path.replace, os.link

    def fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def name(part: Path, target: Path) -> None:
        calls.append(("name", str(target)))
        assert calls[-2] == ("fsync", str(part))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda part, target: name(part, target) or link(part, target))
    monkeypatch.setattr(Path, "replace", lambda part, target: name(part, target) or replace(part, target))
    finished(photos, tmp_path / "out")
    named = [i for i, (what, _) in enumerate(calls) if what == "name"]
    assert all(calls[i + 1] == ("fsync", str(Path(calls[i][1]).parent)) for i in named)
    names = [Path(calls[i][1]).name for i in named]
    assert names[0].startswith("items-")
    assert names[1] == "plan.json"
    assert names[-2:] == ["index.parquet", "dataset.json"]
    assert len(names) > 8
    assert names.index("shard-000000.tar") < names.index("shard-000000.parquet")


def test_writers_of_one_file_do_not_share_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, or two machines whose processes have the same number."""
    (tmp_path / "source").write_bytes(b"x")
    parts: list[Path] = []
    monkeypatch.setattr(store.shutil, "copyfile", lambda _, part: parts.append(part) or part.touch())
    for _ in range(2):
        LocalStore().put(str(tmp_path / "out" / "file"), tmp_path / "source")
    assert len(set(parts)) == 2
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["file"]


def test_a_second_command_is_refused_in_a_line(photos: Path, tmp_path: Path) -> None:
    interrupted(photos, tmp_path / "out")
    before = read_tree(tmp_path / "out")
    with lock_folder(tmp_path / "out" / NOTES):
        line = prepare_error("folder", photos, tmp_path / "out", size=3)
    assert line == f"{tmp_path}/out: another `eagleray prepare` is at work there"
    assert read_tree(tmp_path / "out").keys() == before.keys()


def test_where_nothing_can_be_locked_it_is_said(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    options = PrepareOptions(source="folder", origin=str(photos), destination=str(tmp_path / "out"))
    prepare(options, run=map, command="", note=said.append, tick=lambda *_: None)
    assert said[0] == f"{tmp_path}/out: cannot be locked; do not start a second command for it"


def test_a_command_that_begins_nothing_leaves_nothing(tmp_path: Path) -> None:
    write_tar(tmp_path / "in" / "x.tar", [("n00000001.txt", b"")])
    assert "expected" in prepare_error("imagenet-1k", tmp_path / "in" / "x.tar", tmp_path / "out", split="val")
    assert not (tmp_path / "out").exists()


def test_a_plan_that_becomes_another_commands_is_noticed(photos: Path, tmp_path: Path) -> None:
    """As on a store without locks; the notes of the other plan do not count as this one's."""
    interrupted(photos, tmp_path / "out", seed=1)
    (tmp_path / "out" / NOTES / "plan.json").rename(tmp_path / "theirs.json")
    mine = {p.name: p.read_bytes() for p in (tmp_path / "out" / NOTES).iterdir()}
    for path in (tmp_path / "out").glob("*.tar"):
        path.unlink()
    interrupted(photos, tmp_path / "out", seed=2)
    for name, content in mine.items():
        (tmp_path / "out" / NOTES / name).write_bytes(content)
    assert finished(photos, tmp_path / "out", seed=2) == finished(photos, tmp_path / "whole", seed=2)
    plan_of = preparing._write_plan

    def other(*arguments: Any) -> Any:
        plan = plan_of(*arguments)
        (tmp_path / "late" / NOTES / "plan.json").write_bytes((tmp_path / "theirs.json").read_bytes())
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_write_plan", other)
        assert "was begun with --seed 1, now --seed 2" in prepare_error(
            "folder", photos, tmp_path / "late", size=3, seed=2
        )


def index_of(folder: Path) -> dict[str, bytes]:
    index = open_index(str(folder), note=lambda _: pytest.fail("is indexed again"))
    return {index.key(i): bytes(index.read(i, i + 1)) for i in range(len(index))}


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """From a folder and from a tar; a broken image of such a name is on the card."""
    names = ["b\udce9\udce9/caf\udce9.jpg", "b\udce9\udce9/x.jpg", "a/größe.jpg"]
    data = fill(tmp_path / "in", names)
    (tmp_path / "in" / "b\udce9\udce9" / "bad\udcff.jpg").write_bytes(spoiled(1))
    done = run_prepare("folder", tmp_path / "in", tmp_path / "out")
    assert index_of(tmp_path / "out") == {
        "b\\xe9\\xe9/caf\\xe9": data[names[0]],
        "b\\xe9\\xe9/x": data[names[1]],
        "a/größe": data[names[2]],
    }
    assert next(iter(done["dropped"].values()))["examples"] == ["b\\xe9\\xe9/bad\\xff"]
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        assert {m.name for m in tar if m.name.endswith("jpg")} == set(names)
    again = run_prepare("webdataset", tmp_path / "out", tmp_path / "again")
    assert again["images"] == 3
    assert index_of(tmp_path / "again") == index_of(tmp_path / "out")


def test_a_folder_with_names_that_are_not_utf_8_is_read_in_place(tmp_path: Path) -> None:
    data = fill(tmp_path / "in", ["caf\udce9.jpg", "caf\uefe9.jpg", "a.jpg"])
    open_index(str(tmp_path / "in"), note=lambda _: None)
    index = open_index(str(tmp_path / "in"), note=lambda _: pytest.fail("is indexed again"))
    assert sorted(bytes(index.read(i, i + 1)) for i in range(3)) == sorted(data.values())
    assert {index.key(i) for i in range(3)} == {"a.jpg", "caf\\xe9.jpg", "caf\\xee\\xbf\\xa9.jpg"}
    (tmp_path / "in" / "caf\udce9.jpg").unlink()
    with pytest.raises(UserError, match=r"caf\\xe9.jpg: is gone"):
        open_index(str(tmp_path / "in"))


def test_shards_of_strangers_become_ours(tmp_path: Path) -> None:
    """Every case of the review at once: names stay below the folder into which a shard is unpacked."""
    (tmp_path / "in").mkdir()
    for number, case in enumerate(CASES.values()):
        (tmp_path / "in" / f"{number:02d}.tar").write_bytes(case.data)
    done = run_prepare("webdataset", tmp_path / "in", tmp_path / "out")
    assert done["images"] == sum(len(case.good) for case in CASES.values())
    keys = set(index_of(tmp_path / "out"))
    assert {"x", "abs", "caf\\xe9", "\\xed\\xa0\\x80"} <= keys
    assert not any(key.startswith("/") or ".." in key.split("/") for key in keys)


IMAGE = jpeg(1)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"a.jpg": IMAGE, "a.json": b"[" * 200_000}, "its .json cannot be read"),
        ({"a.jpg": IMAGE, "a.json": b" " * (2**24 + 1)}, "its .json has 16777217 bytes"),
    ],
)
def test_odd_members_of_a_shard_are_a_reason(tmp_path: Path, members: dict[str, bytes], reason: str) -> None:
    write_tar(tmp_path / "in" / "x.tar", members.items())
    assert drop_reasons("webdataset", tmp_path / "in") == {"a": reason}


def test_a_caption_with_half_a_character_keeps_it(tmp_path: Path) -> None:
    """`\\ud800` is valid in JSON, and common in captions from the web."""
    write_tar(tmp_path / "in" / "x.tar", [("a.jpg", IMAGE), ("a.json", b'{"caption": "\\ud800 \xc3\xa9"}')])
    run_prepare("webdataset", tmp_path / "in", tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        file = tar.extractfile("a.json")
        assert file
        assert json.loads(file.read()) == {"caption": "\ud800 é"}


@pytest.mark.parametrize("path", ["/", ".", "", "x" * 5000 + ".jpg", "a\0b.jpg", "..", "../../a.jpg"])
def test_odd_paths_in_parquet(tmp_path: Path, path: str) -> None:
    cells = pa.array([{"bytes": IMAGE, "path": path}, {"bytes": jpeg(2), "path": "b.jpg"}])
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"image": cells}), tmp_path / "in" / "x.parquet")
    run_prepare("parquet", tmp_path / "in", tmp_path / "out")
    keys = set(index_of(tmp_path / "out"))
    assert keys - {"b"} <= {"x-000000000", "a_b", "__", "a"}
    assert len(keys) == 2 - (len(path) > 4000)


def test_a_label_that_no_index_can_hold_is_named(tmp_path: Path) -> None:
    cells = pa.array([{"bytes": IMAGE, "path": "a.jpg"}])
    pq.write_table(pa.table({"image": cells, "label": pa.array([2**63], pa.uint64())}), tmp_path / "x.parquet")
    line = prepare_error("parquet", tmp_path / "x.parquet", tmp_path / "out")
    assert line == f"{tmp_path}/x.parquet: the label of a is 9.22e+18, more than 999999999999999999"


@pytest.mark.parametrize(("pixel", "reason"), [("1" * 23, "line 2: expected emotion,pixels"), ("256", "found 256")])
def test_a_pixel_of_fer2013_that_is_none(tmp_path: Path, pixel: str, reason: str) -> None:
    pixels = np.full(48 * 48, "7", object)
    pixels[5] = pixel
    (tmp_path / "fer2013.csv").write_text(f"emotion,pixels,Usage\n3,{' '.join(pixels)},Training\n")
    assert reason in source_error("fer2013", tmp_path)


def test_a_damaged_or_sparse_archive_of_imagenet_is_named(tmp_path: Path) -> None:
    sparse = pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"0,9")) + member(b"n00000001/a.jpg", IMAGE)
    (tmp_path / "x.tar").write_bytes(sparse + END)
    line = source_error("imagenet-22k", tmp_path / "x.tar")
    assert line == f"{tmp_path}/x.tar: n00000001/a.jpg: stored sparse, so its bytes are not in one piece"


def test_a_card_without_options_is_not_continued(photos: Path, tmp_path: Path) -> None:
    run_prepare("folder", photos, tmp_path / "out")
    card = json.loads((tmp_path / "out" / "dataset.json").read_text())
    for options in (None, [1]):
        (tmp_path / "out" / "dataset.json").write_text(json.dumps(card | {"options": options}))
        assert "its shards were not written by" in prepare_error("folder", photos, tmp_path / "out")
    assert pack.NOTES not in {p.name for p in (tmp_path / "out").iterdir()}


def test_a_finished_shard_that_is_gone_is_named(photos: Path, tmp_path: Path):
    out = tmp_path / "out"
    before = finished(photos, out)
    assert finished(photos, out) == before
    shard = out / "shard-000001.tar"
    again = "put it back, or delete the folder to begin again"
    shard.write_bytes(before[shard.name][:-512])
    assert prepare_error("folder", photos, out, size=3) == (
        f"{out}: was complete, but shard-000001.tar has another size; {again}"
    )
    shard.unlink()
    assert (
        prepare_error("folder", photos, out, size=3) == f"{out}: was complete, but shard-000001.tar is missing; {again}"
    )
    (out / "index.parquet").unlink()
    shards = sum(name.endswith(".tar") for name in before)
    assert prepare_error("folder", photos, out, size=3) == (
        f"{out}: was complete, but 1 of {shards} shards are missing; {again}"
    )
    shard.write_bytes(before[shard.name])
    assert finished(photos, out) == {k: v for k, v in before.items() if k != "index.parquet"}
