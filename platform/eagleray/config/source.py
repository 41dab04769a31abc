"""Parses the datasets of a recipe: one URL or mapping, or a list of them."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Source:
    """Shards, and how often an epoch reads each of their samples; every reading draws new crops. docs/select.md
    describes the expressions."""

    url: str  # folder, glob or brace pattern of shards; file or s3://
    repeat: Annotated[int, Field(gt=0)] = 1
    where: str | None = None  # expression of SQL about a sample's columns: those for which it is true are read
    weight: str | None = None  # expression of SQL: how often an epoch reads a sample, in the mean
    exclude: str | None = None  # Parquet or CSV file with a column `key`: these samples are not read
    columns: Annotated[tuple[str, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = ()  # such files
    share: Annotated[float, Field(gt=0)] | None = None  # of an epoch, beside the shares of the other sources

    @property
    def selects(self) -> bool:
        """Return whether more than the URL and the repeat count decides what is read."""
        return any((self.where, self.weight, self.exclude, self.share))


def _as_list(value: Any) -> Any:
    items = [value] if isinstance(value, str | Mapping) else value
    return [{"url": i} if isinstance(i, str) else i for i in items] if isinstance(items, list | tuple) else value


def _shortest_form(sources: tuple[Source, ...]) -> Any:
    """Return the sources in the shortest form that a recipe allows."""
    items = [_short(s) for s in sources]
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def _short(source: Source) -> Any:
    """Return the URL of a source or, where more is said of it, a mapping without what is not."""
    given = {f.name: getattr(source, f.name) for f in fields(source)}  # type: ignore[arg-type]
    given = {f.name: v for f in fields(source) if (v := given[f.name]) != f.default or f.default is MISSING}  # type: ignore[arg-type]
    if "columns" in given:
        given["columns"] = list(source.columns)
    return source.url if given.keys() == {"url"} else given


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_list), PlainSerializer(_shortest_form)]
