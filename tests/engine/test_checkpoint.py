"""Tests of checkpoints in a folder and on a real S3 server."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import Place, assert_full_of, full_of, keep_one, save
from torch import nn

from eagleray.base.errors import Outage, Superseded, UserError
from eagleray.engine import checkpoint
from eagleray.storage import store


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, b.device.type) == (b.dtype, b.shape, "cpu")
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    model(torch.randn(5, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_what_is_saved_comes_back(place: Place):
    model, optimizer = trained()
    shared = torch.arange(12.0)
    plain = {"step": 3, "seconds": 1.5, "none": None, "yes": True, "recipe": "method: dino\n", "raw": b"\0\xff"}
    tensors = {
        "half": torch.randn(7, 3).bfloat16(),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "across": torch.randn(4, 6).t(),
        "wide": torch.tensor([1.0]).expand(5),
        "shared": (shared, shared[3:], [shared]),
        "ordered": OrderedDict(b=torch.tensor([True]), a=(1, (2.0, "x"))),
    }
    state = plain | tensors | {"method": model.state_dict(), "optimizer": optimizer.state_dict()}
    writer = place.writer()
    writer.save(3, state)
    writer.settle()
    found = place.newest(place.scratch / "elsewhere")
    assert_same(state, found)
    assert found is not None
    again, other = trained()
    again.load_state_dict(found["method"])
    other.load_state_dict(found["optimizer"])
    assert_same(optimizer.state_dict(), other.state_dict())


def test_a_folder_is_given_as_before(tmp_path: Path):
    save(tmp_path / "c", 7, full_of(7), keep=2)
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"step-000000007.pt", "step-000000007.json"}
    assert checkpoint.manifests(tmp_path / "c") == ["step-000000007"]
    assert checkpoint.intact(tmp_path / "c" / "step-000000007.pt")
    said = json.loads((tmp_path / "c" / "step-000000007.json").read_text())
    path = tmp_path / "c" / "step-000000007.pt"
    assert said == {"step": 7, "bytes": path.stat().st_size, "sha256": checkpoint.sha256(path)}
    assert_full_of(checkpoint.newest(tmp_path / "c"), 7)
    assert checkpoint.newest(tmp_path / "none") is None
    assert checkpoint.manifests(tmp_path / "none") == []


def test_training_goes_on_while_a_checkpoint_is_written(place: Place):
    """Tensors change as soon as `save` returns, and the file must not contain the changes."""
    state = {"weights": [torch.zeros(100_000) for _ in range(4)], "moments": {"m": torch.zeros(2, 100_000)}}
    tensors = [*state["weights"], state["moments"]["m"]]
    training, ended = threading.Event(), threading.Event()
    rests = [threading.Event() for _ in range(2)]

    def train(rest: threading.Event) -> None:
        while not ended.is_set():
            rest.clear()
            while training.is_set():
                for x in tensors:
                    x.add_(1000)
            rest.set()
            training.wait(0.05)

    threads = [threading.Thread(target=train, args=(r,), daemon=True) for r in rests]
    for t in threads:
        t.start()
    writer = place.writer(keep=20)
    for step in range(1, 9):
        training.clear()
        for rest in rests:
            rest.clear()
            assert rest.wait(20)
        for x in tensors:
            x.fill_(step)
        writer.save(step, {"step": step, **state})
        training.set()
        writer.settle()
    ended.set()
    training.clear()
    for t in threads:
        t.join()
    assert len(checkpoint.manifests(place.url)) == 8
    for name in checkpoint.manifests(place.url):
        path = place.scratch / "look.pt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(store.store(place.url).get(f"{place.url}/{name}.pt"))
        found = torch.load(path, weights_only=True)
        for x in (*found["weights"], found["moments"]["m"]):
            assert (x == found["step"]).all(), name


def test_memory_is_used_again(tmp_path: Path):
    writer = checkpoint.Writer(tmp_path, keep=1)
    state = {"a": [torch.zeros(5), torch.zeros(6)], "b": torch.zeros(3)}
    writer.save(1, state)
    before = {path: x.data_ptr() for path, x in writer._host_copy._buffers.items()}
    writer.save(2, state | {"a": [torch.zeros(5), torch.zeros(7)]})
    after = {path: x.data_ptr() for path, x in writer._host_copy._buffers.items()}
    assert [path for path in before if before[path] != after[path]] == [("a", 1)]
    writer.settle()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_gpu_still_computes_is_waited_for_and_what_it_does_next_is_not_seen(tmp_path: Path):
    """The GPU twin of `test_training_goes_on_while_a_checkpoint_is_written`."""
    x = torch.zeros(2**24, device="cuda")
    writer = checkpoint.Writer(tmp_path, keep=20)
    for step in range(1, 11):
        for part in range(50):
            x.fill_(step if part == 49 else -1)
        writer.save(step, {"step": step, "x": x})
        x.fill_(-1)
        writer.settle()
        found = checkpoint.newest(tmp_path)
        assert found is not None
        assert (found["x"] == step).all()
    assert all(b.is_pinned() for b in writer._host_copy._buffers.values())


def test_what_would_not_load_again_is_refused_at_once(tmp_path: Path):
    import numpy as np

    with pytest.raises(AssertionError, match=r"'seconds'.*float64"):
        checkpoint.Writer(tmp_path, keep=1).save(1, {"seconds": np.float64(1)})


def test_old_ones_go_when_a_newer_one_counts(place: Place, monkeypatch: pytest.MonkeyPatch):
    writer = place.writer(keep=2)
    for step in (3, 6, 9):
        keep_one(writer, step)
    assert checkpoint.manifests(place.url) == ["step-000000009", "step-000000006"]
    whole = {f"step-{step:09d}.{kind}" for step in (6, 9) for kind in ("pt", "json")}
    assert place.files() == whole
    for name in ("step-000000008.pt", "step-000000012.json", "step-000000012.pt", "notes.txt"):  # one never counted
        store.put_bytes(f"{place.url}/{name}", b"{}")
    assert_full_of(place.newest(), 9)
    keep_one(place.writer(keep=2), 10)
    whole = {f"step-{step:09d}.{kind}" for step in (9, 10) for kind in ("pt", "json")}
    assert place.files() == whole | {"notes.txt"}
    if place.swift:
        assert {p.name for p in place.scratch.glob("*.pt")} == {"step-000000010.pt"}


def test_those_of_milestones_stay(tmp_path: Path):
    writers = [checkpoint.Writer(tmp_path, keep=1, epoch=epoch) for epoch in (1, 2)]
    for writer, step in zip([0, 0, 0, 0, 1, 1, 1], (3, 4, 6, 9, 6, 7, 8), strict=True):
        writers[writer].stays = lambda step: step % 3 == 0
        writers[writer].save(step, full_of(step))
        writers[writer].settle()
    wanted = ["step-000000008-e000002", "step-000000006-e000002", "step-000000009-e000001", "step-000000003-e000001"]
    assert checkpoint.manifests(tmp_path) == wanted


def test_what_has_to_be_there_first_is(place: Place):
    """The metrics of a run are uploaded before a checkpoint counts."""
    away = True

    def first() -> None:
        assert {f"step-{n:09d}.json" for n in (2, 3)} & place.files() == set()
        if away:
            raise Outage(f"{place.url}/metrics.jsonl: is away")

    writer = checkpoint.Writer(place.url, keep=2, scratch=place.scratch, first=first)
    writer.save(2, full_of(2))
    with pytest.raises(Outage, match=r"metrics\.jsonl: is away"):
        writer.settle()
    assert checkpoint.manifests(place.url) == []
    away = False
    keep_one(writer, 3)


def test_weights_that_are_no_numbers_do_not_count(place: Place, warnings: Callable[[], list[str]]):
    writer = place.writer(keep=1)
    keep_one(writer, 1)
    for step, broken in ((2, torch.full((9,), torch.nan)), (3, torch.tensor([0.0, torch.nan]))):
        writer.save(step, full_of(step) | {"method": {"fine": torch.ones(3), "backbone.cls": broken}})
        with pytest.raises(UserError, match=rf"step-00000000{step}: the weights are no numbers .* is backbone.cls"):
            writer.settle()
    assert_full_of(place.newest(), 1)
    assert len(warnings()) == 1
    infinite = {"mask": torch.full((3,), -torch.inf), "none": torch.empty(0), "count": torch.tensor(3)}
    writer.save(4, full_of(4) | {"method": infinite})
    writer.settle()
    assert checkpoint.manifests(place.url) == ["step-000000004"]


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code from a checkpoint ran",)


@pytest.mark.parametrize("content", [{"step": Payload()}, [1, 2]])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "step-000000001.pt"
    torch.save(content, path)
    data = path.read_bytes()
    manifest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"{path}: not a checkpoint written by eagleray"):
        checkpoint.newest(tmp_path)
    assert not capsys.readouterr().out


def test_a_writer_of_an_earlier_epoch_deletes_nothing_of_a_later_one(place: Place):
    """As one that hung comes back, and does not know yet that a run goes on without it."""
    old, new = (checkpoint.Writer(place.url, keep=2, scratch=place.scratch / str(e), epoch=e) for e in (1, 2))
    keep = [(old, 100), (new, 100), (new, 150), (old, 110), (old, 200), (old, 300)]
    for writer, step in keep:
        writer.save(step, full_of(step * writer.epoch))
        writer.settle()
    assert checkpoint.manifests(place.url)[:2] == ["step-000000150-e000002", "step-000000100-e000002"]
    assert_full_of(checkpoint.newest(place.url, place.scratch), 300)  # 150 of the second
    new.save(160, full_of(160))
    new.settle()
    assert checkpoint.manifests(place.url) == ["step-000000160-e000002", "step-000000150-e000002"]


def test_a_writer_that_lost_its_run_neither_marks_nor_deletes(place: Place):
    writer = place.writer(keep=1)
    keep_one(writer, 1)
    before = place.files()

    def guard() -> None:
        raise Superseded("another has begun")

    writer.guard = guard
    writer.save(2, full_of(2))
    with pytest.raises(Superseded):
        writer.settle()
    assert before <= place.files() <= before | {"step-000000002.pt"}
    assert checkpoint.manifests(place.url) == ["step-000000001"]


def test_a_file_that_the_next_owner_deleted_is_no_error_of_the_run(place: Place, monkeypatch: pytest.MonkeyPatch):
    """The old writer reads back what it wrote, and the new one has tidied up meanwhile."""
    writer, lost = place.writer(keep=1), False

    def guard() -> None:
        if lost:
            raise Superseded("another has begun")

    def verify(*_: object) -> None:
        nonlocal lost
        lost = True
        raise OSError("what was read back differs from what was written")

    writer.guard = guard
    monkeypatch.setattr(writer, "_verify", verify)
    writer.save(1, full_of(1))
    with pytest.raises(Superseded, match="another has begun"):
        writer.settle()


def test_checkpoints_without_an_epoch_are_continued(place: Place):
    keep_one(place.writer(), 7)
    writer = checkpoint.Writer(place.url, keep=2, scratch=place.scratch, epoch=3)
    assert_full_of(place.newest(), 7)
    writer.save(9, full_of(9))
    writer.settle()
    assert_full_of(place.newest(), 9)
    save(place.url, 8, full_of(8), keep=2, scratch=place.scratch)  # as a trial takes over another's
    assert checkpoint.manifests(place.url) == ["step-000000008-e000003", "step-000000007"]


def test_a_copy_that_another_process_deletes_is_fetched_again(remote: Place, monkeypatch: pytest.MonkeyPatch):
    keep_one(remote.writer(), 1)
    honest, deleted = checkpoint.read, list[Path]()

    def read(path: Path, **how: Any) -> dict[str, Any]:
        if not deleted:
            path.unlink()
            deleted.append(path)
        return honest(path, **how)

    monkeypatch.setattr(checkpoint, "read", read)
    assert_full_of(remote.newest(), 1)
