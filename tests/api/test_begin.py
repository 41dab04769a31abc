"""A run that is begun in a process of its own, as on a cluster's head, begins as in this one."""

import re
from pathlib import Path

import pytest
from helpers.runs import FAST, arguments

from eagleray.api import begin
from eagleray.base import child
from eagleray.base.errors import UserError
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.recipe import Recipe
from eagleray.runs.sources import resolve_paths

WORDS = ["eagleray", "pretrain", "small"]


def load(small: Path, shards: Path, out: Path, *keys: str) -> Recipe:
    name, *overrides = arguments(small, shards, out, *FAST, *keys)
    return resolve_paths(recipes.load(name, overrides))


@pytest.mark.slow
def test_a_run_begins_apart_as_here(small: Path, shards: Path, tmp_path: Path):
    here = begin.begin(load(small, shards, tmp_path / "run-here"), WORDS, insist=False)
    assert begin.begin_apart(load(small, shards, tmp_path / "run-apart"), WORDS, insist=False) == here
    for name in (layout.RECIPE, layout.ENVIRONMENT):
        one, other = ((tmp_path / folder / name).read_text() for folder in ("run-here", "run-apart"))
        assert other.replace("run-apart", "run-here") == one


def test_what_is_wrong_is_the_same_error(small: Path, shards: Path, tmp_path: Path):
    recipe = load(small, shards, tmp_path / "out", f"data.train={tmp_path / 'none'}")
    with pytest.raises(UserError, match=re.escape(f"data.train: {tmp_path / 'none'}: cannot be read")):
        begin.begin_apart(recipe, WORDS, insist=False)


def test_a_process_that_dies_is_an_error(small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child, "WATCH", "import os; os.kill(os.getpid(), 9)\n")
    with pytest.raises(RuntimeError, match=r"the process of eagleray\.api\.begin:begin_sent ended with status -9"):
        begin.begin_apart(load(small, shards, tmp_path / "out"), WORDS, insist=False)
