"""`eagleray data bench`: every stage has a rate, and the sentence is about the slowest."""

import json
import math
import sys
from pathlib import Path

import pytest
from helpers.pictures import sample, spoiled, write_shards, write_tar

from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.data.bench import Stage, bench, find_bottleneck, time_stage

STAGES = ["store", "read", "decode", "crop", "loader"]


def stages(**rates: float) -> dict[str, Stage]:
    """Of so many images of 100 kB per second; two loader processes."""
    processes = {"decode": 1, "crop": 1, "loader": 2}
    return {n: Stage(n, 1, int(r), int(r) * 100_000, processes.get(n, 0)) for n, r in rates.items()}


def test_every_stage_has_its_rates(tmp_path: Path) -> None:
    notes: list[str] = []
    report = bench(str(write_shards(tmp_path, 40, 2)), seconds=0.02, note=notes.append)
    assert len(notes) == 1  # they were not indexed yet
    assert [s.name for s in report.stages] == STAGES
    assert all(s.rate > 0 and s.bytes > 0 for s in report.stages)
    assert report.bottleneck in STAGES
    out = report.json()
    assert list(out["stages"]) == STAGES
    assert [n for n, row in out["stages"].items() if "images_per_s_per_core" in row] == ["decode", "crop", "loader"]
    assert out["images"] == 40
    text = list(report.lines())
    assert [line.split()[0] for line in text[2:-1]] == STAGES
    assert text[-1].startswith(f"bottleneck: {report.bottleneck}: ")


@pytest.mark.parametrize("samples", [1, 7])
def test_a_few_images_are_enough(samples: int, tmp_path: Path) -> None:
    report = bench(str(write_shards(tmp_path, samples, 1)), seconds=0.02, note=lambda _: None)
    assert report.images == samples


def test_broken_images_are_passed_over_while_there_are_others(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "some", 16, 1, broken=[0, 5])
    assert bench(str(shards), seconds=0.02, note=lambda _: None).images == 16
    write_tar(tmp_path / "all" / "x.tar", sample(1, spoiled(1)))
    with pytest.raises(UserError, match=r"none of \d+ images can be decoded"):
        bench(str(tmp_path / "all"), seconds=0.02, note=lambda _: None)


def test_a_slow_store_is_given_more_time() -> None:
    pieces = ((1, 10) for _ in range(1000))
    assert time_stage("read", 0, pieces, least=25).images == 1  # but not for ever
    assert time_stage("read", math.inf, iter([(1, 10)] * 3)).bytes == 30
    patient = time_stage("read", 0.01, ((1, 0) for _ in iter(int, 1)), least=1)
    assert 0.04 < patient.seconds < 10


FAST = {"store": 9000.0, "read": 8000.0, "decode": 800.0, "crop": 1200.0, "loader": 900.0}


@pytest.mark.parametrize(
    ("change", "remote", "bottleneck", "advice"),
    [
        ({"store": 300.0, "read": 290.0, "loader": 280.0}, True, "store", "data.cache"),
        ({"store": 300.0, "read": 290.0, "loader": 280.0}, False, "store", "a faster disk"),
        (
            {"store": 9000.0, "read": 290.0, "loader": 280.0},
            True,
            "read",
            "290 images/s read, 960 could be decoded",
        ),
        ({}, True, "decode", "a core decodes and crops 480 images/s"),
        ({"crop": 500.0}, True, "crop", "more cores, or fewer or smaller views"),
        ({"loader": 300.0}, True, "loader", "300 images/s arrive where 960 are possible"),
    ],
)
def test_the_slowest_stage_is_named(change: dict[str, float], remote: bool, bottleneck: str, advice: str) -> None:
    name, text = find_bottleneck(stages(**(FAST | change)), cores=2, side=500, remote=remote)
    assert name == bottleneck
    assert text.startswith(f"{name}: ")
    assert advice in text
    assert "max-side" not in text


def test_free_cores_and_large_images_are_mentioned() -> None:
    _, text = find_bottleneck(stages(**FAST), cores=16, side=2000, remote=True)
    assert "more of the 16 cores (data.workers)" in text
    assert "their longer side is 2000 pixels (`eagleray prepare --max-side`)" in text


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(write_shards(tmp_path, 24, 1))
    monkeypatch.setattr(sys, "argv", ["eagleray", "data", "bench", url, "--seconds", "0.1", "--json"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert not caught.value.code
    assert list(json.loads(capsys.readouterr().out)["stages"]) == STAGES
    monkeypatch.setattr(sys, "argv", ["eagleray", "data", "bench", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert capsys.readouterr().err.count("\n") == 1
