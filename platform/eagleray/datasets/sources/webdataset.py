"""Read WebDataset shards, whose images, labels and metadata are to be written into new shards."""

import itertools
import json
from collections.abc import Iterator
from typing import NamedTuple

from eagleray.data.tar_scan import LARGEST, MEMBERS, image_extensions, key_and_extension
from eagleray.datasets.sources.item import MOST, Item, Listing, to_json
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import OWN, Source, SourceFiles
from eagleray.datasets.sources.tars import SPARSE, DamagedTar, members_and_holes
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import Span, read_span

LARGEST_TEXT = 2**24  # bytes of a .cls or .json


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
    damage: list[DamagedTar] = []
    for key, parts in itertools.groupby(_parts(blob, damage), key=lambda p: p[0]):
        items.append(_item(safe_key(key), [part for _, part in itertools.islice(parts, MEMBERS + 1)]))
    if damage:
        reason = str(damage[0]).removeprefix(f"{blob.url}: ")
        items.append(Item(name.removesuffix(".tar"), blob.url, 0, 0, reason=reason))
    return items


class _Part(NamedTuple):
    extension: str
    span: Span
    sparse: bool

    @property
    def last(self) -> str:
        """The last extension."""
        return self.extension.rpartition(".")[2]


def _parts(blob: Blob, damage: list[DamagedTar]) -> Iterator[tuple[str, _Part]]:
    """Yield the key and the position of every file in a shard whose name has a key and an extension.

    Damage is put into a list, as an error would lose the sample before it.
    """
    try:
        for span, sparse in members_and_holes(Span("", blob.url, 0, blob.size)):
            if names := key_and_extension(span.name):
                yield names[0], _Part(names[1], span, sparse)
    except DamagedTar as e:
        damage.append(e)


def safe_key(key: str) -> str:
    """Return a key that stays below the folder into which a new shard is unpacked, whatever the old shard says."""
    parts = key.split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) if parts[0] == "" or ".." in parts else key


def _item(key: str, parts: list[_Part]) -> Item:
    image = next((p for p in parts if p.last in image_extensions()), None)
    if image is None:
        return Item(key, "", 0, 0, reason="no image: only " + ", ".join(p.extension for p in parts)[:200])
    label, meta, reason = -1, None, _fault(image, parts)
    try:
        texts = {p.last: bytes(read_span(p.span)) for p in parts if p.last in ("cls", "json")} if not reason else {}
        label = max(int(texts.get("cls", b"-1")), -1)
        meta = to_json(json.loads(texts["json"])) if "json" in texts else None
    except (ValueError, RecursionError):  # the index would refuse such a label, and broken JSON is of no use
        reason = "its .cls or .json cannot be read"
    if label > MOST:
        label, reason = -1, f"its label is more than {MOST}"
    span = image.span
    return Item(key, span.url, span.offset, span.size, image.last, label, meta=meta, reason=reason)


def _fault(image: _Part, parts: list[_Part]) -> str | None:
    """Return why a sample cannot be read, or None."""
    used = [image, *(p for p in parts if p.last in ("cls", "json"))]
    if len(parts) > MEMBERS:
        return f"more than {MEMBERS} members"
    if len({p.extension for p in parts}) < len(parts):
        return "two members with the same extension"
    if large := next((p for p in used if p.span.size > (LARGEST if p is image else LARGEST_TEXT)), None):
        return f"its .{large.last} has {large.span.size} bytes"
    return f"{sparse.last} {SPARSE}" if (sparse := next((p for p in used if p.sparse), None)) else None


SOURCES = {"webdataset": Source(webdataset, licence=OWN)}
