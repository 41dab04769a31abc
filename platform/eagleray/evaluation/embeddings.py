"""Read and write embeddings: tables next to the shards of a data set, with a backbone's features of every sample."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data import sample_table
from eagleray.data.digests import data_digest
from eagleray.data.index import Index
from eagleray.data.sample_table import About, SampleTable, complete_tables, read_about

WHAT, FOLDER, COLUMN = "embedding", "embeddings", "feature"


def column_of(features: NDArray[np.float32], good: NDArray[np.bool_]) -> pa.Array:
    """Return features (n, D) as a pyarrow column of lists, with null where `good` (n,) is false.

    The lists have variable size, as pyarrow cannot read back its fixed-size lists if one of them is null."""
    ends = np.cumsum(good * np.int32(features.shape[1]), dtype=np.int32)
    return pa.ListArray.from_arrays(np.r_[np.int32(0), ends], features[good].reshape(-1), mask=pa.array(~good))


def read_features(table: SampleTable, samples: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the features (n, D) of `samples`, and a mask (n,) of the samples that have features. Raises UserError when
    a part of the table is missing, damaged or changed."""
    features = np.empty((len(samples), table.about.settings["dim"]), np.float32)
    good, rows_of_part = np.empty(len(samples), bool), sample_table.ROWS
    for number in np.unique(samples // rows_of_part).tolist():
        rows = np.flatnonzero(samples // rows_of_part == number)
        vectors, fine = _read_part(table, number)
        features[rows] = vectors[samples[rows] - number * rows_of_part]
        good[rows] = fine[samples[rows] - number * rows_of_part]
    return features, good


def _read_part(table: SampleTable, number: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    column, dim = table.read(number, [COLUMN])[COLUMN].combine_chunks(), table.about.settings["dim"]
    if column.type != pa.list_(pa.float32()) or set(column.value_lengths().unique().to_pylist()) - {dim, None}:
        raise UserError(f"{table.folder}: part {number} has features of type {column.type}, not of {dim} numbers")
    fine = ~column.is_null().to_numpy(zero_copy_only=False)
    features = np.zeros((len(column), dim), np.float32)
    features[fine] = column.flatten().to_numpy().reshape(-1, dim)  # flatten() skips rows that are null
    return features, fine


def open_embedding(folder: str, index: Index) -> SampleTable:
    """Open the embedding of an index's samples. Raises UserError if it is missing, incomplete or of other images."""
    about = read_about(folder)
    if about is None or about.what != WHAT:
        raise UserError(f"{folder}: no features; expected a folder that eagleray embed has written")
    if about.data != data_digest(index, np.arange(len(index))):
        raise UserError(f"{folder}: features of other images ({about.images:,}, here {len(index):,})")
    table = SampleTable(folder, about)
    if missing := len(table.missing()):
        raise UserError(f"{folder}: {missing} of {len(table.parts)} parts are missing; eagleray embed continues")
    return table


def beside(index: Index, settings: Mapping[str, Any]) -> SampleTable | None:
    """Return a complete embedding of an index's samples with these `settings`, next to its shards; None without one."""

    def fits(about: About) -> bool:
        like = about.what == WHAT and about.images == len(index) and about.settings.items() >= settings.items()
        return like and about.data == data_digest(index, np.arange(len(index)))  # reads the whole index, so it is last

    return next(complete_tables(index.shards, FOLDER, fits), None)
