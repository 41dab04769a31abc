"""Whether a run's numbers at its end are better than those of the untrained backbone, and where it is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.places import picture, write_places
from helpers.ranks import on_ranks
from helpers.runs import arguments, split

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.data.index import open_index
from eagleray.protocols.crop_retrieval import lidar, measure_crops, random_crops
from eagleray.reports import write
from eagleray.runs import evaluations, layout
from eagleray.runs.verdicts import Comparison, compare, judge, verdicts

SIGNS = {"knn/top1": 5.7, "knn/top1_untrained": 9.5, "linear/top1": 13.3, "linear/top1_untrained": 17.7}


@pytest.mark.parametrize(
    ("now", "before", "images", "sign", "noise"),
    [
        (42.1, 30.0, 2000, 1, 3.01),
        (32.0, 30.0, 2000, 0, 2.92),
        (27.2, 30.0, 2000, 0, 2.86),
        (27.0, 30.0, 2000, -1, 2.85),
        (32.0, 30.0, 20_000, 1, 0.92),
        (5.7, 9.5, 430, -1, 3.61),
        (0.0, 0.0, 100, 0, 0.0),
    ],
)
def test_a_difference_counts_beyond_two_standard_errors(
    now: float, before: float, images: int, sign: int, noise: float
):
    found = Comparison.of_shares("kNN", now, before, images)
    p, q = now / 100, before / 100
    assert found.noise == pytest.approx(100 * 2 * ((p * (1 - p) + q * (1 - q)) / images) ** 0.5)
    assert found.noise == pytest.approx(noise, abs=0.006)
    assert found.sign == sign


def test_chance_alone_seldom_makes_a_verdict():
    """Two backbones that are right as often, each on images of its own."""
    draw = np.random.default_rng(0)
    for share in (0.1, 0.5, 0.9):
        counts = draw.binomial(500, share, (2000, 2)) / 5
        signs = [Comparison.of_shares("kNN", a, b, 500).sign for a, b in counts.tolist()]
        assert 0.03 < np.mean(np.abs(signs)) < 0.06


def test_each_number_is_judged_and_named():
    assert [(f.step, f.kind) for f in judge(SIGNS, 430, 52)] == [(52, "below untrained"), (52, "not above untrained")]
    [below, equal] = judge(SIGNS, 430, 52)
    assert below.text == "kNN 5.7 % against 9.5 % (±3.6 by chance) of 430 images"
    assert equal.text == "linear 13.3 % against 17.7 % (±4.9 by chance) of 430 images"
    assert [f.kind for f in judge(SIGNS, 4000, 52)] == ["below untrained"]
    assert verdicts(SIGNS, 4000) == [
        "worse than untrained: kNN 5.7 % against 9.5 % (±1.2 by chance), linear 13.3 % against 17.7 % (±1.6 by chance) "
        "of 4,000 images"
    ]


def test_one_number_that_is_better_is_enough_unless_the_other_is_worse():
    """As kNN 22.2 against 18.6 and linear 27.3 against 19.2 of 860 images."""
    scores = {"knn/top1": 22.2, "knn/top1_untrained": 18.6, "linear/top1": 27.3, "linear/top1_untrained": 19.2}
    assert not list(judge(scores, 860, 9))
    assert verdicts(scores, 860) == [
        "better than untrained: linear 27.3 % against 19.2 % (±4.1 by chance) of 860 images; no better than untrained: "
        "kNN 22.2 % against 18.6 % (±3.9 by chance) of 860 images"
    ]
    assert [f.kind for f in judge(scores | {"knn/top1": 10.0}, 860, 9)] == ["below untrained"]


def test_a_better_backbone_is_no_finding_and_the_start_counts_too():
    scores = {"knn/top1": 60.0, "knn/top1_untrained": 30.0, "knn/top1_start": 61.0}
    assert not list(judge(scores, 2000, 9))
    assert [sentence.partition(":")[0] for sentence in verdicts(scores, 2000)] == [
        "better than untrained",
        "no better than the start",
    ]
    [lost] = judge(scores | {"knn/top1_start": 70.0}, 2000, 9)
    assert lost.kind == "below the start"


def test_where_nothing_can_be_better_nothing_is_found():
    scores = {"crops/found": 99.8, "crops/found_untrained": 99.9}
    assert not list(judge(scores, 1000, 9))
    assert verdicts(scores, 1000)[0].startswith("no better than untrained: crops found 99.8 % against 99.9 %")
    assert compare({"linear/lr": 0.1}, "_untrained", 1000) == []
    assert verdicts({}, 0) == []


@pytest.mark.parametrize(
    ("found", "lidar_now", "said", "kinds"),
    [
        (
            40.0,
            30.0,
            "better than untrained: crops found 40.0 % against 20.0 % (±4.0 by chance), LiDAR 30.0 against 20.0",
            [],
        ),
        (40.0, 20.5, "better than untrained", []),
        (40.0, 9.0, "no labels, and unclear whether better than untrained: crops found 40.0 %", []),
        (21.0, 9.0, "no labels, and unclear", []),
        (21.0, 20.5, "no better than untrained", ["not above untrained"]),
        (9.0, 9.0, "worse than untrained", ["below untrained"]),
        (9.0, 20.5, "worse than untrained", ["below untrained"]),
    ],
)
def test_without_labels_two_numbers_must_not_contradict(found: float, lidar_now: float, said: str, kinds: list[str]):
    scores = {"crops/found": found, "crops/found_untrained": 20.0, "crops/lidar": lidar_now, "crops/lidar_error": 0.4}
    scores |= {"crops/lidar_untrained": 20.0, "crops/lidar_error_untrained": 0.3}
    assert verdicts(scores, 1000)[0].startswith(said)
    assert [f.kind for f in judge(scores, 1000, 9)] == kinds


def tags(uri: Path) -> dict[str, str]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{uri}")
    [run] = client.search_runs([client.get_experiment_by_name("eagleray").experiment_id])
    assert "health.jsonl" in {f.path for f in client.list_artifacts(run.info.run_id)}
    return dict(run.data.tags)


def test_a_backbone_below_the_untrained_one_is_named_everywhere(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluations, "untrained_scores", lambda *_: {"knn/top1": 99.0})
    out = tmp_path / "out"
    run = pretrain(*split(arguments(small, shards, out, "max_steps=2", "evaluate.probe_epochs=0")))
    said = f"kNN {run.summary['knn/top1']:.1f} % against 99.0 % (±"
    [found] = read_lines(out / layout.HEALTH)
    assert (found["step"], found["kind"]) == (2, "below untrained")
    assert found["text"].startswith(said)
    assert run.summary["health"][0].startswith(f"below untrained at step 2: {said}")
    [verdict] = run.summary["verdict"]
    assert verdict.startswith(f"worse than untrained: {said}")
    console = capsys.readouterr().out
    assert f"warning: step 2: below untrained: {said}" in console
    assert "health: below untrained (step 2); checked: non-finite (2 steps)" in console
    assert "not checked: inputs, too large steps (0 of the 1 measurement" in console
    assert f"verdict   {verdict}" in str(run)
    there = tags(tmp_path / "mlflow.db")
    assert there["eagleray.verdict"] == verdict
    assert there["eagleray.health"] == run.summary["health"][0]
    page = Path(write.report([str(out)])[0]).read_text()
    head = page[: page.index("<dl")]
    assert f"<p>W{verdict[1:]}.</p>" in head
    assert "Found at the end: below untrained" in head
    assert head.index(verdict[1:]) < head.index("in batches of"), "the first line"


@pytest.mark.usefixtures("untracked_runs")
def test_a_better_backbone_is_said_to_be_and_nothing_is_found(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluations, "untrained_scores", lambda *_: {"knn/top1": 0.0})
    monkeypatch.setattr(evaluations.Probed, "scores", lambda *_, **__: {"knn/top1": 30.0})
    out = tmp_path / "out"
    run = pretrain(*split(arguments(small, shards, out, "max_steps=2", "evaluate.probe_epochs=0")))
    assert run.summary["verdict"] == ["better than untrained: kNN 30.0 % against 0.0 % (±10.2 by chance) of 80 images"]
    assert run.findings() == []
    assert "health: no findings; checked: non-finite (2 steps)" in capsys.readouterr().out


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 64 images without labels."""
    folder = tmp_path_factory.mktemp("flat")
    for number in range(64):
        picture(0, number)[0].save(folder / f"{number:03d}.png")
    return folder


