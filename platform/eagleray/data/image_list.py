"""Keeps the list of a folder's images, their order and their checksums in an SQLite file on this machine's disk.

SQLite sorts and compares the images, so ten million take no more memory than ten thousand. What a killed command has
listed and read is kept for the next command."""

import contextlib
import hashlib
import itertools
import os
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from eagleray.base.contexts import on_error
from eagleray.base.errors import explained
from eagleray.base.files import cache_folder, file_lock, is_locked
from eagleray.data.file_names import from_text, to_text
from eagleray.data.stamps import Stamp, short
from eagleray.storage.wide_walk import WHOLE, Names

SOME = 256  # images that are read and stored together; a killed command loses at most as many
STALE = 3600.0  # seconds after which a killed listing begins anew, as many files may have changed
CACHE = 32 * 2**20  # bytes of SQLite's page cache
PART = 4096  # most images per part of a folder on average; a part is read from an index, and cached, as a whole
TABLES = """
    CREATE TABLE IF NOT EXISTS images (hash BLOB, path TEXT, size INT, version INT);
    CREATE TABLE IF NOT EXISTS known (hash BLOB, path TEXT, size INT, version INT, crc INT, reason TEXT,
        PRIMARY KEY (hash, path)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS read (hash BLOB, path TEXT, size INT, version INT, crc INT, reason TEXT,
        PRIMARY KEY (hash, path)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS spans (after TEXT, stop TEXT);
    CREATE TABLE IF NOT EXISTS others (kind TEXT PRIMARY KEY, count INT);
    CREATE TABLE IF NOT EXISTS sums (written TEXT, changed TEXT, inode TEXT);
"""
# Listed images (i), with their rows in the index if the size is the same (k), and what was read of this version (r).
JOINED = """images AS i
    LEFT JOIN known AS k ON k.hash = i.hash AND k.path = i.path AND k.size = i.size AND k.reason IS NULL
    LEFT JOIN read AS r ON r.hash = i.hash AND r.path = i.path AND r.size = i.size AND r.version = i.version"""

UNREAD = "k.crc IS NULL AND r.path IS NULL"


class Found(NamedTuple):
    """A listed image. A local file's stamp has its times and inode; in a store, it repeats a digest of the version."""

    path: str
    size: int  # bytes
    stamp: Stamp

    @property
    def version(self) -> int:
        return short(self.stamp)


class Read(NamedTuple):
    """An image that was read: its checksum, or the reason why it cannot be used."""

    path: str
    size: int  # bytes
    version: int | None
    crc: int | None
    reason: str | None


