#!/usr/bin/env python
"""Rewrites the table of data sets in docs/finetune.md from the catalogue."""

from pathlib import Path

from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.sources.source import Dataset

PAGE = Path(__file__).with_name("finetune.md")
START, END = "<!-- written by docs/datasets.py: -->\n", "<!-- :written by docs/datasets.py -->\n"


def page(text: str) -> str:
    """Return the page with a new table between START and END."""
    before, _, rest = text.partition(START)
    table = "| NAME | Splits | Classes | FROM contains |\n| --- | --- | --- | --- |\n"
    table += "".join(row(name, dataset) for name, dataset in DATASETS.items() if dataset.contents)
    return before + START + "\n" + table + "\n" + END + rest.partition(END)[2]


def row(name: str, dataset: Dataset) -> str:
    """Return the line of one data set; the two splits that together make another one follow a semicolon."""
    splits = [f"{count:,} `{split}`" for split, count in dataset.splits.items()]
    cells = ", ".join(splits[:2]) + "".join(f"; {', '.join(splits[2:])}" for _ in splits[2:3])
    return f"| `{name}` | {cells} | {dataset.classes:,} | {dataset.contents} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
