"""Opens the index of a folder of images, local or in a store. The shards in this index are parts of the folder."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from eagleray.base.errors import UserError
from eagleray.data import image_folder, index_file
from eagleray.data.file_names import from_text, readable, to_text
from eagleray.data.image_folder import Images
from eagleray.data.image_list import ImageList, Read, image_list
from eagleray.data.index_file import NAME, File, Note, ShardFiles, Spare, Tick
from eagleray.data.index_schema import SCHEMA, VERSION
from eagleray.data.pixels import HEIC_EXTENSIONS, NO_HEIC, image_extensions
from eagleray.data.stamps import Verified, short
from eagleray.data.unchanged import images_tag
from eagleray.storage import store
from eagleray.storage.blob import Blob

Scan = Callable[[Iterable[Images]], Iterable[tuple[Images, list[Read]]]]
MUCH = 2**30  # bytes of images, above which reading them again is announced


def open_folder(folder: str, spare: Spare, *, note: Note, again: bool, tick: Tick | None, scan_all: Scan) -> ShardFiles:
    """Return the parts of a folder of images as shards, each with the index file that has its rows.

    New images are indexed. Raises UserError when an indexed image is gone or has changed."""
    places = [place for place in (f"{folder}/{NAME}", index_file.aside(folder, spare)) if place]
    with image_list(folder, note) as images:
        image_folder.list_images(folder, images, note)
        both = [_parts(folder, index_file.load(place, again)) for place in places]  # not mixed: parts have equal names
        known = next((k for k in both if k and _is_known(folder, images, k)), next(filter(None, both), []))
        if not again and known and not _is_known(folder, images, known):
            for blob, file in known:
                images.know(_rows(file, index_file.name(blob)))
            if found := images.difference():
                raise _changed(folder, found[0], "is gone" if found[1] else "has changed")
            _check_doubtful(folder, images, scan_all, note)
            # Unless images are new, the index need not be writable: this machine remembers that they are unchanged.
            with contextlib.nullcontext() if images.has_new else contextlib.suppress(UserError):
                known = _index(folder, images, places, scan_all, note, tick, again)
        elif again or not known:
            known = _index(folder, images, places, scan_all, note, tick, again)
        sizes = sum(blob.size for blob, _ in known)
        count = sum(entry.usable + entry.bad for entry in _entries(known))
        if (count, sizes) != (images.count, images.bytes):
            raise known[0][1].damaged(f"{count} images of {sizes} bytes")
        return known


def _parts(folder: str, known: Mapping[str, File]) -> ShardFiles:
    """Return the parts of a folder as its index describes them."""
    names = sorted(filter(image_folder.is_part, known))
    entries = [known[name].entry(name) for name in names]
    return [(Blob(f"{folder}/{entry.name}", entry.size, entry.tag), known[entry.name]) for entry in entries]


def _entries(known: ShardFiles) -> Iterator[Any]:
    return (file.entry(index_file.name(blob)) for blob, file in known)


def _is_known(folder: str, images: ImageList, known: ShardFiles) -> bool:
    """Return whether stamps alone show that the folder has exactly the indexed images."""
    return images.stamp.fits(next(_entries(known)).stamp) or (
        store.folder_of(folder) is not None
        and short(images.stamp, *(blob.tag for blob, _ in known)) in Verified(folder)
    )


def _rows(file: File, name: str) -> Iterator[Read]:
    table = file.rows(name)
    versions = table[VERSION.name].to_pylist() if VERSION.name in table.column_names else itertools.repeat(None)
    columns = [table[column].to_pylist() for column in ("key", "size", "crc", "reason")]
    for key, size, crc, reason, version in zip(*columns, versions, strict=False):
        yield Read(from_text(key), size, version, crc, reason)


def _changed(folder: str, path: str, how: str) -> UserError:
    if image_folder.extension(path)[1:] in HEIC_EXTENSIONS - image_extensions():
        return UserError(f"{folder}/{readable(path)}: is indexed, but this machine does not read {NO_HEIC}")
    return UserError(f"{folder}/{readable(path)}: {how} since it was indexed; `eagleray index {folder}` accepts that")


def _check_doubtful(folder: str, images: ImageList, scan_all: Scan, note: Note) -> None:
    """Read those images again whose times or versions differ from those at which they were last found unchanged. Raises
    UserError that names the first image that has changed."""
    here = store.folder_of(folder) is not None
    verified = Verified(folder if here else None)

    def units() -> Iterator[Images]:
        for some in images.doubtful():
            if mine := tuple(image for image in some if not (here and _mark_of(image) in verified)):
                yield Images(folder, mine)

    total = sum(image.size for unit in units() for image in unit.images) if not here else 0
    if total > MUCH:
        note(f"reading {total >> 20:,} MiB of {folder} again: these images have other versions than those indexed")
    for unit, read in scan_all(units()):
        for before, now in zip(unit.images, read, strict=True):
            if now.crc != before.crc:
                raise _changed(folder, before.path, "has changed")


def _mark_of(image: Read) -> int:
    return short(image.path, image.size, image.crc, image.version)


def _index(
    folder: str, images: ImageList, places: list[str], scan_all: Scan, note: Note, tick: Tick | None, again: bool
) -> ShardFiles:
    """Read the images without a known checksum, and write the whole index."""
    if images.has_new:
        others = f"; not read: {image_folder.said(images.others)}" if images.others else ""
        note(f"indexing {images.count} images of {folder}{others}")
    done = images.count - images.left
    for _, read in scan_all(Images(folder, tuple(some)) for some in images.unread()):
        images.keep(read)
        done += len(read)
        if tick:
            tick(done, images.count)
    labels, here = image_folder.class_labels(images.top_folders()), store.folder_of(folder) is not None
    names, tags, marks = image_folder.part_names(images.part_count), list[str](), set[int]()

    def tables() -> Iterator[tuple[Blob, pa.Table]]:
        for name, rows in zip(names, images.parts(), strict=True):
            table = _table(rows, labels, here)
            tags.append(images_tag(table))
            marks.update(_mark_of(row) for row in rows if here and row.crc is not None)
            yield Blob(f"{folder}/{name}", sum(row.size for row in rows), tags[-1]), table

    try:
        place = index_file.save(tables(), places, {names[0]: images.stamp})
    finally:  # this machine remembers the images even if no index can be written
        if here:
            Verified(folder).add(marks | {short(images.stamp, *tags)})
    return _parts(folder, index_file.load(place, again))


def _table(rows: list[Read], labels: Mapping[str, int], here: bool) -> pa.Table:
    """Return the rows of a part. The offsets of its usable images follow each other without gaps."""
    usable = np.array([row.reason is None for row in rows], dtype=bool)
    sizes = np.array([row.size for row in rows], dtype=np.int64)
    columns: dict[str, Any] = {
        "key": [to_text(row.path) for row in rows],
        "offset": np.where(usable, np.cumsum(sizes * usable) - sizes, -1),
        "size": sizes,
        "label": [labels.get(row.path.partition("/")[0], -1) for row in rows],
        "crc": [row.crc for row in rows],
        "reason": [row.reason and readable(row.reason) for row in rows],
    }
    arrays = {name: pa.array(column, SCHEMA.field(name).type) for name, column in columns.items()}
    arrays |= {"extension": pa.nulls(len(rows), pa.string())}
    return pa.table(arrays | ({} if here else {VERSION.name: pa.array([row.version for row in rows], VERSION.type)}))
