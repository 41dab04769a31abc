"""The rows of a sharded checkpoint of a stranger run no code, leave no folder and end in rows or in one line."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.mutations import change_bytes
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from eagleray.base.errors import UserError
from eagleray.engine import checkpoint
from eagleray.engine.sharded_checkpoint import read_rows

NAME = "step-000000001"


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def rows() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The folder of a sharded checkpoint, which has no manifest."""
    torch.save({"step": 1, "method": {"a": torch.empty(4, 3, device="meta")}}, tmp_path / f"{NAME}.pt")
    folder = tmp_path / f"{NAME}.shards"
    dcp.save({"method.a": rows()}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def read(folder: Path) -> torch.Tensor:
    tensor: torch.Tensor = checkpoint.read(folder.with_suffix(".pt"))["method"]["a"]
    return tensor


def change(folder: Path, edit: Callable[[Any], Any]) -> None:
    """Change what `.metadata` says."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    edited = edit(found)
    path.write_bytes(pickle.dumps(found if edited is None else edited))


def move(to: str) -> Callable[[Any], None]:
    """An edit that places rows in another file."""

    def edit(found: Any) -> None:
        for part in found.storage_data.values():
            part.relative_path = to

    return edit


def less(found: Any) -> None:
    found.state_dict_metadata["method.a"].chunks.clear()


def elsewhere(found: Any) -> None:
    for part in found.storage_data.values():
        part.offset = 7


def test_rows_are_read(shards: Path):
    assert torch.equal(read(shards), rows())


@pytest.mark.parametrize("place", ["alone", "inside"])
def test_what_describes_the_rows_runs_no_code(shards: Path, place: str):
    ran = shards / "ran"

    def edit(found: Any) -> Any:
        found.planner_data = Touch(ran)
        return found if place == "inside" else Touch(ran)

    change(shards, edit)
    if place == "inside":  # where nothing of it is needed
        assert torch.equal(read(shards), rows())
    else:
        with pytest.raises(UserError, match="does not describe rows"):
            read(shards)
    assert not ran.exists()


def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(shards: Path):
    ran = shards / "ran"
    data = io.BytesIO()
    torch.save(Touch(ran), data)
    (shards / "__0_0.distcp").write_bytes(data.getvalue())

    def edit(found: Any) -> None:
        [part] = found.storage_data.values()
        part.offset, part.length = 0, len(data.getvalue())
        found.state_dict_metadata["method.a"] = BytesStorageMetadata()
        found.storage_data = {MetadataIndex("method.a"): part}

    kept = (shards / ".metadata").read_bytes()
    change(shards, edit)
    with pytest.raises(UserError, match="does not describe rows"):
        read(shards)
    (shards / ".metadata").write_bytes(kept)  # described as a tensor
    with pytest.raises(UserError, match="not the rows of a checkpoint"):
        read(shards)
    assert not ran.exists()


@pytest.mark.parametrize("edit", [move("../rows"), move("/dev/zero"), move("__9_9.distcp"), less, elsewhere])
def test_what_cannot_be_true_is_one_line(shards: Path, edit: Callable[[Any], Any]):
    (shards.parent / "rows").write_bytes((shards / "__0_0.distcp").read_bytes())
    change(shards, edit)
    with pytest.raises(UserError, match=rf"{NAME}.shards.*: ") as e:
        read(shards)
    assert "\n" not in str(e.value)


def test_rows_that_are_missing_are_one_line(shards: Path):
    (shards / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata: is missing"):
        read(shards)


def test_tensors_that_no_memory_holds_are_one_line(shards: Path):
    torch.save({"method": {"a": torch.empty(2**57, 3, device="meta")}}, shards.with_suffix(".pt"))
    with pytest.raises(UserError, match="cannot be held"):
        read(shards)


def test_a_few_bytes_take_little_memory(shards: Path):
    """The unpickler in C makes a table for as many objects as a number of the file says."""
    (shards / ".metadata").write_bytes(b"\x80\x04}r\xff\xff\xff\x7f.")
    with one_line(NAME):
        read(shards)


@pytest.mark.parametrize("count", counts(100))
def test_changed_descriptions_end_in_rows_or_in_one_line(count: int | None, shards: Path):
    path = shards / ".metadata"
    text = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with one_line(NAME):
            read_rows(shards, {("method", "a"): torch.empty(4, 3)})

    examples(generators(count).map(lambda rng: change_bytes(rng, text)), check, count, many=400)
