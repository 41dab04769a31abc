"""Say where the numbers of a run come from: digests of its recipe, data, order and code, and how it computes.

Checkpoints and exports hold the digests, and starts.jsonl both: what has changed since explains a step that cannot be
repeated.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import eagleray
from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.config.plugins import Copy
from eagleray.data.digests import LENGTH
from eagleray.data.index import Index
from eagleray.data.reader import Stream
from eagleray.protocols.digests import digest
from eagleray.runs.recipe import Recipe

DIGESTS = ("recipe", "data", "order", "code")
CHANGED = {
    "data": "the shards of data.train are not those",
    "order": "a table of data.train (columns, exclude, or one beside the shards) or the order is not the one",
}


def shards_digest(index: Index) -> str:
    """Return the digest of the names, sizes and tags of all shards, and of how often each is read in an epoch. No row
    of the index is read for it."""
    shards = [(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]
    return digest(shards, index.repeats.tolist())


def order_digest(stream: Stream) -> str:
    """Return the digest of all that decides which sample is read when."""
    blocks = hashlib.sha256(stream.visits.sizes.tobytes()).hexdigest()
    chosen = [stream.selection.digest] if stream.selection else []
    return digest(stream.seed, stream.lanes, stream.batch, blocks, *chosen)


def check_same_order(origin: Mapping[str, str], state: Mapping[str, Any] | None, out: str) -> None:
    """Raises UserError when the data or the order is not that of the run whose checkpoint's `state` is to continue.

    Nothing is expected of a checkpoint that does not say what they were."""
    begun = (state or {}).get("origin", {})
    for name, what in CHANGED.items():
        if begun.get(name, origin[name]) != origin[name]:
            raise UserError(
                f"{out}: {what} that the run has read by up to step {state and state['step']}, so it cannot continue "
                f"exactly; put back what was there, or begin another run with start.from={out}"
            )


@functools.cache
def code_digest() -> str:
    """Return the digest of the source files of this package."""
    folder = Path(eagleray.__file__).parent
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}
    return Copy(folder, files).sha256[:LENGTH]


def arithmetic(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return what the last digits of a run's numbers depend on: the device, the threads of its CPU part, the version of
    PyTorch, and those keys of the recipe that may change when the run continues."""
    o = recipe.optim
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "keys": {
            "precision": recipe.precision,
            "compile": recipe.compile,
            "deterministic": recipe.deterministic,
            "parallel": recipe.parallel,
            "optim.micro_batch": o.micro_batch,
            "optim.checkpointing": o.checkpointing,
            "optim.reduce": o.reduce,
            "data.workers": recipe.data.workers,
        },
    }


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator or, for a CPU, the vector instructions that PyTorch uses on it, such as
    `cpu AVX512`."""
    name = devices.name(device)
    return name if devices.is_accelerator(device) else f"{name} {torch.backends.cpu.get_cpu_capability()}"
