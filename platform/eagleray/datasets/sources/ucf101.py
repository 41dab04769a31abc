"""Read UCF101 as images: the middle frame of each video, split 1, as EsViT does (Li et al. 2021, appendix C.5)."""

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources.lists import Rows, find_listed, lines, names_of, read_labels
from eagleray.datasets.sources.source import Data, PrepareOptions, SourceFiles, read_ranges
from eagleray.storage.blob import Blob

VIDEOS, LISTS, NAMES = "UCF-101", "ucfTrainTestlist", "classInd.txt"


def ucf101(options: PrepareOptions) -> SourceFiles:
    """Find UCF-101/ with its class folders, and the lists of a split and of the classes in ucfTrainTestlist/."""
    found = find_listed(
        options.origin,
        [f"{LISTS}/{options.split}list01.txt", f"{LISTS}/{NAMES}"],
        VIDEOS,
        _read,
        expected=f"{VIDEOS}/ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi in it",
        wanted=lambda url: url.endswith(".avi"),
    )
    return replace(found, read=partial(read_ranges, encode=middle_frame))


def _read(tables: Sequence[Blob]) -> tuple[Rows, Sequence[str]]:
    table, names = tables
    line, expected = r"(?P<label>\d+) (?P<name>\w+)", "a number of 1 to 101 and a class"
    labels = {name: label - 1 for name, label in read_labels(names.url, line, expected, range(1, 102))}
    rows = []
    for number, text in lines(table.url):
        path = text.split()[0]  # the label follows the path in lists of training videos
        if path.partition("/")[0] not in labels:
            where = f"{table.url}: line {number}: expected a video in the folder of a class"
            raise UserError(f"{where} of {NAMES}, found {text[:80]!r}")
        rows.append((path, labels[path.partition("/")[0]]))
    return rows, names_of({label: name for name, label in labels.items()})


def middle_frame(video: Data) -> bytes:
    """Return frame n // 2 of a video of n frames as a PNG, or no bytes if no frame can be decoded.

    Frames are counted by decoding, because headers state wrong numbers and seeking is not exact."""
    import cv2  # imported late, as it is slow to import, and commands that only list data sets import this file

    with tempfile.NamedTemporaryFile(suffix=".avi") as file:
        file.write(video)
        file.flush()
        frames = sum(1 for _ in iter(cv2.VideoCapture(file.name, cv2.CAP_FFMPEG).grab, False))
        reader = cv2.VideoCapture(file.name, cv2.CAP_FFMPEG)
        for _ in itertools.repeat(None, frames // 2):
            reader.grab()
        found, frame = reader.read()
    return encode(Image.fromarray(frame[..., ::-1])) if found else b""
