"""Computes short digests of data, by which equal data is recognised."""

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from eagleray.data.index import Index

LENGTH = 16  # hexadecimal digits


def shard_digests(index: Index) -> dict[str, list[str]]:
    """Return what tells whether the samples of each shard and their order are the same, by the shard's name."""
    cuts = zip(index.first[:-1].tolist(), index.first[1:].tolist(), strict=True)
    return {
        blob.url.rpartition("/")[2]: [f"{blob.size} {blob.tag}", _short(index.crc[first:last])]
        for blob, (first, last) in zip(index.shards, cuts, strict=True)
    }


def same_samples(index: Index, shard: int, digests: list[str]) -> bool:
    """Return whether a shard has the samples in the order of its digests. Rows of the index are read only where the
    file is another one, as a copy in another store is."""
    blob = index.shards[shard]
    return digests[0] == f"{blob.size} {blob.tag}" or digests[1] == _short(
        index.column(shard, ["crc"])["crc"].to_numpy()
    )


def _short(crc: NDArray[np.uint32]) -> str:
    return hashlib.sha256(crc.astype("<u4").tobytes()).hexdigest()[:LENGTH]


def data_digest(index: Index, samples: NDArray[np.int64]) -> str:
    """Return the digest of the images and labels of these samples; the folder of the shards does not change it."""
    total = hashlib.sha256(json.dumps([(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]).encode())
    total.update(samples.tobytes())
    total.update(index.crc[samples].tobytes())
    total.update(index.label[samples].tobytes())
    return total.hexdigest()[:LENGTH]
