"""Finds the store of a URL, and lists the shards that folders, globs and braces select."""

import functools
import importlib
import itertools
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from eagleray.base.errors import Outage, UserError, has_secrets, hide_secrets
from eagleray.base.files import durable_path, make_folder, sync_file, sync_folder
from eagleray.storage.blob import Blob, new_buffer
from eagleray.storage.error_classes import RIGHTS, Allowed, Right
from eagleray.storage.local_files import ask_disk, files_below
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.retry import PATIENCE, answering
from eagleray.storage.shard_names import is_parquet, no_shards, unread_files
from eagleray.storage.url_patterns import Pattern, expand_braces, split_literal

LOOK = 10_000  # most files below a folder that are looked at to say what is there
EDGE = 4096  # bytes at each end of a local file that its tag is computed from


class Store(Protocol):
    """The interface of a store of files.

    `lists` says whether it can list folders and write files; `seeks`, whether `walk` can begin after a URL. Methods
    raise UserError, which names the URL, and Outage when the store has not answered for `patience` seconds."""

    lists: bool
    seeks: bool
    allowed: Allowed

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> list[Blob]:
        """Return the files directly in a folder whose names begin with `start`, or the one file that the URL names."""

    def each(self, url: str) -> Iterator[Blob]:
        """Yield the files directly in a folder, one page of the listing after the other."""

    def walk(self, url: str, after: str = "") -> Iterator[Blob]:
        """Yield the files in a folder and in all folders below it, in any order. A store that seeks yields only those
        whose URLs come after `after`, in the order of URLs."""

    def tag(self, blob: Blob) -> str:
        """Return a string that changes when the content of the file does."""

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        """Return exactly `length` bytes from `start`; with `tag`, a remote file whose tag has changed is refused."""

    def get(self, url: str) -> bytes:
        """Return the whole file. Raises FileNotFoundError when there is none."""

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        """Store a copy of a local file atomically. Raises OSError when it cannot be written."""

    def write(self, url: str, data: bytes) -> None:
        """Store a small file atomically. Raises OSError when it cannot be written."""

    def create(self, url: str, data: bytes) -> bool:
        """Store a small file unless there is one. Returns whether this call, or another with the same data, made it.

        Of several processes that call it at once with different data, one gets True. If the store has no conditional
        writes, or no atomic ones, as in Swift, several may get True, and the data of the last one stays."""

    def look(self, url: str) -> tuple[bytes, float]:
        """Return the whole file and the seconds since it was written, both times by the store's clock. Raises
        FileNotFoundError when there is none."""

    def delete(self, url: str) -> None:
        """Delete a file if it exists."""


class LocalStore:
    """Reads and writes local paths and file:// URLs."""

    lists, seeks = True, False
    allowed = Allowed()

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> list[Blob]:
        path = local_path(url)

        def run() -> list[Blob]:
            files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
            return [Blob(str(p), p.stat().st_size) for p in files if p.name.startswith(start)]

        return ask_disk(url.rstrip("/"), run, patience)

    def each(self, url: str) -> Iterator[Blob]:
        yield from self.list(url)

    def walk(self, url: str, after: str = "") -> Iterator[Blob]:
        root = local_path(url)
        for name in files_below(root):
            path = os.path.join(root, name)
            if os.path.isfile(path):  # no broken link, no socket
                yield Blob(path, os.path.getsize(path))

    def tag(self, blob: Blob) -> str:
        return local_tag(blob)

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        return _read_bytes(url, start, length, patience)

    def get(self, url: str) -> bytes:
        return ask_disk(url, local_path(url).read_bytes, PATIENCE, absent=FileNotFoundError(url))

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        path = local_path(url)
        make_folder(path.parent)
        with durable_path(path) as part:
            shutil.copyfile(source, part)

    def write(self, url: str, data: bytes) -> None:
        path = local_path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable_path(path) as part:  # each writer has a temporary file of its own, as several may write at once
            part.write_bytes(data)

    def create(self, url: str, data: bytes) -> bool:
        path = local_path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            part.write_bytes(data)
            sync_file(part)
            try:
                os.link(part, path)  # the file is complete as soon as it has its name
            except OSError:
                if path.exists():
                    return path.read_bytes() == data
                part.replace(path)  # a file system without links
            sync_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)
        return True

    def look(self, url: str) -> tuple[bytes, float]:
        data = self.get(url)
        return data, time.time() - local_path(url).stat().st_mtime

    def delete(self, url: str) -> None:
        local_path(url).unlink(missing_ok=True)


