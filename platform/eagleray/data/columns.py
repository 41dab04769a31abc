"""Chooses samples by SQL expressions about columns: of the index, of tables beside the shards and of the user's tables.

DuckDB gets the rows in parts, so that memory does not grow with the data."""

import fnmatch
import functools
import io
import itertools
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError, explained
from eagleray.config.source import Source
from eagleray.data import sample_table
from eagleray.data.digests import same_samples
from eagleray.data.expressions import WHY, evaluate, shown
from eagleray.data.file_names import readable
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable, tables_beside
from eagleray.data.selection import Selection, check_weights
from eagleray.storage.store import absolute, store, what_is
from eagleray.storage.url_patterns import SPECIAL, expand_braces

log = logging.getLogger(__name__)
KEY = "data.train"
OWN = {"key": "key", "shard": "", "label": "label", "bytes": "size"}  # name in an expression: column in the index
SIZE = " size"  # column with the size of each image in bytes, in all tables of this module
ROWS = 2**20  # rows that DuckDB gets at a time
MEASURED = "columns"  # folder of measured columns beside the shards, and the `About.what` of the tables in it
UNTYPED = "default"  # Arrow's option to join tables: a column of nulls takes its type from the other tables
NAMES = re.compile(r'"([^"]+)"|([^\W\d]\w*)')


def select(index: Index) -> Selection | None:
    """Return how often each sample is read, by the `where`, `weight`, `exclude` and `share` of the index's sources.
    None: no source has any of these. Raises UserError and Outage."""
    sources = list(dict.fromkeys(index.sources))
    if not any(source.selects for source in sources):
        return None
    weight, shares = np.zeros(len(index), np.float64), [source.share for source in sources]
    kept = total = 0
    if None in shares and any(shares):
        raise UserError(f"{KEY}: some sources have a share and others none; give all of them one")
    mine = [np.flatnonzero([s == source for s in index.sources]) for source in sources]
    tables = open_tables(sources)
    left_out: list[dict[str, int]] = []
    for source, shards in zip(sources, mine, strict=True):
        weighed = weights_of(index, shards, source, tables)
        counts = np.zeros(len(WHY), np.int64)
        for rows, (values, size, why) in zip(rows_of(index, shards), weighed, strict=True):
            weight[rows] = values
            counts += np.bincount(why, minlength=len(WHY))
            kept, total = kept + int(size[values > 0].sum()), total + int(size.sum())
        left_out.append(dict(zip(WHY[1:], counts[1:].tolist(), strict=True)))
    check_found(tables, sources)
    check_weights(weight, KEY)
    if all(shares):
        _share_out(weight, index, [(s, float(s.share or 0), m) for s, m in zip(sources, mine, strict=True)])
        check_weights(weight, f"{KEY}.share")
    return Selection(weight.astype(np.float32), kept, total, tuple(left_out))


def rows_of(index: Index, shards: NDArray[np.int64]) -> Iterator[slice]:
    """Yield, for each of the `shards`, the slice of its samples among those of the index."""
    for shard in shards.tolist():
        yield slice(int(index.first[shard]), int(index.first[shard + 1]))


def _share_out(weight: NDArray[np.float64], index: Index, sources: Sequence[tuple[Source, float, Any]]) -> None:
    """Scale the weights so that each source has its share of an epoch, while the length of the epoch stays the same."""
    total, whole = float(weight.sum()), sum(share for _, share, _ in sources)
    for source, share, shards in sources:
        rows = np.concatenate([np.r_[rows] for rows in rows_of(index, shards)])
        if not (own := float(weight[rows].sum())):
            raise UserError(f"{KEY}: nothing of {source.url} is left, but its share is {share:g}")
        weight[rows] *= share / whole * total / own


def open_tables(sources: Sequence[Source]) -> dict[str, "Table"]:
    """Read the tables that sources name, each once, with the columns that any source needs. Raises UserError."""
    wanted: dict[str, set[str]] = {}
    for source in sources:
        for url in source.columns:
            wanted.setdefault(url, set()).update(names_in(source.where) | names_in(source.weight))
        if source.exclude:
            wanted.setdefault(source.exclude, set())
    return {url: Table(url, names) for url, names in wanted.items()}


