"""Reads shards of others, in order to index them, on all machines of a cluster."""

from collections.abc import Iterator, Sequence
from typing import Any

from eagleray.cluster.ray_map import ray_map
from eagleray.cluster.session import joining
from eagleray.data.index import ScanAll, scan_here, scan_shard
from eagleray.storage.blob import Blob
from eagleray.storage.store import folder_of


def scanner() -> ScanAll:
    """Return what reads tars to index them: the cluster of RAY_ADDRESS if that is set, else threads of this process."""
    return scan_on_cluster if joining() else scan_here


def scan_on_cluster(blobs: Sequence[Blob]) -> Iterator[tuple[Blob, Any]]:
    """Yield tars with the rows of their samples, in any order, each read by a task on the cluster.

    Tars of a local path are read here, as other machines may not have it.
    """
    yield from scan_here([b for b in blobs if folder_of(b.url)])
    if far := [b for b in blobs if not folder_of(b.url)]:
        yield from ray_map(scan_shard, far)