def local_tag(blob: Blob) -> str:
    """Return a checksum of the first and the last bytes of a local file."""
    ends = [_read_bytes(blob.url, at, min(EDGE, blob.size), PATIENCE) for at in (0, max(blob.size - EDGE, 0))]
    return f"crc:{zlib.crc32(ends[1], zlib.crc32(ends[0])):08x}"


def _read_bytes(url: str, start: int, length: int, patience: float) -> memoryview:
    data = new_buffer(length)

    def run() -> int:
        with local_path(url).open("rb", buffering=0) as f:
            f.seek(start)
            at = 0
            while at < length and (count := f.readinto(data[at:])):
                at += count
            return at

    count = ask_disk(url, run, patience)
    if count != length:
        raise UserError(f"{url}: expected {length} bytes from {start} on, but the file ends after {count} of them")
    return data


class Stores(dict[str, Store]):
    """The stores by the schemes of their URLs. Each is imported and made when it is first asked for."""

    classes: ClassVar = {"s3": "S3Store", "gs": "GsStore", "az": "AzStore", "https": "HttpsStore", "hf": "HfStore"}

    def __missing__(self, scheme: str) -> Store:
        if scheme == "http":
            return self.setdefault(scheme, self["https"])
        module = importlib.import_module(f"eagleray.storage.{scheme}")
        return self.setdefault(scheme, getattr(module, self.classes[scheme])())


STORES = Stores(file=LocalStore())
SCHEMES = ("file", "http", *Stores.classes)


def store(url: str) -> Store:
    """Return the store that a URL belongs to. Raises UserError for a scheme that is not known."""
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme not in SCHEMES:
        known = "plain paths, file://, s3://, gs://, az://, https:// and hf://"
        raise UserError(f"{hide_secrets(url)}: unknown scheme {scheme!r}; known are {known}")
    return STORES[scheme]


def check_writable(url: str, key: str = "") -> None:
    """Raises UserError, which names `key`, for a URL whose store can only be read or has an unknown scheme."""
    try:
        lists = store(url).lists
    except UserError as e:
        raise UserError(f"{key}={e}" if key else str(e)) from None
    if not lists:
        from eagleray.storage.https import read_only

        raise read_only(f"{key}={url}" if key else url)


def expect_access(url: str, rights: Sequence[Right] = RIGHTS) -> None:
    """From now on, treat refused requests below a folder as temporary, as an earlier process had these rights there."""
    store(url).allowed.add_folder(url, rights)


def is_remote(url: str) -> bool:
    """Return whether a URL does not name a path of this machine."""
    return "://" in url.removeprefix("file://")


def folder_of(url: str) -> Path | None:
    """Return the path on this machine that a URL names, for code that reads and writes files. None for other stores."""
    return None if is_remote(url) else local_path(url)


def may_exist(url: str) -> bool:
    """Return whether a file or folder may exist: a local one must exist, and a remote one is looked for later."""
    return is_remote(url) or local_path(url).exists()


def may_be_folder(url: str) -> bool:
    """Return whether a URL may name a folder: a local one must exist, and a remote one is looked for later."""
    return is_remote(url) or local_path(url).is_dir()


def local_path(url: str) -> Path:
    """Return the path of a local path or file:// URL."""
    return Path(url.removeprefix("file://"))


