"""Reads data sets of the Hugging Face Hub: hf://datasets/OWNER/NAME[@REVISION][/PATH or SPLIT].

`huggingface_hub` finds a revision's commit and files, the token, and files in its cache on this machine. Bytes are read
by ranges, as from any web server. URLs of files name the commit, so that their content never changes."""

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eagleray.base.errors import UserError, explained, one_line
from eagleray.storage.answers import check_blob
from eagleray.storage.blob import Blob, new_buffer
from eagleray.storage.hf_urls import split_url
from eagleray.storage.https import HttpsStore, is_page
from eagleray.storage.listing import Blobs
from eagleray.storage.retry import PATIENCE, Transient, call_with_retries
from eagleray.storage.shard_names import is_data, kinds_of_files

COMMIT = re.compile(r"[0-9a-f]{40}")
SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
KNOWN = 16  # most commits whose lists of files a process keeps
TIMEOUT = 20.0  # seconds per request to the Hub's API
TOKEN = "set HF_TOKEN to a token that may read it"


_known: dict[tuple[str, str], "Tree"] = {}  # trees by repository and commit


@dataclass(frozen=True)
class Tree:
    """The files of a data set at one commit."""

    repo: str  # OWNER/NAME
    commit: str
    sizes: Mapping[str, int]  # bytes of each file, by path
    configs: list[Any] = field(default_factory=list)  # configurations that the data set's card declares

    def url(self, path: str) -> str:
        """Return the URL of a file, with the commit in it."""
        return f"hf://datasets/{self.repo}@{self.commit}/{path}"

    def splits(self, config: str = "") -> dict[str, list[str]]:
        """Return the data files of each split of a configuration, by the card or, if it has none, by the files' names.
        Files that name no split are in "". Raises UserError without `config` if none of several is the default."""
        data = [path for path in sorted(self.sizes) if is_data(path)]
        known = {str(c.get("config_name", "default")): c for c in self.configs if isinstance(c, dict)}
        known = {name: c for name, c in known.items() if c.get("data_files")}
        usual = [name for name, c in known.items() if c.get("default") or name == "default"]
        one = config or (usual[0] if usual else min(known, default=""))
        if len(known) > 1 and not config and not usual:
            raise UserError(f"hf://datasets/{self.repo}: is several data sets, {', '.join(known)}; add /{one}")
        out: dict[str, list[str]] = {}
        if one in known:
            for split, patterns in _data_files(known[one]["data_files"]):
                found = [path for path in data if any(_matches(path, p) for p in patterns)]
                out[split] = out.get(split, []) + found
            return {split: paths for split, paths in out.items() if paths}
        for path in data:
            out.setdefault(_split_of(path), []).append(path)
        return out

    def select(self, path: str) -> list[str]:
        """Return the data files that `path` names: a path, a pattern, a configuration or a split. Raises UserError if
        there are no such files, or if they are of several splits."""
        url = f"hf://datasets/{self.repo}"
        if path in self.sizes:
            return [path]
        below = [p for p in sorted(self.sizes) if is_data(p) and path and p.startswith(f"{path}/")]
        if found := below or [p for p in sorted(self.sizes) if path and is_data(p) and _matches(p, path)]:
            return found
        names = {str(c.get("config_name", "default")) for c in self.configs if isinstance(c, dict)}
        config, _, split = path.partition("/") if path.partition("/")[0] in names else ("", "", path)
        splits = self.splits(config)
        if not splits:
            there = kinds_of_files(p.rpartition("/")[2] for p in self.sizes)
            raise UserError(
                f"{url}: no .parquet or .tar files there{f', but {there}' if there else ''}; the Hub's own conversion, "
                f"if it made one, is {url}@refs/convert/parquet"
            )
        if not split and len(splits) == 1:
            return next(iter(splits.values()))
        if split not in splits:
            what = f"no file, folder or split {split}" if split else f"has the splits {', '.join(sorted(splits))}"
            example = next(s for s in ("train", *sorted(splits)) if s in splits)
            raise UserError(f"{url}: {what}; name one, such as {url}/{f'{config}/' * bool(config)}{example}")
        return splits[split]


