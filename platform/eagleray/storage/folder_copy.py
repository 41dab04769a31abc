"""Copies a folder of a store to this machine's cache, for code that needs local files, such as images with masks."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.base.files import append_lines, cache_folder, durable_path, file_lock, read_lines, write_atomic, writing
from eagleray.base.progress import PhaseProgress
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.store import absolute, is_remote, store

PIECE = 8 * 2**20  # bytes read at a time
TAGS = "tags.jsonl"  # file beside the copied folder, with the tag of each file in it
DATES = 2**30  # upper bound of the modification times of copies, seconds since 1970


def local_folder(url: str, note: Callable[[str], None] = lambda _: None) -> Path:
    """Return a local folder with the files of the folder at `url`: a copy or, if `url` is local, the folder itself.

    A file is copied to the cache unless its copy has the store's size and tag. Copies of files that the store no longer
    has are deleted. Other processes of this machine wait meanwhile. The modification time of a copy is computed from
    its tag, so that it is the same on every machine, and changes with the file. Raises UserError when the folder is
    empty, a name is not a path inside it, or the disk has no room, and Outage when the store does not answer."""
    if not is_remote(url):
        return Path(absolute(url))
    url = url.rstrip("/")
    root = cache_folder("folders") / f"{url.rpartition('/')[2]}-{zlib.crc32(url.encode()):08x}"
    with writing(f"{url}: its copy in {root}"):
        (root / "files").mkdir(parents=True, exist_ok=True)
        with file_lock(root / "lock"):
            _copy(url, root, note)
    return root / "files"


def _copy(url: str, root: Path, note: Callable[[str], None]) -> None:
    """Bring the copy of a folder up to date."""
    blobs = dict(_names(url))
    folder, known = root / "files", {r["name"]: r["tag"] for r in read_lines(root / TAGS)}
    missing = {name: b for name, b in blobs.items() if known.get(name) != b.tag or _size(folder / name) != b.size}
    for path in [p for p in folder.rglob("*") if not p.is_dir()]:
        if str(path.relative_to(folder)) not in blobs:
            path.unlink()  # a file that the store no longer has, or an incomplete copy
    if not missing:
        return
    kept = [{"name": n, "tag": b.tag} for n, b in blobs.items() if n not in missing]
    write_atomic(root / TAGS, "".join(json.dumps(r) + "\n" for r in kept))
    size, free = sum(b.size for b in missing.values()), shutil.disk_usage(root).free
    if size > free:
        raise UserError(
            f"{url}: {size / 2**20:,.0f} MiB to copy to {root}, which has {free / 2**20:,.0f} MiB free; "
            "XDG_CACHE_HOME names another folder for the cache"
        )
    note(f"{url}: copies {len(missing)} of {len(blobs)} files, {size / 2**20:,.1f} MiB, to {root}")
    done = 0
    with PhaseProgress("kiB") as progress:
        total = max(size >> 10, 1)
        progress("copy", 0, total)
        for name, blob in ordered_map(lambda item: _fetch(*item, folder), missing.items()):
            append_lines(root / TAGS, [{"name": name, "tag": blob.tag}])
            done += blob.size
            progress("copy", done >> 10, total)


def _names(url: str) -> Iterator[tuple[str, Blob]]:
    """Yield the path of each file in a folder, relative to the folder, with the file.

    Raises UserError when there are none, or a name is not a path inside the folder."""
    empty = True
    for blob in store(url).walk(url):
        name = blob.url.removeprefix(url + "/")
        if name.endswith("/") and not blob.size:  # an object that stands for a folder
            continue
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise UserError(f"{blob.url}: its name is no path inside the folder {url}")
        empty = False
        yield name, blob
    if empty:
        raise UserError(f"{url}: no files in this folder")


def _fetch(name: str, blob: Blob, folder: Path) -> tuple[str, Blob]:
    """Copy one file into `folder`. Return `name` and `blob`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_path(path) as part:
        with part.open("wb") as file:
            for start in range(0, blob.size, PIECE):
                file.write(store(blob.url).read(blob.url, start, min(PIECE, blob.size - start), tag=blob.tag))
        date = zlib.crc32(blob.tag.encode()) % DATES
        os.utime(part, (date, date))
    return name, blob


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
