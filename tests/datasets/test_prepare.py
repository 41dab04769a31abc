"""`eagleray prepare`: what it writes, that it writes the same whatever happens on the way, and what it refuses."""

import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import webdataset
from helpers.layouts import fill, prepare_error, read_tree, run_prepare, tar_bytes, write_parquet
from helpers.pictures import encode, jpeg, picture, spoiled, write_tar
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.cluster.ray_map import ray_map
from eagleray.data.decode import decode
from eagleray.data.index import open_index
from eagleray.datasets import card
from eagleray.datasets.assignment import ShardAssignment, cut_evenly
from eagleray.datasets.pack import NOTES
from eagleray.datasets.prepare import prepare
from eagleray.datasets.sources.item import Item, Listing, table
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.storage.store import LocalStore

MIB = 2**20


def samples(folder: Path) -> dict[str, dict[str, Any]]:
    """What webdataset reads."""
    urls = [str(p) for p in sorted(folder.glob("*.tar"))]
    rows = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert len({r["__key__"] for r in rows}) == len(rows)
    return {r["__key__"]: {k: v for k, v in r.items() if not k.startswith("__")} for r in rows}


def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options count in MiB, and tests have kilobytes."""
    monkeypatch.setattr("eagleray.datasets.prepare.MIB", 2000)


@pytest.fixture
def photos(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    return tmp_path / "in", fill(
        tmp_path / "in", [f"{c}/{i:02d}.jpg" for c in ("ant", "bee", "cat") for i in range(12)]
    )


def test_bytes_labels_index_and_card(photos: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: Any):
    small_shards(monkeypatch)
    folder, data = photos
    (folder / "ant" / "bad.jpg").write_bytes(spoiled(1))
    (folder / "ant" / "empty.jpg").touch()
    done = run_prepare("folder", folder, tmp_path / "out", size=3)
    expected = {name.removesuffix(".jpg"): (d, ("ant", "bee", "cat").index(name[:3])) for name, d in data.items()}
    assert {k: (s["jpg"], int(s["cls"])) for k, s in samples(tmp_path / "out").items()} == expected
    index = open_index(str(tmp_path / "out"), note=lambda _: pytest.fail("is indexed again"))
    assert dict(zip((index.key(i) for i in range(len(index))), index.label.tolist(), strict=True)) == {
        k: c for k, (_, c) in expected.items()
    }
    for i in range(len(index)):
        whole = Path(index.shards[index.shard[i]].url).read_bytes()
        key = index.key(i)
        assert whole[index.offset[i] : index.offset[i] + index.size[i]] == expected[key][0]
    assert len(index.shards) == done["shards"] > 3
    assert (done["images"], done["listed"], done["classes"], done["class_names"]) == (36, 38, 3, ["ant", "bee", "cat"])
    assert done["bytes"] == sum(len(d) for d in data.values())
    assert done["formats"] == {"JPEG": 36}
    assert done["dropped"]["the image has no bytes"] == {"count": 1, "examples": ["ant/empty"]}
    assert sum(d["count"] for d in done["dropped"].values()) == 2
    assert card.find(str(tmp_path / "out")) == done
    assert not (tmp_path / "out" / NOTES).exists()


def test_the_index_is_that_of_its_shards(photos: tuple[Path, dict[str, bytes]], tmp_path: Path):
    """What was read_note while writing is what reading the tars would find."""
    run_prepare("folder", photos[0], tmp_path / "out")
    ours = open_index(str(tmp_path / "out"))
    (tmp_path / "out" / "index.parquet").unlink()
    again = open_index(str(tmp_path / "out"), note=lambda _: None)
    assert len(ours) == len(again) == 36
    for name in ("offset", "size", "label"):
        assert np.array_equal(getattr(ours, name), getattr(again, name))
    assert all(ours.key(i) == again.key(i) for i in range(36))
    assert np.array_equal(ours.rows(0, 36).crc, again.rows(0, 36).crc)


def test_equal_keys_are_told_apart(tmp_path: Path):
    data = fill(tmp_path / "in", ["a.jpg", "a.b.jpg", "a_b.jpg", "a.JPG", "a~2.jpg"])
    run_prepare("folder", tmp_path / "in", tmp_path / "out")
    found = samples(tmp_path / "out")
    assert sorted(s["jpg"] for s in found.values()) == sorted(data.values())
    assert sorted(found) == ["a", "a_b", "a_b~2", "a~2", "a~2~2"]


def test_long_and_foreign_names(tmp_path: Path):
    """Tars take 100 bytes without more ado."""
    data = fill(tmp_path / "in", ["x" * 180 + ".jpg", "größe/ä.jpg"])
    run_prepare("folder", tmp_path / "in", tmp_path / "out")
    assert {k: s["jpg"] for k, s in samples(tmp_path / "out").items()} == {k[:-4]: d for k, d in data.items()}
    assert len(open_index(str(tmp_path / "out"))) == 2


def test_metadata_becomes_a_json_member(tmp_path: Path):
    data = write_parquet(tmp_path / "in" / "a.parquet", 0, 5, nsfw=pa.array([0.5] * 5), license=pa.array(["x"] * 5))
    run_prepare("parquet", tmp_path / "in", tmp_path / "out")
    found = samples(tmp_path / "out")
    assert [found[f"img_{i}"]["jpeg"] for i in range(5)] == data
    assert all(json.loads(s["json"]) == {"nsfw": 0.5, "license": "x"} for s in found.values())


def test_sides(tmp_path: Path):
    """Larger images shrink, smaller ones keep their bytes, the smallest go."""
    sizes = {"wide": (60, 120), "tall": (200, 50), "small": (40, 64), "tiny": (10, 90), "gray": (80, 80)}
    (tmp_path / "in").mkdir()
    for i, (name, (height, width)) in enumerate(sizes.items()):
        image = Image.fromarray(picture(i, height, width))
        (tmp_path / "in" / f"{name}.png").write_bytes(encode(image.convert("L") if name == "gray" else image, "PNG"))
    done = run_prepare("folder", tmp_path / "in", tmp_path / "out", max_side=64, min_side=30)
    found = samples(tmp_path / "out")
    assert found["small"]["png"] == (tmp_path / "in" / "small.png").read_bytes()
    shapes = {name: tuple(decode(s["jpg"]).shape[1:]) for name, s in found.items() if "jpg" in s}
    assert shapes == {"wide": (32, 64), "tall": (64, 16), "gray": (64, 64)}
    assert done["dropped"] == {"shorter side below 30 pixels": {"count": 1, "examples": ["tiny"]}}
    assert done["formats"] == {"JPEG": 3, "PNG": 1}
    whole = decode((tmp_path / "in" / "wide.png").read_bytes()).float()
    halves = whole.reshape(3, 30, 2, 60, 2).mean((2, 4))
    with Image.open(io.BytesIO(found["wide"]["jpg"])) as image:
        assert image.layer[0][1:3] == image.layer[1][1:3] == (1, 1), "colours are not subsampled"
    near = decode(found["wide"]["jpg"]).float()
    assert abs(near.mean((1, 2)) - halves.mean((1, 2))).max() < 2


def test_duplicates_go_and_the_first_stays(tmp_path: Path, monkeypatch: Any):
    small_shards(monkeypatch)
    data = fill(tmp_path / "in", [f"{i:02d}.jpg" for i in range(20)])
    for copy, original in {"07b": "07", "03x": "03", "19z": "03"}.items():
        (tmp_path / "in" / f"{copy}.jpg").write_bytes(data[f"{original}.jpg"])
    done = run_prepare("folder", tmp_path / "in", tmp_path / "out", dedup=True, size=2)
    assert set(samples(tmp_path / "out")) == {name[:-4] for name in data}
    assert done["dropped"] == {
        "exact duplicate": {"count": 3, "examples": ["03x (of 03)", "07b (of 07)", "19z (of 03)"]}
    }
    assert len(samples_of(tmp_path, dedup=False)) == 23


def samples_of(folder: Path, **options: Any) -> dict[str, Any]:
    run_prepare("folder", folder / "in", folder / "again", **options)
    return samples(folder / "again")


def test_the_seed_makes_the_order(photos: tuple[Path, dict[str, bytes]], tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_prepare("folder", photos[0], tmp_path / name, seed=seed)
    a, b, c = (list(samples(tmp_path / name)) for name in "abc")
    assert a == b != c
    assert sorted(a) == sorted(c) != a
    assert (tmp_path / "a" / "shard-000000.tar").read_bytes() == (tmp_path / "b" / "shard-000000.tar").read_bytes()


def test_an_order_is_a_permutation_in_even_shards():
    sizes = np.random.default_rng(0).integers(1, 1000, 5000)
    items = table(Item(f"k{i}", "u", 0, int(n)) for i, n in enumerate(sizes))
    order = ShardAssignment.shuffle(items, size=20_000, seed=3)
    rows = [order.rows(n) for n in range(len(order))]
    assert sorted(np.concatenate(rows).tolist()) == list(range(5000))
    held = np.array([sizes[r].sum() for r in rows])
    assert len(order) == -(-sizes.sum() // 20_000)
    assert held.min() > 18_000
    assert held.max() < 21_000


def test_row_groups_stay_together_and_are_mixed_within_a_shard():
    items = table(Item(f"k{i}", "u", i % 10, 100, group=i // 10) for i in range(1000))
    order = ShardAssignment.shuffle(items, size=5000, seed=0)
    rows = [order.rows(n) for n in range(len(order))]
    groups = [Counter((r // 10).tolist()) for r in rows]
    assert sum(len(g) for g in groups) <= 100 + len(order), "each is read once, or twice where a shard ends in it"
    assert all(np.mean(np.diff(r // 10) == 0) < 0.5 for r in rows)


def test_cuts_are_even_and_no_shard_is_empty():
    assert cut_evenly(np.array([4, 4, 4, 4, 4, 4]), 10).tolist() == [0, 2, 4, 6]
    assert cut_evenly(np.array([1]), 10).tolist() == [0, 1]
    assert cut_evenly(np.array([0, 0]), 10).tolist() == [0, 2]
    huge = cut_evenly(np.array([5, 100, 5, 5]), 10)
    assert (np.diff(huge) > 0).all()
    assert huge[-1] == 4


def test_again_with_the_same_options_is_done_already(photos: tuple[Path, dict[str, bytes]], tmp_path: Path):
    first = run_prepare("folder", photos[0], tmp_path / "out")
    before = read_tree(tmp_path / "out")
    said: list[str] = []
    options = PrepareOptions(source="folder", origin=str(photos[0]), destination=str(tmp_path / "out"))
    tick = partial(pytest.fail, "works again")
    assert prepare(options, run=map, command="other", note=said.append, tick=lambda *_: tick()) == first
    assert said == [f"{tmp_path}/out: already complete"]
    assert read_tree(tmp_path / "out") == before


def test_what_differs_is_named(photos: tuple[Path, dict[str, bytes]], tmp_path: Path):
    folder, _ = photos
    run_prepare("folder", folder, tmp_path / "out", seed=1)
    assert prepare_error("folder", folder, tmp_path / "out", seed=2) == (
        f"{tmp_path}/out: was begun with --seed 1, now --seed 2; give the same options, or another folder"
    )
    assert "was begun with no --max-side, now --max-side 9" in prepare_error(
        "folder", folder, tmp_path / "out", seed=1, max_side=9
    )
    run_prepare("webdataset", tmp_path / "out", tmp_path / "few", where="label = 0")
    assert "was begun with --where label = 0, now no --where" in prepare_error(
        "webdataset", tmp_path / "out", tmp_path / "few"
    )
    assert "was begun with --where label = 0, now --where label = 1" in prepare_error(
        "webdataset", tmp_path / "out", tmp_path / "few", where="label = 1"
    )
    fill(folder, ["ant/new.jpg"])
    assert f"the files of {folder} have changed since" in prepare_error("folder", folder, tmp_path / "out", seed=1)


def test_destinations_that_hold_something_else_are_refused(photos: tuple[Path, dict[str, bytes]], tmp_path: Path):
    write_tar(tmp_path / "out" / "x.tar", [("a.jpg", jpeg(1))])
    assert "holds shards already" in prepare_error("folder", photos[0], tmp_path / "out")
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file/out" in prepare_error("folder", photos[0], tmp_path / "file" / "out")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / card.NAME).write_text("[]")
    assert "dataset.json: not a dataset.json written by eagleray" in prepare_error(
        "folder", photos[0], tmp_path / "odd"
    )


def test_nothing_usable_is_refused(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(spoiled(1))
    assert "all 1 listed image(s) were dropped; the most frequent reason: " in prepare_error(
        "folder", tmp_path / "in", tmp_path / "out"
    )


def command(words: list[Any], folder: Path) -> subprocess.Popen[str]:
    """In a folder of its own, so that the command on the card is always the same."""
    line = [sys.executable, "-m", "eagleray.cli", "prepare", *map(str, words), "--workers", "0"]
    return subprocess.Popen(line, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(words: list[Any], folder: Path) -> tuple[int, str]:
    process = command(words, folder)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A tar of class tars of about 5 MB, which takes a second or two."""
    images = [encode(picture(i, 240, 320), quality=97) for i in range(25)]
    tars = {}
    for c in range(3):
        members = {f"n0000000{c}_{i}.JPEG": images[i % 25] + b"%d %d" % (c, i) for i in range(80)}
        members[f"n0000000{c}_copy.JPEG"] = members[f"n0000000{c}_1.JPEG"]
        tars[f"n0000000{c}.tar"] = tar_bytes(members)
    return write_tar(tmp_path / "whole.tar", tars.items())


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_bytes(large: Path, tmp_path: Path):
    words = ["imagenet-22k", large, "out", "--size", 1, "--dedup", "--max-side", 300]
    results = {}
    for name, kills in (("whole", 0), ("killed", 3)):
        (tmp_path / name).mkdir()
        for number in range(kills):
            kill_somewhere(words, tmp_path / name, random.Random(number))
        code, err = finished(words, tmp_path / name)
        assert code == 0, err
        results[name] = read_tree(tmp_path / name)
    assert results["killed"] == results["whole"]
    assert len(results["whole"]) > 5
    assert json.loads(results["whole"][f"out/{card.NAME}"])["dropped"]["exact duplicate"]["count"] == 3