def parent(url: str) -> str:
    """Return the folder of a URL, without a slash at its end."""
    return url.rpartition("/")[0]


def absolute(url: str) -> str:
    """Make a local path absolute, as workers have another working folder than the user. Other URLs are not changed.
    Raises UserError for a URL with one slash after its colon, which would name a folder such as `s3:`."""
    if re.match(rf"({'|'.join(SCHEMES)}):/(?!/)", url):
        raise UserError(f"{url}: expected a URL with two slashes, as text: pathlib.Path leaves one of them out")
    return url if is_remote(url) else os.path.abspath(os.path.expanduser(local_path(url)))


def find(url: str) -> bytes | None:
    """Return a whole file, or None where there is none."""
    try:
        return store(url).get(url)
    except FileNotFoundError:
        return None


def put_bytes(url: str, data: bytes) -> None:
    """Store a small file. Raises OSError when it cannot be written."""
    store(url).write(url, data)


def what_is(url: str, patience: float = PATIENCE, *, part: bool = False) -> Literal["file", "folder", ""]:
    """Return whether a file or a folder has exactly this name, without expanding wildcards and braces; "" for neither.
    With `part`, a slash and more follow the URL. Raises UserError or Outage when a store does not answer."""
    if path := folder_of(url):
        return "folder" if path.is_dir() else "file" if path.is_file() else ""
    storage = store(url)
    try:
        if part:
            return "folder" if storage.lists and next(storage.walk(url), None) else ""
        there = _list(url, "", patience)
        if not there and storage.lists:  # a folder with nothing but folders in it
            there = list(itertools.islice(storage.walk(url), 1))
    except UserError as e:  # a web server may refuse the name; listing it later raises this again
        if isinstance(e.__context__, Outage):
            raise
        return ""
    return "file" if any(b.url == url for b in there) else "folder" if there else ""


def patterns(url: str, patience: float = PATIENCE) -> Iterator[Pattern]:
    """Yield a pattern for each folder in which a URL, perhaps with braces or a glob, selects files. A file or folder of
    exactly this name is taken as it is. Raises UserError for wildcards before the file name, and as `expand_braces`."""

    @functools.cache
    def exists(name: str, part: bool) -> bool:
        return bool(what_is(name, patience, part=part))

    if not url:  # an empty variable of a shell does not mean the working directory
        raise UserError("no shards are given: the path is empty")
    if url.startswith("hf://"):
        from eagleray.storage.hf import expand

        yield from (Pattern(url, parent(one), one.rpartition("/")[2], literal=True) for one in expand(url, patience))
        return
    known, rest = split_literal(absolute(url), exists)
    for end in expand_braces(rest):
        start, rest = split_literal(known + end, exists)
        if any(c in rest.rpartition("/")[0] for c in "*?["):
            raise UserError(f"{url}: wildcards are allowed in the file name only")
        one = start + rest
        folder, _, name = one.rpartition("/")
        whole = not (name.lower().endswith(".tar") or is_parquet(name, ".")) and not any(c in rest for c in "*?[")
        if whole or (not is_remote(one) and what_is(one) == "folder"):
            yield Pattern(url, one.rstrip("/"), "")
        else:
            yield Pattern(url, folder, name, literal=not rest)


def list_shards(urls: str | Sequence[str], *, patience: float = PATIENCE) -> list[Blob]:
    """Return the tars, or else the Parquet files, that folders, globs and brace patterns select, once each, sorted by
    URL.

    Raises UserError when a pattern matches no shard, or a named file does not exist."""
    given = [urls] if isinstance(urls, str) else urls
    found = select([p for url in given for p in patterns(url, patience)], patience)
    if not found:
        raise UserError("no shards are given")
    return each_once(found)


def each_once(found: Mapping[Pattern, list[Blob]]) -> list[Blob]:
    """Return the files that patterns have selected, each once, in the order of their URLs."""
    return sorted({b.url: b for blobs in found.values() for b in blobs}.values(), key=lambda b: b.url)


