"""Read UCF101 as images: the middle frame of each video, split 1, as EsViT does (Li et al. 2021, appendix C.5)."""

import itertools
import tempfile
from functools import partial

from PIL import Image

from eagleray.base.errors import UserError
from eagleray.datasets.shards import encode
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Listing
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import RESEARCH, Data, Dataset, Source, SourceFiles, read_ranges
from eagleray.storage.blob import Blob

VIDEOS, LISTS, NAMES = "UCF-101", "ucfTrainTestlist", "classInd.txt"
CLASSES = 101


def ucf101(options: PrepareOptions) -> SourceFiles:
    """Find UCF-101/ with its class folders, and in ucfTrainTestlist/ the list of a split and the classes."""
    name = f"{options.split or 'train'}list01.txt"
    tables = {b.url.rpartition("/")[2]: b for b in files.list_folder(f"{options.origin}/{LISTS}/")}
    if missing := [table for table in (name, NAMES) if table not in tables]:
        raise files.missing_error(options.origin, f"{LISTS}/{missing[0]} in it")
    root = f"{options.origin}/{VIDEOS}"
    videos = [b for b in files.list_tree(root) if b.url.endswith(".avi")]
    if not videos:
        raise files.missing_error(options.origin, f"{VIDEOS}/ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi in it")
    listing = partial(_listing, tables[name], tables[NAMES], {files.relative_path(b, root): b for b in videos})
    return SourceFiles([tables[name], tables[NAMES], *videos], listing, partial(read_ranges, encode=middle_frame))


def _listing(table: Blob, names: Blob, videos: dict[str, Blob]) -> Listing:
    line, expected, numbers = r"(?P<label>\d+) (?P<name>\w+)", f"a number of 1 to {CLASSES} and a class", range(1, 102)
    labels = {name: label - 1 for name, label in lists.read_labels(names.url, line, expected, numbers)}
    rows = []
    for number, text in enumerate(files.read_text(table.url).splitlines(), 1):
        if not text.strip():
            continue
        path = text.split()[0]  # that of a training video is followed by its label
        if path.partition("/")[0] not in labels:
            where = f"{table.url}: line {number}: expected a video in the folder of a class"
            raise UserError(f"{where} of {NAMES}, found {text.strip()[:80]!r}")
        rows.append((path, labels[path.partition("/")[0]]))
    classes = {label: name for name, label in labels.items()}
    return Listing(lists.match_items(rows, videos), [classes.get(i, "") for i in range(max(classes, default=-1) + 1)])


def middle_frame(video: Data) -> bytes:
    """Return frame n // 2 of a video of n frames as a PNG; nothing for a video without frames that can be decoded.

    Frames are counted by decoding, because headers state wrong numbers and seeking is not exact.
    """
    import cv2  # takes a while, and listing data sets imports this file

    with tempfile.NamedTemporaryFile(suffix=".avi") as file:
        file.write(video)
        file.flush()
        frames = sum(1 for _ in iter(cv2.VideoCapture(file.name, cv2.CAP_FFMPEG).grab, False))
        reader = cv2.VideoCapture(file.name, cv2.CAP_FFMPEG)
        for _ in itertools.repeat(None, frames // 2):
            reader.grab()
        found, frame = reader.read()
    return encode(Image.fromarray(frame[..., ::-1])) if found else b""


SOURCES = {
    "ucf101": Source(
        ucf101,
        licence=RESEARCH,
        dataset=Dataset(
            "UCF101 (middle frames, split 1)",
            short="ucf101",
            classes=CLASSES,
            splits={"train": 9_537, "test": 3_783},
            obtain="Download UCF101.rar and UCF101TrainTestSplits-RecognitionTask.zip from "
            "crcv.ucf.edu/data/UCF101.php",
            contents="`UCF-101/`, `ucfTrainTestlist/`",
        ),
    )
}
