#!/usr/bin/env python
"""Counts the words of the pages that a user reads, those of the site's navigation.

Left out are decisions, the log of failed experiments, the changelog, and everything that a script writes: reference/,
recipes/, the model card in vit/, and all text between or behind marks `<!-- written by ... -->`. Commands in blocks
count: they are read, too.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = re.compile(r"(decisions|reference|recipes|vit)/|(log|CHANGELOG)\.md$")
WRITTEN = re.compile(
    r"<!-- written by (\S+?):? -->.*?<!-- :written by \1 -->|<!-- (from here on )?written by .*", re.DOTALL
)
WORD = re.compile(r"\S*\w\S*")


def words(text: str) -> int:
    """Return the number of words of a page; targets of links and rules of tables are none."""
    return len(WORD.findall(re.sub(r"\]\([^)\s]*\)", "]", WRITTEN.sub("", text))))


def pages() -> list[Path]:
    """Return the files of the navigation, and README.md of the repository."""
    named = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    files = [ROOT / "docs" / name if (ROOT / "docs" / name).exists() else ROOT / name for name in named]
    return [ROOT / "README.md", *(file for file, name in zip(files, named, strict=True) if not OUT.search(name))]


if __name__ == "__main__":
    counts = {page.relative_to(ROOT).as_posix(): words(page.read_text()) for page in pages()}
    for name, count in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{count:7,} {name}")
    print(f"{sum(counts.values()):7,} in {len(counts)} pages")
