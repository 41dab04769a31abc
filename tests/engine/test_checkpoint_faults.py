"""Tests of checkpoints when writers are killed, disks are full, bytes are flipped and stores are unreachable."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import Place, assert_full_of, full_of, keep_one
from helpers.s3.proxy import Faults, Proxy
from helpers.s3.server import Swift, point_at

from eagleray.base.errors import Outage, UserError
from eagleray.engine import checkpoint
from eagleray.storage import store


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
        with pytest.raises(UserError, match=rf"{place.url}/step-00000000{step}.pt: what was read back differs"):
            writer.settle()
    assert checkpoint.manifests(place.url) == ["step-000000001"]
    assert before <= place.files()
    assert_full_of(place.newest(), 1)
    assert len(warnings()) == 1
    monkeypatch.undo()
    if place.swift:
        point_at(monkeypatch, place.swift.port)
    keep_one(writer, 4)
    assert place.files() == {"step-000000004.pt", "step-000000004.json"}


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
    assert warnings() == [f"checkpoint {place.url}/step-000000003.pt is damaged and was skipped"] * 2
    store.put_bytes(f"{place.url}/step-000000002.json", b'{"step": 2, "by')
    assert_full_of(place.newest(tmp_path / "node3"), 1)
    store.store(place.url).delete(f"{place.url}/step-000000001.pt")
    assert place.newest(tmp_path / "node4") is None


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from eagleray.engine import checkpoint
from eagleray.storage.store import STORES
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
        os.write(pipe, b"%d " % step)

best, rounds = 0, []
for number in range(10):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        STORES.pop("s3", None)  # else both processes read answers from one connection
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
    """A writer is killed ten times at random moments; the newest checkpoint that counts stays intact."""
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
    assert checkpoint.newest(place)["step"] == 1
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


@pytest.mark.parametrize("how", ["limit", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_full_disk_costs_checkpoints_and_nothing_else(how: str, tmp_path: Path):
    """Uses a real file system of 14 MiB where one can be mounted."""
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
    warned = [line for line in done.stderr.splitlines() if "was not saved" in line]
    assert warned == [f"step-000000002 was not saved: {folder}/checkpoints: {said}"], done.stderr


def test_a_missing_bucket_is_said(swift: Swift, tmp_path: Path):
    writer = checkpoint.Writer("s3://nothing/run/checkpoints", keep=1, scratch=tmp_path)
    writer.save(1, full_of(1))
    with pytest.raises(UserError, match=r"^s3://nothing/run/checkpoints/step-000000001.pt: NoSuchBucket: [^\n]*$"):
        writer.settle()
    with pytest.raises(UserError, match="NoSuchBucket"):
        checkpoint.newest("s3://nothing/run/checkpoints", tmp_path)


def test_a_store_that_pauses_while_it_is_written_to(remote: Place):
    writer = remote.writer()
    assert remote.swift
    keep_one(writer, 1)
    remote.swift("pause", "object")
    try:
        writer.save(2, full_of(2, 10 * 2**20))  # returns, though nothing can be written yet
        time.sleep(3)
        assert writer.busy
    finally:
        remote.swift("resume", "object")
    writer.settle()
    assert checkpoint.manifests(writer.url)[0] == "step-000000002"
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
    assert checkpoint.manifests(writer.url) == ["step-000000001"]
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
