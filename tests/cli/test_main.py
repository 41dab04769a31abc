"""Wrong input gets one clear line and exit status 2; right input gets what the help promises."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import forked
from helpers.commands import refused
from helpers.layouts import fill, write_parquet
from helpers.pictures import jpeg
from typer.testing import CliRunner

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.cli.early import check_data
from eagleray.data.index import open_index
from eagleray.runs import recipe

RUN = CliRunner()


def eagleray(*args: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", "eagleray.cli", *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("optim.btach=32", "optim.btach: unknown key; did you mean 'optim.batch'?"),
        ("method.temprature=0.1", "method.temprature: unknown key; did you mean 'method.temperature'?"),
        ("views=[{sise: 16}, {}]", "views.0.sise: unknown key; did you mean 'views.0.size'?"),
        ("optim.lr.valu=1", "optim.lr.valu: unknown key; did you mean 'optim.lr.value'?"),
        ("method.name=mocov4", "method.name: unknown 'mocov4'; did you mean 'mocov3'?"),
        ("backbone.name=vit_tiny_patch16_225", "did you mean vit_tiny_patch16_224?"),
        ("backbone.options={depht: 3}", "depht"),
        ("optim.batch=many", "optim.batch: input should be a valid integer"),
        ("optim.batch=-32", "optim.batch: input should be greater than 0"),
        ("optim.batch=30", "optim.batch=30 data.lanes=8"),
        ("optim.batch=3200", "320 images do not fill one batch of optim.batch=3200"),
        ("workers=33", "workers=33: more workers than images in a step; expected at most optim.batch=32"),
        ("workers=-1", "workers: expected a number of workers, or the fewest and the most, such as 4..16, got -1"),
        ("data.workers=many", "data.workers: "),
        ("views=[{size: 16}]", "views: got 1, but mocov3 works with 2"),
        ("views=[{scale: [0.5, 0.2]}, {}]", "views.0"),
        ("views.2.blur=1", "views.2: no such entry; views has 2, counted from 0"),
        ("seed", "'seed': expected key=value"),
        ("data.train=/nowhere/at/all", "/nowhere/at/all: cannot be read: No such file or directory"),
        ("data.train=gcs://bucket", "unknown scheme 'gcs'"),
        ("data.train=null", "data.train: missing"),
        ("out=/proc/nowhere", "out=/proc/nowhere: cannot be written"),
    ],
)
def test_wrong_keys(key: str, wanted: str, small: Path, shards: Path, tmp_path: Path, capsys):
    given = [f"data.train={shards / 'train'}", f"out={tmp_path / 'out'}", key]
    assert wanted in refused(capsys, "pretrain", str(small), *given)


def test_wrong_data(small: Path, shards: Path, tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    out = f"out={tmp_path / 'out'}"
    assert "no .tar shards there" in refused(capsys, "pretrain", str(small), f"data.train={tmp_path / 'empty'}", out)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.tar").write_bytes(b"no tar" * 200)
    line = refused(capsys, "pretrain", str(small), f"data.train={tmp_path / 'broken'}", out)
    assert "no usable image in 1 shard(s); not a tar archive" in line
    line = refused(capsys, "pretrain", str(small), f"data.train={shards / 'train'}/*.tra", out)
    assert "no .tar shards there" in line


def test_an_unreachable_bucket(small: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    for key, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{key}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    line = refused(capsys, "pretrain", str(small), "data.train=s3://bucket/train", f"out={tmp_path / 'out'}")
    assert "s3://bucket/train" in line
    assert "127.0.0.1:9" in line


def test_wrong_recipes(tmp_path: Path, capsys):
    assert "did you mean 'dino_vits16_in1k_ep100'" in refused(capsys, "show", "dino_vits16_in1k_ep10")
    assert "no such recipe file" in refused(capsys, "show", str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "expected a mapping of keys to values" in refused(capsys, "show", str(tmp_path / "list.yaml"))
    (tmp_path / "torn.yaml").write_text("a: [1\n")
    assert "is not YAML" in refused(capsys, "show", str(tmp_path / "torn.yaml"))


def test_wrong_checkpoints(tmp_path: Path, shards: Path, capsys):
    (tmp_path / "some.pt").write_bytes(b"nothing")
    train = ("--train", str(shards / "train"))
    assert "not a checkpoint written by eagleray" in refused(capsys, "evaluate", str(tmp_path / "some.pt"), *train)
    assert "no such run or checkpoint" in refused(capsys, "export", str(tmp_path / "none.pt"))
    assert "holds no intact checkpoint" in refused(capsys, "export", str(tmp_path))
    line = refused(capsys, "evaluate", "untrained:timm:resnet18", *train, "--protocol", "kn")
    assert "--protocol kn: unknown; did you mean 'knn'?" in line


@pytest.mark.parametrize(
    ("words", "url"),
    [
        (("report", "runs/a", "--out"), "s3://bucket/a.html"),
        (("export", "runs/a", "--destination"), "s3://bucket/export"),
        (("init", "--images", "5000", "--out"), "s3://bucket/own.yaml"),
        (("data", "stats", "shards", "--out"), "gs://bucket/stats"),
    ],
)
def test_a_url_where_a_path_is_expected(
    words: tuple[str, ...], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *words, url)
    assert line == f"error: {words[-1]} {url}: expected a path of this machine, not a URL"
    assert not list(tmp_path.iterdir())


def test_show_prints_a_recipe_that_loads(tmp_path: Path):
    shown = RUN.invoke(main.app, ["show", "dino_vits16_in1k_ep100", "optim.batch=1024"])
    assert shown.exit_code == 0
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    again = RUN.invoke(main.app, ["show", str(tmp_path / "shown.yaml")])
    assert again.stdout == shown.stdout
    assert "batch: 1024" in shown.stdout


@pytest.mark.parametrize("name", ["mocov3_vits16_in1k_ep300", "distill_vitxs8_cifar10_ep2"])
def test_show_prints_every_key_also_those_that_digests_leave_out(name: str, tmp_path: Path):
    changes = ["data.train=[{url: a/train, where: bytes > 9}, b/train]", "start={from: runs/a}"]
    shown = RUN.invoke(main.app, ["show", name, *changes]).stdout
    tree = yaml.safe_load(shown)
    assert set(tree) == {field.name for field in dataclasses.fields(recipe.Recipe)}
    assert (tree["precision"], tree["track"], tree["curriculum"]) == ("auto", {"register": None, "also": []}, [])
    assert tree["optim"].items() >= {"checkpointing": False, "reduce": "fp32", "beta2": 0.999}.items()
    assert tree["views"][0]["noise_std"] == [0.02, 0.2]
    assert (tree["backbone"]["patch_norm"], tree["start"]["stop_below"]) == ("timm", None)
    assert tree["method"].get("teacher", tree["method"]).keys() & {"patch_norm", "joint_norm"}
    (tmp_path / "shown.yaml").write_text(shown)
    assert recipe.digest(recipe.load(str(tmp_path / "shown.yaml"))) == recipe.digest(recipe.load(name, changes))


@pytest.mark.parametrize(("kind", "wanted"), [("methods", "dino"), ("backbones", "resnet50"), ("recipes", "dino_")])
def test_list(kind: str, wanted: str):
    rows = json.loads(RUN.invoke(main.app, ["list", kind, "--json"]).stdout)
    names = [row["name"] for row in rows] if kind == "recipes" else list(rows)
    assert any(wanted in name for name in names)
    assert all(rows if kind == "recipes" else rows.values())


@pytest.mark.slow  # `make mission` goes this way, too
def test_from_images_to_a_timm_model(small: Path, tmp_path: Path):
    """The commands of the README, one after the other. timm starts cold, without anything of ours."""
    from eagleray.datasets.shapes import image

    for i in range(120):
        picture, label = image(0, i)
        place = tmp_path / "images" / f"class{label % 3}"
        place.mkdir(parents=True, exist_ok=True)
        picture.save(place / f"{i}.png")
    done = eagleray("shard", str(tmp_path / "images"), str(tmp_path / "shards"))
    assert "120 images of 3 classes" in done.stdout, done.stderr
    again = RUN.invoke(main.app, ["shard", str(tmp_path / "images"), str(tmp_path / "shards")])
    assert again.exit_code == 0
    assert "already complete" in again.stdout
    other = eagleray("shard", str(tmp_path / "images" / "class0"), str(tmp_path / "shards"))
    assert other.returncode == 2
    assert "was begun with FROM" in other.stderr
    done = RUN.invoke(main.app, ["index", str(tmp_path / "shards")])
    assert "index.parquet: 120 images" in done.stdout
    out = tmp_path / "out"
    pretrain(str(small), [f"data.train={tmp_path / 'shards'}", f"out={out}", "max_steps=3"])
    scores = RUN.invoke(main.app, ["evaluate", str(out), "--train", str(tmp_path / "shards"), "--json"])
    assert json.loads(scores.stdout).keys() >= {"knn/top1", "linear/top1"}
    newest = str(max((out / "checkpoints").glob("*.pt")))
    done = eagleray("export", newest, "--to", "timm", "--destination", str(tmp_path / "exported"))
    assert "timm.create_model" in done.stdout, done.stderr
    code = (
        "import timm, torch; m = "
        + done.stdout.split("load it")[1].split("\n")[0].strip()
        + "; print(m(torch.zeros(1, 3, 16, 16)).shape)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "torch.Size([1, 24])" in loaded.stdout, loaded.stderr


def test_data_are_indexed_by_the_columns_that_a_recipe_names(small: Path, tmp_path: Path):
    """They are not those that would be found, neither before nor after PyTorch is imported."""
    more = {"photo": [jpeg(i) for i in range(66)], "class_id": [i % 6 for i in range(66)]}
    write_parquet(tmp_path / "set" / "0.parquet", 0, 66, **more)
    data = f"data.train=[{{url: {tmp_path / 'set'}, image: photo, label: class_id}}]"
    read = recipe.load(str(small), [data, "data.test=null", f"out={tmp_path / 'out'}"])
    check_data(read)
    index = open_index([dataclasses.replace(read.data.sources()[0], url=str(tmp_path / "set"))])
    assert sorted({*index.label.tolist()}) == [*range(6)]


def test_images_that_an_epoch_reads_several_times_fill_a_batch(small: Path, tmp_path: Path):
    fill(tmp_path / "few", [f"{i}.jpg" for i in range(10)])

    def check(more: str) -> None:
        data = f"data.train={{url: {tmp_path / 'few'}, {more}}}"
        check_data(recipe.load(str(small), [data, "data.test=null", f"out={tmp_path / 'out'}", "optim.batch=32"]))

    for more in ("repeat: 4", "weight: '4'"):
        check(more)
    with pytest.raises(UserError, match="30 images do not fill one batch"):
        check("repeat: 3")
