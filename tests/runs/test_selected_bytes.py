"""What a run that reads half of its samples fetches from a real store, also when it is killed in an epoch."""

from pathlib import Path

import numpy as np
import pytest
from helpers.runs import FAST, arguments, start, wait_for_step
from helpers.s3.proxy import Proxy
from helpers.s3.server import point_at, store_of

from eagleray.base.files import read_lines
from eagleray.data import index_file
from eagleray.data.index import Index, open_index, write_index
from eagleray.storage import store

EPOCHS, BLOCK = 4, 16_384
LANES = 8  # of the recipe `small`
LIMIT = 32  # training images of an evaluation, as FAST has it
URL = "s3://data/train"


def kept_bytes(index: Index) -> int:
    """The bytes of the images that are kept, with the headers between neighbours."""
    mine, end = np.flatnonzero(index.label % 2 == 0), index.offset + index.size
    gaps = index.offset[mine[1:]] - end[mine[:-1]]
    return int(index.size[mine].sum() + gaps[np.diff(mine) == 1].clip(0).sum())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_fetches_little_but_what_it_keeps(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index_file, "BLOCK", BLOCK)  # so that small shards have many blocks
    out = tmp_path / "out"
    with store_of(tmp_path / "s3", "data") as server, Proxy(server.port) as proxy:
        for path in (shards / "train").iterdir():
            store.store(URL).put(f"{URL}/{path.name}", path)
        write_index(URL)
        index = open_index(URL)
        point_at(monkeypatch, proxy.port)
        keys = (f"optim.epochs={EPOCHS}", "checkpoint.steps=1", "log_steps=1", "evaluate.every=0", *FAST)
        recipe, _, *more = arguments(small, shards, out, *keys)
        given = [recipe, f'data.train={{url: "{URL}", where: "label % 2 = 0"}}', *more]
        run = start(given)
        wait_for_step(out, 3, run)
        run.kill()
        run.wait()
        second = start(given)
        assert second.wait(200) == 0, second.communicate()[0]
        fetched = sum(n for path, n in proxy.bytes.items() if path.endswith(".tar"))
    assert 0.4 < index.size[index.label % 2 == 0].sum() / index.size.sum() < 0.6
    _, start_again = [line for line in read_lines(out / "starts.jsonl") if "step" in line]
    kept, steps = kept_bytes(index), int((index.label % 2 == 0).sum()) // 32
    repeated = kept * (start_again["reached"] - start_again["step"]) / steps
    asked = LANES * 2 * BLOCK  # the two blocks of each lane that were asked for when the run was killed
    evaluated = 2 * LIMIT * int(index.size.max())  # before the first step and after the last one
    assert kept * (EPOCHS - 1) < fetched <= 1.1 * kept * EPOCHS + repeated + asked + evaluated
