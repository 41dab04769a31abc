"""Reads the body of an HTTP answer straight from its socket into a buffer, under a floor on speed."""

import time
from typing import Any

from eagleray.storage.blob import new_buffer
from eagleray.storage.retry import Transient

READ_TIMEOUT = 20  # seconds without a byte after which a transfer is aborted
GRACE = 20.0  # seconds after which a transfer slower than SLOWEST is aborted
SLOWEST = 64 * 2**10  # bytes per second
PIECE = 2**20  # bytes between two checks of the speed


def read_stream(response: Any, length: int) -> memoryview:
    """Read the body of a response of urllib3, and let the next request reuse its connection.

    Raises Transient when the body is too short or the transfer too slow."""
    data, at, began = new_buffer(length), 0, time.monotonic()
    stream = response._fp  # the raw response; its wrappers would copy every byte twice
    while at < length:
        count = stream.readinto(data[at : at + PIECE])
        if not count:
            response.close()
            raise Transient(f"expected {length} bytes, got {at}")
        at += count
        seconds = time.monotonic() - began
        if seconds > GRACE and at < SLOWEST * seconds:
            response.close()
            raise Transient(f"stalled: {at} bytes in {seconds:.0f} s")
    if stream.isclosed():
        response.release_conn()
    else:  # the end of a body that is sent in chunks has not been read
        response.close()
    return data
