"""The format of embeddings: a folder with a description and Parquet files, a row for each sample of a data set.

The rows of `part-000000.parquet` and of those that follow it are in the order of the index: shard, key, label, and the
feature, which is null where the image does not decode. `_embedding.json` is written first, and says what all rows are.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data.index import Index
from eagleray.storage.store import parent, store

ABOUT = "_embedding.json"  # which readers of a folder of Parquet files pass over
FOLDER = "embeddings"  # beside the shards
FORMAT = 1
ROWS = 16_384  # of a part


@dataclass(frozen=True)
class Embedding:
    """What the rows of an embedding are: those of two embeddings are equal if these are."""

    backbone: str  # its name, for people
    digest: str  # of the backbone
    kind: str  # of features
    dim: int
    size: int  # pixels of the images, and of their short side before the crop
    resize: int
    precision: str
    data: str  # digest of the images
    images: int
    format: int = FORMAT

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return -(-self.images // ROWS)

    def same_as(self, other: "Embedding") -> bool:
        """Return whether the rows are equal; the name of a backbone is not in them."""
        return asdict(self) | {"backbone": ""} == asdict(other) | {"backbone": ""}


def part_url(folder: str, number: int) -> str:
    """Return the URL of a part."""
    return f"{folder}/part-{number:06d}.parquet"


def samples_of(number: int, images: int) -> NDArray[np.int64]:
    """Return the samples of a part."""
    return np.arange(number * ROWS, min((number + 1) * ROWS, images), dtype=np.int64)


def read_about(folder: str) -> Embedding | None:
    """Return the description of the embedding in a folder or URL, or None where there is none. Raises UserError."""
    place = f"{folder}/{ABOUT}"
    try:
        return Embedding(**json.loads(store(place).get(place)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise UserError(f"{place}: not written by `eagleray embed`") from None


def write_about(folder: str, embedding: Embedding) -> None:
    """Write the description of an embedding."""
    place = f"{folder}/{ABOUT}"
    store(place).write(place, json.dumps(asdict(embedding), indent=1).encode())


def parts_there(folder: str, embedding: Embedding) -> set[int]:
    """Return the numbers of the parts that are written."""
    names = {blob.url.rpartition("/")[2] for blob in store(folder).list(f"{folder}/", "part-")}
    return {n for n in range(embedding.parts) if part_url("", n)[1:] in names}


def table_of(
    index: Index, samples: NDArray[np.int64], features: NDArray[np.float32], good: NDArray[np.bool_]
) -> pa.Table:
    """Return the rows of neighbouring samples with their features (n, D), of which only the `good` ones count."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), features.shape[1], mask=pa.array(~good))
    names = [blob.url.rpartition("/")[2] for blob in index.shards]
    shard = pa.DictionaryArray.from_arrays(pa.array(index.shard[samples]), names)
    keys = index.keys(int(samples[0]), int(samples[-1]) + 1)
    columns = {"shard": shard, "key": keys, "label": index.label[samples], "feature": vectors}
    return pa.table(columns)


def encode(table: pa.Table) -> bytes:
    """Return a table as the content of a Parquet file, always the same."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", use_dictionary=["shard", "label"])
    return buffer.getvalue()


def read_features(
    folder: str, embedding: Embedding, samples: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the features (n, D) of some samples, and which of them count (n,). Raises UserError when a part is not as
    it was written."""
    features, good = np.empty((len(samples), embedding.dim), np.float32), np.empty(len(samples), bool)
    for number in np.unique(samples // ROWS).tolist():
        rows = np.flatnonzero(samples // ROWS == number)
        vectors, fine = _read_part(folder, embedding, number)
        features[rows], good[rows] = vectors[samples[rows] - number * ROWS], fine[samples[rows] - number * ROWS]
    return features, good


def _read_part(folder: str, embedding: Embedding, number: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    place = part_url(folder, number)
    try:
        column = pq.read_table(io.BytesIO(store(place).get(place)), columns=["feature"])["feature"].combine_chunks()
    except (FileNotFoundError, pa.ArrowException):
        raise UserError(f"{place}: missing or damaged; delete it, and `eagleray embed` writes it again") from None
    width, rows = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 0, len(column)
    if (width, rows) != (embedding.dim, len(samples_of(number, embedding.images))):
        raise UserError(f"{place}: {rows} rows of {width} numbers, not as {ABOUT} says")
    fine = ~column.is_null().to_numpy(zero_copy_only=False)
    features = np.zeros((rows, width), np.float32)
    features[fine] = column.flatten().to_numpy().reshape(-1, width)  # without the rows that are null
    return features, fine


def beside(index: Index, wanted: Mapping[str, Any]) -> tuple[str, Embedding] | None:
    """Return a complete embedding beside the shards of an index whose description has the wanted values, or None."""
    folders = {parent(blob.url) for blob in index.shards}
    if len(folders) != 1:
        return None
    [home] = folders
    names = {b.url.rpartition("/")[0] for b in store(home).walk(f"{home}/{FOLDER}/") if b.url.endswith(f"/{ABOUT}")}
    for folder in sorted(names):
        found = read_about(folder)
        if found and asdict(found).items() >= wanted.items() and len(parts_there(folder, found)) == found.parts:
            return folder, found
    return None
