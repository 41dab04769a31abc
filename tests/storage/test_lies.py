"""Whatever a server answers, the caller gets the right bytes, or one line: UserError at once, or Outage in its time."""

import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.fuzzing import counts, examples, generators
from helpers.lying_cloud import ERROR, OTHER_XML, PAGE, LyingCloud, Said, draw_lie, lying
from helpers.naps import pass_at_once

from eagleray.base.errors import Outage, UserError
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import Allowed
from eagleray.storage.listing import Page
from eagleray.storage.store import Store

DATA = bytes(n * 7 % 256 for n in range(900))
NAMES = [f"x-{n:03d}.tar" for n in range(7)]  # of two pages
BUCKETS = ("s3", "gs", "az")
ALWAYS = 10**6


@pytest.fixture(scope="module")
def server() -> Iterator[LyingCloud]:
    with lying() as server:
        yield server


@pytest.fixture
def cloud(server: LyingCloud, monkeypatch: pytest.MonkeyPatch) -> LyingCloud:
    pass_at_once(monkeypatch)
    server.times = 0
    server.asked.clear()
    server.files["b"] = {}
    for name in NAMES:
        server.write("b", f"train/{name}", DATA)
        server.write("web", f"train/{name}", DATA)
    for scheme in (*BUCKETS, "http"):
        store.STORES[scheme].allowed = Allowed()  # nothing has been asked for yet
    return server


def folder(cloud: LyingCloud, scheme: str) -> str:
    return f"http://127.0.0.1:{cloud.port}/web/train" if scheme == "http" else f"{scheme}://b/train"


def at(url: str) -> Store:
    return store.store(url)


def tag(cloud: LyingCloud, scheme: str) -> str:
    cloud.times = 0
    return at(url := f"{folder(cloud, scheme)}/{NAMES[0]}").list(url)[0].tag


def tell(cloud: LyingCloud, lie: Callable[[Said], None], times: int = ALWAYS, *, swallow: bool = False) -> None:
    cloud.lie, cloud.times, cloud.swallow = lie, times, swallow


def right(blobs: list[Blob]) -> bool:
    return [(b.url.rpartition("/")[2], b.size) for b in blobs] == [(n, len(DATA)) for n in NAMES]


def ask(cloud: LyingCloud, scheme: str, what: str, known: str) -> str:
    """Make a request, and return how it ended: right, wrong, refused or out. Any other error is one of ours."""
    url, new, where = f"{folder(cloud, scheme)}/{NAMES[0]}", f"new/{secrets.token_hex(4)}", folder(cloud, scheme)
    stored = f"{scheme}://b/{new}"
    try:
        match what:
            case "read":
                good = at(url).read(url, 100, 500, tag=known) == DATA[100:600]
            case "get":
                good = at(url).get(url) == DATA
            case "look":
                good = at(url).look(url)[0] == DATA
            case "list":
                blobs = at(where).list(url if scheme == "http" else f"{where}/")
                good = not blobs or blobs[0].size == len(DATA) if scheme == "http" else right(blobs)
            case "write":
                at(stored).write(stored, b"new")
                good = cloud.files["b"][new].data == b"new"
            case _:
                good = not at(stored).create(stored, b"new") or cloud.files["b"][new].data == b"new"
    except Outage as e:
        return "out" if "\n" not in str(e) else "wrong"
    except (UserError, FileNotFoundError) as e:
        return "refused" if "\n" not in str(e) else "wrong"
    except OSError:
        return "refused" if what in ("write", "create") else "wrong"
    return "right" if good else "wrong"


@pytest.mark.parametrize("count", counts(120))
def test_no_answer_ends_in_wrong_bytes_or_a_raw_error(cloud: LyingCloud, count: int | None) -> None:
    """What passes in two answers is an outage never: it has been asked for again."""
    tags = {scheme: tag(cloud, scheme) for scheme in (*BUCKETS, "http")}

    def check(rng: Random) -> None:
        scheme = rng.choice((*BUCKETS, "http"))
        what = rng.choice(("read", "list", *(("get", "look", "write", "create") * (scheme != "http"))))
        times = rng.choice((1, 2, ALWAYS))
        tell(cloud, draw_lie(rng), times, swallow=rng.random() < 0.3)
        ended = ask(cloud, scheme, what, tags[scheme])
        cloud.times = 0
        assert ended != "wrong", (scheme, what)
        assert ended != "out" or times > 2, (scheme, what)

    examples(generators(count), check, count, many=1500)


