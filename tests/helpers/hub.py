"""A server on loopback that speaks what `huggingface_hub` and we need of the Hugging Face Hub for data sets.

with Hub() as hub:
    hub.commit("owner/name", {"data/train-0.parquet": data})
    hub.point_at(patch)
"""

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_the_test"


class Hub:
    """Listens inside its `with`. A private data set is there for whoever sends TOKEN."""

    def __init__(self) -> None:
        self.sets: dict[str, dict[str, dict[str, bytes]]] = {}  # files by data set and commit
        self.heads: dict[tuple[str, str], str] = {}  # commits by data set and branch
        self.cards: dict[str, Any] = {}
        self.private = set[str]()
        self.asked: Counter[str] = Counter()  # requests by kind
        self.fail = 0  # so many requests are answered with 503

    def commit(self, name: str, files: dict[str, bytes], branch: str = "main", card: Any = None) -> str:
        """Make a commit with these files in addition to those before, and return it."""
        before = self.sets.setdefault(name, {}).get(self.heads.get((name, branch), ""), {})
        files = before | files
        commit = hashlib.sha1(repr((name, branch, sorted(files.items()))).encode()).hexdigest()
        self.sets[name][commit], self.heads[name, branch] = files, commit
        self.cards[name] = card or self.cards.get(name)
        return commit

    def point_at(self, patch: pytest.MonkeyPatch) -> None:
        """Let this process, and those that it starts, ask this server without a token."""
        patch.setenv("HF_ENDPOINT", self.url)
        patch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
        patch.delenv("HF_TOKEN", raising=False)

    def __enter__(self) -> "Hub":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.hub
        api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path)
        hub.asked["api" if api else "file"] += 1
        found = api or file
        if hub.fail:
            hub.fail -= 1
            self._answer(503, b"busy")
        elif not found or found[1] not in hub.sets or (found[1] in hub.private and not self._known()):
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif api:
            self._info(api[1], api[2] or "main")
        elif (data := hub.sets[found[1]].get(found[2], {}).get(found[3])) is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self._part(data)

    do_HEAD = do_GET

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _info(self, name: str, revision: str) -> None:
        commit = self.hub.heads.get((name, revision), revision)
        if commit not in self.hub.sets[name]:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Revision not found"})
            return
        files = self.hub.sets[name][commit]
        siblings = [{"rfilename": path, "size": len(data), "blobId": "0" * 40} for path, data in files.items()]
        info = {"id": name, "sha": commit, "siblings": siblings, "cardData": self.hub.cards[name], "tags": []}
        self._answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _part(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked:
            self._answer(200, data)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        self._answer(206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
