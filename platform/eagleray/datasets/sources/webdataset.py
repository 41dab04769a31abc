"""Read WebDataset shards, whose images, labels and metadata are to be written into new shards."""

import itertools
import json
import re
from collections.abc import Iterator

from eagleray.data.tar_scan import image_extensions
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import OWN, Source, SourceFiles
from eagleray.datasets.sources.tars import DamagedTar, members
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import Span, read_span


def webdataset(options: PrepareOptions) -> SourceFiles:
    """Find the shards in a folder, or those that a pattern with wildcards or braces names."""
    blobs = store.list_shards(options.origin)
    return SourceFiles(blobs, lambda: Listing(itertools.chain.from_iterable(ordered_map(_samples, blobs))))


def _samples(blob: Blob) -> list[Item]:
    """List the samples of a shard, each of which is a run of neighbouring files with the same key.

    In a damaged shard, the samples before the damage are listed, followed by an item with the reason.
    """
    name = blob.url.rpartition("/")[2]
    items: list[Item] = []
    try:
        for key, parts in itertools.groupby(_parts(blob), key=lambda p: p[0]):
            items.append(_item(key, [(extension, span) for _, extension, span in parts]))
    except DamagedTar as e:
        items.append(Item(name.removesuffix(".tar"), blob.url, 0, 0, reason=str(e).removeprefix(f"{blob.url}: ")))
    return items


def _parts(blob: Blob) -> Iterator[tuple[str, str, Span]]:
    """Yield the key, the last extension and the position of every file in a shard whose name has a key and an
    extension.
    """
    for span in members(Span("", blob.url, 0, blob.size)):
        match = re.fullmatch(r"((?:.*/|)[^./][^.]*)\.(?:[^/]*\.)?([^./]+)", span.name)  # a key ends at its first dot
        if match:
            yield match[1], match[2].lower(), span


def _item(key: str, parts: list[tuple[str, Span]]) -> Item:
    image = next(((e, s) for e, s in parts if e in image_extensions()), None)
    if image is None:
        return Item(key, "", 0, 0, reason="no image: only " + ", ".join(e for e, _ in parts))
    texts = {e: bytes(read_span(s)) for e, s in parts if e in ("cls", "json")}
    label, meta, reason = -1, None, None
    try:
        label = max(int(texts.get("cls", b"-1")), -1)
        meta = json.dumps(json.loads(texts["json"]), ensure_ascii=False) if "json" in texts else None
    except ValueError:  # the index would refuse such a label, and broken JSON is of no use
        reason = "its .cls or .json cannot be read"
    extension, span = image
    return Item(key, span.url, span.offset, span.size, extension, label, meta=meta, reason=reason)


SOURCES = {"webdataset": Source(webdataset, licence=OWN)}
