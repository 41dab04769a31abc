"""Runs that read a selection of their data: exact over a stop, recorded, and answerable for each sample."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import refused
from helpers.pictures import jpeg
from helpers.recipes import small_recipe
from helpers.runs import FAST, arguments, assert_same, split, weights

import eagleray
from eagleray.api import pretrain as api
from eagleray.base.files import read_lines
from eagleray.cli import main
from eagleray.config import yaml_text
from eagleray.data.index import open_index, write_index
from eagleray.data.loader import Loader
from eagleray.data.selection import Selection
from eagleray.runs import recipe
from eagleray.runs.plan import open_plan

pytestmark = pytest.mark.usefixtures("quick_runs")
CHOICE = '{url: "%s", where: "label < 8", weight: "1 + (label %% 3) / 2"}'


def given(recipe: Path, shards: Path, out: Path, *more: str, choice: str = CHOICE) -> tuple[str, list[str]]:
    name, keys = split(arguments(recipe, shards, out, *FAST, *more))
    return name, [*keys, f"data.train={choice % (shards / 'train')}"]


def test_a_stop_changes_nothing(small: Path, shards: Path, tmp_path: Path):
    name, keys = given(small, shards, tmp_path / "whole", "max_steps=14", "optim.epochs=4")
    whole = api.pretrain(name, keys)
    for steps in 5, 14:
        api.pretrain(*given(small, shards, tmp_path / "out", f"max_steps={steps}", "optim.epochs=4"))
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    [source] = yaml_text.parse((tmp_path / "whole" / "recipe.yaml").read_text())["data"]["train"]
    assert source == {"url": str(shards / "train"), "where": "label < 8", "weight": "1 + (label % 3) / 2"}
    log = (tmp_path / "whole" / "train.log").read_text()
    assert "of 320 samples are read" in log
    assert "kB each" in log
    assert "eagleray prepare webdataset --where" not in log
    digests = [read_lines(tmp_path / name / "starts.jsonl")[0]["order"] for name in ("whole", "out")]
    assert digests[0] == digests[1]
    api.pretrain(*given(small, shards, tmp_path / "all", "max_steps=1", choice='{url: "%s"}'))
    assert read_lines(tmp_path / "all" / "starts.jsonl")[0]["order"] != digests[0]
    assert whole.summary["steps"] == 14


@pytest.mark.parametrize("method", ["instdisc", "pirl"])
def test_methods_with_a_vector_for_each_image_take_whole_data_sets(
    method: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (recipe := tmp_path / "small.yaml").write_text(small_recipe(method))
    name, keys = given(recipe, shards, tmp_path / "out")
    line = refused(capsys, "pretrain", name, *keys)
    assert re.search(rf"data\.train: leaves out \d+ of 320 samples, but {method} has a vector for each", line)
    weighted = '{url: "%s", weight: "1 + (label %% 3) / 2"}'
    api.pretrain(*given(recipe, shards, tmp_path / "out", "max_steps=2", choice=weighted))


def test_a_run_does_not_continue_with_another_table(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    index = open_index(str(shards / "train"))
    keys = [index.key(i) for i in range(len(index))]
    table, out = tmp_path / "scores.csv", tmp_path / "out"

    def write(least: int) -> None:
        table.write_text("key,score\n" + "".join(f"{key},{i % least}\n" for i, key in enumerate(keys)))

    choice = f'{{url: "%s", columns: "{table}", where: "score > 0"}}'
    write(5)
    api.pretrain(*given(small, shards, out, "max_steps=4", choice=choice))
    before = table.read_text()
    write(4)
    name, more = given(small, shards, out, "max_steps=6", choice=choice)
    line = refused(capsys, "pretrain", name, *more)
    assert "out: a table of data.train (columns, exclude, or one beside the shards) or the order is not the one" in line
    assert "up to step 4, so it cannot continue exactly; put back what was there, or begin another run" in line
    assert line.endswith(f"start.from={out}")
    table.write_text(before)
    assert api.pretrain(name, [*more, "data.workers=1"]).summary["steps"] == 6


def test_shards_that_were_replaced_meanwhile_are_refused(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(shards, tmp_path / "data")
    name, keys = given(small, tmp_path / "data", tmp_path / "out", "max_steps=2", choice='{url: "%s"}')
    api.pretrain(name, keys)
    one, two, *_ = sorted((tmp_path / "data" / "train").glob("*.tar"))
    swapped = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(swapped)
    write_index(str(tmp_path / "data" / "train"))
    line = refused(capsys, "pretrain", name, *keys[:-2], "max_steps=4", keys[-1])
    assert "out: the shards of data.train are not those that the run has read by up to step 2" in line
    assert f"so it cannot continue exactly ({one.name} has changed, and 1 more); put back" in line


def test_an_image_that_was_replaced_in_place_is_said_at_the_next_start(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Also with a new index, with which only another run may read it."""
    shutil.copytree(shards, tmp_path / "data")
    train = tmp_path / "data" / "train"
    name, keys = given(small, tmp_path / "data", tmp_path / "out", "max_steps=2", choice='{url: "%s"}')
    api.pretrain(name, keys)
    index, longer = open_index(str(train)), [*keys[:-2], "max_steps=4", keys[-1]]
    before = (shard := Path(index.shards[3].url)).read_bytes()
    first = int(index.first[3])
    at, size = int(index.offset[first]), int(index.size[first])
    with shard.open("r+b") as file:
        file.seek(at)
        file.write(bytes(size))
    line = refused(capsys, "pretrain", name, *longer)
    assert f"error: data.train: {shard}: changed since it was indexed" in line
    write_index(str(train))
    line = refused(capsys, "pretrain", name, *longer)
    assert f"so it cannot continue exactly ({shard.name} has changed); put back what was there" in line
    other = [key.replace(str(tmp_path / "out"), str(tmp_path / "other")) for key in keys]
    assert api.pretrain(name, other).summary["steps"] == 2
    shard.write_bytes(before)
    write_index(str(train))
    assert api.pretrain(name, longer).summary["steps"] == 4