def replaced(status: int = 0, body: bytes | None = None, **headers: str | None) -> Callable[[Said], None]:
    """Return a lie that replaces the status, the body with its length, and headers; None takes one away."""

    def lie(said: Said) -> None:
        said.status = status or said.status
        if body is not None:
            said.body, said.headers["Content-Length"] = body, str(len(body))
        for name, value in headers.items():
            said.headers.pop(name.replace("_", "-"), None)
            if value is not None:
                said.headers[name.replace("_", "-")] = value

    return lie


READS = {
    "ignored range": replaced(200, DATA, Content_Range=None),
    "an error of the same length": replaced(200, ERROR.ljust(500)),
    "a short error": replaced(200, ERROR, Content_Range=None, ETag=None),
    "a login": replaced(200, PAGE, Content_Range=None, ETag=None, Content_Type="text/html"),
    "another place": replaced(Content_Range="bytes 101-600/900"),
    "less": replaced(body=DATA[100:500], Content_Range="bytes 100-499/900"),
    "longer": replaced(body=DATA[100:700]),
    "no part": replaced(Content_Range=None),
    "negative": replaced(Content_Length="-1"),
    "text": replaced(Content_Length="many"),
    "no length": replaced(Content_Length=None, Content_Range="bytes 100-599/9"),
    "text for a range": replaced(Content_Range="bytes 0-x/y"),
    "huge": replaced(Content_Range="bytes 100-599/" + "9" * 5000),
    "moved": replaced(307, Location="http://127.0.0.1:1/x"),
    "moved to a file": replaced(302, Location="file:///etc/passwd"),
    "moved nowhere": replaced(302, Location=None),
    "another version": replaced(ETag='"other"', **{"x-goog-generation": "1"}),
    "an empty answer": replaced(200, b"", Content_Range=None, ETag=None),
}


