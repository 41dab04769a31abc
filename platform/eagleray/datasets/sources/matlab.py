"""Read variables from MATLAB files."""

import json
import pickle
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleray.base import child
from eagleray.base.errors import UserError, explained
from eagleray.datasets.sources import files

LARGEST = 2**30  # most unpacked bytes of a file, and most values of a variable; SVHN has 0.2 * 10^9 of each
HEADER, COMPRESSED = 128, 15  # bytes before the first data element, and type code of a compressed element
PIECE = 2**20  # bytes that are unpacked at a time to measure a file's unpacked size in little memory

# SciPy's reader is not memory-safe: modified bytes may crash it, so it runs in a separate process.
CHILD = """
import io, json, math, pickle, sys
from scipy.io import loadmat, whosmat
largest, names, squeeze = json.loads(sys.argv[1])
data = sys.stdin.buffer.read()
try:
    if any(math.prod(shape) > largest for _, shape, _ in whosmat(io.BytesIO(data))):
        sys.exit(f"more than {largest} bytes")
    found = loadmat(io.BytesIO(data), variable_names=names, squeeze_me=squeeze)
except Exception as e:
    sys.exit(type(e).__name__)
sys.stdout.buffer.write(pickle.dumps({name: found[name] for name in names if name in found}, 5))
"""


def read_numbers(url: str, names: Sequence[str], expected: range) -> list[NDArray[np.int64]]:
    """Return the variables `names` of a MATLAB file as vectors (N,). Raises UserError for a value not in `expected`."""
    vectors = []
    for name, values in zip(names, read_arrays(url, *names), strict=True):
        numbers = np.asarray(values).ravel()
        if numbers.dtype.kind in "iuf":
            wrong = numbers[~((numbers >= expected.start) & (numbers < expected.stop) & (numbers == np.floor(numbers)))]
        else:
            wrong = np.array([f"values of type {numbers.dtype}"])
        if len(wrong):
            limits = f"{expected.start} to {expected.stop - 1}"
            raise UserError(f"{url}: expected whole numbers of {limits} in {name}, found {wrong[0]}")
        vectors.append(numbers.astype(np.int64))
    return vectors


def read_arrays(url: str, *names: str) -> list[NDArray[Any]]:
    """Return the variables with these names from a MATLAB file.

    Raises UserError when the file or a variable is missing, or the file cannot be read."""
    arrays = load(files.read_bytes(url), f"{url}: expected a MATLAB file with {', '.join(names)}", variable_names=names)
    if missing := [name for name in names if name not in arrays]:
        raise UserError(f"{url}: expected a MATLAB file with {', '.join(names)}; {missing[0]} is missing")
    return [arrays[name] for name in names]


def load(data: bytes, message: str, *, variable_names: Sequence[str], squeeze_me: bool = False) -> dict[str, Any]:
    """Return the variables of a MATLAB file whose bytes are in memory.

    Raises UserError, beginning with `message`, when the bytes cannot be parsed or unpack to more than LARGEST bytes."""
    with explained(message, struct.error, zlib.error):
        unpacked = _unpacked(data)
    if unpacked > LARGEST:
        raise UserError(f"{message} (more than {LARGEST} bytes)")
    asked = json.dumps([LARGEST, list(variable_names), squeeze_me])
    done = child.run_python(CHILD, [asked], input=data)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{message} ({said[-1][:200] if said and done.returncode > 0 else 'SciPy crashes on it'})")
    return dict(pickle.loads(done.stdout))  # safe, as our own child process pickled it, and only arrays are in it


def _unpacked(data: bytes) -> int:
    """Return the unpacked size in bytes of a MATLAB 5 file's elements. Counting stops above LARGEST."""
    order, at, total = ">" if data[HEADER - 2 : HEADER] == b"MI" else "<", HEADER, 0
    while at + 8 <= len(data) and total <= LARGEST:
        kind, size = struct.unpack_from(f"{order}II", data, at)
        packed = data[at + 8 : at + 8 + size] if kind == COMPRESSED else b""
        unpacker = zlib.decompressobj()
        while packed and total <= LARGEST:
            total += len(unpacker.decompress(packed, PIECE))
            packed = unpacker.unconsumed_tail
        at += 8 + size
    return total
