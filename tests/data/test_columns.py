"""What a recipe's `where`, `weight`, `exclude` and `share` choose, and what they refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.pictures import write_shards

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.data import columns, sample_table
from eagleray.data.columns import select
from eagleray.data.index import Index, open_index
from eagleray.runs.recipe import Data
from eagleray.storage.blob import Blob

SAMPLES = 160


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "s", SAMPLES, 3)


@pytest.fixture(autouse=True, params=[2**20, 60])
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shards at once, or each alone."""
    monkeypatch.setattr(columns, "ROWS", request.param)


def opened(*sources: dict[str, Any]) -> Index:
    return open_index([config.check(Source, s, "data.train") for s in sources], note=lambda _: None)


def weights(*sources: dict[str, Any]) -> np.ndarray:
    found = select(opened(*sources))
    assert found is not None
    return found.weight


def table(path: Path, **rows: Any) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(rows), path)
    else:
        pandas.DataFrame(rows).to_csv(path, index=False)  # without quotes: keys such as 000123 look like numbers
    return str(path)


def test_nothing_is_chosen_where_nothing_is_said(data: Path):
    assert select(opened({"url": str(data)})) is None
    assert select(opened({"url": str(data), "repeat": 3})) is None


def test_columns_of_the_index(data: Path):
    index = opened({"url": str(data)})
    assert (weights({"url": str(data), "where": "label = 3"}) == (index.label == 3)).all()
    assert (weights({"url": str(data), "where": "bytes > 880"}) == (index.size > 880)).all()
    second = weights({"url": str(data), "where": f"shard like '%-001.tar' and key >= '{index.key(80)}'"})
    assert (second == ((index.shard == 1) & (np.arange(SAMPLES) >= 80))).all()
    expected = np.where(index.label > 1, 2 / np.sqrt(index.label, where=index.label > 0, out=np.ones(SAMPLES)), 0)
    found = weights({"url": str(data), "where": "label > 1", "weight": "1 / sqrt(label)", "repeat": 2})
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_columns_of_the_users(data: Path, tmp_path: Path, kind: str):
    index = opened({"url": str(data)})
    some = np.arange(0, SAMPLES, 3)
    keys = [index.key(i) for i in some.tolist()][::-1]
    nsfw = table(tmp_path / f"nsfw.{kind}", key=keys, nsfw=np.linspace(1, 0, len(some)))
    group = table(tmp_path / f"group.{kind}", key=[*keys, "elsewhere"], size=[*range(1, len(some) + 1), 7])
    expected = np.zeros(SAMPLES)
    expected[some[:10]] = 1 / np.arange(len(some), 0, -1)[:10]
    given = {"url": str(data), "columns": [nsfw, group], "where": f"nsfw < {9.5 / (len(some) - 1)}", "weight": "1/size"}
    np.testing.assert_allclose(weights(given), expected, rtol=1e-6)
    absent = weights({"url": str(data), "columns": nsfw, "where": "nsfw is null"})
    assert (np.flatnonzero(absent == 0) == some).all()


def test_excluded_samples(data: Path, tmp_path: Path):
    index = opened({"url": str(data)})
    gone = table(tmp_path / "gone.csv", key=[index.key(7), index.key(100)], why=["asked", "asked"])
    assert np.flatnonzero(weights({"url": str(data), "exclude": gone}) == 0).tolist() == [7, 100]
    name = index.shards[0].url.rpartition("/")[2]
    of_shard = table(tmp_path / "of.parquet", key=[index.key(7), index.key(100)], shard=[name, name])
    assert np.flatnonzero(weights({"url": str(data), "exclude": of_shard}) == 0).tolist() == [7]


