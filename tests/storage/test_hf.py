"""Data sets of the Hugging Face Hub: which files a URL selects, at which commit, with whose token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.hub import TOKEN, Hub
from helpers.naps import pass_at_once

from eagleray.base.errors import Outage, UserError
from eagleray.storage import hf, store
from eagleray.storage.https import HttpsStore
from eagleray.storage.store import check_writable, list_shards

NAME = "owner/name"
URL = f"hf://datasets/{NAME}"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    from huggingface_hub import constants

    server.sets.clear()
    server.heads.clear()
    server.cards.clear()
    server.private.clear()
    server.asked.clear()
    hf._known.clear()
    server.point_at(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return server


def selected(url: str) -> list[str]:
    return [blob.url.partition(f"{NAME}@")[2].partition("/")[2] for blob in list_shards(url)]


SPLIT = {f"data/{split}-0000{n}-of-00002.parquet": b"x" * 9 for split in ("train", "test") for n in range(2)}
TRAIN = sorted(name for name in SPLIT if "train" in name)
CARD = {"configs": [{"config_name": "default", "data_files": [{"split": "learn", "path": "data/train-*"}]}]}
TWO = {
    "configs": [
        {"config_name": "large", "data_files": [{"split": "train", "path": "large/*.parquet"}]},
        {"config_name": "small", "data_files": [{"split": "train", "path": ["small/**"]}]},
    ]
}


@pytest.mark.parametrize(
    ("files", "card", "end", "wanted"),
    [
        (SPLIT, None, "/train", TRAIN),
        (SPLIT, None, "/data/train-*", TRAIN),
        (SPLIT, None, "/data", sorted(SPLIT)),
        (SPLIT, None, f"/{TRAIN[0]}", TRAIN[:1]),
        (SPLIT, CARD, "", TRAIN),
        (SPLIT, CARD, "/learn", TRAIN),
        (SPLIT, None, "", "has the splits test, train; name one, such as hf://datasets/owner/name/train"),
        (SPLIT, None, "/val", "no file, folder or split val; name one, such as hf://datasets/owner/name/train"),
        ({"x.parquet": b"x", "sub/y.parquet": b"y", "_z.parquet": b""}, None, "", ["sub/y.parquet", "x.parquet"]),
        ({"x-train.tar": b"x", "x-val.tar": b"y"}, None, "/train", ["x-train.tar"]),
        ({"large/a.parquet": b"x", "small/b/c.parquet": b""}, TWO, "/small", ["small/b/c.parquet"]),
        ({"large/a.parquet": b"x", "small/b/c.parquet": b""}, TWO, "/large/train", ["large/a.parquet"]),
        (
            {"large/a.parquet": b"x", "small/b/c.parquet": b""},
            TWO,
            "",
            "is several data sets, large, small; add /large",
        ),
        ({"images.zip": b"x"}, None, "", "no .parquet or .tar files there, but 1 .zip; the Hub's own conversion"),
    ],
)
def test_a_url_selects_files(hub: Hub, files: dict[str, bytes], card: Any, end: str, wanted: Any):
    hub.commit(NAME, files, card=card)
    if isinstance(wanted, str):
        with pytest.raises(UserError) as e:
            selected(URL + end)
        assert wanted in str(e.value)
    else:
        assert selected(URL + end) == wanted


def test_a_file_is_that_of_its_commit(hub: Hub):
    first = hub.commit(NAME, {"train.parquet": b"first"})
    [old] = list_shards(URL)
    second = hub.commit(NAME, {"train.parquet": b"second"})
    [new] = list_shards(URL)
    assert (old.url, old.size, old.tag) == (f"{URL}@{first}/train.parquet", 5, f"hf:{first}")
    assert (new.url, new.size, new.tag) == (f"{URL}@{second}/train.parquet", 6, f"hf:{second}")
    assert list_shards(f"{URL}@{first}") == [old]
    assert bytes(store.store(old.url).read(old.url, 1, 3)) == b"irs"
    assert store.store(new.url).get(new.url) == b"second"
    hub.commit(NAME, {"a/train.parquet": b"converted"}, branch="refs/convert/parquet")
    assert selected(f"{URL}@refs/convert/parquet/a") == ["a/train.parquet"]
    asked = hub.asked["api"]
    assert list_shards(f"{URL}@{first}") == [old]
    assert hub.asked["api"] == asked, "a commit is asked for once"


def test_a_private_set_wants_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.commit(NAME, {"train.parquet": b"first"})
    hub.private.add(NAME)
    with pytest.raises(UserError) as e:
        list_shards(URL)
    assert str(e.value) == f"{URL}: the Hub has no such data set, or a private one; {hf.TOKEN}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    [blob] = list_shards(URL)
    assert bytes(store.store(URL).read(blob.url, 0, 5)) == b"first"


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("hf://owner/name", "expected hf://datasets/OWNER/NAME"),
        ("hf://datasets/owner", "expected hf://datasets/OWNER/NAME"),
        (f"{URL}@nothing", "has no revision nothing"),
        ("hf://datasets/owner/none", "the Hub has no such data set, or a private one"),
    ],
)
def test_mistakes_are_one_line(hub: Hub, url: str, line: str):
    hub.commit(NAME, {"train.parquet": b"first"})
    with pytest.raises(UserError, match=line):
        list_shards(url)


def test_a_hub_that_is_busy_is_asked_again_and_one_that_is_gone_is_an_outage(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    naps = pass_at_once(monkeypatch)
    hub.commit(NAME, {"train.parquet": b"first"})
    hub.fail = 2
    [blob] = list_shards(URL)
    hub.fail = 2
    assert bytes(store.store(URL).read(blob.url, 0, 5)) == b"first"
    assert len(naps) >= 4
    hub.fail = 10**6
    try:
        with pytest.raises(Outage, match=URL):
            list_shards(URL, patience=1.0)
    finally:
        hub.fail = 0


def test_what_the_cache_of_this_machine_has_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where `hf download` has put it."""
    from huggingface_hub import constants

    commit = hub.commit(NAME, {"data/train-0.parquet": b"first", "data/test-0.parquet": b"test"}, card=CARD)
    place = tmp_path / "hub" / "datasets--owner--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "snapshots" / commit / "data").mkdir(parents=True)
    (place / "snapshots" / commit / "data" / "train-0.parquet").write_bytes(b"first")
    [blob] = list_shards(f"{URL}/learn")
    assert bytes(store.store(URL).read(blob.url, 0, 5)) == b"first"
    assert hub.asked == {"api": 1}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert list_shards(URL) == [blob]
    assert hub.asked == {"api": 1}
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and the Hub's cache on this machine has no copy"):
        list_shards("hf://datasets/owner/other")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and the Hub's cache on this machine does not have it"):
        store.store(URL).read(f"{URL}@{commit}/data/test-0.parquet", 0, 4)


def test_nothing_is_written_there():
    with pytest.raises(UserError, match="can only be read"):
        check_writable(f"{URL}/runs", "out")


def test_a_token_stays_with_the_hub(monkeypatch: pytest.MonkeyPatch):
    """Its files are sent from elsewhere."""
    sent: list[tuple[str, dict[str, str]]] = []

    class Answer:
        def __init__(self, status: int) -> None:
            self.status, self.headers = status, {"Location": "https://files.example/x?signature=1"}

        def close(self) -> None:
            pass

    def send(self: HttpsStore, method: str, address: str, *, headers: Any, **_: Any) -> Answer:
        sent.append((address, dict(headers)))
        return Answer(206 if "files" in address else 302)

    monkeypatch.setattr(HttpsStore, "_send", send)
    headers = {"authorization": "Bearer x", "Range": "bytes=0-1"}
    assert HttpsStore()._follow("https://hub.example/x", headers).status == 206
    assert sent == [
        ("https://hub.example/x", headers),
        ("https://files.example/x?signature=1", {"Range": "bytes=0-1"}),
    ]
