"""A report as data, and the one HTML file that it becomes: no script, no style and no picture is outside of it."""

import base64
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

BUDGET = 3_000_000  # bytes of all pictures of evaluations together; a third more once written as text
LEAST = 20_000  # bytes of one of them, below which nothing could be seen
# Longer side in pixels and quality of a picture that is larger than its share, the first that fits.
SMALLER = ((1600, 90), (1200, 80), (900, 70), (600, 60), (400, 50))


@dataclass(frozen=True)
class Table:
    """The first cell of a row names it. A cell is text, a number or None."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Picture:
    source: str  # a data: URI
    alt: str
    caption: str


@dataclass(frozen=True)
class Pictures:
    pictures: Sequence[Picture]
    large: bool = False  # one below the other, not side by side
    kind: ClassVar[str] = "pictures"


@dataclass(frozen=True)
class Texts:
    """Text as it was written, each part under its name."""

    parts: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "texts"


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Table | Pictures | Texts]
    text: Sequence[str] = ()
    narrow: bool = False  # blocks stand side by side where there is room

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Tile:
    label: str
    value: Any
    hint: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    footer: str
    state: str = ""
    bad: bool = False  # the state is one that somebody must see to
    tiles: Sequence[Tile] = field(default=())


def signed(of: str) -> str:
    """A page's last line."""
    return f"{of} - written by eagleray report, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def render(page: Page) -> str:
    """The page as HTML; every text is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    template = environment.from_string(Path(__file__).with_name("page.html").read_text())
    return template.render(page=page).strip() + "\n"


def shown(value: Any) -> str:
    """A cell for people: numbers to four digits, a dash for nothing."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 10_000 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def uri(data: bytes, kind: str) -> str:
    """A data: URI; `kind` is such as svg+xml."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def inlined(path: Path, share: int) -> str:
    """A picture file as a URI of about `share` bytes at most, made smaller where it must be. Raises OSError for what is
    no picture."""
    from PIL import Image

    with Image.open(path) as image:
        kind = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp"}.get(image.format or "", "")
        small = image.convert("RGB")
    data = path.read_bytes()
    if kind and len(data) <= share:
        return uri(data, kind)
    for side, quality in SMALLER:
        small.thumbnail((side, side))
        small.save(buffer := io.BytesIO(), "WEBP", quality=quality)
        if buffer.tell() <= share:
            break
    return uri(buffer.getvalue(), "webp")
