"""YAML is that of the core schema of YAML 1.2, in files and in what is dumped; a key that stands twice is refused."""

import copy
import math
import pickle
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray import config
from eagleray.config.yaml_text import dump, dump_line, parse, parse_written, plain

CASES = ["lower", "capitalize", "upper"]
LOOKALIKES = ["010", "0o10", "0x1F", "1e-3", "1.10", ".5", "-.inf", ".nan", "off", "no", "yes", "true", "null", "~", ""]
LOOKALIKES += ["2026-11-29", "12:30:45", "1_000", "<<", "=", "a: b", "- x", "# x", "[", "{a}", "*a", "&a", "!x", "0b1"]
TEXTS = st.sampled_from(LOOKALIKES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXTS
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))


@given(TREES)
@settings(max_examples=150, deadline=None)
def test_what_is_dumped_reads_back_equal(tree: Any):
    for text in (dump(tree), dump(tree, allow_unicode=True), dump_line(tree)):
        assert repr(parse(text)) == repr(tree)  # 1, 1.0 and True are equal, but not the same
    assert yaml.safe_load(dump(tree)) == tree  # nor does a reader of YAML 1.1 see anything else


@given(st.integers(-(2**63), 2**63), st.integers(0, 5), st.integers(0, 2**63))
@settings(max_examples=50, deadline=None)
def test_whole_numbers(number: int, zeros: int, positive: int):
    sign, digits = "-" * (number < 0), "0" * zeros + str(abs(number))
    assert same(parse(sign + digits), number)
    assert same(parse(f"+{positive}"), positive)
    for text in (f"0o{positive:o}", f"0x{positive:x}", f"0x{positive:X}"):
        assert same(parse(text), positive)


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=50, deadline=None)
def test_numbers_with_a_dot_or_an_exponent(number: float):
    for text in (repr(number), f"{number:e}", f"{number:E}", f"{number:.0e}", f"{number:.2f}"[-60:]):
        assert same(parse(text), float(text)), text


@pytest.mark.parametrize("case", CASES)
def test_words_that_are_values(case: str):
    def write(word: str) -> str:
        return str(getattr(word, case)())

    assert [parse(write(word)) for word in ("true", "false", "null")] == [True, False, None]
    infinite = "." + write("inf")
    assert [parse(infinite), parse("-" + infinite), parse("+" + infinite)] == [math.inf, -math.inf, math.inf]
    nan = {"lower": ".nan", "capitalize": ".NaN", "upper": ".NAN"}[case]
    assert math.isnan(parse(nan))
    assert parse("[~, '', !!str 5]") == [None, "", "5"]


@pytest.mark.parametrize(
    "text",
    [
        *("no", "No", "yes", "on", "off", "OFF", "y", "tRUE", "nUll", "1_000", "0b11", "-0x1", "0o8", "12:30:45", "1e"),
        *("2026-11-29", "2026-11-29T10:00:00Z", "1.2.3", "+", "-.", ".", ".e3", ".iNF", "-.nan", "=", "<<", "0x", "٣"),
    ],
)
def test_everything_else_is_text(text: str):
    assert parse(text) == text
    assert parse(f"{{{text}: [{text}]}}") == {text: [text]}


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_key_that_stands_twice_is_refused_with_both_lines(data: st.DataObject):
    depth = data.draw(st.integers(0, 5))
    before, between = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    first, second, shown = data.draw(st.sampled_from([("k", "'k'", "k"), ("k", "k", "k"), ("7", "007", "7")]))
    indent = "  " * depth
    lines = [f"{'  ' * i}outer{i}:" for i in range(depth)]
    listed = data.draw(st.booleans())  # the mapping is the entry of a list
    lines += [f"{indent}a{i}: 1" for i in range(before)] + [f"{indent}{first}: {{x: 1}}"]
    lines += [f"{indent}b{i}: [k, {{k: 1}}]" for i in range(between)] + [f"{indent}{second}: 2"]
    if listed:
        lines = ["-", *(f"  {line}" for line in lines)]
    at = depth + before + 1 + listed
    with pytest.raises(ValueError, match=rf"^{shown}: stands twice, in lines {at} and {at + between + 1}; expected"):
        parse("\n".join(lines))


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "[{b: {a: 1, a: 1}}]", "{? a : 1, 'a': 2}"])
def test_a_key_that_stands_twice_in_one_line(text: str):
    with pytest.raises(ValueError, match=r"^a: stands twice, in line 1; expected it once"):
        parse(text)


@pytest.mark.parametrize("text", ["? [a]\n: 1", "? {a: 1}\n: 1"])
def test_a_key_is_no_list(text: str):
    with pytest.raises(ValueError, match="line 1: a list or mapping is no key"):
        parse(text)


def test_a_number_knows_how_it_was_written():
    tree = parse_written("{a: 1.10, b: [010, 0x10], c: 1e3}")
    assert plain(tree) == {"a": 1.1, "b": [10, 16], "c": 1000.0} == tree
    for again in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree)), config.merge(tree, {}), tree):
        assert [again["a"].text, again["b"][0].text, again["c"].text] == ["1.10", "010", "1e3"]
        assert dump_line(again) == "{a: 1.10, b: [010, 0x10], c: 1e3}"
    assert {type(value) for value in plain(tree["b"])} == {int}


def same(value: Any, expected: Any) -> bool:
    """Return whether two numbers are equal and of the same type."""
    return type(value) is type(expected) and value == expected
