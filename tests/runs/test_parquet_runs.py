"""A run on Parquet files, killed and continued, ends with the weights of one on tars whose blocks hold the same images:
from a folder, from a bucket of a real S3 server, and from the Hugging Face Hub."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hub import Hub
from helpers.parquet import write_hub
from helpers.pictures import jpeg, sample, write_tar
from helpers.runs import FAST, assert_same, split, start, wait_for_step, weights
from helpers.s3.server import store_of

from eagleray.api.pretrain import pretrain
from eagleray.base.files import read_lines
from eagleray.storage import store

STEPS, SHARDS = 20, 2
MORE = (f"max_steps={STEPS}", "checkpoint.steps=4", *FAST)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tars/ and files/, each with train and test."""
    folder = tmp_path_factory.mktemp("sets")
    for split_name, count in ("train", 160), ("test", 32):
        for shard in range(SHARDS):
            keys = range(shard * count, (shard + 1) * count)
            write_tar(folder / "tars" / split_name / f"{split_name}-{shard}.tar", [m for k in keys for m in sample(k)])
            rows = [(jpeg(key), key % 10) for key in keys]
            write_hub(folder / "files" / split_name / f"{split_name}-{shard}.parquet", rows)
    return folder


@pytest.fixture(scope="module")
def whole(sets: Path, tmp_path_factory: pytest.TempPathFactory, untracked_runs: None) -> Path:
    """A run on the tars, which nobody kills."""
    from helpers.recipes import SMALL

    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.yaml").write_text(SMALL)
    given = [f"data.{name}={sets / 'tars' / name}" for name in ("train", "test")]
    pretrain(str(folder / "small.yaml"), [*given, f"out={folder / 'run'}", *MORE])
    return folder / "run"


@pytest.fixture(params=["folder", "bucket", "hub"])
def place(request: pytest.FixtureRequest, sets: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """What data.train and data.test are."""
    files = sorted((sets / "files").glob("*/*.parquet"))
    if request.param == "folder":
        yield str(sets / "files" / "train"), str(sets / "files" / "test")
    elif request.param == "bucket":
        with store_of(tmp_path / "s3", "photos"):
            for path in files:
                url = f"s3://photos/{path.parent.name}/{path.name}"
                store.store(url).put(url, path)
            yield "s3://photos/train/*.parquet", "s3://photos/test"
    else:
        with Hub() as hub, pytest.MonkeyPatch.context() as patch:
            hub.commit("owner/name", {f"data/{path.name}": path.read_bytes() for path in files})
            hub.point_at(patch)
            yield "hf://datasets/owner/name/train", "hf://datasets/owner/name/test"


def test_a_killed_run_has_the_weights_of_one_on_tars(place: tuple[str, str], whole: Path, small: Path, tmp_path: Path):
    out, cache = tmp_path / "run", {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MLFLOW_TRACKING_URI": "none"}
    command = [str(small), f"data.train={place[0]}", f"data.test={place[1]}", f"out={out}", *MORE]
    process = start(command, **cache)
    wait_for_step(out, 6, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 6 <= read_lines(out / "metrics.jsonl")[-1]["step"] < STEPS
    process = start(command, **cache)
    text = process.communicate(timeout=600)[0]
    assert process.returncode == 0, text
    assert read_lines(out / "metrics.jsonl")[-1]["step"] == STEPS
    assert_same(weights(out), weights(whole))


def test_another_revision_does_not_continue_a_run(sets: Path, small: Path, tmp_path: Path, untracked_runs: None):
    """The line says which one does."""
    files = {
        f"train-{n}.parquet": (sets / "files" / "train" / f"train-{n}.parquet").read_bytes() for n in range(SHARDS)
    }
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        commit = hub.commit("owner/name", files)
        hub.point_at(patch)
        command = [str(small), "data.train=hf://datasets/owner/name", f"out={tmp_path / 'run'}", *FAST, "log_steps=1"]
        pretrain(*split([*command, "max_steps=4"]))
        hub.commit("owner/name", {"README.md": b"a word"})
        with pytest.raises(Exception, match=f"train-0.parquet has changed, which was of revision {commit}"):
            pretrain(*split([*command, "max_steps=8"]))
        pinned = f"data.train=hf://datasets/owner/name@{commit}"
        pretrain(*split([command[0], pinned, *command[2:], "max_steps=8"]))
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 8