def kill_somewhere(words: list[Any], folder: Path, draw: random.Random) -> None:
    """SIGKILL a little after the command has written its next file."""
    process = command(words, folder)
    seen = len(list(folder.rglob("*")))
    while process.poll() is None and len(list(folder.rglob("*"))) <= seen:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.15))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was too fast"


def test_what_was_done_before_is_kept(large: Path, tmp_path: Path):
    """Shards are not written again, and somebody is told."""
    said: list[str] = []
    options = PrepareOptions(source="imagenet-22k", origin=str(large), destination=str(tmp_path / "out"), size=1)

    def stops(function: Any, tasks: Any) -> Any:
        yield from itertools.islice(map(function, tasks), 2)
        raise UserError("enough")

    quiet = {"command": "", "note": said.append, "tick": lambda *_: None}
    with pytest.raises(UserError, match="enough"):
        prepare(options, run=stops, **quiet)
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.tar")}
    assert len(written) == 2
    prepare(options, run=map, **quiet)
    assert {p: p.stat().st_mtime_ns for p in written} == written
    assert any(line.startswith("write: ") and line.endswith(" images were done before") for line in said)


@pytest.mark.slow
def test_workers_change_nothing(large: Path, tmp_path: Path):
    """Ray's processes write what this one does, and what they raise is a line for the user."""
    runners = {"alone": map, "ray": partial(ray_map, workers=2)}
    for name, runner in runners.items():
        options = PrepareOptions(source="imagenet-22k", origin=str(large), destination=str(tmp_path / name), size=1)
        prepare(options, run=runner, command="same", note=lambda _: None, tick=lambda *_: None)
    assert read_tree(tmp_path / "ray") == read_tree(tmp_path / "alone")
    assert len(samples(tmp_path / "ray")) == 243


