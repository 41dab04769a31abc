"""Which images have the same bytes: a digest of each, by tasks that may run anywhere."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.datasets.pack import put_table
from eagleray.datasets.sources.fetch import fetch

BYTES = 16  # of a digest: among 1e10 images two equal ones by chance are less likely than 1e-18


@dataclass(frozen=True)
class Hash:
    """Writes the digests of some items to a note."""

    notes: str
    column: str

    def __call__(self, task: tuple[int, bytes]) -> int:
        """Number and items of a task; returns how many these were."""
        number, packed = task
        items = pa.ipc.open_stream(packed).read_all()
        digests = [_digest(data) for _, data in fetch(items, self.column)]
        put_table(f"{self.notes}/{self.name(number)}", pa.table({"digest": pa.array(digests, pa.binary(BYTES))}))
        return len(items)

    @staticmethod
    def name(number: int) -> str:
        return f"hash-{number:06d}.parquet"


def _digest(data: bytes | memoryview) -> bytes | None:
    """None for no bytes, of which nothing is a copy."""
    return hashlib.blake2b(data, digest_size=BYTES).digest() if len(data) else None


def copies(digests: pa.ChunkedArray) -> NDArray[np.int64]:
    """The first item with the same digest as each (N,)."""
    first = np.arange(len(digests))
    known = np.flatnonzero(digests.is_valid().to_numpy())
    values = np.frombuffer(b"".join(digests.drop_null().to_pylist()), f"V{BYTES}")
    _, place, of = np.unique(values, return_index=True, return_inverse=True)
    first[known] = known[place[of]]
    return first
