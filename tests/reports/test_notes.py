"""What a person or another version has written into a run's folder: a page shows it, or one line says what is wrong."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.mutations import change_bytes, change_tree
from helpers.run_folder import SUMMARY, lines, write_run
from typer.testing import CliRunner

from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.reports import compare, listing, plots, sections
from eagleray.reports.page import Page, render
from eagleray.reports.read import read

NOTES: dict[str, Any] = {
    "plan.json": {"line": "fits", "memory": {"weights": 2**30}, "phases": [{"until": 1}], "images_per_s": 90.0},
    "choice.json": {
        "digest": "0",
        "tables": [["Left out", ["Why", "Images"], [["small", 3]]]],
        "sheets": [["kept", "data:image/png;base64,"]],
        "text": ["Half of them."],
    },
    "environment.json": {"python": "3.11", "packages": {"torch": "2.11"}, "gpus": ["H100"], "command": ["eagleray"]},
    ".failure": {"user": True, "why": "data.train: gone"},
}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "health.jsonl": [{"step": 67, "kind": "spike", "text": "gradients 52 times their median"}],
    "skipped.jsonl": [{"step": 30, "keys": ["a", "b"]}],
    "quarantine.jsonl": [{"shard": "s3://b/a.tar", "key": "k", "offset": 0, "reason": "truncated"}],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has failed, with all notes; its curves are not drawn."""
    monkeypatch.setattr(plots, "draw_panel", lambda *_, **__: None)
    monkeypatch.setattr(sections, "figures", lambda pictures: [])
    folder = write_run(tmp_path / "run", summary=None)
    for name, note in NOTES.items():
        (folder / name).write_text(json.dumps(note))
    for name, rows in HISTORIES.items():
        lines(folder / name, rows)
    return folder


def page(folder: Path) -> Page:
    """The page of a run, which is also on one that compares it, and in a list."""
    found = read(str(folder))
    whole = sections.page(found, folder / "report")
    render(whole).encode()
    compare.states({"a": found})
    compare.results({"a": found})
    compare.differences({"a": found, "b": found})
    return whole


def test_a_page_shows_the_notes(folder: Path):
    text = render(page(folder))
    for shown in ("fits", "Half of them.", "H100", "data.train: gone", "52 times", "a, b", "truncated"):
        assert shown in text, shown


@pytest.mark.parametrize("name", [*NOTES, *HISTORIES, "recipe.yaml"])
@pytest.mark.parametrize("count", counts(40))
def test_a_note_is_shown_or_refused_in_one_line(name: str, count: int | None, folder: Path):
    path = folder / name
    text = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with one_line(name):
            page(folder)
        [found] = listing.list_runs(str(folder.parent), "loss")
        assert found.state in ("failed", "damaged") or name == ".failure"

    def written(rng: Random) -> bytes:
        if name == "recipe.yaml":
            return yaml.safe_dump(change_tree(rng, yaml.safe_load(text))).encode()
        if name in NOTES:
            return json.dumps(change_tree(rng, NOTES[name])).encode()
        rows = change_tree(rng, HISTORIES[name])
        return b"".join(json.dumps(r).encode() + b"\n" for r in (rows if isinstance(rows, list) else [rows]))

    examples(
        generators(count).map(written) | generators(count).map(lambda rng: change_bytes(rng, text)),
        check,
        count,
        many=2000,
    )


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("recipe.yaml", "optim: 3", "optim: expected keys with values, got 3"),
        ("recipe.yaml", "optim: {epochs: x}", "optim.epochs: input should be a valid integer or a valid number, got"),
        ("recipe.yaml", "method: [simclr]", "method: expected keys with values, got"),
        (".failure", "out of memory", "not valid JSON"),
        (".failure", "{}", "why: missing"),
        ("plan.json", '{"x": 1}', "line: missing"),
        ("choice.json", "[1]", "expected a JSON object, got a list"),
        ("choice.json", '{"digest": "0", "x": 1}', "tables: missing"),
        (
            "choice.json",
            '{"digest": "0", "tables": [["Kept", ["A"], [["x", 1]]]], "sheets": [], "text": []}',
            "tables: 'Kept': expected columns, and as many cells in each row",
        ),
    ],
)
def test_what_cannot_be_shown_is_named(name: str, text: str, line: str, folder: Path):
    (folder / name).write_text(text)
    with pytest.raises(UserError) as said:
        page(folder)
    assert str(said.value).startswith(f"{folder / name}: {line}")


def test_half_a_surrogate_pair_is_shown_as_its_code(folder: Path):
    (folder / ".failure").write_text(json.dumps({"user": True, "why": "s3://b/\ud800.tar: gone"}))
    assert "s3://b/\\ud800.tar: gone" in render(page(folder)).encode().decode()


def test_the_short_form_of_a_method_is_a_name(folder: Path):
    (folder / "recipe.yaml").write_text("method: simclr\n")
    assert "simclr" in page(folder).title
    [found] = listing.list_runs(str(folder.parent), "loss")
    assert found.method == "simclr"


def test_one_odd_folder_does_not_hide_the_others(folder: Path):
    write_run(folder.parent / "good", summary=SUMMARY)
    (folder / "recipe.yaml").write_text("optim: 3")
    done = CliRunner().invoke(main.app, ["runs", str(folder.parent)], catch_exceptions=False)
    assert [line.split()[0] for line in done.output.splitlines() if "finished" in line] == ["good"]
    assert "damaged" in done.output


@pytest.mark.parametrize("name", HISTORIES)
def test_lines_that_say_something_else_are_left_out_and_told_of(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
):
    lines(folder / name, [{"step": 1}, *HISTORIES[name]])
    page(folder)
    [record] = caplog.records
    assert record.getMessage().startswith(f"{folder / name}: left out 1 of 2 lines, which have no ")