def test_an_image_in_a_folder_that_was_replaced_is_said_at_the_next_start(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(40):
        (photos / f"{i}.jpg").write_bytes(jpeg(i))
    keys = [f"data.train={photos}", f"out={tmp_path / 'out'}", *FAST, "data.lanes=8"]
    api.pretrain(str(small), [*keys, "max_steps=1"])
    image = photos / "7.jpg"
    image.write_bytes(jpeg(7)[:-1] + b"!")
    line = refused(capsys, "pretrain", str(small), *keys, "max_steps=2")
    assert (
        line == f"error: data.train: {image}: has changed since it was indexed; `eagleray index {photos}` accepts that"
    )
    write_index(str(photos))
    line = refused(capsys, "pretrain", str(small), *keys, "max_steps=2")
    assert "so it cannot continue exactly (an image of the folder has changed); put back" in line


def test_the_report_shows_what_is_read_and_what_is_not(small: Path, shards: Path, tmp_path: Path):
    run = api.pretrain(*given(small, shards, tmp_path / "out", "max_steps=1"))
    page = Path(eagleray.report(run)[0]).read_text()
    section = page[page.index("Choice of samples</h2>") :]
    label = open_index(str(shards / "train")).label
    weight = np.where(label < 8, 1 + label % 3 / 2, 0)
    kept = int((weight > 0).sum())

    def numbers(name: str) -> list[float]:
        return [float(n) for n in re.findall(rf'data-label="{name}"><data value="([\d.]+)">', section)]

    assert numbers("Images") == [kept, 320 - kept, 320]  # the last is that of the source
    assert numbers("Readings in an epoch") == pytest.approx([weight.sum()])
    assert numbers("% of an epoch") == [100]
    assert numbers("where is false") == [320 - kept]
    assert numbers("excluded") == numbers("where is null") == numbers("weight is 0") == [0]
    assert "where of source 1: label &lt; 8" in section
    assert len(set(re.findall(r'src="(data:image/webp;base64,.*?)"', section))) == 2
    drawn = (tmp_path / "out" / "choice.json").stat().st_mtime_ns
    api.pretrain(*given(small, shards, tmp_path / "out", "max_steps=2"))
    assert (tmp_path / "out" / "choice.json").stat().st_mtime_ns == drawn, "once is enough"


def test_a_choice_of_few_samples_is_better_written_as_shards():
    assert "eagleray prepare webdataset --where" in str(Selection(np.array([1, 0], np.float32), 9_000, 100_000))
    assert str(Selection(np.array([1, 0], np.float32), 10_000, 100_000)) == (
        "1 of 2 samples are read, 1 times an epoch, 10.0 kB each"
    )


def keys_of_step(out: Path, step: int) -> list[str]:
    """The keys of the images of a step's batch, as the loader gives them."""
    plan = open_plan(recipe.load(str(out / "recipe.yaml")), note=lambda _: None)
    loader = Loader(plan.stream, rank=0, ranks=1, workers=0, device=torch.device("cpu"))
    [(batch, _)] = loader.batches(step - 1, step)
    return [plan.index.key(sample) for sample in batch.index.tolist()]


def test_which_steps_have_read_a_sample(small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shards = Path(shutil.copytree(shards, tmp_path / "shards"))
    api.pretrain(*given(small, shards, tmp_path / "out", "max_steps=9", "checkpoint.steps=3", "checkpoint.keep=9"))
    keys = {step: keys_of_step(tmp_path / "out", step) for step in (4, 8)}
    for step, of_step in keys.items():
        for key in of_step[:5]:
            [found] = eagleray.which(tmp_path / "out", key)
            assert found["steps"].count(step) == of_step.count(key)
            assert all(other == step or key not in keys.get(other, ()) for other in found["steps"] if other in keys)
    capsys.readouterr()
    main.app(["data", "which", str(tmp_path / "out"), "--key", keys[4][0]], standalone_mode=False)
    assert f"{keys[4][0]}: read in " in capsys.readouterr().out
    line = refused(capsys, "data", "which", str(tmp_path / "out"), "--key", "nobody")
    assert line == "error: --key nobody: no sample of the training data has this key"
    assert "no run there" in refused(capsys, "data", "which", str(tmp_path / "none"), "--key", "nobody")
    for name in ("metrics.jsonl", "steps.jsonl"):  # as of a run that was killed before the first lines
        (tmp_path / "out" / name).unlink()
    assert 8 in eagleray.which(tmp_path / "out", keys[8][0])[0]["steps"]
    shutil.copy(next((shards / "train").glob("*.tar")), shards / "train" / "zz.tar")
    line = refused(capsys, "data", "which", str(tmp_path / "out"), "--key", keys[4][0])
    assert "the shards of data.train are not those that the run has read; put back what was there" in line


def test_an_own_loop_reads_a_selection(shards: Path):
    source = {"url": str(shards / "train"), "where": "label = 3"}
    loader = eagleray.loader(source, views=[{"size": 16}], batch=8, workers=0)
    assert {int(label) for batch in loader for label in batch.label} == {3}


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        ('{url: "%s", where: "labels < 8"}', "data.train.where: labels < 8: "),
        ('{url: "%s", were: "label < 8"}', "data.train.0.were: unknown key; did you mean 'data.train.0.where'?"),
        ('{url: "%s", where: "label > 100"}', "data.train: leaves none of 320 samples"),
        ('{url: "%s", where: "label = 3"}', "optim.batch=32"),
        ('{url: "%s", share: 0}', "data.train.0.share"),
    ],
)
def test_a_choice_that_cannot_be_is_one_line(
    choice: str, line: str, small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    name, keys = given(small, shards, tmp_path / "out", choice=choice)
    assert line in refused(capsys, "pretrain", name, *keys)


def test_a_test_set_is_not_chosen_from(small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name, keys = given(small, shards, tmp_path / "out", choice='"%s"')
    line = refused(capsys, "pretrain", name, *keys, f'data.test={{url: "{shards / "test"}", where: "label < 3"}}')
    assert line == "error: data.test: where, weight, exclude and share are for data.train"
