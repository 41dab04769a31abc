"""Keeps a list of the images of a folder in a file on this machine's disk: their order, and what was read of them.

SQLite sorts and compares them, so ten million take no more memory than ten thousand. What a command that was killed has
listed and read is there for the next one.
"""

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

SOME = 256  # images that are read in one piece of work: what a kill loses
STALE = 3600.0  # seconds after which a listing that was killed begins anew: much may have come and gone since
CACHE = 32 * 2**20  # bytes of the file in memory
PART = 4096  # most images of one part of a folder in the mean; parts are read from an index, and kept, as wholes
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
# What `known` and `read` say of an image as it is now.
JOINED = """images AS i
    LEFT JOIN known AS k ON k.hash = i.hash AND k.path = i.path AND k.size = i.size AND k.reason IS NULL
    LEFT JOIN read AS r ON r.hash = i.hash AND r.path = i.path AND r.size = i.size AND r.version = i.version"""

UNREAD = "k.crc IS NULL AND r.path IS NULL"


class Found(NamedTuple):
    """An image of a listing. What its stamp has is a local file's, or thrice the digest of a version in a store."""

    path: str
    size: int  # bytes
    stamp: Stamp

    @property
    def version(self) -> int:
        return short(self.stamp)


class Read(NamedTuple):
    """An image that was read: its checksum, or why it cannot be used."""

    path: str
    size: int  # bytes
    version: int | None
    crc: int | None
    reason: str | None


class ImageList:
    """The images of a folder and of all folders below it, ordered by a hash of their paths."""

    def __init__(self, path: Path) -> None:
        """Open the list in a file, or begin one."""
        self._db = sqlite3.connect(path, isolation_level=None)
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA journal_mode = WAL")  # a kill loses what is not committed, and no more
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA temp_store = FILE")
        self._db.execute(f"PRAGMA cache_size = -{CACHE // 2**10}")
        self._db.executescript(TABLES)
        self.fresh = time.time() - path.stat().st_mtime < STALE
        self.others = Counter[str]()  # files that are not read, by extension with its dot; hidden ones are not counted
        self.sums = [0, 0, 0]

    def begin(self, *, resume: bool) -> list[Names]:
        """Return the spans that a killed listing had still to read; or forget its images and return the whole."""
        left = self._db.execute("SELECT after, stop FROM spans").fetchall()
        if resume and left and self.fresh:
            self.others = Counter(dict(self._db.execute("SELECT kind, count FROM others")))
            self.sums = [int(n) for n in self._db.execute("SELECT * FROM sums").fetchone()]
            return [(from_text(after), from_text(stop)) for after, stop in left]
        self._db.executescript("DROP INDEX IF EXISTS by_hash; DELETE FROM images; DELETE FROM others")
        self.others, self.sums = Counter(), [0, 0, 0]
        return [WHOLE]

    def add(self, images: Iterable[Found], others: Iterable[str], left: Sequence[Names]) -> None:
        """Add what a listing has found, and keep which spans it has left."""
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
        """Sort the images, all of which were added."""
        self._db.execute("CREATE INDEX IF NOT EXISTS by_hash ON images (hash, path)")
        self.count, self.bytes = self._db.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM images").fetchone()

    @property
    def stamp(self) -> Stamp:
        """Return what tells that an image was written, comes or goes."""
        return Stamp(*self.sums)

    def top_folders(self) -> list[str]:
        """Return the folders that hold the images, directly below the listed one; an empty name for that one itself."""
        rows = self._db.execute(
            "SELECT DISTINCT CASE instr(path, '/') WHEN 0 THEN '' ELSE substr(path, 1, instr(path, '/') - 1) END "
            "FROM images"
        )
        return [from_text(row[0]) for row in rows]

    @property
    def has_new(self) -> bool:
        """Return whether an image is not among those that are known."""
        return self._number("SELECT COUNT(*) FROM known") < self.count

    @property
    def left(self) -> int:
        """Return the number of images of which no checksum is known."""
        return self._number(f"SELECT COUNT(*) FROM {JOINED} WHERE {UNREAD}")

    @property
    def part_count(self) -> int:
        """Return into how many parts the images are divided: a power of two."""
        return 2 ** max(0, -(-self.count // PART) - 1).bit_length()

    def know(self, rows: Iterable[Read]) -> None:
        """Add rows of an index."""
        self._keep("known", rows)

    def keep(self, rows: Iterable[Read]) -> None:
        """Add what was read of the images."""
        self._keep("read", rows)

    def difference(self) -> tuple[str, bool] | None:
        """Return the first known image that is gone or has another size, and whether it is gone."""
        row = self._db.execute(
            "SELECT k.path, i.path IS NULL FROM known AS k "
            "LEFT JOIN images AS i ON i.hash = k.hash AND i.path = k.path "
            "WHERE i.path IS NULL OR i.size != k.size ORDER BY k.hash LIMIT 1"
        ).fetchone()
        return row and (from_text(row[0]), bool(row[1]))  # type: ignore[no-any-return]

    def doubtful(self) -> Iterator[list[Read]]:
        """Yield, some at a time, images of another version than is known of them, with the checksum that is known."""
        return self._paged(
            "SELECT i.hash, i.path, i.size, i.version, k.crc, NULL", "k.crc IS NOT NULL AND k.version IS NOT i.version"
        )

    def unread(self) -> Iterator[list[Read]]:
        """Yield, some at a time, images of which no checksum is known, without one."""
        return self._paged("SELECT i.hash, i.path, i.size, i.version, NULL, NULL", UNREAD)

    def parts(self) -> Iterator[list[Read]]:
        """Yield the images by parts, which the first bits of the hashes make: all images, where there are few."""
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
        """Return whether there is work that the next command need not do again."""
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
        """Yield the rows of a query, which others may change meanwhile, some at a time."""
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
    """Lend the list of a folder's images, which nobody else has meanwhile. It is deleted at the end, unless work was
    broken off that the next command can go on with. Raises UserError when it cannot be kept."""
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
    with contextlib.ExitStack() as stack:
        place = cache_folder("images")
        try:
            place.mkdir(parents=True, exist_ok=True)
            if is_locked(place / f"{name}.lock"):
                note(f"waiting for another command, which lists the images of {folder}")
            stack.enter_context(file_lock(place / f"{name}.lock"))
        except OSError:  # a home folder that cannot be written
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
    except sqlite3.DatabaseError:  # after the power has failed
        _delete(path)
        return ImageList(path)


def _delete(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def _hash(path: str) -> bytes:
    return hashlib.md5(path.encode(errors="surrogateescape"), usedforsecurity=False).digest()