@pytest.mark.usefixtures("untracked_runs")
def test_a_run_without_labels_shows_its_evidence(
    small: Path, flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    keys = [f"data.train={flat}", "workers=0", "max_steps=2"]
    run = pretrain(str(small), keys, out=tmp_path / "out")
    both = [run.summary["crops/found" + suffix] for suffix in ("", "_untrained")]
    said = f"crops found {both[0]:.1f} %, untrained {both[1]:.1f} % (64 training images, of which a guess finds 1.6 %)"
    console = capsys.readouterr().out
    assert said in console
    assert "kNN dip (no labels)" in console
    assert f"LiDAR {run.summary['crops/lidar']:.1f}, untrained {run.summary['crops/lidar_untrained']:.1f} (" in console
    assert f"crops found {both[0]:.1f} % against {both[1]:.1f} % (±" in run.summary["verdict"][0]
    test = pretrain(str(small), [*keys, f"data.test={flat}"], out=tmp_path / "test")
    assert "(64 test images" in (tmp_path / "test" / layout.LOG).read_text()
    assert test.summary["crops/found"] == both[0]


def test_labels_on_one_side_alone_are_refused(small: Path, shards: Path, flat: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"data.test: has no labels; evaluation needs labels in both"):
        pretrain(str(small), [f"data.train={shards / 'train'}", f"data.test={flat}"], out=tmp_path / "a")


class Means(torch.nn.Module):
    """A backbone whose features are the mean colour of each quarter of the image."""

    dim = 12

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


def test_crops_are_the_same_for_every_backbone_and_on_any_number_of_ranks(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from eagleray.protocols import crop_retrieval, features

    monkeypatch.setattr(features, "BATCH", 16)
    index = open_index(str(flat))

    def work() -> Any:
        return measure_crops(Means(), index, np.arange(64), size=16, resize=32)  # type: ignore[arg-type]

    alone = work()
    assert 5 < alone[0] < 100
    assert 1 < alone[1] < 12
    assert 0 < alone[2] < 3
    assert on_ranks(2, work, tmp_path, start="fork") == [alone, alone]
    monkeypatch.setattr(crop_retrieval, "AREA", (1.0, 1.0))
    assert work()[0] == 100
    assert measure_crops(Means(), index, np.arange(4), size=16, resize=32) is None  # type: ignore[arg-type]


def test_lidar_counts_the_directions_in_which_images_differ():
    draw = torch.Generator().manual_seed(0)
    images, crops = (torch.randn(2000, *shape, generator=draw, dtype=torch.float64) for shape in ((1, 16), (2, 16)))
    assert lidar(10 * images + crops) == pytest.approx(16, rel=0.05)
    assert lidar(10 * images * (torch.arange(16) < 4) + crops) == pytest.approx(4, rel=0.1)
    assert lidar(torch.zeros(10, 2, 3, dtype=torch.float64)) == 1


def test_a_crop_is_a_part_of_its_image():
    images = torch.arange(32, dtype=torch.uint8).mul(8).expand(4, 3, 32, 32).contiguous()  # brighter to the right
    first, again, second = (random_crops(images, [7, 8, 9, 7], 16, number) for number in (0, 0, 1))
    assert first.shape == (4, 3, 16, 16)
    assert torch.equal(first, again)
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    widths = (first[:, 0, 0, -1].int() - first[:, 0, 0, 0].int()) / 8
    assert all(0.4 * 30 < width <= 31 for width in widths.tolist())


@pytest.mark.slow
def test_classes_that_the_crops_hide_get_worse_and_the_run_says_so(tmp_path: Path):
    """1,720 pictures whose class is the place of a disc, and a recipe of BYOL at a quarter of its size."""
    train, test = (write_places(tmp_path / name, n, seed) for seed, (name, n) in enumerate((("a", 1720), ("b", 860))))
    keys = [f"data.train={train}", f"data.test={test}", "workers=0", "optim.epochs=6", "optim.batch=64"]
    keys += [f"backbone.options.{key}" for key in ("embed_dim=64", "depth=3", "num_heads=2")]
    run = pretrain("byol_vitxs8_cifar10_ep2", keys, out=tmp_path / "out")
    assert [f["kind"] for f in run.findings()] == ["below untrained"]
    assert json.loads((tmp_path / "out" / layout.SUMMARY).read_text())["verdict"][0].startswith("worse than untrained")
