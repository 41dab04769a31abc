"""Evaluates SQL expressions about samples with DuckDB, which is kept from reading files.

A run that continues evaluates them again. So functions that may give another value then, such as random(), are refused.
Time and memory are limited, as the evaluation of an SQL expression may never end."""

import functools
import json
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.base.errors import UserError, first_line
from eagleray.base.threads import begin
from eagleray.config.source import Source
from eagleray.data.selection import check_weights

WHY = ("read", "excluded", "where is false", "where is null", "weight is 0")  # reasons why a sample is read, or not
CLOCKS = ("current_date", "current_time", "current_timestamp", "localtime", "localtimestamp")  # no brackets are needed
SHOWN = 200  # most characters of an expression that an error quotes
LIMIT = 60.0  # seconds to evaluate one expression
MEMORY = 4 * 2**30  # bytes to evaluate one expression
GRACE = 5.0  # seconds that an interrupted DuckDB has to end
LOOK = 0.05  # seconds between checks of the time and the memory
CONSTANT_TABLES = ("unnest", "range", "generate_series", "json_each", "json_tree")
UNSTABLE = f"""
    SELECT DISTINCT function_name FROM duckdb_functions()
    WHERE stability <> 'CONSISTENT' OR macro_definition LIKE '%current_%'
        OR function_name LIKE 'current_local%' -- which DuckDB takes for constants
        OR function_type = 'table' AND function_name NOT IN {CONSTANT_TABLES}
            AND function_name NOT IN (SELECT function_name FROM duckdb_functions() WHERE function_type = 'scalar')
"""


