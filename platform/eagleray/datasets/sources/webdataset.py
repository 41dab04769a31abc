"""WebDataset shards that are to become other shards: images, labels and metadata of their samples."""

import itertools
import json
import re
from collections.abc import Iterator

from eagleray.data.tar_scan import image_extensions
from eagleray.datasets.sources.item import Found, Item, Listing
from eagleray.datasets.sources.job import Job
from eagleray.datasets.sources.tars import Damaged, members
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ahead
from eagleray.storage.range_file import Span, content


def webdataset(job: Job) -> Found:
    """A folder, a glob or a brace pattern of shards."""
    blobs = store.shards(job.origin)
    return Found(blobs, lambda: Listing(itertools.chain.from_iterable(ahead(_samples, blobs))))


def _samples(blob: Blob) -> list[Item]:
    """Neighbouring members that share a key, as webdataset groups them. What is left of a damaged shard is used."""
    name = blob.url.rpartition("/")[2]
    out: list[Item] = []
    try:
        for key, parts in itertools.groupby(_parts(blob), key=lambda p: p[0]):
            out.append(_item(key, [(extension, span) for _, extension, span in parts]))
    except Damaged as e:
        out.append(Item(name.removesuffix(".tar"), blob.url, 0, 0, reason=str(e).removeprefix(f"{blob.url}: ")))
    return out


def _parts(blob: Blob) -> Iterator[tuple[str, str, Span]]:
    """Key, last extension and place of every member that has them."""
    for span in members(Span("", blob.url, 0, blob.size)):
        parts = re.fullmatch(r"((?:.*/|)[^./][^.]*)\.(?:[^/]*\.)?([^./]+)", span.name)  # a key ends at its first dot
        if parts:
            yield parts[1], parts[2].lower(), span


def _item(key: str, parts: list[tuple[str, Span]]) -> Item:
    image = next(((e, s) for e, s in parts if e in image_extensions()), None)
    if image is None:
        return Item(key, "", 0, 0, reason="no image: only " + ", ".join(e for e, _ in parts))
    said = {e: bytes(content(s)) for e, s in parts if e in ("cls", "json")}
    label, meta, reason = -1, None, None
    try:
        label = max(int(said.get("cls", b"-1")), -1)
        meta = json.dumps(json.loads(said["json"]), ensure_ascii=False) if "json" in said else None
    except ValueError:  # the index would refuse such a label, and JSON that is none helps nobody
        reason = "its .cls or .json cannot be read"
    extension, span = image
    return Item(key, span.url, span.offset, span.size, extension, label, meta=meta, reason=reason)
