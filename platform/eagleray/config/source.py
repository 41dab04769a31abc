"""Parses the datasets of a recipe: one URL, or a list of URLs and of mappings with a repeat count."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Source:
    """Shards, and how often an epoch reads each of their samples; every reading draws new crops."""

    url: str  # folder, glob or brace pattern of shards; file or s3://
    repeat: Annotated[int, Field(gt=0)] = 1


def _as_list(value: Any) -> Any:
    items = [value] if isinstance(value, str) else value
    return [{"url": i} if isinstance(i, str) else i for i in items] if isinstance(items, list | tuple) else value


def _shortest_form(sources: tuple[Source, ...]) -> Any:
    """Return the sources in the shortest form that a recipe allows."""
    items = [s.url if s.repeat == 1 else {"url": s.url, "repeat": s.repeat} for s in sources]
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_list), PlainSerializer(_shortest_form)]
