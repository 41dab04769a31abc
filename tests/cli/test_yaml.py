"""Values on the command line, in files, of plug-ins and from Python mean the same: YAML's, or text where it is due."""

from pathlib import Path
from typing import Any

import pytest
from helpers.commands import refused, run
from helpers.plugins import write_plugin, write_recipe

from eagleray import config
from eagleray.api.overrides import overrides_of
from eagleray.base.errors import UserError
from eagleray.config import plugins, yaml_text
from eagleray.evaluation.registry import PROTOCOLS
from eagleray.runs import recipe
from eagleray.sweeps import sweep

NAME = "mocov3_vitxs8_cifar10_ep2"
TWICE = "base: mocov3_vitxs8_cifar10_ep2\noptim: {batch: 64}\ndata: {lanes: 32}\noptim: {epochs: 3}\n"


def shown(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    """The keys of what `eagleray show` prints, with dots."""
    run("show", NAME, *given)
    return config.flatten(yaml_text.parse(capsys.readouterr().out))


def test_a_key_that_stands_twice_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "twice.yaml"
    path.write_text(TWICE)
    line = f"error: {path}: optim: stands twice, in lines 2 and 4; expected it once"
    for command in ("show", "pretrain", "plan", "tune"):
        assert refused(capsys, command, str(path)) == line
    (tmp_path / "child.yaml").write_text("base: twice.yaml\n")
    assert line.removeprefix("error: ") in refused(capsys, "show", str(tmp_path / "child.yaml"))
    said = refused(capsys, "show", NAME, "optim={batch: 1, batch: 2}")
    assert said == "error: optim: batch: stands twice, in line 1; expected it once"


@pytest.mark.parametrize(
    ("item", "value"),
    [
        *(("seed=010", 10), ("seed=0100", 100), ("seed=0x10", 16), ("seed=0o10", 8), ("optim.lr.value=1e-3", 1e-3)),
        *(("workers=010", 10), ("out=off", "off"), ("out=0", "0"), ("out=2026-11-29", "2026-11-29")),
        *(("out=1.10", "1.10"), ("out=1_000", "1_000"), ("out=12:30:45", "12:30:45"), ("out=1e3", "1e3")),
        *(("data.train=2024", "2024"), ("data.train=1.10", "1.10"), ("data.train=[007, a]", ["007", "a"])),
        *(("backbone.weights=0x10", "0x10"), ("data.cache=null", None), ("backbone.options={a: 010, b: 1e-3}", 10)),
        ("start={from: 007}", "007"),
    ],
)
def test_an_override_and_a_file_have_one_meaning(
    item: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    key, _, text = item.partition("=")
    given = shown(capsys, item)
    key = {"backbone.options": "backbone.options.a", "start": "start.from"}.get(key, key)
    assert given[key] == value
    assert type(given[key]) is type(value)
    first, *rest = item.partition("=")[0].split(".")
    own = f"{first}: {{{rest[0]}: {text}}}" if len(rest) == 1 else None if rest else f"{first}: {text}"
    if own:
        (tmp_path / "mine.yaml").write_text(f"base: {NAME}\n{own}\n")
        of_file = config.flatten(config.to_plain(recipe.load(str(tmp_path / "mine.yaml"))))
        assert of_file[key] == value
        assert type(of_file[key]) is type(value)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("out=true", "out: input should be a valid string, got True"),
        ("data.train=true", "data.train.0.url: input should be a valid string, got True"),
        ("seed=-1", "seed: input should be greater than or equal to 0, got -1"),
        ("seed=12:30", "seed: input should be a valid integer, unable to parse string as an integer, got '12:30'"),
        ("optim.batch=2024-01-01", "optim.batch: input should be a valid integer"),
        ("workers=-1", "workers: expected a number of workers, or the fewest and the most, such as 4..16, got -1"),
        ("precision=16", "precision: input should be 'auto', 'bf16', 'fp16' or 'fp32', got 16"),
    ],
)
def test_what_is_neither_is_one_line(item: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert refused(capsys, "show", NAME, item).startswith(f"error: {NAME}: {message}")


def test_a_plugin_gets_text_where_its_types_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, keys = write_plugin(tmp_path), 'dim: int = 8, hint: str = "", hints: tuple[str, ...] = (), '
    path.write_text(path.read_text().replace("dim: int = 8, ", keys))
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        given = ["method={name: cosine_pairs, dim: 010, hint: 1.10, hints: [010, off, a]}", "views.0.operations=[]"]
        args = recipe.load("mine.yaml", given, ["my_method.py"]).method.args
        assert (args["dim"], args["hint"], args["hints"]) == (10, "1.10", ("010", "off", "a"))
        with pytest.raises(UserError, match=r"method\.hint: input should be a valid string, got True"):
            recipe.load("mine.yaml", [*given, "method.hint=true"], ["my_method.py"])
    finally:
        plugins.unload()


def test_text_from_python_stays_text():
    for text in ("1e-3", "010", "0o10", "off", "no", "2026-11-29", "1.10", "null", "true", "~", ""):
        [line] = overrides_of({"data.cache": text})
        assert config.override(line) == {"data": {"cache": text}}
        assert recipe.load(NAME, [line]).data.cache == text


def test_a_sweep_reads_the_same_and_so_does_its_folder(tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(f"{{recipe: {NAME}, out: 2024, trials: 010, space: {{seed: {{choice: [010, 0o10]}}}}}}")
    found = sweep.load(str(path), ["data.train=1.10", "optim.epochs=020"])
    path.write_text(config.dump(found))
    for each in (found, sweep.load(str(path))):
        [branch] = each.alternatives.values()
        assert (each.out, each.trials, branch.space["seed"].options) == ("2024", 10, (10, 8))
        assert isinstance(branch.recipe, dict)
        assert (branch.recipe["data"]["train"], branch.recipe["optim"]["epochs"]) == ("1.10", 20)


def test_settings_of_protocols_mean_the_same():
    parse = PROTOCOLS["knn"].parse
    assert parse({"k": "010", "ks": "010,0x10"}) == {"k": 10, "ks": (10, 16)}
    assert parse({"temperature": "1e-1"}) == {"temperature": 0.1}
