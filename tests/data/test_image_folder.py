"""A folder of images is read as exactly as shards are, and what is wrong in it is said or replaced."""

import errno
import itertools
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import refused
from helpers.recipes import SMALL
from helpers.runs import assert_same, weights

import eagleray
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.data.image_folder import check_outside
from eagleray.data.index import Index, open_index, write_index
from eagleray.datasets.shapes import image
from eagleray.storage.store import LocalStore

IMAGES = 96


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """96 images of 3 classes, deeper or not, and two files that are none."""
    folder = tmp_path / "photos"
    for i in range(IMAGES):
        path = folder / "abc"[i % 3] / ("deeper" if i % 2 else "") / f"{i:02d}.{'PNG' if i % 5 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image(0, i)[0].save(path)
    (folder / "notes.txt").write_text("no image")
    (folder / "a" / ".hidden.png").write_text("no image, and hidden")
    (folder / "b" / "labels.csv").write_text("no image")
    return folder


def opened(folder: Path) -> tuple[Index, list[str]]:
    notes: list[str] = []
    return open_index(str(folder), note=notes.append), notes


def keys_of(index: Index) -> list[str]:
    return [index.key(i) for i in range(len(index))]


def loader(folder: Path, **keys: Any) -> eagleray.Loader:
    return eagleray.loader(folder, **{"views": [{"size": 16}], "batch": 8, "workers": 0, "bad_limit": 0.1, **keys})


def test_linked_folders_are_read_as_if_they_were_there(photos: Path, tmp_path: Path):
    """A set of some classes is often a folder of links; neither a link to its own folder nor one to itself ends it."""
    (linked := tmp_path / "linked").mkdir()
    for name in "ac":
        (linked / name).symlink_to(photos / name)
    (photos / "a" / "deeper" / "up").symlink_to(photos / "a")
    (photos / "a" / "itself").symlink_to(photos / "a" / "itself")
    index, notes = opened(linked)
    assert sorted(keys_of(index)) == sorted(str(p.relative_to(photos)) for p in photos.glob("[ac]/**/[0-9]*"))
    assert set(index.label.tolist()) == {0, 1}
    assert notes == [f"indexing {len(index)} images of {linked}; not read: 1 without extension"]


def test_a_folder_that_cannot_be_listed_ends_in_a_line(photos: Path, monkeypatch: pytest.MonkeyPatch):
    def scandir(path: Any) -> Any:
        if str(path).endswith("/b/deeper"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)  # these tests may run as root
    with pytest.raises(UserError, match=f"{photos}/b/deeper: cannot be read: Permission denied"):
        opened(photos)


def test_a_folder_that_a_file_server_forgets_for_a_moment_is_listed(photos: Path, monkeypatch: pytest.MonkeyPatch):
    def scandir(path: Any) -> Any:
        if str(path).endswith("/b/deeper") and not failed:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return scan(path)

    scan, failed = os.scandir, list[Any]()
    monkeypatch.setattr(os, "scandir", scandir)
    assert len(opened(photos)[0]) == IMAGES
    assert failed


def test_every_image_is_there_with_its_label_and_bytes(photos: Path):
    index, notes = opened(photos)
    assert notes == [f"indexing {IMAGES} images of {photos}; not read: 1 .csv, 1 .txt"]
    keys = keys_of(index)
    assert sorted(keys) == sorted(str(p.relative_to(photos)) for p in photos.rglob("[0-9]*"))
    assert keys != sorted(keys), "neighbours would be of one class"
    assert [int(x) for x in index.label] == ["abc".index(k[0]) for k in keys]
    assert all(bytes(index.read(i, i + 1)) == (photos / k).read_bytes() for i, k in enumerate(keys))
    assert bytes(index.read(3, 6)) == b"".join((photos / k).read_bytes() for k in keys[3:6])
    again, notes = opened(photos)
    assert (len(again), notes) == (IMAGES, [])