def check_found(tables: Mapping[str, "Table"], sources: Sequence[Source]) -> None:
    """Log a warning about a list of excluded samples of which some were not found. Raises UserError when no key of a
    table was found in any source that names the table."""
    for url, table in tables.items():
        named = [source for source in sources if url in (*source.columns, source.exclude)]
        if not table.found.any():
            raise UserError(f"{url}: none of its {len(table.keys)} keys is in {', '.join(s.url for s in named)}")
        if url in [source.exclude for source in named] and not table.found.all():
            example = readable(table.keys[int(np.argmin(table.found))].as_py())
            log.warning(
                "%s: %d of %d keys found; %s, for one, is not there", url, table.found.sum(), len(table.keys), example
            )


def weights_of(
    index: Index, shards: NDArray[np.int64], source: Source, opened: Mapping[str, "Table"], key: str = f"{KEY}."
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield, for each of the `shards` of one source, the weights of its samples, the bytes of their images, and the
    index in WHY of the reason for each weight. A UserError begins with `key` and the expression's name."""
    names = names_in(source.where) | names_in(source.weight)
    beside = tables_beside([index.shards[s] for s in shards.tolist()], MEASURED, lambda a: a.what == MEASURED)
    tables = list(beside) if names else []
    measured = [Measured(table) for table in tables if not table.missing()]
    given = [opened[url] for url in source.columns]
    excluded = opened[source.exclude] if source.exclude else None
    known = [*OWN, *(name for m in measured for name in m.names), *(name for g in given for name in g.names)]
    wanted = [name for name in known if name in names]
    if twins := [pair for pair in itertools.combinations(sorted({*wanted}), 2) if len({*map(str.lower, pair)}) == 1]:
        raise UserError(f"{key}where: SQL takes the columns {' and '.join(twins[0])} for one; rename one")
    there = "; ".join([", ".join(known), *(unfinished(table, source.url) for table in tables if table.missing())])
    check_meaning(source, measured, given, key)
    keyed = wanted + (["key", "shard"] if given or excluded else [])
    for chunk in in_chunks(index, shards):
        rows = [own_columns(index, shard, keyed, measured) for shard in chunk]
        lengths, table = [len(r) for r in rows], pa.concat_tables(rows, promote_options=UNTYPED)
        size = table[SIZE].to_numpy()  # taken now, as a table of the user's may have a column of this name
        for other in given:
            table = other.join(table, wanted)
        gone = excluded.rows_of(table).is_valid().to_numpy() if excluded else np.zeros(len(table), bool)
        (weights, why), cuts = evaluate(table, ~gone, source, there, key), np.cumsum(lengths)[:-1]
        yield from zip(*(np.split(values, cuts) for values in (weights, size, why)), strict=True)


def unfinished(table: SampleTable, url: str) -> str:
    """Return text that names an interrupted table of the shards at a URL, and the command that continues it."""
    settings = table.about.settings
    if "measures" not in settings:
        return f"{table.folder} is not finished: the same eagleray data cluster continues it"
    names = [*settings["measures"], *(f"json.{name}" for name in settings.get("json", {}))]
    command = f"eagleray data measure {url} --columns {','.join(names)} out={table.folder}"
    return f"{table.folder} is not finished: {command} continues it"


def names_in(expression: str | None) -> set[str]:
    """Return the names in an expression, of columns and functions."""
    return {m[1] or m[2] for m in NAMES.finditer(expression or "")}


def check_meaning(source: Source, measured: Sequence["Measured"], given: Sequence["Table"], key: str) -> None:
    """Raises UserError when an expression names a column that means different things in tables beside the shards, as
    `similarity` from JSON and from clusters does. A column of a `given` table takes precedence, so it is no error."""
    for option, expression in ("where", source.where), ("weight", source.weight):
        for name in sorted(names_in(expression) - {name for table in given for name in table.names}):
            meanings = {table.meaning(name): table.table.folder for table in measured if name in table.names}
            if len(meanings) > 1:
                one, *others = meanings.values()
                raise UserError(
                    f"{key}{option}: {expression}: {' and '.join([one, *others])} both have a column {name}; "
                    f"name the one that counts as columns, such as {one}/part-*.parquet"
                )


def samples_where(
    index: Index, url: str, where: str, columns: str
) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.int64]]]:
    """Yield, for each shard, a mask of the samples for which the expression of the option `--where` is true, and the
    bytes of all samples. `columns` is the file of `--columns` or empty. Raises UserError."""
    source = Source(url=url, where=where, columns=(columns,) if columns else ())
    tables = open_tables([source])
    for weight, size, _ in weights_of(index, np.arange(len(index.shards)), source, tables, key="--"):
        yield weight > 0, size
    check_found(tables, [source])


