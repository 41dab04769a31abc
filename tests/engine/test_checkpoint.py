"""Checkpoints in a folder and in a real S3 server: what counts is whole, whatever happens while it is written."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.s3.proxy import Faults, Proxy
from helpers.s3.server import Swift, point_at, store_of
from torch import nn

from eagleray.base.errors import Outage, UserError
from eagleray.engine import checkpoint
from eagleray.storage import store

STORES = ("folder", "s3")


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with store_of(tmp_path_factory.mktemp("s3"), "runs") as server:
        yield server


@dataclass
class Place:
    """Where the checkpoints of one test are kept."""

    url: str
    scratch: Path
    swift: Swift | None = None

    def writer(self, *, keep: int = 2, patience: float = 60) -> checkpoint.Writer:
        return checkpoint.Writer(self.url, keep=keep, scratch=self.scratch, patience=patience)

    def newest(self, scratch: Path | None = None) -> dict[str, Any] | None:
        return checkpoint.newest(self.url, scratch or self.scratch)

    def files(self) -> set[str]:
        folder = self.url + "/"
        if not self.swift and not Path(self.url).exists():
            return set()
        return {b.url.removeprefix(folder) for b in store.store(folder).list(folder)}

    def data(self, name: str) -> Path:
        """The file on some disk that holds a checkpoint."""
        if not self.swift:
            return Path(self.url, name)
        size = store.store(self.url).list(f"{self.url}/{name}")[0].size
        found = [p for p in self.swift.root.rglob("*.data") if p.stat().st_size == size]
        return max(found, key=lambda p: p.stat().st_mtime_ns)


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place(str(tmp_path / "checkpoints"), tmp_path / "scratch")
    return s3_place(request.getfixturevalue("swift"), tmp_path)


@pytest.fixture
def remote(swift: Swift, tmp_path: Path) -> Place:
    return s3_place(swift, tmp_path)


def s3_place(swift: Swift, tmp_path: Path) -> Place:
    return Place(f"s3://runs/{tmp_path.name}/checkpoints", tmp_path / "scratch", swift)


@pytest.fixture
def proxy(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server, that everything goes through."""
    with Proxy(swift.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setitem(store.STORES, "s3", store.S3Store())
        yield proxy


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("eagleray"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.name == "eagleray.engine.checkpoint" and r.levelno > 20]


def full_of(step: int, size: int = 1000) -> dict[str, Any]:
    """A state that shows by every number of it of which step it is."""
    return {"step": step, "parts": [torch.full((size,), float(step)), {"count": torch.tensor(step)}]}


def assert_full_of(state: dict[str, Any] | None, step: int) -> None:
    assert state is not None
    assert state["step"] == step
    assert (state["parts"][0] == step).all()
    assert state["parts"][1]["count"] == step


def keep_one(writer: checkpoint.Writer, step: int, size: int = 1000) -> None:
    writer.save(step, full_of(step, size))
    writer.settle()
    assert writer.verified == step


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
    checkpoint.save(tmp_path / "c", 7, full_of(7), keep=2)
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
    """Tensors change from the moment on that `save` returns; no file may see it."""
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
    for step in range(1, 21):
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
    assert len(checkpoint.manifests(place.url)) == 20
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
    before = {path: x.data_ptr() for path, x in writer._snapshot._buffers.items()}
    writer.save(2, state | {"a": [torch.zeros(5), torch.zeros(7)]})
    after = {path: x.data_ptr() for path, x in writer._snapshot._buffers.items()}
    assert [path for path in before if before[path] != after[path]] == [("a", 1)]
    writer.settle()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_gpu_still_computes_is_waited_for_and_what_it_does_next_is_not_seen(tmp_path: Path):
    """The twin of `test_training_goes_on_while_a_checkpoint_is_written`."""
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
    assert all(b.is_pinned() for b in writer._snapshot._buffers.values())


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


def test_only_what_is_read_back_as_it_was_written_counts(
    place: Place, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
):
    writer, honest = place.writer(keep=1), checkpoint.serialise

    def faulty(state: dict[str, Any], path: Path) -> dict[str, Any]:
        said = honest(state, path)
        flip(path)
        return said

    keep_one(writer, 1)
    before = place.files()
    monkeypatch.setattr(checkpoint, "serialise", faulty)
    for step in (2, 3) if place.swift else (2, 1, 3):
        writer.save(step, full_of(step))
        with pytest.raises(UserError, match=rf"{place.url}/step-00000000{step}.pt: what is read back is not"):
            writer.settle()
    assert writer.verified == 1
    assert checkpoint.manifests(place.url) == ["step-000000001"]
    assert before <= place.files()
    assert_full_of(place.newest(), 1)
    assert len(warnings()) == 1
    monkeypatch.undo()
    if place.swift:
        point_at(monkeypatch, place.swift.port)
    keep_one(writer, 4)
    assert place.files() == {"step-000000004.pt", "step-000000004.json"}


def test_what_has_to_be_there_first_is(place: Place):
    """The histories of a run go where its checkpoints are; one that is ahead of them does not count."""
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


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_passed_over(place: Place, tmp_path: Path, warnings: Callable[[], list[str]]):
    writer = place.writer(keep=3)
    for step in (1, 2, 3):
        keep_one(writer, step)
    path = place.data("step-000000003.pt")
    attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)} if place.swift else {}
    flip(path)
    for name, value in attributes.items():  # Swift's own
        os.setxattr(path, name, value)
    for turn in range(2):  # Swift gives the bad bytes once, and then says that there is nothing
        assert_full_of(place.newest(tmp_path / f"node{turn}"), 2)
    assert warnings() == [f"checkpoint {place.url}/step-000000003.pt is damaged and passed over"] * 2
    store.put_bytes(f"{place.url}/step-000000002.json", b'{"step": 2, "by')
    assert_full_of(place.newest(tmp_path / "node3"), 1)
    store.store(place.url).delete(f"{place.url}/step-000000001.pt")
    assert place.newest(tmp_path / "node4") is None


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from eagleray.engine import checkpoint
place, scratch, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
draw = random.Random(size)