def test_images_without_classes_have_no_labels(photos: Path):
    shutil.copy(photos / "a" / "00.jpg", photos / "00.jpg")
    assert not opened(photos)[0].labelled
    assert not opened(photos / "c")[0].labelled


def test_a_moved_folder_keeps_its_index(photos: Path, tmp_path: Path):
    keys = keys_of(opened(photos)[0])
    photos.rename(tmp_path / "moved")
    index, notes = opened(tmp_path / "moved")
    assert (keys_of(index), notes) == (keys, [])


def test_an_epoch_is_a_permutation_and_any_start_continues_it(photos: Path):
    whole = list(loader(photos))
    assert sorted(torch.cat([b.index for b in whole]).tolist()) == list(range(IMAGES))
    for start in (1, 5):
        rest = list(loader(photos, start=start))
        assert len(rest) == len(whole) - start
        for a, b in zip(rest, whole[start:], strict=True):
            assert torch.equal(a.index, b.index)
            assert torch.equal(a.views[0], b.views[0])
    with_workers = list(loader(photos, workers=2))
    assert all(torch.equal(a.views[0], b.views[0]) for a, b in zip(with_workers, whole, strict=True))
    cached = list(loader(photos, cache=photos.parent / "cache"))
    assert all(torch.equal(a.views[0], b.views[0]) for a, b in zip(cached, whole, strict=True))


def test_new_images_are_indexed_and_others_are_known(photos: Path):
    before = opened(photos)[0]
    image(1, 1)[0].save(photos / "c" / "new.png")
    index, notes = opened(photos)
    assert len(index) == IMAGES + 1
    assert notes == [f"indexing {IMAGES + 1} images of {photos}; not read: 1 .csv, 1 .txt"]
    assert set(before.crc.tolist()) < set(index.crc.tolist())


def test_loader_processes_read_the_index_that_was_opened(photos: Path):
    """A run starts loader processes for each evaluation; another command may have indexed new images meanwhile."""
    index = opened(photos)[0]
    keys = keys_of(index)
    for number in range(8):
        shutil.copy(photos / "a" / "00.jpg", photos / "a" / f"new-{number}.jpg")
    assert len(opened(photos)[0]) == IMAGES + 8
    assert keys_of(pickle.loads(pickle.dumps(index))) == keys


