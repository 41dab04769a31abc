"""Say where the numbers of a run come from: digests of its recipe, data, order and code.

Checkpoints, exports and starts.jsonl hold them: what has changed explains numbers that cannot be repeated.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import eagleray
from eagleray.base.errors import UserError
from eagleray.config.plugins import Copy
from eagleray.data import image_folder
from eagleray.data.digests import LENGTH
from eagleray.data.file_names import readable
from eagleray.data.index import Index
from eagleray.data.reader import Stream
from eagleray.protocols.digests import digest

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


def shards_text(index: Index) -> str:
    """Return the name, size and tag of each shard, a line each, from which `difference` names the one that is another
    one."""
    return "".join(f"{b.url.rpartition('/')[2]}\t{b.size} {b.tag}\n" for b in index.shards)


def difference(before: str, now: str) -> str:
    """Say which shards of two texts of `shards_text` differ; an empty string if none does."""
    old, new = (dict(line.rpartition("\t")[::2] for line in text.split("\n")[:-1]) for text in (before, now))
    names = {name: "an image of the folder" if name == image_folder.NAME else readable(name) for name in old | new}
    said = [f"{names[name]} is gone" for name in old if name not in new]
    said += [f"{names[name]} has changed" for name in old if new.get(name, old[name]) != old[name]]
    said += [f"{names[name]} is new" for name in new if name not in old]
    return ", ".join(said[:1] + [f"and {len(said) - 1} more"] * (len(said) > 1))


def order_digest(stream: Stream) -> str:
    """Return the digest of all that decides which sample is read when."""
    blocks = hashlib.sha256(stream.visits.sizes.tobytes()).hexdigest()
    chosen = [stream.selection.digest] if stream.selection else []
    return digest(stream.seed, stream.lanes, stream.batch, blocks, *chosen)


def check_same_order(origin: Mapping[str, str], state: Mapping[str, Any] | None, out: str, shards: str) -> None:
    """Raises UserError when the data or the order is not that of the run whose checkpoint's `state` is to continue. It
    names the shard, of those in the text `shards`.

    Nothing is expected of a checkpoint that does not say what they were."""
    begun = (state or {}).get("origin", {})
    for name, what in CHANGED.items():
        if begun.get(name, origin[name]) != origin[name]:
            found = difference((state or {}).get("shards_read", ""), shards) if name == "data" else ""
            named = f" ({found})" if found else ""
            raise UserError(
                f"{out}: {what} that the run has read by up to step {state and state['step']}, so it cannot continue "
                f"exactly{named}; put back what was there, or begin another run with start.from={out}"
            )


@functools.cache
def code_digest() -> str:
    """Return the digest of the source files of this package."""
    folder = Path(eagleray.__file__).parent
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}
    return Copy(folder, files).sha256[:LENGTH]