@pytest.mark.slow
def test_a_lost_worker_and_a_wrong_input_on_ray(tmp_path: Path):
    """A task whose process dies is run once more; a line for the user stays one."""

    def task(number: int) -> int:
        if number == 0 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            raise UserError("there is no second")
        return number

    results = ray_map(task, range(3), workers=1)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(UserError, match=r"^there is no second$"):
        next(results)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nothing", "in", "out"], "SOURCE nothing: unknown"),
        (["folder", "in", "ftp://x/out"], "ftp://x/out"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path: Path, words: list[str], line: str):
    fill(tmp_path / "in", ["a.jpg"])
    code, err = finished(words, tmp_path)
    assert code == 2
    assert line in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_images_that_are_left_out_are_not_all_in_memory(
    photos: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An expression may leave out nearly all of 14 million."""
    run_prepare("folder", photos[0], tmp_path / "first")  # imports what it needs
    name, photo = next(iter(photos[1].items()))
    left_out = (Item(f"{i:08d}", "", 0, 0, reason="--where is not true") for i in range(40_000))
    listing = Listing(itertools.chain([Item("a", str(photos[0] / name), 0, len(photo), "jpg")], left_out))
    monkeypatch.setattr("eagleray.datasets.prepare.find", lambda options: SourceFiles([], lambda: listing))
    for module in ("prepare", "sources.item"):
        monkeypatch.setattr(f"eagleray.datasets.{module}.BATCH", 500)
    tracemalloc.start()
    try:
        done = run_prepare("folder", photos[0], tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (done["images"], done["listed"]) == (1, 40_001)
    assert peak < 5 * MIB


def test_notes_are_deleted_several_at_a_time(
    photos: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a store each takes a while."""
    honest, together = LocalStore.delete, threading.Barrier(2)

    def slow(self: LocalStore, url: str) -> None:
        if url.endswith("-000000.parquet"):  # of the images' hashes, and of the shard
            together.wait(10)
        honest(self, url)

    monkeypatch.setattr(LocalStore, "delete", slow)
    run_prepare("folder", photos[0], tmp_path / "out", dedup=True)
    assert together.n_waiting == 0
