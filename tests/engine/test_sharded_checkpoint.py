"""The part of a checkpoint that ranks write together, in a folder and on a real S3 server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as td
from helpers.checkpoints import Place
from helpers.processes import free_port
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from eagleray.base.errors import UserError
from eagleray.engine import checkpoint
from eagleray.engine.checkpoint import Writer
from eagleray.engine.sharded_checkpoint import ShardWriter, read_rows, split
from eagleray.runs.run_dir import RunDir
from eagleray.runs.tracking import Tracking
from eagleray.storage.store import local_path


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    td.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    td.destroy_process_group()


def state_of(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    rows = torch.full((50, 30), float(step))
    return {"step": step, "method": {"a": DTensor.from_local(rows, mesh, [Shard(0)]), "b": torch.full((3,), step)}}


def save(state: dict[str, Any], writer: Writer, rows: ShardWriter) -> None:
    plain, own = split(state)
    writer.save(state["step"], plain, rows.save(checkpoint.step_name(state["step"]), own))


@pytest.fixture
def written(place: Place, mesh: DeviceMesh) -> Place:
    """Three checkpoints, of which two are kept; training goes on while each is written."""
    writer = place.writer(keep=2)
    rows = ShardWriter(writer.scratch, writer.store_file, scratch=place.swift is not None)
    for step in (1, 2, 3):
        save(state := state_of(step, mesh), writer, rows)
        for tensor in state["method"].values():
            tensor.zero_()
        writer.settle()
    return place


def test_whoever_reads_gets_whole_tensors(written: Place, mesh: DeviceMesh):
    assert checkpoint.manifests(written.url) == ["step-000000003", "step-000000002"]
    assert {name.partition(".")[0].partition("/")[0] for name in written.files()} == {
        "step-000000003",
        "step-000000002",
    }
    state = written.newest(written.scratch.parent / "another machine" if written.swift else None)
    assert state is not None
    assert state["step"] == 3
    for tensor in state["method"].values():
        assert type(tensor) is torch.Tensor
        assert (tensor == 3).all()


def test_ranks_read_their_rows(written: Place, mesh: DeviceMesh):
    state = checkpoint.newest(written.url, written.scratch, whole=False)
    assert state is not None
    assert state["method"]["a"].is_meta
    target = DTensor.from_local(torch.zeros(50, 30), mesh, [Shard(0)])
    folder = written.scratch if written.swift else local_path(written.url)
    assert state["shards"] == str(folder / "step-000000003.shards")
    read_rows(folder / "step-000000003.shards", {("method", "a"): target})
    assert (target.to_local() == 3).all()


def test_a_damaged_part_damages_the_checkpoint(written: Place):
    part = written.data(f"step-000000003.shards{'.' if written.swift else '/'}__0_0.distcp")
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    state = written.newest(written.scratch.parent / "another machine" if written.swift else None)
    assert state is not None
    assert state["step"] == 2


def test_a_part_that_cannot_be_written_leaves_no_checkpoint(place: Place, mesh: DeviceMesh):
    writer = place.writer()

    def full(_: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    rows = ShardWriter(writer.scratch, full, scratch=False)
    save(state_of(1, mesh), writer, rows)
    with pytest.raises(UserError, match="No space left on device"):
        writer.settle()
    assert checkpoint.manifests(place.url) == []
    assert place.newest() is None
    save(state_of(2, mesh), writer, ShardWriter(writer.scratch, writer.store_file, scratch=False))
    writer.settle()
    assert json.dumps(checkpoint.manifests(place.url)) == '["step-000000002"]'


def test_rows_that_are_no_numbers_do_not_count(place: Place, mesh: DeviceMesh):
    writer = place.writer()
    rows = ShardWriter(writer.scratch, writer.store_file, scratch=place.swift is not None)
    save(state_of(1, mesh), writer, rows)
    writer.settle()
    broken = state_of(2, mesh)
    broken["method"]["a"].to_local()[3, 4] = torch.nan
    save(broken, writer, rows)
    with pytest.raises(UserError, match=r"the weights are no numbers .* is method\.a"):
        writer.settle()
    assert checkpoint.manifests(place.url) == ["step-000000001"]


def test_a_checkpoint_right_after_another_waits_for_the_rows_of_that_one(place: Place, mesh: DeviceMesh):
    """As before an evaluation, or where a run is asked to stop while it saves."""
    writer = place.writer(keep=2)

    def slowly(path: Path) -> dict[str, Any]:
        time.sleep(0.2)
        return writer.store_file(path)

    recipe: Any = SimpleNamespace(out=place.url)
    folder = RunDir(recipe, 0, Tracking("none"), command="")
    folder.writer, folder.shards = writer, ShardWriter(writer.scratch, slowly, scratch=place.swift is not None)
    for step in (1, 2):
        folder.save(step, state_of(step, mesh))
    writer.settle()
    assert checkpoint.manifests(place.url) == ["step-000000002", "step-000000001"]
