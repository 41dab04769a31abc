"""Read WebDataset shards, to write their images, labels and metadata into new shards."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data import tar_headers, tar_scan
from eagleray.data.columns import samples_where
from eagleray.data.index import open_index
from eagleray.data.index_faults import lines_of_passed
from eagleray.data.pixels import HEIC_EXTENSIONS, NO_HEIC, begins_like_image, image_extensions
from eagleray.data.tar_scan import LABEL, LARGEST, MEMBERS, NO_IMAGE, START, key_and_extension
from eagleray.datasets.sources.files import find_file
from eagleray.datasets.sources.item import Item, Listing, to_json
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.datasets.sources.tars import SPARSE, DamagedTar, members_and_holes
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import Span, read_span

LARGEST_TEXT = 2**24  # most bytes of a .json


def webdataset(options: PrepareOptions) -> SourceFiles:
    """Find the shards in a folder, or those that a pattern with wildcards or braces names."""
    blobs = store.list_shards(options.origin)
    if options.columns and not options.where:
        raise UserError(f"--columns {options.columns}: is for --where, which is missing")
    tables = [find_file(options.columns)] if options.columns else []

    def listing() -> Listing:
        wanted = _wanted(options) if options.where else None
        passed = {blob.url: Counter[str]() for blob in blobs}
        items = itertools.chain.from_iterable(ordered_map(lambda blob: _samples(blob, passed[blob.url]), blobs))
        marked: Iterable[Item] = items if wanted is None else (_marked(item, wanted) for item in items)
        return Listing(marked, found=lambda: lines_of_passed(passed))

    return SourceFiles([*blobs, *tables], listing)


def _wanted(options: PrepareOptions) -> dict[str, NDArray[np.int64]]:
    """Return, by URL of a shard, the ascending offsets of the images for which `--where` is true. Raises UserError when
    there are none."""
    index = open_index(options.origin, note=lambda _: None)
    of_shards = samples_where(index, options.origin, options.where, options.columns)
    wanted = {
        blob.url: np.sort(index.column(shard, ["offset"])["offset"].to_numpy()[kept])
        for shard, (blob, (kept, _)) in enumerate(zip(index.shards, of_shards, strict=True))
    }
    if not sum(map(len, wanted.values())):
        raise UserError(f"--where: {options.where}: leaves none of {len(index)} samples")
    return wanted


def _marked(item: Item, wanted: Mapping[str, NDArray[np.int64]]) -> Item:
    """Return an item; if its offset is not among its shard's `wanted` offsets, it gets a reason to be left out."""
    offsets = wanted.get(item.url, np.empty(0, np.int64))
    at = int(np.searchsorted(offsets, item.offset))
    if item.reason or (at < len(offsets) and offsets[at] == item.offset):
        return item
    return item._replace(reason="--where is not true")


def _samples(blob: Blob, passed: Counter[str]) -> list[Item]:
    """List the samples of a shard, runs of neighbouring files with the same key, and count all else in `passed`.

    In a damaged shard, the samples before the damage are listed, followed by an item with the reason."""
    name = blob.url.rpartition("/")[2]
    items: list[Item] = []
    damage: list[DamagedTar] = []
    for (_, key), parts in itertools.groupby(_parts(blob, damage, passed), key=lambda p: p[0]):
        items.append(_item(safe_key(key), [part for _, part in itertools.islice(parts, MEMBERS + 1)], passed))
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
        """The part of the extension after its last dot."""
        return self.extension.rpartition(".")[2]


def _parts(blob: Blob, damage: list[DamagedTar], passed: Counter[str]) -> Iterator[tuple[tuple[int, str], _Part]]:
    """Yield the position of every file in a shard whose name has a key and an extension, with the index of its archive
    and its key. Other members are counted in `passed`, by kind.

    A DamagedTar is put into `damage` and not raised, as the caller would lose the sample before the damage."""
    try:
        for span, sparse in members_and_holes(Span("", blob.url, 0, blob.size), passed):
            if names := key_and_extension(span.name):
                yield (passed[tar_headers.ARCHIVE], names[0]), _Part(names[1], span, sparse)
            else:
                hidden = span.name.rpartition("/")[2].startswith(".")
                passed[tar_scan.HIDDEN if hidden else tar_scan.EXTENSIONLESS] += 1
    except DamagedTar as e:
        damage.append(e)


def safe_key(key: str) -> str:
    """Return a key without the parts, such as "..", by which a file of the new shard would be unpacked elsewhere."""
    parts = key.split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) if parts[0] == "" or ".." in parts else key


def _item(key: str, parts: list[_Part], passed: Counter[str]) -> Item:
    images = [p for p in parts if p.last in image_extensions()]
    image = images[0] if images else None
    if len(images) > 1:
        image = next((p for p in images if begins_like_image(_read_start(p.span))), image)
    if image is None:
        heic = NO_HEIC if any(p.last in HEIC_EXTENSIONS for p in parts) else ""
        return Item(key, "", 0, 0, reason=heic or NO_IMAGE + ", ".join(p.extension for p in parts)[:200])
    label, meta, reason = -1, None, _fault(image, parts)
    passed[tar_scan.UNREAD] += len(images) - 1
    spans = {p.last: p.span for p in parts if p.last in ("cls", "json")} if not reason else {}
    if "cls" in spans:
        text = _read_start(spans["cls"], LABEL).strip()
        label = int(text) if re.fullmatch(rb"\d{1,18}", text) else -1
        passed[tar_scan.UNLABELLED] += label < 0
    try:
        meta = to_json(json.loads(bytes(read_span(spans["json"])))) if "json" in spans else None
    except (ValueError, RecursionError):  # broken JSON cannot be written again
        reason = "its .json cannot be read"
    span = image.span
    return Item(key, span.url, span.offset, span.size, image.last, label, meta=meta, reason=reason)


def _read_start(span: Span, size: int = START) -> bytes:
    """Return the first bytes of a member."""
    return bytes(read_span(span._replace(size=min(size, span.size)))) if span.size else b""


def _fault(image: _Part, parts: list[_Part]) -> str | None:
    """Return the reason why a sample cannot be read, or None if it can be."""
    used = [image, *(p for p in parts if p.last == "json")]
    if len(parts) > MEMBERS:
        return f"more than {MEMBERS} members"
    if len({p.extension for p in parts}) < len(parts):
        return "two members with the same extension"
    if large := next((p for p in used if p.span.size > (LARGEST if p is image else LARGEST_TEXT)), None):
        return f"its .{large.last} has {large.span.size} bytes"
    return f"{sparse.last} {SPARSE}" if (sparse := next((p for p in used if p.sparse), None)) else None