def evaluate(
    table: pa.Table, kept: NDArray[np.bool_], source: Source, there: str, key: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Return the weights (n,) of a table's rows by a source's `where` and `weight`, 0 for rows that are not `kept`
    (n,), and the position in WHY of each row's reason. Raises UserError for a wrong expression. The message begins with
    `key`, and quotes `there`, the list of known names."""
    where, weight = (
        f"{key}{k}: {shown(text or '')}" for k, text in (("where", source.where), ("weight", source.weight))
    )
    why = np.where(kept, WHY.index("read"), WHY.index("excluded")).astype(np.uint8)
    if source.where:
        found = _run(table, source.where, where, there)
        if not (pa.types.is_boolean(found.type) or pa.types.is_null(found.type)):
            raise UserError(f"{where}: expected true or false, got {found.type}")
        true = found.cast(pa.bool_()).fill_null(False).to_numpy()
        why[kept & ~true] = WHY.index("where is false")
        why[kept & found.is_null().to_numpy()] = WHY.index("where is null")
        kept = kept & true
    out = np.zeros(len(table))
    out[kept] = source.repeat
    if source.weight:
        found = _run(table.filter(pa.array(kept)), source.weight, weight, there)
        if not (pa.types.is_integer(found.type) or pa.types.is_floating(found.type) or pa.types.is_decimal(found.type)):
            raise UserError(f"{weight}: expected numbers, got {found.type}")
        out[kept] *= found.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()
        check_weights(np.append(out, 1), weight)  # 1 is appended, as all weights of some shards may be 0
        why[kept & (out == 0)] = WHY.index("weight is 0")
    return out, why


def _run(table: pa.Table, expression: str, name: str, there: str) -> pa.ChunkedArray:
    """Return an expression's value for every row. Raises UserError if it is invalid, or may differ at the next call."""
    import duckdb

    if any("\ud800" <= c <= "\udfff" for c in expression):  # surrogates, halves of a character in UTF-16
        raise UserError(f"{name}: has half of a character")
    # The connection is not closed: it ends with its last user, which may be a thread that does not stop.
    connection = duckdb.connect(":memory:", config={"threads": 1, "memory_limit": f"{MEMORY // 2**20}MiB"})
    connection.register("samples", table)
    for setting in ("temp_directory=''", "enable_external_access=false", "lock_configuration=true"):
        connection.execute(f"SET {setting}")
    sql = f"SELECT (\n{expression}\n) AS value FROM samples"
    expected = "expected columns and functions that depend on them alone"
    try:
        parts = list(parts_of(one_expression(connection, expression, name)))
    except RecursionError:
        raise UserError(f"{name}: is nested too deeply") from None
    if changing := changes_in(parts, table.column_names):
        raise UserError(f"{name}: {changing[0]} may give another value when the run continues; {expected}")
    if looks_at_others(parts):
        raise UserError(f"{name}: looks at other samples, of which it would see only some; {expected}")
    try:
        found = within_limits(connection, sql, name)
    except (duckdb.Error, RuntimeError, AttributeError) as e:
        names = f"; there are {there}" if "not found in FROM" in str(e) else ""
        raise UserError(f"{name}: {first_line(e) or type(e).__name__}{names}") from None
    if found.column_names != ["value"] or len(found) != len(table):
        raise UserError(f"{name}: gives {len(found)} values for {len(table)} samples; expected one for each")
    return found["value"]


def shown(text: str) -> str:
    """Return the beginning of a text, on one line, for an error message."""
    return " ".join(text.split())[:SHOWN].encode(errors="backslashreplace").decode()


def within_limits(connection: Any, sql: str, name: str) -> pa.Table:
    """Return the result of a statement. Raises UserError, beginning with `name`, when it takes more than LIMIT seconds
    or MEMORY bytes. Errors of DuckDB are raised as they are."""
    memory, began = psutil.Process(), time.monotonic()
    before, over = memory.memory_info().rss, ""
    # The statement runs in another thread, so that this one can go on without it. DuckDB notices an interruption only
    # between blocks of rows, and its memory limit does not count all of its memory.
    found = begin(lambda: connection.sql(sql).to_arrow_table(), "expression")
    while not over and not found.done():
        wait([found], LOOK)
        if time.monotonic() - began > LIMIT:
            over = f"takes more than {LIMIT:g} s"
        elif memory.memory_info().rss - before > MEMORY:
            over = f"takes more than {MEMORY / 2**30:g} GiB of memory"
    if over:
        connection.interrupt()
        wait([found], GRACE)
        raise UserError(f"{name}: {over}, the limit of an expression over all samples")
    return found.result()


def one_expression(connection: Any, expression: str, name: str) -> Any:
    """Return the syntax tree of an expression. Raises UserError, beginning with `name`, unless the text is exactly one
    expression, and RecursionError for a very deep one.

    It is parsed as the only element of a list. A text that closes the bracket or adds a statement or a second value
    changes the tree around the element."""
    import duckdb

    sql = f"SELECT [\n{expression}\n] AS value FROM samples"
    try:
        # For invalid SQL, this raises errors in DuckDB's own words.
        connection.extract_statements(f"SELECT (\n{expression}\n) AS value FROM samples")
        found, plain = (parsed(connection, text) for text in (sql, "SELECT [\n0\n] AS value FROM samples"))
    except duckdb.Error as e:
        raise UserError(f"{name}: {first_line(e) or type(e).__name__}") from None
    elements = _take_elements(found)
    _take_elements(plain)
    if len(elements) != 1 or found != plain:
        raise UserError(f"{name}: expected one expression, which gives one value")
    return elements[0]


def _take_elements(tree: Any) -> list[Any]:
    """Remove the elements of the only list that a statement selects from the statement's syntax tree, and return them;
    none for statements of another form. Also remove all positions in the text from the tree."""
    statements = tree.get("statements") or [{}]
    selected = statements[0].get("node", {}).get("select_list") or [{}]
    elements: list[Any] = next((selected[0].pop(key) for key in ("arguments", "children") if key in selected[0]), [])
    for part in parts_of(tree):
        part.pop("query_location", None)
        part.pop("query_location_length", None)
    return list(elements)


@functools.cache
def unstable() -> frozenset[str]:
    """Return the names of DuckDB's functions that may give another value at the next call."""
    import duckdb

    with duckdb.connect(":memory:") as connection:
        return frozenset(name for (name,) in connection.execute(UNSTABLE).fetchall())


def parsed(connection: Any, sql: str) -> Any:
    """Return the syntax tree of a statement, incomplete if DuckDB cannot parse the statement. Raises RecursionError."""
    ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    return json.loads(text)


def looks_at_others(parts: Sequence[dict[str, Any]]) -> bool:
    """Return whether an expression's value for a row depends on other rows of `samples`, by a window or a subquery.
    This table has only some of all rows, and DuckDB returns the values of windows in another order."""
    tables = {part["table_name"].lower() for part in parts if part.get("table_name")}
    return "samples" in tables or any(part.get("class") == "WINDOW" for part in parts)


def changes_in(parts: Sequence[dict[str, Any]], columns: Collection[str]) -> list[str]:
    """Return names for the `parts` of an expression that may give another value when it is evaluated again. `columns`
    are the columns of the table, which take precedence over CLOCKS."""
    found = []
    for part in parts:
        name = part.get("function_name", "")
        arguments = part.get("arguments", part.get("children", ()))  # DuckDB 2 and older versions name them differently
        if name in unstable() or (name == "age" and len(arguments) == 1):  # age with one argument depends on the clock
            found.append(f"{name}()")
        if part.get("sample"):
            found.append("a sample of rows")
        if part.get("class") == "COLUMN_REF":
            known = {column.lower() for column in columns}
            found += [n for n in part["column_names"] if n.lower() in CLOCKS and n.lower() not in known]
    return found


def parts_of(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings in a tree of JSON values."""
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from parts_of(part)