def _data_files(given: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the splits in a card's `data_files` with their patterns. `given` is a pattern, a mapping, or a list of
    both."""
    for item in given if isinstance(given, list) else [given]:
        split, paths = (item.get("split", "train"), item.get("path")) if isinstance(item, dict) else ("train", item)
        yield str(split), [str(p) for p in (paths if isinstance(paths, list) else [paths])]


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern.removeprefix("./").replace("**/", "*"))


def _split_of(path: str) -> str:
    """Return the split that a path mentions, in the file's name or else in its nearest folder; "" if none does."""
    for part in reversed(path.split("/")):
        for word in re.split(r"[-._ \d]+", part):
            if word.lower() in SPLITS:
                return SPLITS[word.lower()]
    return ""


def tree_of(url: str, patience: float = PATIENCE) -> Tree:
    """Return the files at the commit of a URL's revision. Raises UserError if it cannot be read, and Outage."""
    repo, revision, _ = split_url(url)
    if tree := _known.get((repo, revision)):
        return tree
    tree = _ask(repo, revision, patience)
    if len(_known) >= KNOWN:
        _known.clear()
    _known[repo, tree.commit] = tree
    return tree


def expand(url: str, patience: float = PATIENCE) -> list[str]:
    """Return the URLs, with the commit, of the files that a URL selects. Raises like `tree_of` and `Tree.select`."""
    tree = tree_of(url, patience)
    return [tree.url(path) for path in tree.select(split_url(url)[2])]


def _ask(repo: str, revision: str, patience: float) -> Tree:
    """Return a revision's files, from the Hub or, if HF_HUB_OFFLINE is set, from its cache on this machine."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    url = f"hf://datasets/{repo}"
    if constants.HF_HUB_OFFLINE:
        return _cached_tree(repo, revision)

    def attempt() -> Tree:
        try:
            api = HfApi(endpoint=_endpoint())
            info = api.dataset_info(repo, revision=revision or None, files_metadata=True, timeout=TIMEOUT)
        except GatedRepoError:
            raise UserError(f"{url}: the Hub asks who reads it: accept its terms there and {TOKEN}") from None
        except RevisionNotFoundError:
            raise UserError(f"{url}: has no revision {revision}") from None
        except RepositoryNotFoundError:
            raise UserError(f"{url}: the Hub has no such data set, or a private one; {TOKEN}") from None
        except HfHubHTTPError as e:
            status = getattr(e.response, "status_code", 500)
            if status >= 500 or status in (408, 429):
                raise Transient(one_line(e)) from None
            raise UserError(f"{url}: {one_line(e)}{f'; {TOKEN}' * (status in (401, 403))}") from None
        except ValueError as e:  # the Hub does not allow every name
            raise UserError(f"{url}: {one_line(e)}") from None
        except Exception as e:  # any library below fails in its own way without network, by a proxy or a wrong answer
            raise Transient(one_line(e) or type(e).__name__) from None
        sizes = {s.rfilename: s.size for s in info.siblings or () if isinstance(s.size, int)}
        configs = info.card_data.to_dict().get("configs") if info.card_data else None
        if not COMMIT.fullmatch(info.sha or ""):
            raise Transient(f"an answer without a commit: {info.sha}")
        return Tree(repo, str(info.sha), sizes, configs if isinstance(configs, list) else [])

    return call_with_retries(url, attempt, patience=patience)


def _endpoint() -> str:
    """Return the address of the Hub. HF_ENDPOINT may have been set after `huggingface_hub` was imported."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def _cached_tree(repo: str, revision: str) -> Tree:
    """Return the files of a revision in the Hub's cache on this machine. Raises UserError when it has none."""
    from huggingface_hub import metadata_load, snapshot_download

    copy = f"revision {revision}" if revision else "copy"
    missing = f"hf://datasets/{repo}: HF_HUB_OFFLINE is set, and the Hub's cache on this machine has no {copy} of it"
    with explained(missing, Exception):
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision or None, local_files_only=True))
        sizes = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        card = folder / "README.md"
        configs = (metadata_load(card) or {}).get("configs") if card.is_file() else None
    return Tree(repo, folder.name, sizes, configs if isinstance(configs, list) else [])


class HfStore(HttpsStore):
    """Reads files of the Hub, or of its cache on this machine. URLs name a commit."""

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> Blobs:
        tree = tree_of(url, patience)
        path = split_url(url)[2]
        below = f"{path}/{start}" if path and url.endswith("/") else path + start
        there = [p for p in tree.sizes if p == below or (url.endswith("/") and self._is_in(p, path, below))]
        return [check_blob(Blob(tree.url(p), tree.sizes[p], f"hf:{tree.commit}")) for p in sorted(there)]

    def _is_in(self, path: str, folder: str, start: str) -> bool:
        return path.startswith(start) and "/" not in path[len(folder) + bool(folder) :]

    def walk(self, url: str, after: str = "") -> Iterator[Blob]:
        tree, (_, _, path) = tree_of(url), split_url(url)
        names = (p for p in sorted(tree.sizes) if not path or p.startswith(f"{path}/"))
        blobs = (Blob(tree.url(p), tree.sizes[p], f"hf:{tree.commit}") for p in names)
        yield from (blob for blob in blobs if blob.url > after)

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        if path := cached_file(url):
            data = new_buffer(length)
            with path.open("rb") as file:
                file.seek(start)
                if file.readinto(data) == length:
                    return data
        return super().read(url, start, length, tag=tag, patience=patience)

    def get(self, url: str) -> bytes:
        path = cached_file(url)
        return path.read_bytes() if path else super().get(url)

    def _open(self, url: str, tag: str = "", span: str = "") -> Any:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers

        if constants.HF_HUB_OFFLINE:
            raise UserError(f"{url}: HF_HUB_OFFLINE is set, and the Hub's cache on this machine does not have it")
        repo, revision, path = split_url(url)
        address = f"{_endpoint()}/datasets/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}"
        response = self._follow(address, build_hf_headers() | ({"Range": span} if span else {}))
        if is_page(response.headers):
            response.close()
            raise Transient(f"a page for a browser in place of the file (status {response.status})")
        return response


def cached_file(url: str) -> Path | None:
    """Return the path of a file in the Hub's cache on this machine, or None."""
    from huggingface_hub import try_to_load_from_cache

    repo, revision, path = split_url(url)
    known = try_to_load_from_cache(repo, path, revision=revision, repo_type="dataset") if path else None
    return Path(known) if isinstance(known, str) else None
