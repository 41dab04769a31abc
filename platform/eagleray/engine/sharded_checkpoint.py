"""The sharded part of a checkpoint, which torch.distributed.checkpoint writes and reads.

The file `step-N.pt` has the shapes of sharded tensors without values; the folder `step-N.shards` has the rows of every
rank. The manifest names all files, and is written last."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor

from eagleray.base import dist
from eagleray.base.dist import sharded
from eagleray.base.errors import Outage, UserError, explained
from eagleray.base.files import sync_folder
from eagleray.engine.checkpoint_files import METADATA
from eagleray.engine.serialise import NOT_NUMBERS, ruined
from eagleray.engine.sharded import Path as Keys
from eagleray.engine.sharded import replace, tensors


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[Keys, Tensor]]:
    """Return a copy of the state with meta tensors, without values, for the sharded ones, and the latter by keys."""
    rows = {keys: x for keys, x in tensors(state) if sharded(x)}
    for keys, x in rows.items():
        state = replace(state, keys, torch.empty(x.shape, dtype=x.dtype, device="meta"))
    return state, rows


def fill(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a state with unsharded tensors in place of meta tensors, with values from the folder of a checkpoint.

    Raises UserError when memory is too small or the folder is damaged, and OSError."""
    with explained(f"{folder}: its tensors cannot be held", RuntimeError):
        targets = {keys: torch.empty_like(x, device="cpu") for keys, x in tensors(state) if x.is_meta}
    if targets:
        read_rows(folder, targets)
    for keys, x in targets.items():
        state = replace(state, keys, x)
    return state


def read_rows(folder: Path, targets: Mapping[Keys, Tensor]) -> None:
    """Read tensors, in place, from the folder of a checkpoint: plain ones entirely, DTensors only in this rank's rows.

    Any number of ranks may have written the checkpoint. Raises UserError when the folder is damaged, and OSError."""
    from eagleray.engine import row_reader  # imports torch.distributed.checkpoint, which takes 1 s

    row_reader.read(folder, {_name(k): x for k, x in targets.items()})


class ShardWriter:
    """Writes the rows of this rank in the background, together with all other ranks.

    `settle(path)` verifies a written file, after its upload if checkpoints are in a store, and returns its size and
    checksum. With `scratch`, `folder` holds only files on their way to a store, and older checkpoints in it are
    deleted."""

    def __init__(self, folder: Path, settle: Callable[[Path], dict[str, Any]], *, scratch: bool) -> None:
        self.folder, self.settle, self.scratch = folder, settle, scratch
        self.group: Any = dist.host_group()  # a group of its own, as saving overlaps with training
        self._thread: threading.Thread | None = None
        self._ruined: list[str] = []  # names of tensors with a NaN in the save that is under way

    def save(self, name: str, rows: Mapping[Keys, Any]) -> Callable[[], dict[str, Any]]:
        """Copy the rows and start to write them. Called by all ranks together.

        Returns a function that waits for all ranks and returns the files for the manifest. Each rank has to call it
        once, in the background. It raises OSError, UserError or Outage when a rank could not write."""
        from torch.distributed import checkpoint as dcp

        self.wait()
        folder = self.folder / f"{name}.shards"
        for old in self.folder.glob("step-*.shards") if self.scratch else ():
            shutil.rmtree(old, ignore_errors=True)  # another rank on this machine may delete it too
        self._ruined = ruined({_name(keys): x.to_local() for keys, x in rows.items() if keys[0] == "method"})
        state = {_name(keys): x for keys, x in rows.items()}
        # The rows are on the host, so no copying ahead: it would open a CUDA context on GPU 0 in torch's own thread.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        future: Any = dcp.async_save(state, storage_writer=writer, process_group=self.group)
        return partial(self._finish, folder, future)

    def follow(self, finish: Callable[[], dict[str, Any]]) -> None:
        """Take part in a save on a rank other than 0, which writes no manifest. Errors are raised on rank 0."""

        def run() -> None:
            with contextlib.suppress(OSError, UserError, Outage):  # rank 0 raises them
                finish()

        self._thread = threading.Thread(target=run, name="shards", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the rows of this rank are written."""
        if self._thread:
            self._thread.join()

    def _finish(self, folder: Path, future: "Future[Any]") -> dict[str, Any]:
        files: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            future.result()
            if self._ruined:
                raise UserError(f"{folder.stem}: {NOT_NUMBERS} {self._ruined[0]}")
            for written in (folder, folder.parent):
                sync_folder(written)
            for path in [*folder.glob(f"__{dist.rank()}_*"), *([folder / METADATA] * (dist.rank() == 0))]:
                files[path.name] = self.settle(path)
        except (OSError, UserError, Outage) as e:
            problem = e
        except BaseException as e:  # torch raises a BaseException for problems of any rank
            problem = OSError(f"{folder}: {' '.join(str(e).split())[:300]}")
        answers: list[Any] = [None] * dist.size()
        td.all_gather_object(answers, (files, problem), group=self.group)
        for _, other in answers:
            if other:
                raise other
        return {"shards": {name: entry for part, _ in answers for name, entry in part.items()}}


def _name(keys: Keys) -> str:
    return ".".join(map(str, keys))
