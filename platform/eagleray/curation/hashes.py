"""Perceptual hashes of images, by which near copies are told from images that only mean the same."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.data.columns import MEASURED, Measured, own_columns
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable, complete_tables

COLUMN = "phash"
LENGTH = 63  # bits that may differ: the first of the 64 of the text is 0


def hash_tables(index: Index) -> list[SampleTable]:
    """Return the tables beside the shards with the hashes that `eagleray data measure` writes. Raises UserError when
    there are none."""
    tables = complete_tables(index.shards, MEASURED, lambda about: COLUMN in about.settings.get("measures", ()))
    if not (found := list(tables)):
        raise UserError(f"--bits: needs the column {COLUMN}, which eagleray data measure writes beside the shards")
    return found


def read_hashes(index: Index) -> NDArray[np.uint64]:
    """Return the hashes of all samples (N,), 0 for images that do not decode. Raises UserError when there are none."""
    measured, out = [Measured(table) for table in hash_tables(index)], np.zeros(len(index), np.uint64)
    for shard in range(len(index.shards)):
        texts = own_columns(index, shard, [COLUMN], measured)[COLUMN].to_pylist()
        out[index.first[shard] : index.first[shard + 1]] = [int(text or "0", 16) for text in texts]
    return out


def signs(hashes: NDArray[np.uint64], device: torch.device) -> Tensor:
    """Return the bits of hashes (n,) as -1 and 1 (n, 64): the product of two rows is 64 less twice the bits that
    differ."""
    bits = np.unpackbits(hashes.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1)
    return torch.from_numpy(bits).to(device).float().mul_(2).sub_(1)
