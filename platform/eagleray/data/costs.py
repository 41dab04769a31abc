"""Predicts from an image's header the memory and time to decode it, and refuses images that take too much for the size
of their files.

With a limit of pixels alone, a WebP of 34 bytes could take 2.7 GiB. So the limit is FREE bytes of memory, which every
machine has, and PER_BYTE more for each byte of the file: photographs have at least one byte per fifty pixels."""

import re
from collections.abc import Iterator
from itertools import islice

from PIL import Image

MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
FREE, PER_BYTE = 2**28, 2**10  # bytes of memory that any image may take; more for each byte of its file
# Bytes of memory per pixel for the copies of an image that the decoder, Pillow and eagleray make, measured with images
# of one colour. USUAL is for other formats, OF_JPEG for JPEG.
MEMORY = {"WEBP": 17, "AVIF": 14, "HEIF": 14, "JPEG2000": 20, "TIFF": 14}
# COEFFICIENT is for each coefficient of a JPEG of several scans: libjpeg keeps all of them until the last scan.
USUAL, OF_JPEG, COEFFICIENT = 8, 3, 2
# Encoders write about ten scans. A scan may have only 31 bytes, and take as long to decode as the whole image.
MAX_SCANS = 100
FREE_WORK = 2**29  # values that all scans of a JPEG may have, about two seconds; PER_BYTE more per byte of the file
MAX_WORK = 24 * MAX_PIXELS  # most values in a JPEG's scans: as many as 18 progressive scans of four colours have
SLOW = {"ppm", "ppm_plain", "bmp_rle"}  # Pillow's decoders in Python, at half a microsecond per value
MAX_SLOW = 2**25  # most values that these decoders may have to decode
MAX_SEGMENTS = 2**14  # most segments in a JPEG's header

JPEG = b"\xff\xd8"  # first bytes of a JPEG
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # 255 before 0 or a restart marker is part of compressed data
FRAME, END, SCAN = 0xC0, 0xD9, 0xDA  # second bytes of markers: the lowest of a frame header, the end and a scan
PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
SCANS = re.compile(rb"\xff\xda")  # marker of a scan; a regular expression takes 0.4 of the time of bytes.count
Data = bytes | memoryview


class BadImage(ValueError):
    """The reason why an image cannot be used."""


def check_pixels(width: int, height: int) -> None:
    """Raise BadImage for more than MAX_PIXELS pixels."""
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels, more than {MAX_PIXELS}")


def check_memory(what: str, need: int, size: int) -> None:
    """Raise BadImage if decoding an image takes `need` bytes of memory, too many for a file of `size` bytes."""
    if need > (most := FREE + PER_BYTE * size):
        raise BadImage(f"{what} in {size} bytes would take {need >> 20} MiB to decode, more than {most >> 20} MiB")


def check_webp(data: Data) -> None:
    """Raise BadImage for a WebP that is too large: libwebp allocates its pixels already when the file is opened."""
    if bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WEBP" and len(data) >= 30:
        kind, bits = bytes(data[12:16]), int.from_bytes(data[21:25], "little")
        if kind == b"VP8X":
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        elif kind == b"VP8L":
            width, height = ((bits >> shift & 0x3FFF) + 1 for shift in (0, 14))
        else:
            width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        _check(width, height, MEMORY["WEBP"], len(data))


def check_image(image: Image.Image, size: int) -> None:
    """Raise BadImage for an opened, undecoded image that takes too much memory or time for its `size` in bytes."""
    _check(*image.size, MEMORY.get(image.format or "", USUAL), size)
    if any(part[0] in SLOW for part in getattr(image, "tile", ())):
        values = min(image.width * image.height * len(image.getbands()), size)
        if values > MAX_SLOW:
            raise BadImage(f"{values} values that Pillow decodes one after the other, more than {MAX_SLOW}")


def _check(width: int, height: int, memory: int, size: int) -> None:
    check_pixels(width, height)
    check_memory(f"{width} x {height} pixels", width * height * memory, size)


