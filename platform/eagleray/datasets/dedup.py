"""Find images with identical bytes by digests, which tasks on any machine compute."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.datasets.pack import get_table, put_table
from eagleray.datasets.sources.source import Read, fetch

BYTES = 16  # length of a digest: the chance that two of 1e10 images collide is below 1e-18


@dataclass(frozen=True)
class HashTask:
    """A task that computes digests of some items' image files and writes them to a file in the folder `notes`."""

    notes: str
    read: Read
    plan: str  # digest of the plan that the items belong to

    def __call__(self, task: tuple[int, bytes]) -> int:
        """Run the task (index, serialized items). Return the number of items."""
        number, message = task
        items = pa.ipc.open_stream(message).read_all()
        digests = [_digest(data) for _, data in fetch(items, self.read)]
        table = pa.table({"digest": pa.array(digests, pa.binary(BYTES))})
        put_table(self._url(number), table.replace_schema_metadata({"plan": self.plan}))
        return len(items)

    def digests(self, number: int) -> pa.Table | None:
        """Return the digests that the task with this index wrote; None if missing, damaged or of another plan."""
        table = get_table(self._url(number))
        known = table is not None and (table.schema.metadata or {}).get(b"plan") == self.plan.encode()
        return table if known else None

    def _url(self, number: int) -> str:
        return f"{self.notes}/hash-{number:06d}.parquet"


def _digest(data: bytes | memoryview) -> bytes | None:
    """Return the digest of an image file, or None for empty data, which never counts as a duplicate."""
    return hashlib.blake2b(data, digest_size=BYTES).digest() if len(data) else None


def first_copies(digests: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return, for each of N items, the position (N,) of the first item with its digest; without one, its own."""
    first = np.arange(len(digests))
    valid = np.flatnonzero(digests.is_valid().to_numpy())
    values = np.frombuffer(b"".join(digests.drop_null().to_pylist()), f"V{BYTES}")
    _, position, inverse = np.unique(values, return_index=True, return_inverse=True)
    first[valid] = valid[position[inverse]]
    return first
