"""Numbers that a caller in Python gives are checked before anything is read or written."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import eagleray
from eagleray.base.errors import UserError
from eagleray.base.numbers_given import whole
from eagleray.evaluation.embed import embed


def embedded(**keys: Any) -> None:
    target: Any = SimpleNamespace(settings=SimpleNamespace(size=32, resize=32))
    embed(target, "none", None, kind="pooled", **keys)


def clustered(**keys: Any) -> None:
    eagleray.find_clusters("none", "none", **keys)


def prepared(**keys: Any) -> None:
    eagleray.prepare("folder", "none", "out", workers=0, **keys)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: prepared(size=0), "size=0: expected a whole number from 1 on"),
        (lambda: prepared(size=0.5), "size=0.5: expected a whole number"),
        (lambda: prepared(size="128"), "size='128': expected a whole number"),
        (lambda: prepared(size=True), "size=True: expected a whole number from 1 on"),
        (lambda: prepared(max_side=-5), "max_side=-5: expected a whole number from 0 on"),
        (lambda: prepared(min_side=32.5), "min_side=32.5: expected a whole number"),
        (lambda: prepared(seed=-1), "seed=-1: expected a whole number from 0 on"),
        (lambda: prepared(seed=1.5), "seed=1.5: expected a whole number"),
        (lambda: embedded(size=0), "size=0: expected a whole number from 1 on"),
        (lambda: embedded(size=-5), "size=-5: expected a whole number from 1 on"),
        (lambda: embedded(resize=32.5), "resize=32.5: expected a whole number"),
        (lambda: clustered(clusters=[2.5]), "clusters=2.5: expected a whole number"),
        (lambda: clustered(clusters=3), "clusters=3: expected a list of whole numbers, such as [3]"),
        (lambda: clustered(seed=-1), "seed=-1: expected a whole number from 0 on"),
        (lambda: clustered(workers=-1), "workers=-1: expected a whole number from 0 on"),
        (lambda: eagleray.prepare("folder", "none", "o", workers=-1), "workers=-1: expected a whole number from 0 on"),
        (lambda: eagleray.measure("none", workers=-1), "workers=-1: expected a whole number from 0 on"),
        (lambda: eagleray.tune("none", max_concurrent=-1), "max_concurrent=-1: expected a whole number from 1 on"),
        (lambda: eagleray.report([]), "runs=[]: expected a run, a sweep, or several runs"),
        (lambda: eagleray.watch("none", 99999), "port=99999: expected a whole number from 0 to 65535"),
    ],
)
def test_a_wrong_number_is_one_line_and_writes_nothing(
    call: Callable[[], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as e:
        call()
    assert str(e.value) == said
    assert not list(tmp_path.iterdir())


def test_whole_numbers_of_numpy_count():
    assert type(whole("size", np.int64(3), 1)) is int
