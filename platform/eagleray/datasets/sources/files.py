"""Find the files of a source: a single file, the files in a folder, or all files in a folder and its subfolders."""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from eagleray.base.errors import UserError, explained
from eagleray.storage import store
from eagleray.storage.blob import Blob

COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


def find_file(url: str) -> Blob:
    """Return the file at a URL. Raises UserError when there is none."""
    blobs = [b for b in list_folder(url) if b.url == url]
    if not blobs:
        raise UserError(f"{url}: no such file")
    return blobs[0]


def list_folder(url: str) -> list[Blob]:
    """Return the file at a URL, or the files directly in the folder at a URL; an empty list if nothing is there."""
    return store.store(url).list(url) if store.may_exist(url) else []


def list_tree(url: str) -> list[Blob]:
    """Return all files in a folder and its subfolders, sorted by URL; an empty list if the folder does not exist."""
    return sorted(store.store(url).walk(url.rstrip("/")), key=lambda b: b.url)


def relative_path(blob: Blob, folder: str) -> str:
    """Return the path of a file relative to a folder."""
    return blob.url.removeprefix(folder.rstrip("/") + "/")


def by_path(blobs: Iterable[Blob], folder: str) -> dict[str, Blob]:
    """Return files by their paths relative to a folder."""
    return {relative_path(blob, folder): blob for blob in blobs}


def by_name(blobs: Iterable[Blob]) -> dict[str, Blob]:
    """Return files by their names, whatever folders they are in; of files with the same name, the last."""
    return {PurePosixPath(blob.url).name: blob for blob in blobs}


def pick(origin: str, blobs: Mapping[str, Blob], names: Iterable[str], archive: str = "") -> list[Blob]:
    """Return the files of these `names` among `blobs`. A name may be two alternatives divided by ` or `.

    Raises UserError for a missing file, which the message names, and also the `archive` that contains it. In `archive`,
    {} stands for the name of the file."""
    found = {name: next((blobs[n] for n in name.split(" or ") if n in blobs), None) for name in names}
    if missing := next((name for name, blob in found.items() if blob is None), None):
        hint = f", unpacked from {archive.format(missing)}" if archive else ""
        raise missing_error(origin, f"{missing} in it{hint}")
    return [blob for blob in found.values() if blob]


def read_bytes(url: str) -> bytes:
    """Read a small file. Raises UserError when it does not exist."""
    with explained(f"{url}: no such file", FileNotFoundError, why=False):
        return bytes(store.store(url).get(url))


def read_text(url: str) -> str:
    """Read a small UTF-8 file. Raises UserError when it does not exist or is not UTF-8."""
    with explained(f"{url}: not UTF-8 text", UnicodeDecodeError):
        return read_bytes(url).decode("utf-8-sig")


def read_csv(url: str, delimiter: str = ",") -> list[dict[str, str]]:
    """Read a CSV file whose first line names the columns. Cells missing at the end of a line are empty.

    Raises UserError when the file does not exist or is not a CSV file."""
    text = io.StringIO(read_text(url), newline="")
    with explained(f"{url}: not a CSV file", csv.Error):
        return list(csv.DictReader(text, delimiter=delimiter, restval=""))


def missing_error(url: str, expected: str) -> UserError:
    """Return the error for a folder in which the expected files are missing.

    If the folder holds a compressed archive, the message adds that it must be unpacked."""
    blobs = list_folder(url)
    if not blobs and not store.may_exist(url):
        return UserError(f"{url}: no such file or folder")
    archive = next((b.url for b in blobs if b.url.lower().endswith(COMPRESSED)), None)
    hint = f"; {archive.rpartition('/')[2]} must be unpacked first" if archive else ""
    return UserError(f"{url}: expected {expected}{hint}")
