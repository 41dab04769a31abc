"""Commands of pages that are sent to a cluster run on a real head of Ray and a real S3 server: in the order of their
page, with small models under the papers' names."""

import json
from collections.abc import Iterator

import pytest
from helpers import ray_auth, reader_home
from helpers.commands import run
from helpers.page_share import FOUND, HEAD_PAGES, on_head
from helpers.ray_head import TOKEN, Head, running
from helpers.s3.server import store_of

from eagleray.config import bundled
from eagleray.storage import store

pytestmark = pytest.mark.slow
LONG = ["data.train=s3://bucket/train", "out=s3://bucket/runs/long", "optim.epochs=400"]  # a run to be stopped


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head, a store with data that its jobs read, and the folder and environment of a reader's terminal."""
    folder = tmp_path_factory.mktemp("home")
    reader_home.labelled(folder / "labelled")
    reader_home.imagenet(folder, "folder of the tar")
    (folder / "tuned.yaml").write_text(reader_home.TUNED)
    with store_of(folder / "store", "bucket"), running() as head, pytest.MonkeyPatch.context() as patch:
        reader_home.upload("s3://bucket/train", (folder / "labelled" / "train").iterdir())
        reader_home.upload("s3://bucket/val", (folder / "labelled" / "test").iterdir())
        reader_home.upload("s3://bucket", [folder / "ILSVRC2012_img_train.tar"])
        for i, path in enumerate(sorted((folder / "labelled" / "train").iterdir())):
            store.store("s3://bucket").put(f"s3://bucket/train-{i:03d}.tar", path)
        patch.setattr(bundled, "tree", reader_home.shipped)
        for name in ("RAY_AUTH_MODE", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("RAY_API_SERVER_ADDRESS", head.address)
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_AUTH_MODE", "token")
        ray_auth.read_again()
        patch.chdir(folder)
        yield head


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", HEAD_PAGES)
def test_commands_for_a_cluster_run_on_a_head(page: str, head: Head, capsys: pytest.CaptureFixture[str]):
    for command in (c for c in FOUND if c.page == page and on_head(c)):
        words = reader_home.adapted(command)
        if words[0] == "stop":
            run("submit", "dino_vits16_in1k_ep100", *LONG)
        if words[0] == "submit":
            for place in reader_home.written_by(words[1:]):
                reader_home.clear(place)
            words += ["--follow"] if "--follow" not in words else []  # so that its status is that of the job
        run(*(last(capsys) if word == "ID" else word for word in words))
    capsys.readouterr()
    run("jobs", "--json")
    states = {j["id"]: j["state"] for j in json.loads(capsys.readouterr().out)}
    assert states
    assert all(state == ("stopped" if name.startswith("long-") else "succeeded") for name, state in states.items())


def last(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the id of the job that was sent last."""
    capsys.readouterr()
    run("jobs", "--json")
    return json.loads(capsys.readouterr().out)[-1]["id"]