def test_shards_of_a_list_hold_when_a_folder_of_images_grows(tmp_path: Path):
    """The folder then has more parts, with other numbers than in the table from which the list was made."""
    gone = table(tmp_path / "gone.parquet", key=["a/1.jpg", "b/2.jpg", "s1"], shard=[".000001", ".", "x-000.tar"])
    shards = [".000003", "x-001.tar", "x-000.tar", "."]
    samples = pa.table({"key": ["b/2.jpg", "s1", "s1", "a/1.jpg"], "shard": shards})
    assert columns.Table(gone).rows_of(samples).to_pylist() == [1, None, 2, 0]


def test_it_is_counted_why_samples_are_left_out(data: Path, tmp_path: Path):
    """A sample counts once: excluded, then by `where`, then by its weight."""
    index = opened({"url": str(data)})
    keys = [index.key(i) for i in range(SAMPLES)]
    scores = table(tmp_path / "scores.csv", key=keys[:100], score=[i % 4 for i in range(100)])
    gone = table(tmp_path / "gone.csv", key=[*keys[:10], *keys[150:]])
    given = {"url": str(data), "columns": scores, "exclude": gone, "where": "score > 0", "weight": "score - 1"}
    chosen, plain = select(opened(given)), str(write_shards(tmp_path / "t", 40, 1))
    assert chosen is not None
    score = np.arange(10, 100) % 4
    why = {"excluded": 20, "where is false": int((score == 0).sum()), "where is null": 50}
    assert chosen.left_out == (why | {"weight is 0": int((score == 1).sum())},)
    assert sum(chosen.left_out[0].values()) == SAMPLES - chosen.kept
    both = select(opened(given, {"url": plain}))
    assert both is not None
    assert [sum(counts.values()) for counts in both.left_out] == [SAMPLES - chosen.kept, 0]


