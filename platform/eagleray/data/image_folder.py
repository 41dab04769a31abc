"""Lists and reads a folder of images, local or in a store, as if it were one shard with its files one after the other.

The files are ordered by a hash of their paths, as neighbours are read together and would mostly be of one class if they
were ordered by name. Large folders are divided into parts of this order, so that no process has all rows in memory."""

import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagleray.base.errors import UserError, explained
from eagleray.data.checksum import crc32
from eagleray.data.file_names import from_text, readable
from eagleray.data.image_list import Found, ImageList, Read
from eagleray.data.pixels import HEIC_EXTENSIONS, NO_HEIC, image_extensions
from eagleray.data.stamps import Stamp, settle, short
from eagleray.data.tar_scan import LARGEST, READ
from eagleray.storage import store
from eagleray.storage.blob import Blob, new_buffer
from eagleray.storage.local_files import files_below
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import PATIENCE as LONG
from eagleray.storage.retry import PATIENCE
from eagleray.storage.shard_names import is_shard
from eagleray.storage.wide_walk import WHOLE, Disordered, Names, wide_walk

NAME = "."  # name of a whole folder as a shard, and first character of the names of its parts
PARTS = re.compile(r"\.[0-9]*")
INDEX = "index.parquet"
SHARD = ".tar shards"  # the kind under which .tar shards beside images are counted
SURROGATE = re.compile("[\ud800-\udfff]")  # lone surrogates: a name with one cannot be written as UTF-8
KINDS = 5  # most extensions of unread files that a message names
PAGE = 1000  # files handled together, as many as S3 returns per listing request
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def said(others: Counter[str]) -> str:
    """Return text with the number of files of each extension, the most frequent first; empty if there are none."""
    kinds = sorted(others.items(), key=lambda item: (-item[1], item[0]))
    more = sum(n for _, n in kinds[KINDS:])
    return ", ".join([f"{n} {_named(kind)}" for kind, n in kinds[:KINDS]] + [f"{more} more"] * bool(more))


def extension(path: str) -> str:
    """Return the extension of an unread file as messages name it."""
    return readable(os.path.splitext(path)[1].lower()[:20]) or "without extension"


def _named(kind: str) -> str:
    return f"{kind} ({NO_HEIC})" if kind[1:] in HEIC_EXTENSIONS else kind


def is_part(name: str) -> bool:
    """Return whether a shard of this name is a folder of images, or a part of one."""
    return PARTS.fullmatch(name) is not None


def part_names(count: int) -> list[str]:
    """Return the names of the `count` parts of a folder, in their order."""
    return [NAME] if count == 1 else [f"{NAME}{number:06d}" for number in range(count)]


def is_folder_blob(blob: Blob) -> bool:
    """Return whether a shard is a folder of images, or a part of one."""
    return is_part(blob.url.rpartition("/")[2])


def address(blob: Blob) -> str:
    """Return the address that messages show for a shard: its URL or, for a folder of images, that of the folder."""
    return store.parent(blob.url) if is_folder_blob(blob) else blob.url


def whole(blob: Blob) -> Blob:
    """For a folder of images or a part of one, return the shard that stands for the whole folder; otherwise, `blob`."""
    return Blob(f"{address(blob)}/{NAME}", 0) if is_folder_blob(blob) else blob


def holds_images(folder: str) -> bool:
    """Return whether a folder has images in it or below it, and no tars directly in it. In a store, only the first PAGE
    files are listed, and more until an image is found."""
    root = store.folder_of(folder)
    if root is None:
        return store.store(folder).lists and _holds_images_there(folder)
    if not root.is_dir():
        return False
    if any(is_shard(entry.name) and not entry.is_dir() for entry in os.scandir(root)):
        return False
    return any(images_below(root))


def check_outside(out: str, urls: Iterable[str], option: str) -> None:
    """Raise UserError if `out`, a folder or URL, lies in a folder of images, whose images its pictures would join."""
    for url in (url.rstrip("/") for url in urls):
        if f"{out}/".startswith(f"{url}/") and holds_images(url):
            raise UserError(f"{option}{out}: lies in {url}, whose images its pictures would join; give another folder")


def images_below(root: Path) -> Iterator[str]:
    """Yield the paths of the images in a local folder and below it, relative to the folder and in no order."""
    return filter(_is_image, files_below(root, hidden=False))


def _holds_images_there(folder: str) -> bool:
    storage, root, found = store.store(folder), f"{folder}/", False
    for number, blob in enumerate(storage.each(root)):
        if found and number >= PAGE:
            break
        if is_shard(blob.url):
            return False
        found = found or _is_ours(blob.url.removeprefix(root))
    return found or any(_is_ours(blob.url.removeprefix(root)) for blob in storage.walk(root))


def list_images(folder: str, images: ImageList, note: Callable[[str], None] = lambda _: None) -> None:
    """List the images in a folder and in all folders below it. In a store, a listing that was killed is continued, and
    `note` is called with the progress of a long one.

    Raises UserError when a folder cannot be listed, and when shards lie directly in a store's folder beside images."""
    if store.folder_of(folder):
        _list_here(folder, images)
    else:
        _list_there(folder, images, note)
    images.end()


def _list_here(folder: str, images: ImageList) -> None:
    root, newest = store.local_path(folder), Stamp(0, 0, 0)
    images.begin(resume=False)
    paths = files_below(root, hidden=False)
    while some := list(itertools.islice(paths, PAGE)):
        found, others = list[Found](), list[str]()
        for path in some:
            if not _is_image(path):
                others += [extension(path)] * (path != INDEX)
                continue
            try:
                status = os.stat(root / path)
                found.append(Found(path, status.st_size, Stamp.of(status)))
                newest = max(newest, found[-1].stamp, key=lambda stamp: stamp.changed)
            except OSError:  # a broken link, or a file that has vanished meanwhile
                others.append("gone or a broken link")
        images.add(found, others, [WHOLE])
    images.add((), (), ())
    settle([newest])