class ImageList:
    """The images of a folder and of all folders below it, ordered by a hash of their paths."""

    def __init__(self, path: Path) -> None:
        """Open the list in a file, or create it."""
        self._db = sqlite3.connect(path, isolation_level=None)
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA journal_mode = WAL")  # a kill then loses only what is not committed
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA temp_store = FILE")
        self._db.execute(f"PRAGMA cache_size = -{CACHE // 2**10}")
        self._db.executescript(TABLES)
        self.fresh = time.time() - path.stat().st_mtime < STALE
        self.others = Counter[str]()  # number of files that are neither images nor hidden, by extension with its dot
        self.sums = [0, 0, 0]

    def begin(self, *, resume: bool) -> list[Names]:
        """Return the spans of names that a killed listing has left to list. If there are none, if they are stale or
        without `resume`, forget all images and return the span of all names."""
        left = self._db.execute("SELECT after, stop FROM spans").fetchall()
        if resume and left and self.fresh:
            self.others = Counter(dict(self._db.execute("SELECT kind, count FROM others")))
            self.sums = [int(n) for n in self._db.execute("SELECT * FROM sums").fetchone()]
            return [(from_text(after), from_text(stop)) for after, stop in left]
        self._db.executescript("DROP INDEX IF EXISTS by_hash; DELETE FROM images; DELETE FROM others")
        self.others, self.sums = Counter(), [0, 0, 0]
        return [WHOLE]

    def add(self, images: Iterable[Found], others: Iterable[str], left: Sequence[Names]) -> None:
        """Add the images and other files of a listing, and store the spans of names that are still to be listed."""
        rows = []
        for image in images:
            rows.append((_hash(image.path), to_text(image.path), image.size, image.version))
            for n, number in enumerate(image.stamp):
                self.sums[n] = (self.sums[n] + short(image.path, image.size, number)) % 2**63
        self.others.update(others)
        with self._whole():
            self._db.executemany("INSERT INTO images VALUES (?, ?, ?, ?)", rows)
            self._db.execute("DELETE FROM spans")
            self._db.executemany("INSERT INTO spans VALUES (?, ?)", [tuple(map(to_text, span)) for span in left])
            self._db.execute("DELETE FROM sums")
            self._db.execute("INSERT INTO sums VALUES (?, ?, ?)", [str(n) for n in self.sums])
            self._db.executemany("INSERT OR REPLACE INTO others VALUES (?, ?)", self.others.items())

    def end(self) -> None:
        """Sort and count the images, after all were added. What a killed command knew of an index is forgotten."""
        self._db.executescript("CREATE INDEX IF NOT EXISTS by_hash ON images (hash, path); DELETE FROM known")
        self.count, self.bytes = self._db.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM images").fetchone()

    @property
    def stamp(self) -> Stamp:
        """Return a stamp that changes when an image is written, added or removed."""
        return Stamp(*self.sums)

    def top_folders(self) -> list[str]:
        """Return the names of the folders directly below the listed folder that hold images, and an empty name if
        images lie in the listed folder itself."""
        rows = self._db.execute(
            "SELECT DISTINCT CASE instr(path, '/') WHEN 0 THEN '' ELSE substr(path, 1, instr(path, '/') - 1) END "
            "FROM images"
        )
        return [from_text(row[0]) for row in rows]

    @property
    def has_new(self) -> bool:
        """Return whether some image is not in the index."""
        return self._number("SELECT COUNT(*) FROM known") < self.count

    @property
    def left(self) -> int:
        """Return the number of images without a known checksum."""
        return self._number(f"SELECT COUNT(*) FROM {JOINED} WHERE {UNREAD}")

    @property
    def part_count(self) -> int:
        """Return the number of parts that the images are divided into, a power of two."""
        return 2 ** max(0, -(-self.count // PART) - 1).bit_length()

    def know(self, rows: Iterable[Read]) -> None:
        """Add images from an index, with their checksums, or the reasons why they cannot be used."""
        self._keep("known", rows)

    def keep(self, rows: Iterable[Read]) -> None:
        """Add images that were read, with their checksums, or the reasons why they cannot be used."""
        self._keep("read", rows)

    def difference(self) -> tuple[str, bool] | None:
        """Return the path of the first known image that is gone or has another size, and whether it is gone."""
        row = self._db.execute(
            "SELECT k.path, i.path IS NULL FROM known AS k "
            "LEFT JOIN images AS i ON i.hash = k.hash AND i.path = k.path "
            "WHERE i.path IS NULL OR i.size != k.size ORDER BY k.hash LIMIT 1"
        ).fetchone()
        return row and (from_text(row[0]), bool(row[1]))  # type: ignore[no-any-return]

    def doubtful(self) -> Iterator[list[Read]]:
        """Yield lists of images whose version differs from that in the index, with their checksum in the index."""
        return self._paged(
            "SELECT i.hash, i.path, i.size, i.version, k.crc, NULL", "k.crc IS NOT NULL AND k.version IS NOT i.version"
        )

    def unread(self) -> Iterator[list[Read]]:
        """Yield lists of images without a known checksum."""
        return self._paged("SELECT i.hash, i.path, i.size, i.version, NULL, NULL", UNREAD)

    def parts(self) -> Iterator[list[Read]]:
        """Yield the images of each part. The first bits of an image's hash decide its part. A small folder has one
        part."""
        edges = [(n * 2**32 // self.part_count).to_bytes(4) for n in range(self.part_count)] + [b"\xff" * 17]
        for ends in itertools.pairwise(edges):
            yield [
                Read(from_text(path), *rest)
                for path, *rest in self._db.execute(
                    f"SELECT i.path, i.size, i.version, COALESCE(k.crc, r.crc), r.reason FROM {JOINED} "
                    "WHERE i.hash >= ? AND i.hash < ? ORDER BY i.hash, i.path",
                    ends,
                )
            ]

    @property
    def unfinished(self) -> bool:
        """Return whether the file has an unfinished listing or checksums, which the next command can use."""
        return bool(self._number("SELECT EXISTS (SELECT 1 FROM spans) OR EXISTS (SELECT 1 FROM read)"))

    def close(self) -> None:
        self._db.close()

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def _keep(self, table: str, rows: Iterable[Read]) -> None:
        with self._whole():
            self._db.executemany(
                f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?, ?)",
                ((_hash(row.path), to_text(row.path), *row[1:]) for row in rows),
            )

    def _paged(self, columns: str, where: str) -> Iterator[list[Read]]:
        """Yield the rows of a query in lists of at most SOME. The caller may change the rows between lists."""
        last = (b"", "")
        while rows := self._db.execute(
            f"{columns} FROM {JOINED} WHERE (i.hash, i.path) > (?, ?) AND {where} ORDER BY i.hash, i.path LIMIT {SOME}",
            last,
        ).fetchall():
            last = rows[-1][:2]
            yield [Read(from_text(row[1]), *row[2:]) for row in rows]

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        with on_error(lambda: self._db.execute("ROLLBACK")):
            yield
        self._db.execute("COMMIT")


@contextlib.contextmanager
def image_list(folder: str, note: Callable[[str], None]) -> Iterator[ImageList]:
    """Lend the list of a folder's images to one process at a time. It is deleted at the end, unless interrupted work is
    left that the next command can continue. Raises UserError when it cannot be stored."""
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
    with contextlib.ExitStack() as stack:
        place = cache_folder("images")
        try:
            place.mkdir(parents=True, exist_ok=True)
            if is_locked(place / f"{name}.lock"):
                note(f"waiting for another command, which lists the images of {folder}")
            stack.enter_context(file_lock(place / f"{name}.lock"))
        except OSError:  # the home folder may not be writable
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagleray-")))
        path = place / f"{name}.sqlite"
        kept = f"{path}: the list of the images of {folder} cannot be kept there"
        stack.enter_context(explained(kept, sqlite3.Error))
        images = _opened(path)

        def end(error: type[BaseException] | None, *_: object) -> None:
            unfinished = error is not None and images.unfinished
            images.close()
            if not unfinished:
                _delete(path)

        stack.push(end)
        yield images


def _opened(path: Path) -> ImageList:
    try:
        return ImageList(path)
    except sqlite3.DatabaseError:  # a power failure may have damaged it
        _delete(path)
        return ImageList(path)


def _delete(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def _hash(path: str) -> bytes:
    return hashlib.md5(path.encode(errors="surrogateescape"), usedforsecurity=False).digest()