def test_a_list_that_matches_in_part_says_so(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    index = opened({"url": str(data)})
    gone = table(tmp_path / "gone.csv", key=[index.key(7), "nobody", "noone"])
    assert np.flatnonzero(weights({"url": str(data), "exclude": gone}) == 0).tolist() == [7]
    [line] = caplog.messages
    assert line == f"{gone}: 1 of 3 keys found; nobody, for one, is not there"
    caplog.clear()
    whole = table(tmp_path / "whole.csv", key=[index.key(7)])
    weights({"url": str(data), "exclude": whole})
    assert not caplog.messages


def test_a_list_counts_over_all_sources(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Of the second source it has no key."""
    index, other = opened({"url": str(data)}), str(write_shards(tmp_path / "t", 40, 1))
    last = index.shards[2].url.rpartition("/")[2]
    gone = table(tmp_path / "gone.csv", key=[index.key(SAMPLES - 1)], shard=[last])
    given = [{"url": str(data), "exclude": gone}, {"url": other, "exclude": gone}]
    assert (weights(*given) == 0).sum() == 1
    assert not caplog.messages
    nobody = table(tmp_path / "nobody.csv", key=["x"])
    with pytest.raises(UserError, match=f"nobody.csv: none of its 1 keys is in {data}, {other}"):
        select(opened(*(source | {"exclude": nobody} for source in given)))


def test_sources_have_their_shares(data: Path, tmp_path: Path):
    write_shards(tmp_path / "t", 40, 1)
    one, two = {"url": str(data), "share": 0.75}, {"url": str(tmp_path / "t"), "share": 0.25, "where": "label > 2"}
    index, chosen = opened(one, two), select(opened(one, two))
    assert chosen is not None
    first = np.repeat([source.url == str(data) for source in index.sources], np.diff(index.first))
    assert chosen.weight[first].sum() == pytest.approx(3 * chosen.weight[~first].sum(), rel=1e-5)
    assert chosen.total == SAMPLES + int((index.label[~first] > 2).sum())
    with pytest.raises(UserError, match="some sources have a share and others none"):
        select(opened(one, {"url": str(tmp_path / "t")}))
    with pytest.raises(UserError, match=r"nothing of .*/t is left, but its share is 0\.25"):
        select(opened(one, two | {"where": "label > 99"}))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"where": "nsfw < 1"}, 'data.train.where: nsfw < 1: .*"nsfw" not found.*; there are key, shard, label, bytes'),
        ({"where": "label >"}, "data.train.where: label >: .*syntax error"),
        ({"where": "label + 1"}, "data.train.where: .*: expected true or false, got int64"),
        ({"where": "label > 99"}, "data.train: leaves none of 160 samples"),
        ({"where": "count(*) > 1"}, "gives 1 values for"),
        ({"where": "true) FROM samples; --"}, "data.train.where: .*: .*"),
        (
            {"where": "key in (select column0 from read_csv('/etc/passwd'))"},
            r"data.train.where: .*read_csv\(\) may give",
        ),
        ({"where": "key in (select * from '/etc/passwd')"}, "data.train.where: .*"),
        ({"where": "row_number() over (partition by label order by bytes) < 3"}, "where: .*: looks at other samples"),
        ({"where": "bytes > (select avg(bytes) from Samples)"}, "where: .*: looks at other samples, of which it would"),
        ({"weight": "+".join(["label"] * 600)}, r"data.train.weight: label\+.*: is nested too deeply"),
        ({"weight": "key"}, "data.train.weight: key: expected numbers, got string"),
        ({"weight": "label - 3"}, "data.train.weight: label - 3: .* samples have a weight such as -"),
        ({"weight": "1 / (label - 3)"}, "samples have a weight such as"),
        ({"weight": "null"}, "data.train.weight: null: expected numbers, got"),
        ({"weight": "100000"}, "a sample has a weight of 100000; expected at most 1000"),
        (
            {"weight": "hash(key)"},
            r"data.train.weight: hash\(key\): a sample has a weight of .*e\+.*; expected at most",
        ),
        ({"columns": ["nowhere.parquet"]} | {"where": "true"}, "nowhere.parquet: no such table"),
    ],
)
def test_what_is_wrong_is_one_line(data: Path, given: dict[str, Any], line: str):
    with pytest.raises(UserError, match=line) as e:
        select(opened({"url": str(data), **given}))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("random() < 0.5", r"random\(\)"),
        ("Main.RANDOM() < 0.5", r"random\(\)"),
        ("list_contains([x + random() for x in [label]], 3)", r"random\(\)"),
        ("current_date > date '2020-01-01'", "current_date"),
        ("LocalTimestamp is not null", "LocalTimestamp"),
        ("current_localtimestamp() is not null", r"current_localtimestamp\(\)"),
        ("now() > timestamptz '2020-01-01'", r"now\(\)"),
        ("ago(interval 1 day) is not null", r"ago\(\)"),
        ("age(timestamp '2020-01-01') > interval 1 day", r"age\(\)"),
        ("nextval('s') > 1", r"nextval\(\)"),
        ("current_setting('threads') = 1", r"current_setting\(\)"),
        ("key in (select path from read_blob('/etc/*'))", r"read_blob\(\)"),
        ("exists (select * from duckdb_settings())", r"duckdb_settings\(\)"),
        ("key in (select key from samples using sample 50%)", "a sample of rows"),
    ],
)
def test_what_would_change_when_the_run_continues_is_refused(data: Path, expression: str, what: str):
    line = rf": {what} may give another value when the run continues; expected columns and functions that depend"
    with pytest.raises(UserError, match="data.train.where: .*" + line):
        select(opened({"url": str(data), "where": expression}))
    with pytest.raises(UserError, match="data.train.weight: .*" + line):
        select(opened({"url": str(data), "weight": f"if({expression}, 1, 2)"}))


def test_functions_of_columns_alone_are_accepted(data: Path, tmp_path: Path):
    keys = [f"s{i:04d}" for i in range(SAMPLES)]
    days = table(tmp_path / "days.csv", key=keys, current_date=["2024-02-03"] * SAMPLES, user=["random()"] * SAMPLES)
    where = (
        "label in (select * from range(99)) and md5(key) <> 'now()' and current_date > '2020-01-01' "
        "and \"user\" <> key and age(timestamp '2021-01-01', timestamp '2020-01-01') > interval 1 day "
        "and hash(key) % 2 in (0, 1) and regexp_matches(key, 's.*') "
        "and date_part('year', date '2020-01-01') = 2020 and left(key, 1) = 's'"
    )
    assert weights({"url": str(data), "columns": days, "where": where}).all()


def test_names_of_columns_are_in_any_script(data: Path, tmp_path: Path):
    keys = [f"s{i:04d}" for i in range(SAMPLES)]
    given = table(tmp_path / "t.parquet", key=keys, ähnlich=np.arange(SAMPLES), 品質=np.ones(SAMPLES))
    assert weights({"url": str(data), "columns": given, "where": "ähnlich < 40 and 品質 = 1"}).sum() == 40


def test_columns_whose_names_mean_others(data: Path, tmp_path: Path):
    """SQL ignores case, and this package has a hidden column " size"."""
    given = table(tmp_path / "t.parquet", key=["s0001", "s0002"], Label=[100, 0], **{" size": ["a", "b"]})
    assert weights({"url": str(data), "columns": given, "where": "Label > 50"}).sum() == 1
    with pytest.raises(UserError, match=r"where: SQL takes the columns Label and label for one; rename one$"):
        weights({"url": str(data), "columns": given, "where": "Label > 50 and label < 10"})
    assert weights({"url": str(data), "columns": given, "where": "\" size\" = 'b'"}).sum() == 1


def test_tables_that_cannot_be_used(data: Path, tmp_path: Path):
    others = table(tmp_path / "others.csv", key=["x", "y"])
    for given in {"exclude": others}, {"columns": others, "where": "true"}:
        with pytest.raises(UserError, match=r"others\.csv: none of its 2 keys is in "):
            select(opened({"url": str(data), **given}))
    twice = table(tmp_path / "twice.csv", key=["a", "000001", "000001"])
    with pytest.raises(UserError, match=r"twice\.csv: has the key '000001' twice"):
        select(opened({"url": str(data), "exclude": twice}))
    without = table(tmp_path / "without.csv", name=["a"])
    with pytest.raises(UserError, match=r"without\.csv: has no column key; it has name"):
        select(opened({"url": str(data), "exclude": without}))
    (tmp_path / "broken.parquet").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"broken\.parquet: cannot be read"):
        select(opened({"url": str(data), "exclude": str(tmp_path / "broken.parquet")}))


def test_tables_with_odd_keys_and_columns(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for key, line in (
        (["s0001", None], "1 of 2 rows have no key, or no shard"),
        (pa.nulls(3), "3 of 3 rows have no key, or no shard"),
        ([["s0001"]], "expected texts as key and shard: Unsupported cast from list<.*"),
        ([b"\xff"], "expected texts as key and shard: Invalid UTF8 payload"),
    ):
        with pytest.raises(UserError, match=rf"k\.parquet: {line}$"):
            select(opened({"url": str(data), "exclude": table(tmp_path / "k.parquet", key=key)}))
    part = table(tmp_path / "s.parquet", key=["s0001", "s0002"], shard=["x-000.tar", None])
    with pytest.raises(UserError, match=r"s\.parquet: 1 of 2 rows have no key, or no shard$"):
        select(opened({"url": str(data), "exclude": part}))
    (tmp_path / "utf16.csv").write_bytes("key\r\ns0001\r\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"utf16\.csv: cannot be read: .*codec"):
        select(opened({"url": str(data), "exclude": str(tmp_path / "utf16.csv")}))
    (tmp_path / "two.csv").write_text("key,score,score\ns0001,1,2\n")
    pq.write_table(pa.table([["s0001"], [1], [2]], ["key", "score", "score"]), tmp_path / "two.parquet")
    for name in "two.csv", "two.parquet":
        with pytest.raises(UserError, match=rf"{name}: has the column score twice$"):
            select(opened({"url": str(data), "columns": [str(tmp_path / name)], "where": "score > 0"}))
    weights({"url": str(data), "exclude": table(tmp_path / "lines.csv", key=["s0001", "two\nlines"])})
    assert caplog.messages == [f"{tmp_path / 'lines.csv'}: 1 of 2 keys found; two\\x0alines, for one, is not there"]


def test_the_shortest_form_of_a_recipe(data: Path):
    for given, short in (
        ("a", "a"),
        ({"url": "a"}, "a"),
        ({"url": "a", "where": "label > 1"}, [{"url": "a", "where": "label > 1"}]),
        (["a", {"url": "b", "repeat": 2, "columns": "c.csv"}], ["a", {"url": "b", "repeat": 2, "columns": ["c.csv"]}]),
    ):
        read = config.check(Data, {"train": given}, "data")
        assert config.to_plain(read)["train"] == short
        assert config.check(Data, config.to_plain(read), "data") == read
    with pytest.raises(UserError, match=r"unknown key; did you mean 'train\.0\.where'"):
        config.check(Data, {"train": {"url": "a", "were": "b"}}, "data")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_in_many_files_is_one(data: Path, tmp_path: Path, kind: str):
    """As img2dataset leaves one beside each tar, in which a column may be of another type, or missing."""
    index = opened({"url": str(data)})
    scores = {f"s{i:04d}": i / SAMPLES for i in range(SAMPLES)}
    keys = list(scores)
    for number, part in enumerate((keys[:50], keys[50:51], keys[51:])):
        more = {"language": ["en"] * len(part)} if number else {}
        table(tmp_path / f"{number:05d}.{kind}", key=part, score=[scores[k] for k in part], **more)
    table(tmp_path / f"00003.{kind}", key=["elsewhere"], score=[1])  # a whole number
    table(tmp_path / "other.txt", key=keys[:1], score=[5.0])
    want = np.array([scores[index.key(i)] > 0.25 for i in range(len(index))])
    source = {"url": str(data), "columns": str(tmp_path / f"*.{kind}"), "where": "score > 0.25"}
    assert (weights(source) == want).all()
    braces = source | {"columns": str(tmp_path / f"0000{{0..3}}.{kind}")}
    assert (weights(braces) == want).all()
    spoken = weights(source | {"where": "language = 'en'"})
    assert (spoken == [index.key(i) not in keys[:50] for i in range(len(index))]).all()


def test_only_columns_that_expressions_name_are_read(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Captions and URLs of millions of images would not fit into memory."""
    keys = [f"s{i:04d}" for i in range(SAMPLES)]
    path = table(tmp_path / "a.parquet", key=keys, score=[1.0] * SAMPLES, caption=["a dog"] * SAMPLES)
    read, names = [], pq.read_table
    monkeypatch.setattr(pq, "read_table", lambda *a, columns: (read.extend(columns), names(*a, columns=columns))[1])
    weights({"url": str(data), "columns": path, "where": "score > 0"})
    assert read == ["key", "score"]
    with pytest.raises(UserError, match=r"there are .*caption"):
        weights({"url": str(data), "columns": path, "where": "skore > 0"})


def test_files_that_do_not_fit_each_other_are_refused(data: Path, tmp_path: Path):
    table(tmp_path / "a.parquet", key=["s0001"], score=[1.0])
    table(tmp_path / "b.parquet", key=["s0002"], score=["high"])
    with pytest.raises(UserError, match=r"\*.parquet: its files have other columns: .*score"):
        weights({"url": str(data), "columns": str(tmp_path / "*.parquet"), "where": "score > 0"})
    with pytest.raises(UserError, match=r"none-\*.parquet: no such table"):
        weights({"url": str(data), "columns": str(tmp_path / "none-*.parquet"), "where": "score > 0"})


def test_shards_of_a_web_server_have_no_tables_beside_them() -> None:
    for scheme in ("http", "https"):
        shards = [Blob(f"{scheme}://host/x/a.tar", 1)]
        assert list(sample_table.tables_beside(shards, "embeddings", lambda about: True)) == []