def train(pipe):
    writer, found = checkpoint.Writer(place, keep=1, scratch=scratch), checkpoint.newest(place, scratch)
    step = found["step"] if found else 0
    x = torch.full((size,), float(step))
    while True:
        step += 1
        x.fill_(step)
        writer.save(step, {"step": step, "x": x})
        x.fill_(-1)
        writer.settle()
        os.write(pipe, b"%d " % writer.verified)

best, rounds = 0, []
for number in range(10):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    begun = b""
    if number % 2:
        begun = os.read(ours, 99)
    time.sleep(draw.uniform(0, 0.5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = (begun + b"".join(iter(lambda: os.read(ours, 9999), b""))).split()
    best = max(best, *map(int, said), 0)
    found = checkpoint.newest(place, scratch)
    step = found["step"] if found else 0
    assert step >= best, (step, best)
    assert found is None or (found["x"] == step).all()
    assert checkpoint.newest(place, scratch.with_name(f"other{number}")) is None or step >= best
    rounds.append(step)
print(json.dumps(rounds))
"""


@pytest.mark.slow
def test_killed_while_saving(place: Place, tmp_path: Path):
    """Ten times, at any moment: what counted before stays, with `keep=1`, and what is found is whole."""
    command = [sys.executable, "-c", KILLED, place.url, str(place.scratch), str(2**20)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert rounds == sorted(rounds)
    assert rounds[-1] >= 5
    keep_one(place.writer(keep=1), rounds[-1] + 1)
    assert len(place.files()) == 2
    assert not list(place.scratch.glob("*.part"))


FULL = """
import os, resource, sys
from pathlib import Path
import torch
from eagleray.engine import checkpoint
from eagleray.base.errors import UserError
place, how = Path(sys.argv[1]), sys.argv[2]
writer = checkpoint.Writer(place, keep=2)

def save(step, size=2**20):
    writer.save(step, {"step": step, "x": torch.full((size,), float(step))})
    writer.settle()

def fill(path):
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(2**16)):
                pass
        except OSError:
            pass

save(1)
if how == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
else:
    fill(place.parent / "other")
for step in (2, 3):
    try:
        save(step)
        raise SystemExit("was written")
    except UserError as e:
        print(e)
    assert sorted(p.name for p in place.iterdir()) == ["step-000000001.json", "step-000000001.pt"]
    assert writer.verified == 1 and checkpoint.newest(place)["step"] == 1
if how == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
else:
    (place.parent / "other").unlink()
save(4)
assert checkpoint.newest(place)["step"] == 4
if how == "disk":
    fill(place / "step-000000005.part")  # as a killed writer may leave it
    save(6)
"""


@pytest.mark.parametrize("how", ["limit", "disk"])
def test_a_full_disk_costs_checkpoints_and_nothing_else(how: str, tmp_path: Path):
    """On a real file system of 14 MiB where one can be mounted."""
    said = {"limit": "File too large", "disk": "No space left on device"}[how]
    folder = tmp_path / "small"
    folder.mkdir()
    command = [sys.executable, "-c", FULL, str(folder / "checkpoints"), how]
    if how == "disk":
        mount = f'mount -t tmpfs -o size=14m none {folder} && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", *command]
        if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", folder], capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{folder}/checkpoints: {said}"] * 2
    warned = [line for line in done.stderr.splitlines() if "is not kept" in line]
    assert warned == [f"step-000000002 is not kept: {folder}/checkpoints: {said}"], done.stderr


def test_a_missing_bucket_is_said(swift: Swift, tmp_path: Path):
    writer = checkpoint.Writer("s3://nothing/run/checkpoints", keep=1, scratch=tmp_path)
    writer.save(1, full_of(1))
    with pytest.raises(UserError, match=r"^s3://nothing/run/checkpoints/step-000000001.pt: NoSuchBucket: [^\n]*$"):
        writer.settle()
    assert writer.verified is None
    with pytest.raises(UserError, match="NoSuchBucket"):
        checkpoint.newest("s3://nothing/run/checkpoints", tmp_path)


def test_a_store_that_pauses_while_it_is_written_to(remote: Place):
    writer = remote.writer()
    assert remote.swift
    keep_one(writer, 1)
    remote.swift("pause", "object")
    try:
        began = time.monotonic()
        writer.save(2, full_of(2, 10 * 2**20))
        assert time.monotonic() - began < 1
        time.sleep(3)
        assert writer.busy
        assert writer.verified == 1
    finally:
        remote.swift("resume", "object")
    writer.settle()
    assert writer.verified == 2
    assert_full_of(remote.newest(remote.scratch / "elsewhere"), 2)


def test_a_store_that_is_away_costs_checkpoints_and_nothing_else(
    remote: Place, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
):
    writer = remote.writer(patience=0.5)
    assert remote.swift
    keep_one(writer, 1)
    remote.swift("kill9", "proxy")
    try:
        for step in (2, 3):
            writer.save(step, full_of(step))
            with pytest.raises(Outage, match=rf"^{remote.url}/step-00000000{step}.pt: Could not connect[^\n]*$"):
                writer.settle()
        with pytest.raises(Outage):
            checkpoint.newest(remote.url, remote.scratch, patience=0.5)
    finally:
        remote.swift("start")
    assert len(warnings()) == 1
    assert writer.verified == 1
    assert_full_of(remote.newest(), 1)
    keep_one(writer, 4)


def test_large_ones_go_in_parts_that_are_repeated_one_by_one(remote: Place, proxy: Proxy):
    writer = remote.writer()
    proxy.faults = Faults(refuse=0.3)
    keep_one(writer, 1, 14 * 2**20)  # 56 MiB
    assert proxy.done["refuse"] > 1
    assert_full_of(remote.newest(remote.scratch / "elsewhere"), 1)
    path = "/" + remote.url.removeprefix("s3://") + "/step-000000001.pt"
    assert proxy.requests[path] > 4 + 2 * 7


def test_the_ranks_of_a_node_fetch_once(remote: Place, proxy: Proxy, tmp_path: Path):
    keep_one(remote.writer(), 1, 2**22)
    path = "/" + remote.url.removeprefix("s3://") + "/step-000000001.pt"
    size = (remote.scratch / "step-000000001.pt").stat().st_size
    proxy.clear()
    assert_full_of(remote.newest(), 1)
    assert proxy.bytes[path] == 0  # rank 0 wrote it here
    found: list[Any] = []
    ranks = [threading.Thread(target=lambda: found.append(remote.newest(tmp_path / "node"))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 4
    for state in found:
        assert_full_of(state, 1)
    assert proxy.bytes[path] == size
    flip(tmp_path / "node" / "step-000000001.pt")
    assert_full_of(remote.newest(tmp_path / "node"), 1)
    assert proxy.bytes[path] == 2 * size


EXIT = """
import sys, torch
from eagleray.engine import checkpoint
checkpoint.Writer(sys.argv[1], keep=1).save(1, {f"{i}": torch.zeros(1_000_000) for i in range(20)})
sys.exit(3)
"""


@pytest.mark.parametrize("turn", range(3))
def test_a_process_may_end_while_a_checkpoint_is_written(turn: int, tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
