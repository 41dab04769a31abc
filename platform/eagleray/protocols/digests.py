"""Compute short digests of backbones and settings, by which equal evaluations are recognised."""

import hashlib
import json
from pathlib import Path

from torch import nn

from eagleray.data.digests import LENGTH
from eagleray.models.tensor_files import hash_tensors


def digest(*parts: object) -> str:
    """Return a short digest of values that can be written as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:LENGTH]


def weights_digest(net: nn.Module, *about: object) -> str:
    """Return the digest of a network's tensors, and of further values `about` it."""
    total = hashlib.sha256(" ".join(map(str, about)).encode())
    hash_tensors(total, net.state_dict())
    return total.hexdigest()[:LENGTH]


def tree_digest(root: Path, *, times: bool = False) -> str:
    """Return the digest of the names and sizes of a folder's files and, with `times`, of their modification times."""
    files = sorted((str(p.relative_to(root)), p.stat()) for p in root.rglob("*") if p.is_file())
    return digest([(name, s.st_size, s.st_mtime_ns if times else 0) for name, s in files])
