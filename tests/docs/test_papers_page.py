"""docs/papers.md has every row of the papers, counts them correctly, and names what is there."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from braceexpand import braceexpand
from helpers.walks import check_all

from eagleray.config import bundled
from eagleray.evaluation.registry import PROTOCOLS
from eagleray.runs import recipe

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "papers.md").read_text()
# The letter of a paper's rows, its name in the table of counts, and how many rows it has.
PAPERS = {
    "E": ("EsViT", 67),
    "M": ("MoCo v3", 47),
    "S": ("MoCo v3's slides", 21),
    "F": ("SelfPatch's supplement", 20),
    "D": ("DRLoc", 25),
}
SOURCES = r"EsViT|MoCo v3|SelfPatch|DRLoc"  # in `published` of a recipe


class Row(NamedTuple):
    """A row of the page: what is in the paper, how a user gets it, its state, and what is missing or differs."""

    id: str
    paper: str
    here: str
    state: str
    limits: str

    def spans(self) -> list[str]:
        """Return what the row names as code, with every name that braces stand for."""
        return [name for span in re.findall(r"`([^`]+)`", self.here + self.limits) for name in braceexpand(span)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


ROWS = [Row(*cells(line)) for line in re.findall(r"^\| [A-Z]\d\d \|.*", TEXT, re.M)]


def test_every_row_is_there_once() -> None:
    assert [row.id for row in ROWS] == [f"{letter}{i:02}" for letter, (_, n) in PAPERS.items() for i in range(1, n + 1)]


def test_the_counts_are_those_of_the_rows() -> None:
    counted = Counter((row.id[0], row.state) for row in ROWS)
    lines = {name: list(map(int, n)) for name, *n in map(cells, re.findall(r"^\| [^|]+ (?:\| \d+ )+\|$", TEXT, re.M))}
    for letter, (name, rows) in PAPERS.items():
        assert lines[name][0] == rows
        assert lines[name][1:] == [counted[letter, state] for state in "WPN"], name
    total = lines.pop("all")
    assert total == [sum(column) for column in zip(*lines.values(), strict=True)]
    assert f"{total[0]} rows" in TEXT


def test_a_row_says_how_it_is_had_or_why_it_is_not() -> None:
    def check(row: Row) -> None:
        assert row.paper
        assert row.state in ("W", "P", "N")
        assert bool(row.here) == (row.state != "N")
        assert row.limits or row.state == "W"

    check_all(check, ROWS, lambda row: row.id)


def test_what_a_row_names_is_there() -> None:
    check_all(check_names, ROWS, lambda row: row.id)


def check_names(row: Row) -> None:
    """Recipes load with the keys behind them; sweeps, protocols with their options, and scripts exist."""
    for span in row.spans():
        name, *rest = span.split()
        if name in bundled.names():
            if rest:  # loading takes a while, and names without keys are loaded by other tests
                recipe.load(name, rest)
        elif name in PROTOCOLS:
            options = (option.removeprefix("--").replace("-", "_") for option in rest[::2])
            PROTOCOLS[name].parse(dict(zip(options, rest[1::2], strict=True)))
        elif name == "python":
            assert (ROOT / rest[0]).is_file(), span
        elif name == "eagleray":  # docs/test_pages.py parses commands
            continue
        else:
            assert name in bundled.names("sweep") or name.startswith("timm:"), span


def test_every_row_with_regions_from_a_later_epoch_says_so() -> None:
    """EsViT's section 2.2 has its loss on regions from the start."""
    trees = {name: bundled.tree(name)["method"] for name in bundled.names() if name.startswith("esvit")}
    late = {name for name, method in trees.items() if isinstance(method, dict) and method.get("region_from")}

    def check(row: Row) -> None:
        if late & {span.split()[0] for span in row.spans()}:
            assert re.search(r"L_R|see E\d\d", row.paper + row.limits)

    assert late
    check_all(check, ROWS, lambda row: row.id)


def test_every_recipe_that_a_paper_published_is_on_the_page() -> None:
    named = {span.split()[0] for row in ROWS for span in row.spans()}
    published = {
        name
        for name, shipped in bundled.recipes().items()
        if any(re.search(SOURCES, entry["source"]) for entry in shipped.published)
    }
    assert not published - named
