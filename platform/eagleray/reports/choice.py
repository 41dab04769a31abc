"""A section of a page on which samples are read and which are left out, in numbers and with images drawn at random."""

from dataclasses import dataclass
from typing import Any

from eagleray.reports.page import Picture, Pictures, Section, Table


@dataclass(frozen=True)
class Choice:
    """The choice of samples of a data set, in plain values that a run can store in its folder."""

    digest: str  # digest of the weights with which samples are read
    tables: list[tuple[str, list[str], list[list[Any]]]]  # caption, names of columns, and rows of each table
    sheets: list[tuple[str, str]]  # name and data: URI of each contact sheet of images
    text: list[str]

    def __post_init__(self) -> None:
        for caption, columns, rows in self.tables:
            if not columns or any(len(row) != len(columns) for row in rows):
                raise ValueError(f"tables: {caption!r}: expected columns, and as many cells in each row")

    def section(self, title: str) -> Section:
        """Return the choice as a section of a page with this title: its tables, contact sheets and text."""
        pictures = [Picture(source, f"{name} images", f"{name}, at random") for name, source in self.sheets]
        return Section(title, [*(Table(*table) for table in self.tables), Pictures(pictures)], self.text)
