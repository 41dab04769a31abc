"""A manifest beside a checkpoint, whatever it says, makes the checkpoint count or not, and nothing else happens."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import Place, assert_full_of, keep_one
from helpers.fuzzing import counts, examples, generators
from helpers.mutations import change_bytes, change_tree

from eagleray.engine import checkpoint, checkpoint_files
from eagleray.engine.checkpoint_files import sha256
from eagleray.storage.blob import Blob


def two_checkpoints(folder: Path) -> tuple[Place, Path]:
    """A place with checkpoints of steps 1 and 2, and the manifest of the second."""
    place = Place(str(folder / "checkpoints"), folder / "scratch")
    for step in (1, 2):
        keep_one(place.writer(), step)
    return place, folder / "checkpoints" / "step-000000002.json"


@pytest.mark.parametrize("count", counts(100))
def test_a_changed_manifest_costs_its_own_checkpoint_at_most(count: int | None, tmp_path: Path):
    place, path = two_checkpoints(tmp_path)
    text = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        state = place.newest()
        assert state is not None
        assert_full_of(state, state["step"])

    trees = generators(count).map(lambda rng: json.dumps(change_tree(rng, json.loads(text))).encode())
    examples(trees | generators(count).map(lambda rng: change_bytes(rng, text)), check, count, many=400)


@pytest.mark.parametrize("count", counts(100))
def test_a_changed_list_of_rows_costs_its_own_checkpoint_at_most(count: int | None, tmp_path: Path):
    place, path = two_checkpoints(tmp_path)
    folder = path.with_suffix(".shards")
    folder.mkdir()
    shards = {}
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(name.encode())
        shards[name] = {"bytes": len(name), "sha256": sha256(folder / name)}
    whole = json.loads(path.read_bytes())
    path.write_text(json.dumps(whole | {"shards": shards}))
    assert checkpoint.intact(path.with_suffix(".pt"))

    def check(changed: Any) -> None:
        path.write_text(json.dumps(whole | {"shards": changed}))
        state = place.newest()
        assert state is not None
        assert_full_of(state, state["step"])

    examples(generators(count).map(lambda rng: change_tree(rng, shards)), check, count, many=400)


@pytest.mark.parametrize(
    "shards",
    [
        *([1], 7, None, "x", {"a": 3}, {"__0_0.distcp": 3}, {"__0_0.distcp": {}}, {"__0_0.distcp": None}),
        {"/dev/zero": {"bytes": 0, "sha256": "0" * 64}},
        {"../../secret": {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}},
        {"__0_0.distcp\n": {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}},
        {"__0_0.distcp": {"bytes": -1, "sha256": "0" * 64}},
        {"__0_0.distcp": {"bytes": True, "sha256": "0" * 64}},
    ],
)
def test_names_and_numbers_that_no_writer_writes_are_no_manifest(shards: Any, tmp_path: Path):
    place = Place(str(tmp_path / "checkpoints"), tmp_path / "scratch")
    keep_one(place.writer(), 1)
    (tmp_path / "secret").write_bytes(b"x")
    path = tmp_path / "checkpoints" / "step-000000001.json"
    whole = json.loads(path.read_bytes())
    assert place.newest() is not None
    path.write_text(json.dumps(whole | {"shards": shards}))
    assert place.newest() is None


def test_depth_is_no_manifest_and_a_pipe_is_not_waited_for(tmp_path: Path):
    place = Place(str(tmp_path / "checkpoints"), tmp_path / "scratch")
    keep_one(place.writer(), 1)
    path = tmp_path / "checkpoints" / "step-000000001.json"
    path.write_text("[" * 100_000)
    assert place.newest() is None
    path.unlink()
    os.mkfifo(path)
    assert place.newest() is None


def test_no_file_beside_the_copy_of_a_run_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A manifest in a store names a file that is above the cache."""
    url, scratch, pt, evil = "s3://stranger/run/checkpoints", tmp_path / "cache" / "checkpoints", b"x", b"theirs"
    mine = tmp_path / "mine"
    mine.write_text("mine")
    told = {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in (("pt", pt), ("evil", evil))}
    name = "../../../mine"
    flat = ".".join(Path("step-000000001.shards", name).parts)
    files = {
        f"{url}/step-000000001.json": json.dumps(told["pt"] | {"shards": {name: told["evil"]}}).encode(),
        f"{url}/step-000000001.pt": pt,
        f"{url}/{flat}": evil,
    }

    class Bucket:
        def list(self, url: str, start: str = "", **_: Any) -> list[Blob]:
            return [Blob(name, len(data)) for name, data in files.items() if name.startswith(url + start)]

        def read(self, url: str, start: int, size: int, **_: Any) -> memoryview:
            return memoryview(files[url][start : start + size])

    scratch.mkdir(parents=True)
    (scratch / "step-000000001.shards").mkdir()
    for module in (checkpoint, checkpoint_files):
        monkeypatch.setattr(module, "store", lambda _: Bucket())
    assert checkpoint.newest(url, scratch) is None
    assert mine.read_text() == "mine"
