"""Computes short digests of data, by which equal data is recognised."""

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from eagleray.data.index import Index

LENGTH = 16  # hexadecimal digits


def data_digest(index: Index, samples: NDArray[np.int64]) -> str:
    """Return the digest of the images and labels of these samples; the folder of the shards does not change it."""
    total = hashlib.sha256(json.dumps([(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]).encode())
    total.update(samples.tobytes())
    total.update(index.crc[samples].tobytes())
    total.update(index.label[samples].tobytes())
    return total.hexdigest()[:LENGTH]
