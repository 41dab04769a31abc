"""Parses the datasets of a recipe: one URL or mapping, or a list of them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT

SCALAR = str | int | float  # YAML reads the name of a folder such as 2024 as a number


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, SCALAR) else value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Source:
    """Shards, and how often an epoch reads each of their samples, every time with new crops.

    docs/select.md describes the expressions."""

    url: str  # folder, glob or brace pattern of shards, as a local path or a store's URL
    repeat: Annotated[int, Field(gt=0)] = 1
    where: str | None = None  # SQL expression over a sample's columns; only samples for which it is true are read
    weight: str | None = None  # SQL expression for how often an epoch reads a sample, on average
    exclude: str | None = None  # Parquet or CSV file with a column `key`, the keys of samples that are not read
    columns: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()  # Parquet or CSV files with more columns
    share: Annotated[float, Field(gt=0)] | None = None  # part of an epoch, relative to the shares of other sources
    image: str | None = None  # column of the images in Parquet files; needed if several columns may hold images
    label: str | None = None  # column of the classes in Parquet files; None: no classes
    licence: str | None = None  # licence of the images, if no data card beside them states it

    @property
    def selects(self) -> bool:
        """Return whether expressions, excluded keys or a share select samples, besides the URL and the repeat count."""
        return any((self.where, self.weight, self.exclude, self.share))


def _as_list(value: Any) -> Any:
    items = [value] if isinstance(value, SCALAR | Mapping) else value
    return [{"url": i} if isinstance(i, SCALAR) else i for i in items] if isinstance(items, list | tuple) else value


def _shortest_form(sources: tuple[Source, ...]) -> Any:
    """Return the sources in the shortest form that a recipe allows."""
    items = [_short(s) for s in sources]
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def _short(source: Source) -> Any:
    """Return the URL of a source or, if other fields are set, a mapping of the URL and these fields."""
    bare, given = vars(Source(url=source.url)), vars(source)
    more = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items() if k in bare and v != bare[k]}
    return {"url": source.url, **more} if more else source.url


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_list), PlainSerializer(_shortest_form)]