def samples_listed(index: Index, listed: str, where: str) -> tuple[list[int], list[str]]:
    """Return samples, and keys without a sample. `listed`, the file of `--samples`, names the samples; if it is empty,
    the expression of `--where` is true for them. Raises UserError when there is no sample."""
    given = list(dict.fromkeys(index.sources))
    asked = [
        Source(url=s.url, exclude=listed) if listed else Source(url=s.url, where=where, columns=s.columns)
        for s in given
    ]
    tables, found = open_tables(asked), list[int]()
    for source, ask in zip(given, asked, strict=True):
        shards = np.flatnonzero([s == source for s in index.sources])
        weighed = weights_of(index, shards, ask, tables, key="--")
        for rows, (weight, *_) in zip(rows_of(index, shards), weighed, strict=True):
            found += (rows.start + np.flatnonzero((weight > 0) != bool(listed))).tolist()
    if not found:
        check_found(tables, asked)
        raise UserError(f"--where: {shown(where)}: true for none of {len(index)} samples")
    return found, [] if not listed else tables[listed].keys.filter(pa.array(~tables[listed].found)).to_pylist()


def in_chunks(index: Index, shards: NDArray[np.int64]) -> Iterator[list[int]]:
    """Yield lists of neighbouring shards with about ROWS samples per list."""
    ends = np.cumsum(np.diff(index.first)[shards])
    for _, group in itertools.groupby(zip(shards.tolist(), ends.tolist(), strict=True), lambda each: each[1] // ROWS):
        yield [shard for shard, _ in group]


def own_columns(index: Index, shard: int, wanted: Sequence[str], measured: Sequence["Measured"]) -> pa.Table:
    """Return a table of a shard's samples: their bytes, and the `wanted` columns that the index or `measured` has."""
    name = index.shards[shard].url.rpartition("/")[2]
    read = index.column(shard, sorted({OWN[c] for c in wanted if OWN.get(c)} | {"size"}))
    columns = {c: read[OWN[c]] for c in wanted if OWN.get(c)} | {SIZE: read["size"]}
    if "shard" in wanted:
        columns["shard"] = pa.array([name]).take(pa.array(np.zeros(len(read), np.int64)))
    for table in measured:
        columns |= table.columns_of(index, shard, [c for c in table.names if c in wanted])
    return pa.table(columns)


class Table:
    """A table that the user provides for some samples, in one or more Parquet or CSV files. The column `key` tells
    which sample a row is about, together with the column `shard` where shards have the same keys."""

    def __init__(self, url: str, wanted: Collection[str] = ()) -> None:
        """Read the keys and the `wanted` columns. Raises UserError when there is no such table, when it has no keys, a
        row without one or a key twice, and when its files have different columns that cannot be joined."""
        self.url = url
        read = [_read(file, {"key", "shard", *wanted}) for file in files_of(url)]
        with explained(f"{url}: its files have other columns", pa.ArrowException):
            self.table = pa.concat_tables([table for table, _ in read], promote_options="permissive")
        if "key" not in self.table.column_names:
            raise UserError(f"{url}: has no column key; it has {', '.join(read[0][1])}")
        self.by_shard = "shard" in self.table.column_names
        with explained(f"{url}: expected texts as key and shard", pa.ArrowException):
            self.keys = self._joined(self.table)
        if self.keys.null_count:
            raise UserError(f"{url}: {self.keys.null_count} of {len(self.keys)} rows have no key, or no shard")
        again = pc.index_in(self.keys, value_set=pc.unique(self.keys)).to_numpy() != np.arange(len(self.keys))
        if again.any():
            key = self.keys[int(again.argmax())].as_py()
            raise UserError(f"{url}: has the key {key!r} twice; a column shard tells samples of one key apart")
        self.found = np.zeros(len(self.keys), bool)  # whether a sample with each key was found
        self.names = [c for c in dict.fromkeys(c for _, names in read for c in names) if c not in ("key", "shard")]

    def rows_of(self, samples: pa.Table) -> pa.ChunkedArray:
        """Return the row of this table for each sample, by the sample's key and shard, or null if there is none."""
        rows = pc.index_in(self._joined(samples), value_set=self.keys)
        self.found[rows.drop_null().to_numpy()] = True
        return rows

    def join(self, samples: pa.Table, wanted: Sequence[str]) -> pa.Table:
        """Return `samples` with the `wanted` columns of this table, null for samples without a row in it."""
        rows = self.rows_of(samples)
        for name in self.names:
            if name in wanted:
                column = self.table[name].take(rows)
                at = samples.schema.get_field_index(name)
                samples = samples.append_column(name, column) if at < 0 else samples.set_column(at, name, column)
        return samples

    def _joined(self, rows: pa.Table) -> Any:
        keys, part = rows["key"].cast(pa.string()), r"^\.[0-9]+$"  # parts of a folder are renumbered as it grows
        shard = pc.replace_substring_regex(rows["shard"].cast(pa.string()), part, ".") if self.by_shard else None
        return pc.binary_join_element_wise(shard, keys, "/") if self.by_shard else keys


class Measured:
    """A table beside the shards with a row for every sample, as `eagleray data measure` writes it."""

    def __init__(self, table: SampleTable) -> None:
        self.table, self.names = table, table.columns()
        self.last: tuple[int, Any] = (-1, None)  # index and rows of the part that was read last

    def meaning(self, name: str) -> str:
        """Return a text that identifies what the column `name` means: equal texts of two tables mean the same."""
        settings = self.table.about.settings
        if name in settings.get("json", {}):
            return "json"
        return "measure" if "measures" in settings else self.table.folder

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The rows of each shard, by its name: first, and last (excluded)."""
        places: dict[str, tuple[int, int]] = {}
        for number in self.table.parts:
            first = start = int(self.table.samples(number)[0])
            column = self.table.read(number, ["shard"])["shard"].combine_chunks()
            runs = pc.run_end_encode(column.dictionary_decode())
            for name, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
                places[name] = places.get(name, (start, 0))[0], first + end
                start = first + end
        return places

    def columns_of(self, index: Index, shard: int, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        """Return some columns for the samples of a shard. Raises UserError when the shard had other samples, or another
        order of them, when the table was written."""
        if not names:
            return {}
        name, samples = index.shards[shard].url.rpartition("/")[2], int(index.first[shard + 1] - index.first[shard])
        first, last = self.places.get(name, (0, 0))
        digests = self.table.about.shards.get(name)
        if last - first != samples or (digests and not same_samples(index, shard, digests)):
            raise UserError(f"{self.table.folder}: was measured before {name} changed; delete it, and measure again")
        size = sample_table.ROWS
        end = max(-(-last // size), first // size + 1)  # one part at least, for a shard without samples
        parts = [self._part(number).select(names) for number in range(first // size, end)]
        whole = pa.concat_tables(parts, promote_options=UNTYPED).slice(first % size, samples)
        return {name: whole[name] for name in names}

    def _part(self, number: int) -> pa.Table:
        if self.last[0] != number:
            self.last = number, self.table.read(number, self.names)
        return self.last[1]


def files_of(url: str) -> list[str]:
    """Return the files that a URL names. Braces, and wildcards in the file name, are expanded unless a file of this
    very name exists. Raises UserError when no file matches a wildcard."""
    files: list[str] = []
    if SPECIAL & set(url) and what_is(absolute(url)) == "file":
        return [absolute(url)]
    for one in expand_braces(url):
        folder, _, name = absolute(one).rpartition("/")
        if any(c in name for c in "*?["):
            there = [blob.url for blob in store(folder).list(folder + "/")]
            found = sorted(file for file in there if fnmatch.fnmatchcase(file.rpartition("/")[2], name))
            if not found:
                raise UserError(f"{url}: no such table")
            files += found
        else:
            files.append(one)
    return files


def _read(url: str, wanted: Collection[str]) -> tuple[pa.Table, list[str]]:
    """Return the wanted columns of a Parquet or CSV file, and the names of all its columns. Raises UserError if
    it is missing or damaged."""
    data = io.BytesIO(read_file(url))
    texts = pyarrow.csv.ConvertOptions(column_types={"key": pa.string(), "shard": pa.string()})  # 007 would become 7
    with explained(f"{url}: cannot be read", pa.ArrowException, OSError, UnicodeError):
        table = None if url.lower().endswith(".parquet") else pyarrow.csv.read_csv(data, convert_options=texts)
        names = pq.read_schema(data).names if table is None else table.column_names
        read = [name for name in names if name in wanted]
        if len(set(read)) < len(read):
            raise UserError(f"{url}: has the column {max(read, key=read.count)} twice")
        return pq.read_table(data, columns=read) if table is None else table.select(read), names


def read_file(url: str) -> bytes:
    """Return the content of a table. Raises UserError when there is none."""
    with explained(f"{url}: no such table", FileNotFoundError, why=False):
        return store(url).get(url)
