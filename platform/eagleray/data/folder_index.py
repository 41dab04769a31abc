"""Opens the index of a local folder of images, in which these are one shard."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from eagleray.base.errors import UserError
from eagleray.data import image_folder, index_file
from eagleray.data.index_file import NAME, File, Spare, load_both, name
from eagleray.data.index_schema import Shard
from eagleray.data.stamps import Stamp, Verified, short
from eagleray.data.unchanged import check_images, images_tag, remember_images
from eagleray.storage.blob import Blob

Note = Callable[[str], None]
Tick = Callable[[int, int], None]  # shards or images done, and in all


def open_folder(folder: str, spare: Spare, *, note: Note, again: bool, tick: Tick | None) -> tuple[Blob, File]:
    """Return a folder of images as one shard, with the index file that has its rows.

    New images are indexed. Raises UserError when an indexed image is gone or has changed.
    """
    beside, aside = f"{folder}/{NAME}", index_file.aside(folder, spare)
    listing = image_folder.list_images(folder)
    blob, stamp = image_folder.blob_of(folder, listing), listing.stamp
    known = load_both(beside, aside, again)
    old, file = None, known.get(name(blob))
    if file and not again and not _is_known(file.entry(name(blob)), folder, stamp):
        old = file.rows(name(blob))
        if what := image_folder.difference(old, listing):
            raise UserError(f"{folder}/{what} since it was indexed; `eagleray index {folder}` accepts that")
        check_images(folder, listing, old)
        if len(old) == len(listing.sizes):
            tag = file.entry(name(blob)).tag
            Verified(folder).add([short(stamp, tag)])
            with contextlib.suppress(UserError):  # this machine remembers
                index_file.save([(replace(blob, tag=tag), old)], [u for u in (beside, aside) if u], {name(blob): stamp})
                known = load_both(beside, aside, again)
    if again or file is None or (old is not None and len(old) < len(listing.sizes)):
        others = f"; not read: {listing.unread()}" if listing.others else ""
        note(f"indexing {len(listing.sizes)} images of {folder}{others}")
        rows = image_folder.scan_folder(folder, listing, old)
        total = len(listing.sizes)
        table = index_file.table_of(row for n, row in enumerate(rows, 1) if tick is None or tick(n, total) is None)
        remember_images(folder, listing, table)
        tagged = replace(blob, tag=images_tag(table))
        index_file.save([(tagged, table)], [u for u in (beside, aside) if u], {name(blob): stamp})
        known = load_both(beside, aside, again)
    file = known[name(blob)]
    shard = file.entry(name(blob))
    if shard.size != blob.size or shard.usable + shard.bad != len(listing.sizes):
        raise file.damaged(f"{shard.usable + shard.bad} images of {shard.size} bytes")
    return replace(blob, tag=shard.tag), file


def _is_known(entry: Shard, folder: str, stamp: Stamp) -> bool:
    """Return whether all images are those of the index, by their times alone."""
    return stamp.fits(entry.stamp) or short(stamp, entry.tag) in Verified(folder)
