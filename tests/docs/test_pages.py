"""Every page: its links lead somewhere, its commands parse, and what is written from the code is up to date."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from helpers import pages
from helpers.page_share import FOUND as TYPED
from helpers.page_share import RUN, runs
from helpers.pages import PAGES, ROOT, Command, anchors, links, name
from helpers.recipes import METHODS
from helpers.walks import check_all
from PIL import Image

from eagleray.api.job_commands import COMMANDS
from eagleray.cli import main
from eagleray.config import bundled
from eagleray.runs import recipe

GROUP = typer.main.get_command(main.app)
FOUND = list(pages.commands())
RECIPES = ("pretrain", "show", "plan", "submit")  # whose first word is a recipe and whose others are its keys


def test_every_link_leads_to_a_file_and_a_heading():
    def check(page: Path, target: str) -> None:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists()
        assert file.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(file)

    check_all(check, ((page, target) for page in PAGES for target in links(page)), lambda of: f"{name(of[0])}: {of[1]}")


def test_every_command_parses():
    def check(command: Command) -> None:
        words = command.words()
        kind: Any = GROUP
        while hasattr(kind, "commands") and words:
            assert words[0] in kind.commands or words[0].startswith("-")
            if words[0].startswith("-"):  # an option of eagleray itself
                return
            kind = kind.commands[words.pop(0)]
        if command.whole or words:
            parse(kind, words, partial=not command.whole)

    check_all(check, FOUND, called)


def called(command: Command) -> str:
    return f"{command.page}: {command.text}"


def parse(kind: Any, words: list[str], *, partial: bool) -> None:
    """Parse the words of a command, and load the recipe that they name with the keys that they change."""
    try:
        values = kind.make_context(kind.name, list(words)).params
    except Exception as error:
        if not (
            partial and re.search("Missing|BadOptionUsage", type(error).__name__)
        ):  # a mention need not be complete
            pytest.fail(f"{' '.join(words)}: {error}")
        return
    if kind.name == "submit" and values["name"] in COMMANDS:
        parse(GROUP.commands[values["name"]], own(values["words"]), partial=True)
    elif kind.name in RECIPES and values["name"] in bundled.names():
        keys = own(values.get("overrides") or values.get("words") or ())
        recipe.load(values["name"], [key for key in keys if "=" in key])


def own(words: Any) -> list[str]:
    """Return the words that a submitted command gets: not the options of `submit`."""
    text = re.sub(r"--(follow|gpus \S+|address \S+)", "", "\0".join(words).replace("\0", " \0"))
    return [word.strip() for word in text.split("\0") if word.strip()]


def test_blocks_that_a_reader_types_have_no_language():
    """What looks for commands reads the blocks without one."""

    def check(page: Path) -> None:
        languages = {language for language, _ in pages.BLOCK.findall(page.read_text())}
        assert not languages & {"bash", "sh", "shell", "console", "zsh"}

    check_all(check, PAGES, name)


def test_every_command_that_a_reader_can_type_runs_in_a_test():
    assert [called(command) for command in TYPED if not runs(command)] == []


def test_pages_that_run_as_a_whole_and_their_tests_exist():
    assert all((ROOT / page).exists() and (ROOT / "tests" / test).exists() for page, test in RUN.items())


def test_every_make_target_of_the_pages_is_one():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = page.read_text()
        typed = [*pages.FENCE.findall(text), *re.findall(r"`make [^`]+`", pages.FENCE.sub("", text))]
        named = re.findall(r"(?:^|`)make ([a-z-]+)", "\n".join(typed), re.M)
        assert set(named) <= targets, name(page)


def test_pages_that_are_written_from_the_code_are_up_to_date():
    docs = ROOT / "docs"
    for page, text in runpy.run_path(str(docs / "reference.py"))["pages"]().items():
        assert (docs / page).read_text() == text, f"{page}: run `python docs/reference.py`"


def test_the_picture_of_the_rooms_is_that_of_the_code():
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    drawn = Image.open(ROOT / "docs" / "images" / "rooms.png").info[figures["NOTE"]]
    assert drawn == figures["digest"](), "run `python docs/figures.py`"


def test_every_method_has_a_figure_that_is_up_to_date():
    drawn = runpy.run_path(str(ROOT / "docs" / "method_figures.py"))
    shown = re.findall(r"\(images/methods/(\w+)\.png\)", (ROOT / "docs" / "methods.md").read_text())
    assert sorted(shown) == sorted(drawn["FIGURES"])
    twins = {"byol_regions", "selfpatch_moby", "supervised", "drloc"}  # two of them in the sections of others
    assert set(METHODS) - twins == set(shown)
    for method, spec in drawn["FIGURES"].items():
        note = Image.open(drawn["IMAGES"] / f"{method}.png").info[drawn["NOTE"]]
        assert note == repr(spec), f"{method}: run `python docs/method_figures.py`"


def test_the_pages_have_no_more_words_than_somebody_reads():
    counting = runpy.run_path(str(ROOT / "docs" / "count.py"))
    counted = sum(counting["words"](page.read_text()) for page in counting["pages"]())
    assert 40_000 < counted <= 58_000, "merge pages or shorten some: `python docs/count.py`"


def test_every_page_is_in_the_navigation_of_the_site():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w./-]+\.md", str(yaml.safe_load(text)["nav"]))
    there = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    there -= {p for p in there if re.match(r"decisions/\d", p)}  # listed by decisions/README.md
    assert len(listed) == len(set(listed))
    assert set(listed) - there == {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "benchmarks/README.md",
        "deploy/README.md",
    }
    assert not there - set(listed)
