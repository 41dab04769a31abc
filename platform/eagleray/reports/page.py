"""Define the parts of a report, and render them as one HTML file that needs no other file."""

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

from eagleray.base import files
from eagleray.base.errors import UserError

BUDGET = 3_000_000  # largest size in bytes of all evaluations' pictures together, before base64 adds a third
LEAST = 20_000  # smallest limit in bytes per picture, however many share BUDGET: less would show nothing
FORMATS = ("PNG", "JPEG", "WEBP")  # formats that browsers show, and that PIL reads without starting a program
PIXELS = 50_000_000  # pictures with more pixels are not decoded
# For a picture above its size limit: longer sides in pixels and WebP qualities, which are tried until one fits.
SMALLER = ((1600, 90), (1200, 80), (900, 70), (600, 60), (400, 50))


@dataclass(frozen=True)
class Table:
    """A table of a page. The first cell of each row is its name. A cell is text, a number or None."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Picture:
    """A picture with its caption, and a text for readers who cannot see it."""

    source: str  # a data: URI
    alt: str
    caption: str


@dataclass(frozen=True)
class Pictures:
    """A group of pictures on a page."""

    pictures: Sequence[Picture]
    large: bool = False  # whether the pictures are one below the other instead of side by side
    kind: ClassVar[str] = "pictures"


@dataclass(frozen=True)
class Texts:
    """Pairs of a name and a text, such as lines of a log, which is shown unchanged."""

    parts: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "texts"


@dataclass(frozen=True)
class Section:
    """A titled part of a page, made of tables, pictures and texts."""

    title: str
    blocks: Sequence[Table | Pictures | Texts]
    text: Sequence[str] = ()
    narrow: bool = False  # whether its blocks are side by side where the page is wide enough

    @property
    def anchor(self) -> str:
        """Return the HTML id of the section, to which the table of contents links."""
        return re.sub(r"[^a-z]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Tile:
    """One of the large numbers at the top of a page."""

    label: str
    value: Any
    hint: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report, ready to be rendered."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    footer: str
    state: str = ""
    bad: bool = False  # whether the state is one in which somebody must act
    tiles: Sequence[Tile] = field(default=())


def footer_text(of: str) -> str:
    """Return the last line of a page: what the page is `of`, and when it was written."""
    return f"{of} - written by eagleray report, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def check_page(option: str, path: Path, url: str) -> None:
    """Raises UserError when `path`, the value of `option`, is a file, but not a page about the data at `url`."""
    from markupsafe import escape

    footer = escape(footer_text(url.rstrip("/")).rpartition(",")[0])
    own = f"<footer>{footer}".encode(errors="backslashreplace")
    with files.writing(f"{option}{path}"):
        if path.exists() and own not in path.read_bytes():
            raise UserError(f"{option}{path}: is there, and is no page about {url}; give another name")


def render(page: Page) -> str:
    """Return the page as HTML, with texts escaped. Lone surrogates, which UTF-8 cannot encode, are shown as codes."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    template = environment.from_string(Path(__file__).with_name("page.html").read_text())
    text = template.render(page=page).strip() + "\n"
    return text.encode(errors="backslashreplace").decode()


def shown(value: Any) -> str:
    """Return the value of a cell as text: a number with four digits, and a dash for None or an empty text."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 10_000 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def uri(data: bytes, kind: str) -> str:
    """Return bytes as a data: URI. `kind` is the image type, such as svg+xml."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture_uri(path: Path, share: int) -> str:
    """Return a picture file as a data: URI of about `share` bytes at most. A larger picture is shrunk. Raises OSError
    when the file is not a picture, or has too many pixels."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            kind = (image.format or "").lower()
            if image.width * image.height > PIXELS:
                raise OSError(f"{path}: more than {PIXELS:,} pixels")
            small = image.convert("RGB")
    except (SyntaxError, ValueError, Image.DecompressionBombError) as e:  # incomplete files and decompression bombs
        raise OSError(f"{path}: {e}") from None
    if path.stat().st_size <= share:
        return uri(path.read_bytes(), kind)
    for side, quality in SMALLER:
        small.thumbnail((side, side))
        small.save(buffer := io.BytesIO(), "WEBP", quality=quality)
        if buffer.tell() <= share:
            break
    return uri(buffer.getvalue(), "webp")
