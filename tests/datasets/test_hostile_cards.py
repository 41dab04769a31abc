"""A dataset.json from a stranger is shown, or refused in a line that names it."""

import json
from pathlib import Path

import pytest
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.layouts import fill, run_prepare
from helpers.mutations import change_bytes, change_tree

from eagleray.datasets import card


@pytest.mark.parametrize("count", counts(150))
def test_a_changed_card_is_shown_or_refused(count: int | None, tmp_path: Path):
    fill(tmp_path / "in", [f"{c}/{i}.jpg" for c in "ab" for i in range(3)])
    run_prepare("folder", tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out" / card.NAME
    text = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with one_line(f"{path}: not a {card.NAME}"):
            assert all(len(line) < 50_000 for line in card.lines(card.read(str(tmp_path / "out"))))

    trees = generators(count).map(lambda rng: json.dumps(change_tree(rng, json.loads(text))).encode())
    examples(trees | generators(count).map(lambda rng: change_bytes(rng, text)), check, count, many=400)


def test_a_text_that_nobody_reads_to_its_end_is_cut(tmp_path: Path):
    fill(tmp_path / "in", ["a/0.jpg", "b/0.jpg"])
    run_prepare("folder", tmp_path / "in", tmp_path / "out")
    known = card.read(str(tmp_path / "out"))
    line = next(line for line in card.lines(known | {"licence": "x" * 10**6}) if "licence" in line)
    assert line.startswith("source   folder")
    assert line.endswith("xxx ...")
    assert len(line) < 20_000
