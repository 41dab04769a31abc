"""Reads fields of the JSON that img2dataset and other tools store beside each image in its tar, as columns of a table.

The JSON is not trusted. A value that is too large, not JSON, or not of its column's type becomes null, and the column
FAULT gives the reason."""

import contextlib
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data.columns import OWN
from eagleray.data.image_folder import is_folder_blob
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable
from eagleray.data.tar_headers import BLOCK, DamagedTar, Member, members
from eagleray.data.tar_scan import READ, key_and_extension
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import RangeFile, Span

PREFIX = "json."  # prefix of the names of measures that are fields of the JSON
FAULT = "json_fault"  # name of the column that says what is wrong with a sample's JSON
LARGEST = 2**20  # most bytes of the JSON of one sample
LONGEST = 4096  # most characters of a value that is text
LOOK = 1000  # number of first samples, whose JSON decides the types of the fields
NAMED = 20  # most fields or faults that are listed
KINDS = {"number": pa.float64(), "text": pa.string(), "true or false": pa.bool_()}
MISSING = "no .json beside the image"
FIELD = re.compile(r"\w[\w .-]{0,99}")


def fields_of(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the fields of JSON among `names` of measures. Raises UserError for a field whose name cannot be that of a
    column, or is taken, for example by one of the other measures' `columns`."""
    fields = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    for field in fields:
        if not FIELD.fullmatch(field):
            raise UserError(f"--columns {PREFIX}{field}: expected the name of a field, of letters, digits and . - _")
        if field in OWN or field in columns or field == FAULT or fields.count(field) > 1:
            raise UserError(f"--columns {PREFIX}{field}: there is another column {field}")
    return fields


def kinds_of(index: Index, fields: Sequence[str]) -> dict[str, str]:
    """Return the type, a key of KINDS, of each field in the first LOOK samples. Raises UserError for a field that is in
    none of them, or whose values have several types or one that is not in KINDS."""
    if any(is_folder_blob(blob) for blob in index.shards):
        raise UserError(f"--columns {PREFIX}{fields[0]}: JSON is read from tars, not from a folder of images")
    seen: dict[str, set[str]] = {field: set() for field in fields}
    known: Counter[str] = Counter()
    for _, document in documents(index, np.arange(min(LOOK, len(index)))):
        if isinstance(document, str):
            continue
        known.update(name[:40] for name in itertools.islice(document, NAMED))
        for field in fields:
            if document.get(field) is not None:
                seen[field].add(_kind(document[field]))
    for field, kinds in seen.items():
        if not kinds:
            there = ", ".join(ascii(name)[1:-1] for name, _ in known.most_common(NAMED)) or "none at all"
            raise UserError(f"--columns {PREFIX}{field}: no JSON of the first {LOOK} samples has it; they have {there}")
        if len(kinds) > 1 or not kinds <= KINDS.keys():
            what = " and ".join(sorted(kinds))
            raise UserError(f"--columns {PREFIX}{field}: expected {', '.join(KINDS)}; its values are {what}")
    return {field: kinds.pop() for field, kinds in seen.items()}


def columns(index: Index, samples: NDArray[np.int64], kinds: Mapping[str, str]) -> dict[str, pa.Array]:
    """Return columns with the fields of neighbouring samples (n,), and the column FAULT. Raises UserError and Outage
    for failures of the store."""
    first = int(samples[0])
    values: dict[str, list[Any]] = {field: [None] * len(samples) for field in kinds}
    faults: list[str | None] = [MISSING] * len(samples)
    for sample, document in documents(index, samples):
        if isinstance(document, str):
            faults[sample - first] = document
            continue
        faults[sample - first] = None
        for field, kind in kinds.items():
            value, wrong = value_of(document.get(field), kind)
            values[field][sample - first] = value
            if wrong:
                faults[sample - first] = f"{field}: {wrong}"
    arrays = {field: pa.array(values[field], KINDS[kind]) for field, kind in kinds.items()}
    return arrays | {FAULT: pa.array(faults, pa.string())}


def fault_lines(table: SampleTable) -> Iterator[str]:
    """Yield a line for each of the most frequent faults of JSON, with the number of samples that have it."""
    counts: Counter[str] = Counter()
    for number in table.parts:
        counts.update(fault for fault in table.read(number, [FAULT])[FAULT].to_pylist() if fault)
    for fault, count in counts.most_common(NAMED):
        yield f"{count:,} samples: {fault}"


def documents(index: Index, samples: NDArray[np.int64]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield each of the neighbouring samples (n,) that has JSON, with its JSON or the reason why that is unusable."""
    first, stop = int(samples[0]), int(samples[-1]) + 1
    shards = np.searchsorted(index.first, [first, stop - 1], "right") - 1
    for shard in range(int(shards[0]), int(shards[1]) + 1):
        begin, end = max(first, int(index.first[shard])), min(stop, int(index.first[shard + 1]))
        if begin < end:
            rows = index.rows(begin, end)
            places = {int(offset): begin + i for i, offset in enumerate(rows.offset)}
            yield from _in_shard(rows.blob, _start(index, shard, begin), places)


def _start(index: Index, shard: int, sample: int) -> int:
    """Return an offset in a shard before all members of a sample: the end of the image of the sample before it."""
    if sample == int(index.first[shard]):
        return 0
    before = index.rows(sample - 1, sample)
    return -(-int(before.offset[0] + before.size[0]) // BLOCK) * BLOCK


def _in_shard(blob: Blob, start: int, places: Mapping[int, int]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the samples of a shard from byte `start` on, up to the first damage, with their JSON or why it is unusable.
    `places` maps the offsets of the images to samples."""
    size = blob.size - start
    file = cast(BinaryIO, io.BufferedReader(RangeFile(Span("", blob.url, start, size)), READ))
    last = max(places.values())
    for _, group in itertools.groupby(_files(file, size, -start), key=lambda each: each[0][0]):
        sample, document = None, None
        for (_, extension), member in group:
            sample = places.get(start + member.offset, sample)
            if extension == "json":
                document = _read(file, member.offset, member.size, member.sparse)
        if sample is not None and document is not None:
            yield sample, document
        if sample == last:
            return


def _files(file: BinaryIO, size: int, base: int) -> Iterator[tuple[tuple[str, str], Member]]:
    """Yield the files of a shard that belong to samples, with their keys and extensions, up to the first damage. The
    index has already recorded the damage, and has no samples after it."""
    with contextlib.suppress(DamagedTar):
        for member in members(file, size, base=base):
            if names := key_and_extension(member.name):
                yield names, member


def _read(file: BinaryIO, offset: int, size: int, sparse: bool) -> dict[str, Any] | str:
    """Return the JSON object in a member, or the reason why it cannot be used."""
    if sparse:
        return "its .json is stored sparse"
    if size > LARGEST:
        return f"its .json has more than {LARGEST:,} bytes"
    file.seek(offset)
    try:
        found = json.loads(file.read(size))
    except (ValueError, RecursionError):
        return "its .json is not JSON, or nested too deeply"
    return found if isinstance(found, dict) else "its .json is not an object"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else "lists or objects"


def value_of(value: Any, kind: str) -> tuple[Any, str]:
    """Return `value` and "", or None and the reason why a column of the type `kind` cannot hold the value."""
    if value is None:
        return None, ""
    if _kind(value) != kind:
        return None, f"expected {kind}"
    if kind == "text" and (len(value) > LONGEST or not _is_unicode(value)):
        return None, f"expected at most {LONGEST} characters of Unicode"
    if kind == "number" and not abs(value) <= sys.float_info.max:
        return None, "expected a finite number"
    return (float(value) if kind == "number" else value), ""


def _is_unicode(text: str) -> bool:
    """Return whether a text can be stored as UTF-8, which a lone surrogate, half of a pair, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
