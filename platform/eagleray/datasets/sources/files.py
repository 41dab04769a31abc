"""Files of a source: one, those of a folder, or those of all folders below it."""

from eagleray.base.errors import UserError
from eagleray.storage import store
from eagleray.storage.blob import Blob

COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


def one(url: str) -> Blob:
    """Raises UserError when it is not there."""
    found = [b for b in directly(url) if b.url == url]
    if not found:
        raise UserError(f"{url}: no such file")
    return found[0]


def directly(url: str) -> list[Blob]:
    """The one file, or the files of the folder; none where there is no such place."""
    if url.startswith("s3:") or store.local(url).exists():
        return store.store(url).list(url)
    return []


def below(url: str) -> list[Blob]:
    """All files below a folder, by their URLs; none where there is no such folder."""
    return sorted(store.store(url).walk(url.rstrip("/")), key=lambda b: b.url)


def relative(blob: Blob, folder: str) -> str:
    return blob.url.removeprefix(folder.rstrip("/") + "/")


def text(url: str) -> str:
    """A small file. Raises UserError when it is not there."""
    try:
        return bytes(store.store(url).get(url)).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{url}: is no UTF-8 text ({e.reason} at byte {e.start})") from None


def nothing(url: str, expected: str) -> UserError:
    """What to say of a place that holds nothing of use."""
    here = directly(url)
    if not here and not url.startswith("s3:") and not store.local(url).exists():
        return UserError(f"{url}: no such file or folder")
    archive = next((b.url for b in here if b.url.lower().endswith(COMPRESSED)), None)
    hint = f"; {archive.rpartition('/')[2]} must be unpacked first" if archive else ""
    return UserError(f"{url}: expected {expected}{hint}")
