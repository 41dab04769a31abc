"""A damaged metrics.jsonl or summary.json is read as far as it can be: a page and the continuation of a run leave out
the rest."""

import itertools
import json
from pathlib import Path

import pytest
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.mutations import change_bytes, change_tree
from helpers.run_folder import SUMMARY, records, write_run
from helpers.walks import check_all

from eagleray.base.files import JsonLines, read_history
from eagleray.reports import compare, listing, sections
from eagleray.reports.read import read
from eagleray.runs import layout, plots
from eagleray.runs.summary import finished


@pytest.mark.parametrize("count", counts(20))
def test_a_damaged_history_is_read_without_what_is_no_record(count: int | None, tmp_path: Path):
    run = write_run(tmp_path / "run", summary=None)
    path = run / layout.METRICS
    text = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with one_line(str(run)):
            list(sections.tiles(read(str(run))))
            sections.results(read(str(run)))
            plots.read(run)
        listing.list_runs(str(tmp_path), "loss")
        JsonLines(path, step=100).log({"step": 101, "loss": 1.0})  # as a run continues
        steps = [r["step"] for r in read_history(path)]
        assert steps[-1] == 101
        assert all(0 <= step <= 100 for step in steps[:-1])

    def lines(tree: object) -> bytes:
        return b"".join(json.dumps(r).encode() + b"\n" for r in (tree if isinstance(tree, list) else [tree]))

    trees = generators(count).map(lambda rng: lines(change_tree(rng, records())))
    examples(trees | generators(count).map(lambda rng: change_bytes(rng, text)), check, count, many=2000)


@pytest.mark.parametrize(
    "value", ['"0.5"', "null", "[1]", "true", "1" + 400 * "0"], ids=["text", "null", "list", "bool", "huge"]
)
def test_what_is_no_number_is_left_out(value: str, tmp_path: Path):
    run = write_run(tmp_path / "run", summary=None)
    with (run / layout.METRICS).open("a") as f:
        f.write(f'{{"step": 99, "epoch": {value}, "loss": {value}, "images_per_s": {value}, "data_wait": {value}}}\n')
    last = read(str(run)).records[-1]
    assert last == {"step": 99}
    assert "steps" in {tile.label for tile in sections.tiles(read(str(run)))}


def read_everything(run: Path) -> None:
    """Read the numbers of a run in every way that a page and a list have."""
    found = read(str(run))
    list(sections.tiles(found))
    sections.results(found)
    sections.times(found)
    compare.results({"a": found, "b": found})
    compare.hours({"a": found})
    plots.read(run)
    finished(run)
    listing.list_runs(str(run.parent), "knn/top1")


@pytest.mark.parametrize("count", counts(40))
def test_a_damaged_summary_is_read_without_what_is_no_number(count: int | None, tmp_path: Path):
    run = write_run(tmp_path / "run")
    path = run / layout.SUMMARY
    text = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with one_line(str(path)):
            read_everything(run)

    trees = generators(count).map(lambda rng: json.dumps(change_tree(rng, SUMMARY)).encode())
    examples(trees | generators(count).map(lambda rng: change_bytes(rng, text)), check, count, many=2000)


def test_a_number_of_a_summary_that_is_none_is_left_out(tmp_path: Path):
    run = write_run(tmp_path / "run")

    def check(key: str, value: str | None) -> None:
        given = {k: json.dumps(v) for k, v in SUMMARY.items()} | ({key: value} if value else {})
        kept = [f"{json.dumps(k)}: {v}" for k, v in given.items() if value or k != key]
        (run / layout.SUMMARY).write_text("{" + ", ".join(kept) + "}")
        read_everything(run)
        assert (finished(run) is None) == (key == "steps")

    check_all(check, itertools.product(SUMMARY, ['"x"', "null", "NaN", "-1", "1e300", None]))


def test_an_empty_summary_is_that_of_a_run_that_has_not_ended(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / layout.SUMMARY).write_text("{}")
    read_everything(run)
    assert finished(run) is None