def select(
    selected: Sequence[Pattern], patience: float = PATIENCE, unread: dict[str, str] | None = None
) -> dict[Pattern, list[Blob]]:
    """Return the tars, or else the Parquet files, of each pattern. Each folder is listed once, however many patterns
    select files in it. `unread`, if given, gets the text of `unread_files` of each folder that is selected as a whole.

    Raises UserError when a pattern matches no shard, or a named file does not exist."""
    out: dict[Pattern, list[Blob]] = {}
    for folder, group in itertools.groupby(sorted(selected, key=lambda p: p.folder), key=lambda p: p.folder):
        mine = list(group)
        files = {b.url.rpartition("/")[2]: b for b in _find(folder, mine, patience)}
        for p in mine:
            names = p.choose(files) if p.is_glob else [p.name][: p.name in files]
            out[p] = [files[n] for n in names] or _inside(p, files, patience)
        whole = [b.url for p in mine if not p.name for b in out[p]]
        if unread is not None and whole and (said := unread_files(files, whole)):
            unread[folder] = said
    return out


def _inside(p: Pattern, files: Iterable[str], patience: float) -> list[Blob]:
    """Return the shards in the remote folder that a pattern names, such as x.tar. Raises UserError when there are none;
    the message tells the kinds of `files`, the files in the pattern's folder."""
    if not p.is_glob and is_remote(p.folder) and store(p.folder).lists:
        inside = {b.url.rpartition("/")[2]: b for b in _list(f"{p.folder}/{p.name}/", "", patience)}
        if names := Pattern(p.url, p.folder, "").choose(inside):
            return [inside[name] for name in names]
    if not p.is_glob:
        raise UserError(f"{p.url}: no shard {p.folder}/{p.name}")
    if p.name:
        raise UserError(f"{p.url}: {no_shards(files)}; {p.folder} without {p.name} takes images, too")
    raise UserError(
        f"{p.url}: {no_shards(files, _below(p.folder))}; expected .tar or .parquet shards in it, or images such "
        "as .jpg and .png in it or below it"
    )


def _below(folder: str) -> list[str]:
    """Return the names of the first LOOK files in the folders below a folder."""
    deeper = (blob.url for blob in store(folder).walk(f"{folder}/") if "/" in blob.url.removeprefix(f"{folder}/"))
    return [url.rpartition("/")[2] for url in itertools.islice(deeper, LOOK)]


def _find(folder: str, mine: Sequence[Pattern], patience: float) -> list[Blob]:
    """Return the files of a folder that patterns may select. In a store without listings, they are the named files."""
    if store(folder + "/").lists:
        # A listing can be restricted to names with a common prefix, which need not be a whole path component.
        return _list(folder + "/", os.path.commonprefix([re.split(r"[*?\[]", p.name)[0] for p in mine]), patience)  # noqa: RUF071
    if unnamed := [p.url for p in mine if p.is_glob]:
        from eagleray.storage.https import NO_LISTING

        if has_secrets(unnamed[0]):
            how = "expected an s3://, gs:// or az:// URL, with credentials in the environment"
            raise UserError(f"{hide_secrets(unnamed[0])}: signed URLs are not read, as they expire; {how}")
        address, _, query = unnamed[0].partition("?")
        hint = f"; queries are not sent: expected {address}" if query else ""
        raise UserError(f"{hide_secrets(unnamed[0])}: {NO_LISTING}{hint}")
    names = dict.fromkeys(f"{folder}/{p.name}" for p in mine)
    return [b for blobs in ordered_map(lambda url: _list(url, "", patience), names) for b in blobs]


def _list(url: str, start: str, patience: float) -> list[Blob]:
    """List a folder of shards. Raises UserError or Outage like `answering`."""
    with answering(patience):
        return store(url).list(url, start, patience=patience)
