"""Chooses samples by expressions of SQL about columns: those of the index, and those of tables of the user's.

DuckDB evaluates the expressions; it can read no files meanwhile. Rows pass through it in parts, so that memory does not
grow with the data.
"""

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.data import sample_table
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable, complete_tables
from eagleray.data.selection import Selection, check_weights
from eagleray.storage.store import parent, store

KEY = "data.train"
OWN = {"key": "key", "shard": "", "label": "label", "bytes": "size"}  # columns of every index, and their names there
ROWS = 2**20  # that pass through DuckDB at a time
MEASURED = "columns"  # the folder of measured columns beside the shards, and what their tables are
NAMES = re.compile(r'"([^"]+)"|([A-Za-z_]\w*)')


def select(index: Index) -> Selection | None:
    """Return how often each sample is read by what the sources of an index say; None where they say nothing. Raises
    UserError and Outage."""
    sources = list(dict.fromkeys(index.sources))
    if not any(source.selects for source in sources):
        return None
    weight, shares = np.zeros(len(index), np.float64), [source.share for source in sources]
    if None in shares and any(shares):
        raise UserError(f"{KEY}: some sources have a share and others none; give all of them one")
    mine = [np.flatnonzero([s == source for s in index.sources]) for source in sources]
    for source, shards in zip(sources, mine, strict=True):
        for rows, values in zip(rows_of(index, shards), weights_of(index, shards, source), strict=True):
            weight[rows] = values
    check_weights(weight, KEY)
    if all(shares):
        _share_out(weight, index, [(s, float(s.share or 0), m) for s, m in zip(sources, mine, strict=True)])
        check_weights(weight, f"{KEY}.share")
    return Selection(weight.astype(np.float32))


def rows_of(index: Index, shards: NDArray[np.int64]) -> Iterator[slice]:
    """Yield the samples of each of some shards."""
    for shard in shards.tolist():
        yield slice(int(index.first[shard]), int(index.first[shard + 1]))


def _share_out(weight: NDArray[np.float64], index: Index, sources: Sequence[tuple[Source, float, Any]]) -> None:
    """Scale the weights so that each source has its share of an epoch, which stays as long as it is."""
    total, whole = float(weight.sum()), sum(share for _, share, _ in sources)
    for source, share, shards in sources:
        rows = np.concatenate([np.r_[rows] for rows in rows_of(index, shards)])
        if not (own := float(weight[rows].sum())):
            raise UserError(f"{KEY}: nothing of {source.url} is left, but its share is {share:g}")
        weight[rows] *= share / whole * total / own


def weights_of(index: Index, shards: NDArray[np.int64], source: Source) -> Iterator[NDArray[np.float64]]:
    """Yield the weights of the samples of each of some shards, all of one source. Raises UserError."""
    tables: list[Table | Measured] = [*measured_beside(index, shards), *(Table(url) for url in source.columns)]
    excluded = Table(source.exclude) if source.exclude else None
    names = {m[1] or m[2] for text in (source.where, source.weight) if text for m in NAMES.finditer(text)}
    known = [*OWN, *(c for t in tables for c in t.names)]
    wanted = [c for c in known if c in names]
    for chunk in in_chunks(index, shards):
        rows = [_table(index, shard, wanted, tables, excluded) for shard in chunk]
        weight = evaluate(pa.concat_tables(rows), source, known)
        yield from np.split(weight, np.cumsum([len(r) for r in rows])[:-1])
    for table in (*tables, *([excluded] if excluded else [])):
        if isinstance(table, Table) and not table.found:
            raise UserError(f"{table.url}: none of its {len(table.keys)} keys is in {source.url}")


