"""Finds the columns of images and of classes in a Parquet file, first by type, then by name."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from eagleray.base.errors import UserError
from eagleray.data.file_names import readable
from eagleray.data.kinds import NONE

IMAGES = {"image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes"}
LABELS = {"label", "labels", "class", "cls", "target", "category", "class_id", "label_id", "fine_label", "coarse_label"}
NAMED = 12  # most columns that a message names
LONGEST = 200  # most characters of a class's name


class Columns(NamedTuple):
    """The columns of a file that are read. A nested column is named OUTER.INNER, such as image.path."""

    image: str
    leaf: int  # index of the column with the bytes of images among all columns of the file
    depth: int  # number of optional fields around each value of that column
    path: str  # column of file names; empty: none
    label: str  # column of classes; empty: none
    classes: tuple[str, ...]  # names of the classes, if the file has them


def choose(url: str, file: pq.ParquetFile, image: str = "", label: str = "") -> Columns:
    """Return the columns of a file. `image` and `label`, if not empty, are the columns that the user names. Raises
    UserError where no column fits, or several do."""
    schema, features = file.schema_arrow, _features(file.schema_arrow)
    images = {f.name: _kind(features, f.name) == "Image" for f in schema if may_hold_images(f.type)}
    numbers = {f.name: _kind(features, f.name) == "ClassLabel" for f in schema if _holds_classes(f.type)}
    image = _one(url, "image", image, images, _likely(images, IMAGES) or list(images), schema)
    if not image:
        raise UserError(f"{url}: no column holds the bytes of images; the columns are {_typed(schema)}")
    label = "" if label == NONE else _one(url, "label", label, numbers, _likely(numbers, LABELS), schema)
    kind = schema.field(image).type
    inside = [f.name for f in kind] if pa.types.is_struct(kind) else []
    leaf = _leaf(file, f"{image}.bytes" if inside else image)
    column = file.schema.column(leaf)
    return Columns(
        image,
        leaf,
        column.max_definition_level,
        f"{image}.path" if "path" in inside and _is_text(kind.field("path").type) else "",
        label,
        _names(features[label]) if numbers.get(label) else (),
    )


def _likely(found: Mapping[str, bool], usual: set[str]) -> list[str]:
    """Return the columns that `found` marks as declared by the file or, if there are none, those with a usual name."""
    return [name for name in found if found[name]] or [name for name in found if name.lower() in usual]


def _one(url: str, key: str, given: str, found: Collection[str], likely: Sequence[str], schema: pa.Schema) -> str:
    """Return the `given` column, else the likely column called `key`, else the only likely column, else "". Raises
    UserError when the given column is missing or of another type, and for several likely columns."""
    if given and given not in found:
        why = f"holds no {'numbers' if key == 'label' else 'bytes'}" if given in schema.names else "no such column"
        raise UserError(f"{url}: {key}={given}: {why}; the columns are {_typed(schema)}")
    if given or len(likely) < 2 or key in likely:
        return given or (key if key in likely else "".join(likely))
    names, none = ", ".join(map(readable, likely[:NAMED])), f", or {key}={NONE}" * (key == "label")
    raise UserError(
        f"{url}: the columns {names} may all be meant; choose one with '{{url: ..., {key}: {readable(likely[0])}}}' in "
        f"data.train, or with `eagleray index URL --{key} {readable(likely[0])}`{none}"
    )


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return the description of the columns that Hugging Face's `datasets` has put into the file's metadata, or {}."""
    try:
        known = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return {n: f for n, f in known.items() if isinstance(f, dict)} if isinstance(known, dict) else {}


def _kind(features: dict[str, Any], name: str) -> Any:
    return features.get(name, {}).get("_type")


def _names(feature: dict[str, Any]) -> tuple[str, ...]:
    names = feature.get("names")
    return tuple(readable(str(name)[:LONGEST]) for name in names) if isinstance(names, list) else ()


def may_hold_images(kind: pa.DataType) -> bool:
    """Return whether a column of this type may hold the bytes of images, alone or with their paths."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _is_binary(kind.field("bytes").type)
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def _is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _holds_classes(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating))


def _leaf(file: pq.ParquetFile, path: str) -> int:
    """Return the index of the column with this path, which must exist."""
    return next(n for n in range(len(file.schema)) if file.schema.column(n).path == path)


def _typed(schema: pa.Schema) -> str:
    """Return the names of the columns with their types."""
    shown = [f"{readable(f.name)} ({str(f.type)[:60]})" for f in schema]
    return ", ".join(shown[:NAMED] + [f"{len(shown) - NAMED} more"] * (len(shown) > NAMED)) or "there are none"