def _list_there(folder: str, images: ImageList, note: Callable[[str], None]) -> None:
    root = f"{folder}/"
    other = "this store does not list files in the order of their names, which images need; shards do not"
    with explained(f"{folder}: {other}: `eagleray shard {folder} DST`", Disordered, why=False):
        _list_spans(root, images, images.begin(resume=store.store(folder).seeks), note)
    if shards := images.others[SHARD]:
        raise UserError(f"{folder}: there are images and {shards} .tar shards; {folder}/*.tar names the shards")


def _list_spans(root: str, images: ImageList, left: Sequence[Names], note: Callable[[str], None]) -> None:
    count, began, wait = 0, time.monotonic(), 2.0  # seconds after which the next line is printed
    for blobs, rest in wide_walk(root, left):
        count, seconds = count + len(blobs), time.monotonic() - began
        if seconds > wait:
            note(f"listing {root}: {count:,} files so far, {count / seconds:,.0f} files/s")
            wait = 1.5 * seconds
        found, others = list[Found](), list[str]()
        for blob in blobs:
            path = blob.url.removeprefix(root)
            if _is_ours(path):
                found.append(Found(path, blob.size, Stamp(*[short(blob.tag)] * 3)))
            elif is_shard(path) and "/" not in path:
                others.append(SHARD)
            elif not is_hidden(path) and path != INDEX:
                others.append(extension(path))
        images.add(found, others, rest)


class Images(NamedTuple):
    """Some of a folder's images, read together to index them or to see whether they have changed."""

    url: str  # URL of the folder
    images: tuple[Read, ...]

    def read(self) -> list[Read]:
        """Return the images with their checksums, or with the reasons why they cannot be used. Only a part of a file is
        in memory at a time. Raises UserError and Outage for failures of the store."""
        return list(ordered_map(self._read, self.images))

    def _read(self, image: Read) -> Read:
        crc, reason = _checksum(self.url, image.path, image.size)
        return image._replace(crc=crc, reason=reason)


def class_labels(tops: Iterable[str]) -> dict[str, int]:
    """Return the class of each name in `tops`, the folders directly below the listed one that hold images. An empty
    name stands for the listed folder itself.

    No classes are returned if there is only one such folder, or if an image lies in none of them."""
    names = sorted(tops)
    return {top: number for number, top in enumerate(names)} if "" not in names and len(names) > 1 else {}


def read_files(folder: str, paths: Sequence[str], sizes: Sequence[int], patience: float, each: Each) -> memoryview:
    """Return the bytes of some files, joined. `paths` are names as an index stores them. `each` maps a function over
    several files, concurrently.

    A file that is gone or has become too short is filled with zeros. Its checksum is wrong then, so it counts as a
    broken sample and does not stop the run."""
    data = new_buffer(sum(sizes))
    places = zip(map(from_text, paths), itertools.accumulate(sizes, initial=0), sizes, strict=False)

    def read(place: tuple[str, int, int]) -> None:
        path, at, size = place
        if ".." in path.split("/") or "\0" in path:  # a stranger's index could have such a path
            raise UserError(f"{folder}: its index has an image outside of the folder: {readable(path)}")
        try:
            data[at : at + size] = _bytes(f"{folder}/{path}", 0, size, size, patience)
        except Unusable:
            data[at : at + size] = bytes(size)

    for _ in each(read, places) if len(paths) > 1 else map(read, places):
        pass
    return data


class Unusable(Exception):
    """The reason why a file cannot be read. It is not a failure of the store."""


def _bytes(url: str, at: int, length: int, size: int, patience: float) -> memoryview:
    """Read a part of a file of `size` bytes. Raises Unusable, or UserError and Outage for failures of the store."""
    try:
        return store.store(url).read(url, at, length, patience=patience)
    except UserError as e:
        if not store.is_remote(url):
            raise Unusable(str(e).removeprefix(f"{url}: ")) from None
        there = [blob for blob in store.store(url).list(url, patience=patience) if blob.url == url]
        if there and there[0].size == size:
            raise
        raise Unusable("is gone" if not there else f"has changed: {there[0].size} bytes, not {size}") from None


def _is_image(path: str) -> bool:
    return path.rpartition("/")[2].rpartition(".")[2].lower() in image_extensions()


def is_hidden(path: str) -> bool:
    """Return whether a file is left out silently: a hidden file, a file below a hidden folder, or the object with which
    a store marks a folder."""
    return path.startswith(".") or "/." in path or path.endswith("/")


def _is_ours(path: str) -> bool:
    """Return whether a path is that of an image that is not hidden, without NUL or surrogates in its name."""
    return not is_hidden(path) and _is_image(path) and "\0" not in path and not SURROGATE.search(path)


def _checksum(folder: str, path: str, size: int) -> tuple[int | None, str | None]:
    """Return the checksum of a file, or why it cannot be used. Only a part of the file is in memory at a time."""
    if size == 0:
        return None, "the image has no bytes"
    if size > LARGEST:
        return None, f"the image has {size} bytes, more than {LARGEST}"
    crc, patience = 0, LONG if store.is_remote(folder) else PATIENCE
    try:
        for at in range(0, size, READ):
            crc = crc32(_bytes(f"{folder}/{path}", at, min(READ, size - at), size, patience), crc)
        return crc, None
    except Unusable as e:
        return None, str(e)