@pytest.mark.parametrize("harm", ["is gone", "has changed"])
def test_an_image_that_is_gone_or_changed_is_refused_in_a_line(
    harm: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    opened(photos)
    victim = photos / "a" / "00.jpg"
    victim.unlink() if harm == "is gone" else victim.write_bytes(victim.read_bytes()[:-7])
    (tmp_path / "small.yaml").write_text(SMALL)
    line = refused(capsys, "pretrain", str(tmp_path / "small.yaml"), f"data.train={photos}", f"out={tmp_path / 'out'}")
    assert line == f"error: data.train: {victim}: {harm} since it was indexed; `eagleray index {photos}` accepts that"
    [(_, images, bad)] = write_index(str(photos))
    assert (images, bad) == (IMAGES - (harm == "is gone"), 0)
    opened(photos)


def test_what_changes_during_a_run_is_replaced_and_listed(photos: Path):
    batches = loader(photos)
    same_size, shorter, gone = photos / "a" / "00.jpg", photos / "b" / "04.PNG", photos / "c" / "02.PNG"
    same_size.write_bytes(bytes(len(same_size.read_bytes())))
    shorter.write_bytes(shorter.read_bytes()[:50])
    gone.unlink()
    list(batches)
    bad = {(b.shard, b.key): b.reason for b in batches.bad}
    assert set(bad) == {(str(photos), str(p.relative_to(photos))) for p in (same_size, shorter, gone)}
    assert all("its bytes have changed since it was indexed" in reason for reason in bad.values())


def test_broken_images_are_replaced_and_listed(photos: Path):
    (photos / "a" / "empty.png").touch()
    (photos / "a" / "text.png").write_text("no image at all")
    batches = loader(photos)
    assert batches.samples == IMAGES + 1
    list(batches)
    assert {b.key: b.reason.split(":")[0] for b in batches.bad} == {
        "a/empty.png": "the image has no bytes",
        "a/text.png": "cannot identify image file",
    }
    with pytest.raises(UserError, match="of 98 samples are broken, more than bad_limit=0 allows; the first is"):
        loader(photos, bad_limit=0)


def test_folders_without_usable_images(tmp_path: Path):
    with pytest.raises(UserError, match=r"no \.tar shards there"):
        opened(tmp_path)
    (tmp_path / "a.png").touch()
    with pytest.raises(UserError, match="no usable image in 1 shard"):
        opened(tmp_path)


def test_a_folder_can_stand_beside_shards(photos: Path, shards: Path):
    index = open_index([str(photos), str(shards / "test")], note=lambda _: None)
    assert len(index) == IMAGES + 80
    both = loader([str(photos), str(shards / "test")])  # type: ignore[arg-type]
    assert sum(len(b.index) for b in both) == 176


@pytest.mark.parametrize("place", [".", "a/runs/x"])
def test_a_run_does_not_draw_among_its_images(photos: Path, tmp_path: Path, place: str):
    (tmp_path / "small.yaml").write_text(SMALL)
    with pytest.raises(
        UserError, match=f"^out={photos / place}: lies in {photos}, whose images its pictures would join"
    ):
        eagleray.pretrain(tmp_path / "small.yaml", {"data.train": photos}, out=photos / place)
    check_outside(f"{photos}-runs/x", [str(photos)], "out=")


@pytest.mark.slow
def test_a_run_trains_on_it_and_resumes_to_the_bit(photos: Path, tmp_path: Path):
    (tmp_path / "small.yaml").write_text(SMALL)
    (photos / "a" / "text.png").write_text("no image at all")
    keys = {"data.train": photos, "data.bad_limit": 0.1, "evaluate.limit": 32, "data.workers": 2}
    for steps in (2, 6):
        twice = eagleray.pretrain(tmp_path / "small.yaml", keys, out=tmp_path / "twice", max_steps=steps)
    once = eagleray.pretrain(tmp_path / "small.yaml", keys, out=tmp_path / "once", max_steps=6)
    assert_same(weights(tmp_path / "once"), weights(tmp_path / "twice"))
    assert once.summary["knn/top1"] == twice.summary["knn/top1"]
    [bad] = read_lines(tmp_path / "once" / "quarantine.jsonl")
    assert (bad["shard"], bad["key"]) == (str(photos), "a/text.png")


def test_lanes_are_the_same_for_any_number_of_ranks(photos: Path, monkeypatch: pytest.MonkeyPatch):
    whole = list(itertools.islice(loader(photos), 3))
    parts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        parts.append(list(itertools.islice(loader(photos), 3)))
    for a, b, all_ in zip(*parts, whole, strict=True):
        assert torch.equal(torch.cat([a.index, b.index]), all_.index)
        assert a.rows == b.rows == (4, 4)


def test_new_images_of_a_folder_that_may_only_be_read(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened(photos)  # by its owner, who adds an image later
    image(1, 1)[0].save(photos / "c" / "new.png")
    honest = LocalStore.put

    def put(self: LocalStore, url: str, *given: Any, **more: Any) -> None:
        if url.startswith(f"{photos}/"):
            raise OSError(errno.EROFS, "Read-only file system")
        honest(self, url, *given, **more)

    monkeypatch.setattr(LocalStore, "put", put)
    for said in ([f"indexing {IMAGES + 1} images of {photos}; not read: 1 .csv, 1 .txt"], []):
        notes: list[str] = []
        assert len(open_index(str(photos), tmp_path / "spare", note=notes.append)) == IMAGES + 1
        assert notes == said
