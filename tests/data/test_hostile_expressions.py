"""What a recipe's expressions may say: one expression about a sample's columns, which ends."""

import json
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.data import expressions

ROWS = 40
TABLE = pa.table({"key": [f"s{i}" for i in range(ROWS)], "label": pa.array(range(ROWS), pa.int64())})


def chosen(where: str) -> list[int]:
    """The samples that an expression chooses."""
    every = np.ones(ROWS, bool)
    weights, _ = expressions.evaluate(TABLE, every, Source(url="x", where=where), "key, label", "data.train.")
    return list(np.flatnonzero(weights))


def refused(where: str) -> str:
    with pytest.raises(UserError) as e:
        chosen(where)
    line = str(e.value)
    assert line.startswith("data.train.where: ")
    assert "\n" not in line
    line.encode()  # no half of a character
    return line


NOT_ONE = [
    "true) AS value FROM samples; CREATE TABLE x AS SELECT 1; SELECT (random() < 0.5",
    "true) AS value FROM samples; SELECT (random() < 0.5",
    "true) AS value FROM samples; SELECT (true",
    "true) AS value FROM samples UNION ALL SELECT (random() < 0.5",
    "true) AS value, (random() < 0.5",
    "true) AS value, (true",
    "true) OR (false",
    "true] AS value FROM samples; SELECT [random() < 0.5",
    "true], [true",
    "true][1] or [true",
    "true, true",
    "[label > 3 for label in [1",
    "",
    "-- nothing",
    "true; ",
    "COPY samples TO 'x.csv'",
    "label > 3 AS value",
]


@pytest.mark.parametrize("where", NOT_ONE)
def test_what_is_not_one_expression_is_refused(where: str):
    if where:
        refused(where)


@pytest.mark.parametrize("where", ["label > 3 -- and so on", "/* all */ label > 3", "(label) > (3)", "label >\n3"])
def test_comments_brackets_and_lines_are_part_of_an_expression(where: str):
    assert chosen(where) == list(range(4, ROWS))


def test_half_of_a_character_is_refused():
    assert "\\ud800" in refused("key = '\ud800'")


FRAGMENTS = [
    "true",
    "label > 3",
    "random() < 0.5",
    "(",
    ")",
    "[",
    "]",
    ",",
    ";",
    "--",
    "/*",
    "*/",
    "\n",
    "'",
    '"',
    "$$",
    "x",
]
FRAGMENTS += [
    " AS value FROM samples",
    "SELECT",
    "SELECT (",
    "CREATE TABLE x AS SELECT 1",
    "UNION ALL",
    " OR ",
    " FROM ",
    "1",
]
FRAGMENTS += [
    "(SELECT ",
    "samples",
    " WHERE ",
    "\ud800",
    "\0",
    "::",
    " AS ",
    "*",
    "key",
    "over ()",
    "FROM",
    "LIMIT 1",
    "e'\\''",
]
FRAGMENTS += [
    "current_date",
    "PRAGMA version",
    "SET threads=2",
    "nextval('s')",
    "lambda x: x",
    "?",
    "$1",
    "case when",
    "end",
]


def is_one_argument(text: str) -> bool:
    """Whether a text stands for one argument of a function, as DuckDB reads it."""
    asked = f"SELECT greatest(\n{text}\n, 42) AS value FROM samples"
    ((tree,),) = duckdb.sql("SELECT json_serialize_sql(?)", params=[asked]).fetchall()
    statements = json.loads(tree).get("statements") or []
    if len(statements) != 1:
        return False
    [part, *others] = statements[0]["node"]["select_list"]
    arguments: list[Any] = part.get("arguments", part.get("children", []))
    return not others and part.get("function_name") == "greatest" and len(arguments) == 2


@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=9).map("".join) | st.text(max_size=12))
@example("true) AS value FROM samples; SELECT (random() < 0.5")
@settings(max_examples=150, deadline=None)
def test_whatever_is_said_it_is_one_lasting_expression_or_one_line(where: str):
    line = ""
    try:
        once = chosen(where)
    except UserError as e:
        line = str(e)
    assert len(line.splitlines()) == bool(line)
    assert len(line.encode()) < 1000
    if line:
        return
    assert not where or is_one_argument(where)
    assert once == chosen(where), "another choice when the run continues"


ENDLESS = [
    "label < (WITH RECURSIVE r AS (SELECT 1 AS x UNION ALL SELECT x + 1 FROM r) SELECT max(x) FROM r)",
    "label < (SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000000) c)",
]


@pytest.mark.parametrize("where", ENDLESS)
def test_an_expression_without_an_end_is_ended(where: str, monkeypatch: pytest.MonkeyPatch):
    assert expressions.LIMIT <= 60
    monkeypatch.setattr(expressions, "LIMIT", 0.3)
    assert refused(where).endswith(": takes more than 0.3 s, the limit of an expression over all samples")


def test_an_expression_that_fills_the_memory_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expressions, "MEMORY", 2**28)
    doubled = "SELECT 'a' AS x UNION ALL SELECT x || x FROM r"
    line = refused(f"label < (WITH RECURSIVE r AS ({doubled}) SELECT max(length(x)) FROM r)")
    assert "takes more than 0.25 GiB of memory" in line or "Out of Memory" in line
