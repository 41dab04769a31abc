"""YAML from anywhere ends in a value or in one line, within little time and memory."""

import time
from pathlib import Path

import pytest
import yaml

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.yaml_text import parse
from eagleray.runs import recipe

NINE = ", ".join(["*a{0}"] * 9)
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{NINE.format(i - 1)}]\n" for i in range(1, 12))
MERGED = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [{NINE.format(i - 1)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "values with all aliases"),
        (MERGED, "values with all aliases"),
        ("&a [*a]", "nested in each other"),
        ("[" * 1_000_000, "nested in each other"),
        ("{a: " * 900 + "1" + "}" * 900, "nested in each other"),
        ("[" + "1," * 300_000 + "]", "more than 100,000 values"),
        ("x" * 2_000_000, "expected at most 1,048,576"),
        ("seed: " + "9" * 5000, "a number of 5,000 characters"),
        ("a: !!timestamp 2001-99-99", "timestamp: not a kind of value"),
        ("a: {!!merge x: {b: 1}}", "merge: not a kind of value"),
        ("a: !!python/object/apply:os.system [x]", "python/object/apply:os.system: not a kind of value"),
        ("a: !!int x", "'x': not a value of the type int"),
        ("a: !!bool x", "'x': not a value of the type bool"),
    ],
    ids=lambda text: text[:20],
)
def test_what_would_take_long_or_run_is_refused(text: str, message: str, tmp_path: Path):
    (tmp_path / "r.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match=f"r.yaml: .*{message}"):
        config.read(tmp_path / "r.yaml")
    assert time.process_time() - began < 10


@pytest.mark.parametrize("text", ["a: &x {b: [1, 2.5, true, null]}\nc: *x", "", "a: 1.0e-3", "- 'x y'\n- |\n  z\n"])
def test_what_is_within_the_bounds_is_what_yaml_says(text: str):
    assert parse(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("seed=" + "9" * 90, "seed: expected a number that fits into 64 bits"),
        ("data.cache_size=" + "9" * 400, "data.cache_size: a number of 400 characters"),
        ("data.cache_size=1.2.3GiB", "data.cache_size: input should be a valid integer"),
        ("data.cache_size=" + "9" * 400 + "GB", "data.cache_size: input should be less than 9223372036854775808"),
        ("out=s3://KEY:HIDDEN@bucket/run", "out: contains a user, password or key"),
        ("data.train=[/a, {url: s3://KEY:HIDDEN@b/t}]", "data.train.1.url: contains a user, password or key"),
    ],
)
def test_values_that_no_recipe_may_have(item: str, message: str, small: Path):
    with pytest.raises(UserError, match=message) as caught:
        recipe.load(str(small), [item])
    assert "HIDDEN" not in str(caught.value)