def in_chunks(index: Index, shards: NDArray[np.int64]) -> Iterator[list[int]]:
    """Yield neighbouring shards that have about ROWS samples together."""
    ends = np.cumsum(np.diff(index.first)[shards])
    for _, group in itertools.groupby(zip(shards.tolist(), ends.tolist(), strict=True), lambda each: each[1] // ROWS):
        yield [shard for shard, _ in group]


def _table(
    index: Index, shard: int, wanted: Sequence[str], tables: Sequence["Table | Measured"], excluded: "Table | None"
) -> pa.Table:
    """Return the wanted columns of the samples of a shard, and whether each is excluded."""
    name = index.shards[shard].url.rpartition("/")[2]
    needs_keys = any(isinstance(t, Table) for t in tables) or excluded is not None or "key" in wanted
    own = {OWN[c] for c in wanted if OWN.get(c)} | ({"key"} if needs_keys else {"label"})
    read = index.column(shard, sorted(own))
    columns = {c: read[OWN[c]] for c in wanted if OWN.get(c)}
    if "shard" in wanted:
        columns["shard"] = pa.array([name]).take(pa.array(np.zeros(len(read), np.int64)))
    for table in tables:
        columns |= table.columns_of(name, read, [c for c in table.names if c in wanted])
    gone = excluded.rows_of(name, read["key"]).is_valid() if excluded else pa.nulls(len(read), pa.bool_())
    return pa.table(columns | {" gone": gone})


class Table:
    """A table of the user's with a row for each of some samples: Parquet or CSV, with the column `key`, and `shard`
    where keys are not unique among the shards."""

    def __init__(self, url: str) -> None:
        """Raises UserError when there is no such table, it has no keys, or some of them twice."""
        self.url, self.found = url, 0
        data = io.BytesIO(read_file(url))
        try:
            self.table = pq.read_table(data) if url.lower().endswith(".parquet") else pyarrow.csv.read_csv(data)
        except (pa.ArrowException, OSError) as e:
            raise UserError(f"{url}: cannot be read: {' '.join(str(e).split())[:200]}") from None
        if "key" not in self.table.column_names:
            raise UserError(f"{url}: has no column key; it has {', '.join(self.table.column_names)}")
        self.by_shard = "shard" in self.table.column_names
        self.keys = self._joined(self.table["key"].cast(pa.string()), self.table["shard"] if self.by_shard else None)
        if len(pc.unique(self.keys)) < len(self.keys):
            raise UserError(f"{url}: has a key twice; a column shard tells samples of one key apart")
        self.names = [c for c in self.table.column_names if c not in ("key", "shard")]

    def rows_of(self, shard: str, keys: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the row of each key of a shard, null where the table has none."""
        rows = pc.index_in(self._joined(keys, pa.scalar(shard) if self.by_shard else None), value_set=self.keys)
        self.found += len(rows) - rows.null_count
        return rows

    def columns_of(self, shard: str, own: pa.Table, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        """Return some columns for the samples of a shard, whose keys are in their `own` columns; null where the table
        has no row."""
        rows = self.rows_of(shard, own["key"])
        return {name: self.table[name].take(rows) for name in names}

    def _joined(self, keys: Any, shard: Any) -> Any:
        if shard is None:
            return keys
        return pc.binary_join_element_wise(shard.cast(pa.string()), keys, "/")


class Measured:
    """A table beside the shards with a row for every sample, as `eagleray data measure` writes it."""

    def __init__(self, table: SampleTable) -> None:
        self.table, self.names = table, table.columns()
        self.last: tuple[int, Any] = (-1, None)  # the part that was read last
        self.places: dict[str, tuple[int, int]] = {}  # of each shard: its first row, and the one behind its last
        for number in table.parts:
            first = int(table.samples(number)[0])
            runs = pc.run_end_encode(table.read(number, ["shard"])["shard"].combine_chunks().dictionary_decode())
            start = 0
            for name, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
                self.places[name] = self.places.get(name, (first + start, 0))[0], first + end
                start = end

    def columns_of(self, shard: str, own: pa.Table, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        """Return some columns for the samples of a shard. Raises UserError when the shard had other samples."""
        first, last = self.places.get(shard, (0, 0))
        if last - first != len(own):
            raise UserError(f"{self.table.folder}: was measured before {shard} changed; delete it, and measure again")
        rows = range(sample_table.ROWS * (first // sample_table.ROWS), last, sample_table.ROWS)
        parts = [self._part(start // sample_table.ROWS).select(names) for start in rows] if names else []
        if not parts:
            return {}
        whole = pa.concat_tables(parts).slice(first - rows.start, last - first)
        return {name: whole[name] for name in names}

    def _part(self, number: int) -> pa.Table:
        if self.last[0] != number:
            self.last = number, self.table.read(number, self.names)
        return self.last[1]


def measured_beside(index: Index, shards: NDArray[np.int64]) -> list[Measured]:
    """Return what was measured of the shards of a source, all in one folder; nothing where they are in several."""
    homes = {parent(index.shards[shard].url) for shard in shards.tolist()}
    if len(homes) > 1:
        return []
    return [Measured(table) for table in complete_tables(homes.pop(), MEASURED, lambda about: about.what == MEASURED)]


def read_file(url: str) -> bytes:
    """Return the content of a table. Raises UserError when there is none."""
    try:
        return store(url).get(url)
    except FileNotFoundError:
        raise UserError(f"{url}: no such table") from None


def evaluate(table: pa.Table, source: Source, known: Sequence[str]) -> NDArray[np.float64]:
    """Return the weights (n,) of rows by the expressions of a source. Raises UserError for one that is wrong; `known`
    are the names that it may use."""
    where = f"{KEY}.where: {source.where}"
    weight = f"{KEY}.weight: {source.weight}"
    kept = np.ones(len(table), bool)
    if source.exclude:
        kept &= ~table[" gone"].to_numpy()
    if source.where:
        found = _run(table, source.where, where, known)
        if not (pa.types.is_boolean(found.type) or pa.types.is_null(found.type)):
            raise UserError(f"{where}: expected true or false, got {found.type}")
        kept &= found.cast(pa.bool_()).fill_null(False).to_numpy(zero_copy_only=False)
    out = np.zeros(len(table))
    out[kept] = source.repeat
    if source.weight:
        found = _run(table.filter(pa.array(kept)), source.weight, weight, known)
        if not (pa.types.is_integer(found.type) or pa.types.is_floating(found.type) or pa.types.is_decimal(found.type)):
            raise UserError(f"{weight}: expected numbers, got {found.type}")
        out[kept] *= found.cast(pa.float64()).fill_null(np.nan).to_numpy()
        check_weights(np.append(out, 1), weight)  # that some are left is checked for all shards together
    return out


def _run(table: pa.Table, expression: str, name: str, known: Sequence[str]) -> pa.ChunkedArray:
    """Return the values of an expression for every row."""
    import duckdb

    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        connection.register("samples", table)
        for setting in ("SET enable_external_access=false", "SET lock_configuration=true"):
            connection.execute(setting)
        sql = f"SELECT (\n{expression}\n) AS value FROM samples"
        try:
            found = connection.sql(sql).to_arrow_table()
        except (duckdb.Error, RuntimeError, AttributeError) as e:
            line = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            names = f"; there are {', '.join(known)}" if isinstance(e, duckdb.BinderException) else ""
            raise UserError(f"{name}: {line}{names}") from None
    if found.column_names != ["value"] or len(found) != len(table):
        raise UserError(f"{name}: gives {len(found)} values for {len(table)} samples; expected one for each")
    return found["value"]
