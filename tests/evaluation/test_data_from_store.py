"""A folder of a store becomes a folder of this machine, once; and protocols run on it, on a real S3 server."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.annotated import coco, davis, masks
from helpers.networks import VIT
from helpers.s3.server import store_of

from eagleray.base.errors import UserError
from eagleray.evaluation import evaluate
from eagleray.evaluation.target import Target
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.protocols.digests import tree_digest
from eagleray.protocols.settings import Evaluate
from eagleray.storage import folder_copy, store
from eagleray.storage.blob import Blob
from eagleray.storage.folder_copy import local_folder


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with store_of(tmp_path_factory.mktemp("s3"), "sets"):
        yield "s3://sets"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def upload(folder: Path, url: str) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            store.store(url).put(f"{url}/{path.relative_to(folder)}", path)
    return url


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that are read from the store."""
    urls: list[str] = []
    plain = store.STORES["s3"].read

    def read(url: str, *args: Any, **keys: Any) -> memoryview:
        urls.append(url)
        return plain(url, *args, **keys)

    monkeypatch.setattr(store.STORES["s3"], "read", read)
    return urls


def test_only_what_changed_is_copied_again(
    bucket: str, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(folder_copy, "PIECE", 100)  # files in several pieces
    here = masks(tmp_path / "here")
    (here / "empty.txt").touch()
    url, notes = upload(here, f"{bucket}/changed"), []
    copy = local_folder(url, notes.append)
    assert content(copy) == content(here)
    assert tree_digest(copy) == tree_digest(here)
    assert "copies 9 of 9 files" in notes[0]
    times = tree_digest(copy, times=True)

    reads.clear()
    assert local_folder(url + "/", notes.append) == copy
    assert not reads
    assert len(notes) == 1

    (copy / "images/train/0.png").write_bytes(b"short")  # as if a disk had been full
    (copy / "images/train/.1.png.77").write_bytes(b"left half written")
    (here / "masks/val/1.png").write_bytes((here / "masks/val/0.png").read_bytes())
    store.store(url).put(f"{url}/masks/val/1.png", here / "masks/val/1.png")
    store.store(url).delete(f"{url}/empty.txt")
    (here / "empty.txt").unlink()
    local_folder(url)
    assert {u.removeprefix(f"{url}/") for u in reads} == {"images/train/0.png", "masks/val/1.png"}
    assert content(copy) == content(here)
    assert tree_digest(copy, times=True) != times

    other = tree_digest(copy, times=True)
    shutil.rmtree(copy.parent)
    assert tree_digest(local_folder(url), times=True) == other, "on another machine it is the same set"


def test_a_copy_that_was_stopped_goes_on(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = masks(tmp_path / "here")
    url, plain, fetched = upload(here, f"{bucket}/stopped"), folder_copy._fetch, []

    def fetch(name: str, blob: Blob, folder: Path) -> tuple[str, Blob]:
        if len(fetched) == 3:
            raise KeyboardInterrupt
        fetched.append(name)
        return plain(name, blob, folder)

    monkeypatch.setattr(folder_copy, "_fetch", fetch)
    monkeypatch.setattr(folder_copy, "ordered_map", map)
    with pytest.raises(KeyboardInterrupt):
        local_folder(url)
    monkeypatch.setattr(folder_copy, "_fetch", lambda *args: fetched.append(args[0]) or plain(*args))
    assert content(local_folder(url)) == content(here)
    assert sorted(fetched) == sorted(content(here))


@pytest.mark.parametrize("name", ["../../over.txt", "/etc/passwd", "a/./b", "a//b"])
def test_a_name_outside_of_the_folder_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store.STORES["s3"], "walk", lambda url: iter([Blob(f"{url}/{name}", 3, "s3:1")]))
    with pytest.raises(UserError, match="its name is no path inside the folder s3://b/set"):
        local_folder("s3://b/set")


def test_a_folder_without_files_and_a_full_disk_are_one_line(bucket: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="s3://sets/none: no files in this folder"):
        local_folder(f"{bucket}/none")
    monkeypatch.setattr(store.STORES["s3"], "walk", lambda url: iter([Blob(f"{url}/a", 1 << 60, "s3:1")]))
    with pytest.raises(UserError, match="MiB free; XDG_CACHE_HOME names another folder"):
        local_folder(f"{bucket}/large")


def test_a_local_folder_is_not_copied(tmp_path: Path):
    assert local_folder(f"file://{tmp_path}") == local_folder(str(tmp_path)) == tmp_path
    assert not (tmp_path / "cache").exists()


SETTINGS = {
    "davis": {"davis.size": "32"},
    "segmentation": {"segmentation.steps": "2", "segmentation.size": "32", "width": "16", "segmentation.batch": "2"},
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("detection", "davis", "suite")]


@pytest.mark.parametrize("name", ["segmentation", *SLOW])
def test_a_protocol_reads_its_data_from_a_store(
    name: str, bucket: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind, options = "vit_tiny_patch16_224", VIT | {"depth": 4}
    torch.manual_seed(0)
    backbone = Backbone(kind, options=options).eval()
    target = Target("tests", backbone, Network(name=kind, options=options), Evaluate(size=16, resize=16))
    monkeypatch.setattr(evaluate, "load_target", lambda *_: target)
    here = {"davis": davis, "segmentation": masks, "detection": coco, "suite": lambda f: f}[name](tmp_path / "here")
    if name == "suite":
        (here / "cifar-100").mkdir(parents=True)
        for split in ("train", "test"):
            shutil.copytree(shards / split, here / "cifar-100" / split)
    settings = {"schedule": str(here / "schedule.yaml")} if name == "detection" else SETTINGS.get(name, {})
    need = {"segmentation": "masks", "detection": "coco"}.get(name, name)
    results = []
    for root in (str(here), upload(here, f"{bucket}/{name}")):
        request = evaluate.Request(
            "tests", [name], folders={need: root}, settings=settings, out=str(tmp_path / f"out{len(results)}")
        )
        report = evaluate.evaluate(request)
        assert report.refused == []
        results += report.results
    assert results[1].numbers == results[0].numbers
    assert results[1].data == {need: f"{bucket}/{name}"}
    if name != "suite":
        assert results[1].data_digest == results[0].data_digest
        assert [os.path.basename(p) for p in results[1].pictures] == [os.path.basename(p) for p in results[0].pictures]


@pytest.mark.slow
def test_a_training_whose_results_are_in_a_store_continues_on_another_machine(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, out = upload(masks(tmp_path / "here"), f"{bucket}/continued"), f"{bucket}/results"
    settings = {"steps": "2", "segmentation.size": "32", "width": "16", "batch": "2"}
    numbers, lines = [], list[str]()
    for machine in "ab":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        request = evaluate.Request(
            "untrained:test_resnet", ["segmentation"], folders={"masks": url}, settings=settings, out=out
        )
        lines.clear()
        report = evaluate.evaluate(request, note=lines.append)
        assert report.refused == []
        numbers.append(report.results[0].numbers)
    assert "segmentation: continues after step 2 of 2" in lines
    assert numbers[0] == numbers[1]
    names = [b.url for b in store.store(out).walk(out)]
    assert {f"{out}/pictures/untrained/segmentation-fpn.{kind}" for kind in ("png", "csv")} <= set(names)
    assert len([n for n in names if n.endswith("/step-000000002.pt")]) == 1


def test_an_error_names_the_file_in_the_store(bucket: str, tmp_path: Path):
    here = masks(tmp_path / "here")
    (here / "masks/train/1.png").unlink()
    url = upload(here, f"{bucket}/lacking")
    request = evaluate.Request(
        "untrained:resnet18", ["segmentation"], folders={"masks": url}, settings={"steps": "1"}, out=str(tmp_path / "o")
    )
    [line] = evaluate.evaluate(request).refused
    assert line == f"segmentation: {url}/images/train/1.png: no mask in {url}/masks/train has the same name"
