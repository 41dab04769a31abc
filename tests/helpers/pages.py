"""The pages of the documentation: their links, anchors and commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LOOSE = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = [ROOT / page for page in LOOSE] + sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)  # its language and its text


class Command(NamedTuple):
    """A command of a page as it is written; `whole` if a reader can type it, and not only a mention in a sentence."""

    page: str
    text: str
    whole: bool

    def words(self) -> list[str]:
        """Return the words after `eagleray`, with examples for what a reader has to replace and what is optional."""
        text = re.sub(r"(?<=\s)\[([^\[\]]*\]\.\.\.|options\])", "", self.text)  # [KEY=VALUE]...
        text = re.sub(r"(?<=\s)\[([A-Za-z-][^\[\]]*)\]", r"\1", text)  # [--json], and not a list of numbers
        text = re.sub(r"(?<= )([\w.=-]+)\|[\w.|-]+", r"\1", text)  # timm|onnx
        words = shlex.split(text, comments=True)[1:]
        words = words[: words.index(">")] if ">" in words else words
        words = [re.sub(r"^((?:seed|workers)=)?(?:N|MIB|P|R)$", r"\g<1>1", word) for word in words if word != "..."]
        return ["timm" if word == "LIBRARY" else word for word in words]


def typed(page: Path) -> list[str]:
    """Return the blocks of a page that have no language: what a reader types."""
    return [text for language, text in BLOCK.findall(page.read_text()) if not language]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands() -> Iterator[Command]:
    """Yield every command `eagleray ...` of the pages, but for those that the parser itself has written."""
    for page in PAGES:
        if "reference/" in name(page):
            continue
        text = page.read_text()
        for block in typed(page):
            for line in re.split(r"\n|&&|;", block.replace("\\\n", " ")):
                line = re.sub(r"^\s*(\w+=\S+ )*", "", line)
                if re.match(r"(?:\S*/)?eagleray\s", line):
                    yield Command(name(page), line, whole=True)
        for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
            if span.startswith("eagleray "):
                yield Command(name(page), " ".join(span.split()), whole=False)


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links, but for addresses."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Git hosts and the site make them."""
    out: set[str] = set()
    for title in re.findall(r"^#+ +(.*)", FENCE.sub("", page.read_text()), re.M):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        out.add(next(s for s in [slug, *(f"{slug}-{i}" for i in range(1, 99))] if s not in out))
    return out