@pytest.mark.parametrize("lie", READS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("scheme", [*BUCKETS, "http"])
def test_a_false_answer_to_a_read_passes_or_is_an_outage(cloud: LyingCloud, scheme: str, lie: str) -> None:
    known = tag(cloud, scheme)
    tell(cloud, READS[lie], 2)
    lasting = scheme == "http" and lie == "another version"  # many web servers do not know If-Match
    assert ask(cloud, scheme, "read", known) == ("refused" if lasting else "right")
    tell(cloud, READS[lie])
    assert ask(cloud, scheme, "read", known) == ("refused" if lasting else "out")


@pytest.mark.parametrize("scheme", [*BUCKETS, "http"])
def test_an_answer_in_chunks_is_read(cloud: LyingCloud, scheme: str) -> None:
    def chunks(said: Said) -> None:
        said.chunks = True

    known = tag(cloud, scheme)
    tell(cloud, chunks)
    assert ask(cloud, scheme, "read", known) == "right"
    assert scheme == "http" or ask(cloud, scheme, "get", known) == ask(cloud, scheme, "list", known) == "right"


def changed(old: str, new: str) -> Callable[[Said], None]:
    def lie(said: Said) -> None:
        said.body = re.sub(old.encode(), new.encode(), said.body)
        said.headers["Content-Length"] = str(len(said.body))

    return lie


ENTITIES = "".join(f"<!ENTITY a{n} '{f'&a{n - 1 or 0};' * 10}'>" for n in range(1, 10))
BILLION = (
    f"<!DOCTYPE l [<!ENTITY a0 'aaaaaaaa'>{ENTITIES}]><ListBucketResult><IsTruncated>false</IsTruncated>"
    "<Contents><Key>&a9;</Key></Contents></ListBucketResult>"
).encode()
LISTS = {
    "html": ("", replaced(body=PAGE)),
    "empty": ("", replaced(body=b"")),
    "another kind": ("", replaced(body=OTHER_XML)),
    "json": ("", replaced(body=b"{}")),
    "negative": ("", changed("900", "-5")),
    "text for a size": ("", changed("900", "many")),
    "huge": ("", changed("900", str(2**62))),
    "other keys": ("", changed("train/x-001", "other/../../etc/x")),
    "no end": ("s3", changed("<IsTruncated>.*?</IsTruncated>", "")),
    "no token": ("s3", changed("<NextContinuationToken>.*?</NextContinuationToken>", "")),
    "no tags": ("s3", changed("<ETag>.*?</ETag>", "")),
    "no sizes": ("s3", changed("<Size>.*?</Size>", "")),
    "no tags of Azure": ("az", changed("<Etag>.*?</Etag>", "")),
    "no sizes of Google": ("gs", changed('"size": "900", ', "")),
    "an error": ("s3", replaced(body=ERROR)),
}


@pytest.mark.parametrize("lie", LISTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("scheme", BUCKETS)
def test_a_listing_that_is_none_passes_or_is_an_outage(cloud: LyingCloud, scheme: str, lie: str) -> None:
    only, change = LISTS[lie]
    if only and only != scheme:
        return
    tell(cloud, change, 2)
    assert ask(cloud, scheme, "list", "") == "right"
    tell(cloud, change)
    assert ask(cloud, scheme, "list", "") == "out"


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_a_listing_that_unpacks_to_gigabytes_is_an_outage(cloud: LyingCloud, scheme: str) -> None:
    tell(cloud, replaced(body=BILLION))
    with pytest.raises(Outage):
        at(f"{scheme}://b/train/").list(f"{scheme}://b/train/", patience=0.01)


@pytest.mark.parametrize("circle", ["token", "files", "nothing"])
@pytest.mark.parametrize("scheme", BUCKETS)
def test_a_listing_ends(cloud: LyingCloud, scheme: str, circle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins anew, by its token or by its files, or that goes on and on without any."""
    monkeypatch.setattr("eagleray.storage.listing.EMPTY", 20)
    numbers = iter(range(10**6))

    def page(bucket: str, prefix: str, delimiter: str, marker: str) -> Any:
        blobs = [] if circle == "nothing" else [Blob(f"{scheme}://b/train/x", 1, "t")]
        return Page(blobs, [], "same" if circle == "token" else str(next(numbers)))

    monkeypatch.setattr(at(f"{scheme}://b/x"), "_page", page)
    with pytest.raises(Outage, match="a listing that goes in a circle after"):
        at(f"{scheme}://b/x").list(f"{scheme}://b/train/")
    assert next(numbers) < 100


def test_a_listing_of_more_files_than_anybody_has_is_refused_and_a_long_one_said(
    cloud: LyingCloud, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eagleray.storage.listing.IN_FOLDER", 6)
    monkeypatch.setattr("eagleray.storage.listing.SAID", -1.0)
    cloud.write("b", "train/y.tar", b"")
    for n in range(5):
        cloud.write("b", f"train/z-{n}.tar", b"")
    with pytest.raises(UserError, match="s3://b/train/: more than 6 files are listed there"):
        at("s3://b/x").list("s3://b/train/")
    assert "s3://b/train/: 5 files are listed after" in caplog.text


@pytest.mark.parametrize("scheme", BUCKETS)
@pytest.mark.parametrize("what", ["write", "create"])
def test_what_a_proxy_swallows_is_sent_again(cloud: LyingCloud, scheme: str, what: str) -> None:
    tell(cloud, replaced(200, PAGE), 2, swallow=True)
    assert ask(cloud, scheme, what, "") == "right"
    tell(cloud, replaced(200, PAGE), swallow=True)
    assert ask(cloud, scheme, what, "") == "out"


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_an_upload_in_pieces_ends_whatever_is_answered(
    cloud: LyingCloud, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagleray.storage.gs.PIECE", 2**18)
    monkeypatch.setattr("eagleray.storage.az.PART", 2**18)
    (tmp_path / "large").write_bytes(secrets.token_bytes(2**20))
    url = f"{scheme}://b/large"
    for lie in (
        replaced(308, b""),
        replaced(308, b"", Range="bytes=0-9999999"),
        replaced(308, Range="x"),
        replaced(200, PAGE),
    ):
        tell(cloud, lie)
        with pytest.raises((Outage, OSError)):
            at(url).put(url, tmp_path / "large", patience=1)
    cloud.times = 0
    at(url).put(url, tmp_path / "large")
    assert cloud.files["b"]["large"].data == (tmp_path / "large").read_bytes()


@pytest.mark.parametrize("status", [403, 400, 405])
@pytest.mark.parametrize("scheme", BUCKETS)
def test_a_refusal_that_lasts_is_no_outage(cloud: LyingCloud, scheme: str, status: int) -> None:
    tell(cloud, replaced(status, ERROR.replace(b"SlowDown", b"AccessDenied")))
    for what in ("read", "get", "look", "list", "write"):
        assert ask(cloud, scheme, what, "") == "refused", what
    assert cloud.asked.total() <= 10  # each once, or again by botocore, which looks for the bucket's region
