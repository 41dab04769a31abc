"""`eagleray plan`: a plan for a named GPU, as text and as JSON, and one line for what cannot be."""

import json
from pathlib import Path

import pytest
from helpers.pictures import encode, picture
from typer.testing import CliRunner

import eagleray
from eagleray.cli import main

SMALL = ["views=[{size: 32, count: 2}]", "optim.batch=64", "data.lanes=8", "method.hidden=64"]
SMALL += ["backbone.options={img_size: 32, patch_size: 16, embed_dim: 48, depth: 2, num_heads: 3}"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main.app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the command prints when it ends with status 2."""
    monkeypatch.setattr("sys.argv", ["eagleray", "plan", *arguments])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    text = capsys.readouterr().err.strip()
    assert "\n" not in text
    return text


def test_a_plan_says_memory_speed_limit_hours_and_money():
    text = run(
        "mocov3_vits16_in1k_ep300", *SMALL, "--gpu", "h100", "--gpus", "4", "--price", "2.5", "--input-rate", "200"
    )
    for word in (
        "4 x h100, bf16",
        "of 79.6 GiB",
        "GFLOP per image",
        "images/s",
        "the decoding limits it",
        "step      ",
        "input     3200 images/s with 4 loader processes",
        "1281167 images",
    ):
        assert word in text
    assert "data.workers=" in text
    assert " at 2.5 an hour" in text


def test_a_plan_as_json_holds_the_numbers():
    """The images are where this machine cannot read them, so their number is given."""
    keys = [*SMALL, "method.prototypes=64", "data.train=s3://of-another-network/train"]
    given = ["--gpu", "v100", "--images", "5000", "--input-rate", "1e6", "--json"]
    out = json.loads(run("dino_vits16_in1k_ep100", *keys, *given))
    assert (out["precision"], out["batch"], out["ranks"], out["fits"]) == ("fp16", 64, 1, True)
    assert out["steps"] == 100 * (5000 // 64)
    assert out["images_per_s"] == min(out["rates"].values())
    assert set(out["memory"]) >= {"weights", "teacher", "moments", "images", "activations"}


def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert "did you mean 'h100'" in refused(capsys, monkeypatch, "mocov3_vits16_in1k_ep300", "--gpu", "h10")
    mine = ["--gpu", "t4", "--input-rate", "100"]
    assert "--images: expected" in refused(capsys, monkeypatch, "mocov3_vitxs8_shapes_demo", *mine)
    odd = ["mocov3_vits16_in1k_ep300", *mine, "optim.batch=1000"]
    assert "a global batch of 1000 cannot be divided into" in refused(capsys, monkeypatch, *odd)
    many = ["mocov3_vits16_in1k_ep300", *SMALL, *mine, "--gpus", "65"]
    assert "workers=65: more workers than images in a step" in refused(capsys, monkeypatch, *many)
    groups = ["moco_resnet50_in1k_ep200", *mine, "--gpus", "3"]
    assert "method.norm_group=32: expected a divisor of the images per rank" in refused(capsys, monkeypatch, *groups)
    monkeypatch.setattr("eagleray.runs.forecast.remedies", lambda *_: ())  # each of them is one more trace
    big = ["mocov3_vits16_in1k_ep300", *SMALL, "method.hidden=50000", "method.dim=50000"]
    assert "GiB on each t4, which has 15.0 GiB" in refused(capsys, monkeypatch, *big, *mine)


def test_data_is_opened_and_its_images_are_counted_and_decoded(tmp_path: Path, folder_of_images: Path):
    planned = eagleray.plan(
        "mocov3_vitxs8_shapes_demo", {"data.train": str(folder_of_images), "data.lanes": 2, "optim.batch": 4},
        out=str(tmp_path / "run"), gpu="t4",
    )  # fmt: skip
    assert planned.data.images == 8
    assert planned.data.core_rate > 0
    assert planned.data.image_bytes == pytest.approx(
        sum(f.stat().st_size for f in folder_of_images.iterdir()) / 8, rel=0.5
    )


@pytest.fixture
def folder_of_images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.jpg").write_bytes(encode(picture(i)))
    return folder


def test_a_run_that_cannot_fit_is_not_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from eagleray.runs import recipe
    from eagleray.runs.local_forecast import check_named

    monkeypatch.setattr("eagleray.runs.forecast.remedies", lambda *_: ())
    name = "mocov3_vits16_in1k_ep300"
    big = recipe.load(name, [*SMALL, "method.hidden=50000", "method.dim=50000", "workers=2"])
    with pytest.raises(eagleray.UserError, match=r"GiB on each t4.*--insist sends the run"):
        check_named(big, None, "t4", insist=False)
    check_named(big, None, "t4", insist=True)
    assert capsys.readouterr().out.count("of 15.0 GiB on 2 x t4") == 2
