"""Make sources of images for the tests of `eagleray prepare`, and run it on them."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.pictures import jpeg

from eagleray.base.errors import UserError
from eagleray.datasets.prepare import prepare
from eagleray.datasets.sources.source import PrepareOptions


def fill(folder: Path, names: list[str]) -> dict[str, bytes]:
    """Write a different picture into each file; return the bytes by name."""
    data = {name: jpeg(i) for i, name in enumerate(names)}
    for name, content in data.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return data


def tar_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_parquet(path: Path, first: int, rows: int, **more: Any) -> list[bytes]:
    """Write images as Hugging Face's `datasets` does, in row groups of three; return their bytes."""
    data = [jpeg(first + i) for i in range(rows)]
    cells = [{"bytes": d, "path": f"img.{first + i}.JPEG"} for i, d in enumerate(data)]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"image": pa.array(cells, struct), "label": pa.array([i % 4 for i in range(rows)], pa.int64()), **more}
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return data


def run_prepare(source: str, origin: Path, destination: Path, **options: Any) -> dict[str, Any]:
    prepare_options = PrepareOptions(source=source, origin=str(origin), destination=str(destination), **options)
    return prepare(prepare_options, run=map, command="eagleray prepare ...", note=lambda _: None, tick=lambda *_: None)


def prepare_error(*arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as e:
        run_prepare(*arguments, **options)
    assert "\n" not in str(e.value)
    return str(e.value)


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