def check_jpeg(data: Data) -> tuple[int, int, int]:
    """Return height, width and channels of a JPEG. Raises BadImage for one that would take too much memory or time."""
    height, width, channels = jpeg_size(data)
    check_pixels(width, height)
    pixels, seeming = height * width, sum(1 for _ in islice(SCANS.finditer(data), MAX_SCANS + 1))
    most = pixels * channels  # upper bound of a scan's values, by which nearly all images pass with no scan parsed
    if seeming > MAX_SCANS or seeming * most > FREE_WORK or OF_JPEG * pixels + COEFFICIENT * most > FREE:
        _check_scans(data, f"{width} x {height} pixels", pixels)
    return height, width, channels


def _check_scans(data: Data, what: str, pixels: int) -> None:
    kind, parts = _frame(data)
    scans, values = count_scans(bytes(data), dict(parts))
    if scans > MAX_SCANS:
        raise BadImage(f"{scans} scans, more than {MAX_SCANS}")
    if values * pixels > min(FREE_WORK + PER_BYTE * len(data), MAX_WORK):
        raise BadImage(f"{scans} scans of {what} in {len(data)} bytes would take too long to decode")
    kept = COEFFICIENT * sum(part for _, part in parts) if kind in PROGRESSIVE or scans > 1 else 0
    check_memory(what, int(pixels * (OF_JPEG + kept)), len(data))


def count_scans(data: bytes, parts: dict[int, float]) -> tuple[int, float]:
    """Return the number of a JPEG's scans, and the sum of their values per pixel. `parts` has the values per pixel of a
    component by its id. Scans of thumbnails, and bytes in videos that phones append to an image, are skipped."""
    scans, values, found = 0, 0.0, MARKER.search(data, 2)
    while found and (kind := data[found.end() - 1]) != END:
        at = found.end()
        if kind == SCAN:
            scans += 1
            values += sum(parts.get(component, 1) for component in data[at + 3 : at + 3 + 2 * min(data[at + 2], 4) : 2])
        length = int.from_bytes(data[at : at + 2])
        # After a marker below FRAME, libjpeg looks for the next restart marker and reads no length.
        found = MARKER.search(data, at + (length if kind >= FRAME else 0))
    return scans, values


def jpeg_size(data: Data) -> tuple[int, int, int]:
    """Read height, width and channels from a JPEG's frame header. Raises BadImage when there is none."""
    at = _frame_at(data)
    return int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 7 : at + 9]), data[at + 9]


def _frame(data: Data) -> tuple[int, list[tuple[int, float]]]:
    """Return the marker of a JPEG's frame header and, for each channel, its id and its values per pixel, fewer than one
    if colour is subsampled. In damaged files, two channels may have one id. Raises BadImage."""
    at = _frame_at(data)
    fields = bytes(data[at + 10 : at + 10 + 3 * data[at + 9]])
    factors = [(both >> 4) * (both & 15) for both in fields[1::3]]
    return data[at + 1], [(number, f / max(1, *factors)) for number, f in zip(fields[::3], factors, strict=False)]


def _frame_at(data: Data) -> int:
    """Return the offset of a JPEG's frame header. Raises BadImage when there is none."""
    for kind, at in jpeg_segments(data):
        if is_frame(kind):
            return at
    raise BadImage("the JPEG ends inside its header")


def is_frame(kind: int) -> bool:
    """Return whether a segment of this kind is a JPEG's frame header."""
    return 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC)


def jpeg_segments(data: Data) -> Iterator[tuple[int, int]]:
    """Yield the kind and the offset of each segment of a JPEG's header. Raises BadImage where the header is damaged."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        if at + 9 >= len(data):
            return
        if data[at] != 0xFF:
            raise BadImage("damaged JPEG header")
        kind = data[at + 1]
        if kind == 0xFF:  # fill byte
            at += 1
            continue
        if kind == 0x01 or 0xD0 <= kind <= 0xD7:  # markers without a length, which libjpeg skips
            at += 2
            continue
        yield kind, at
        length = int.from_bytes(data[at + 2 : at + 4])
        if kind in (0x00, 0xD8, 0xD9, 0xDA) or length < 2:  # libjpeg reads no length after the marker 0, either
            raise BadImage("damaged JPEG header")
        at += 2 + length
    raise BadImage(f"a JPEG with more than {MAX_SEGMENTS} segments in its header")
