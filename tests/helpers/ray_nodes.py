"""A Ray cluster of real nodes on this machine: a head that only directs, and nodes that come and go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers import ray_auth

from eagleray.cluster.session import ENVIRONMENT

MEMORY = 100 * 2**20  # bytes of each node's object store
NOTICE = 40  # seconds between being told and being taken away


@contextmanager
def ray_cluster(monkeypatch: pytest.MonkeyPatch, **settings: str) -> Iterator[Any]:
    """A context with a cluster that has no node for work yet. RAY_ADDRESS and `settings` are in the environment."""
    from ray.cluster_utils import Cluster

    for name, value in (ENVIRONMENT | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"} | settings).items():
        monkeypatch.setenv(name, value)
    ray_auth.read_again()
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def add(cluster: Any, **settings: str) -> Any:
    """Add a node with one CPU, whose processes have `settings` in their environment."""
    return cluster.add_node(num_cpus=1, object_store_memory=MEMORY, env_vars=settings)


def drain(cluster: Any, node: Any) -> None:
    """What a cloud's notice of preemption comes to."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = GcsClient(address=cluster.gcs_address)
    taken, why = client.drain_node(node.node_id, reason, "spot", int((time.time() + NOTICE) * 1000))
    assert taken, why
