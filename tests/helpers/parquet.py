"""Parquet files of images in the forms that other programs write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[tuple[bytes | None, int | None]]  # images and classes


def features(classes: Sequence[str]) -> dict[bytes, bytes]:
    """What `datasets` writes into the schema of a set with a column of images and one of classes."""
    label = {"names": list(classes), "_type": "ClassLabel"}
    known = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    return {b"huggingface": json.dumps(known).encode()}


def write_hub(path: Path, rows: Rows, *, classes: Sequence[str] = (), names: bool = True, **options: Any) -> Path:
    """Write a file as `datasets` does: images with their paths, a hundred in a row group."""
    cells = [{"bytes": image, "path": f"{path.stem}-{n}.jpg" if names else None} for n, (image, _) in enumerate(rows)]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(cells, image), "label": pa.array([label for _, label in rows], pa.int64())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(features(classes)), path, **{"row_group_size": 100, **options})
    return path


def write_bytes(path: Path, rows: Rows, *, column: str = "jpg", **options: Any) -> Path:
    """Write a file with a column of bytes and one of classes."""
    images, labels = [image for image, _ in rows], [label for _, label in rows]
    table = pa.table({"label": pa.array(labels, pa.int32()), column: pa.array(images, pa.binary())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path
