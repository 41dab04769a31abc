"""Computes short digests by which equal data is recognised."""

import hashlib
import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from eagleray.data import index_file
from eagleray.data.index import Index

LENGTH = 16  # hexadecimal digits


def shard_digests(index: Index) -> dict[str, list[str]]:
    """Return by shard name two texts for `same_samples`: size and tag, and a digest of the checksums in order."""
    cuts = zip(index.first[:-1].tolist(), index.first[1:].tolist(), strict=True)
    return {
        index_file.name(blob): [f"{blob.size} {blob.tag}", _short(index.crc[first:last])]
        for blob, (first, last) in zip(index.shards, cuts, strict=True)
    }


def same_samples(index: Index, shard: int, digests: list[str]) -> bool:
    """Return whether a shard has the same samples in the same order as the shard with these digests. The index's rows
    are read only if the file's size or tag differs, as the tag of a copy in another store does."""
    blob = index.shards[shard]
    return digests[0] == f"{blob.size} {blob.tag}" or digests[1] == _short(
        index.column(shard, ["crc"])["crc"].to_numpy()
    )


def same_shards(index: Index, digests: Mapping[str, list[str]]) -> bool:
    """Return whether an index has the shards with these `shard_digests`, in this order and with the same samples."""
    names = list(map(index_file.name, index.shards))
    return names == list(digests) and all(same_samples(index, i, digests[name]) for i, name in enumerate(names))


def _short(crc: NDArray[np.uint32]) -> str:
    return hashlib.sha256(crc.astype("<u4").tobytes()).hexdigest()[:LENGTH]


def data_digest(index: Index, samples: NDArray[np.int64]) -> str:
    """Return a digest of the images and labels of these samples. It does not depend on the folder of the shards."""
    total = hashlib.sha256(json.dumps([(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]).encode())
    total.update(samples.tobytes())
    total.update(index.crc[samples].tobytes())
    total.update(index.label[samples].tobytes())
    return total.hexdigest()[:LENGTH]
