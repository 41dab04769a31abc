"""Protocols on the backbone itself in several Ray workers give what they give in one process."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.annotated import coco, davis, masks
from helpers.ranks import on_ranks

from eagleray.base.errors import UserError
from eagleray.evaluation import evaluate, feature_cache, on_workers
from eagleray.evaluation.on_workers import Job
from eagleray.evaluation.target import Inputs, Target, load_target
from eagleray.models.backbone import Backbone
from eagleray.models.pixels import OURS, Pixels
from eagleray.protocols import fine_tuning


def run(name: str, out: Path, folder: Path, workers: int, settings: dict[str, str]) -> Any:
    folders = {{"davis": "davis", "segmentation": "masks", "detection": "coco"}[name]: str(folder)}
    request = evaluate.Request(
        "untrained:test_vit", [name], folders=folders, settings=settings, workers=workers, out=str(out)
    )
    report = evaluate.evaluate(request)
    assert report.refused == []
    return report.results[0]


def test_videos_are_measured_by_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same numbers and the same pictures, in the order of the list, of which each rank measures every second."""

    def ranks(function: Any, task: Any, *, workers: int, gpus: bool, note: Any) -> Any:
        (tmp_path / "stores").mkdir()
        return on_ranks(workers, function, tmp_path / "stores", task, print)[0]

    monkeypatch.setattr(on_workers, "ray_ranks", ranks)
    compare_videos(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_videos_are_measured_by_ranks_on_ray(tmp_path: Path):
    compare_videos(tmp_path)


def compare_videos(tmp_path: Path) -> None:
    folder = davis(tmp_path / "davis", "a", "b", "c")
    one, several = (run("davis", tmp_path / str(n), folder, n, {"davis.size": "64"}) for n in (0, 2))
    assert list(several.numbers.items()) == list(one.numbers.items())
    assert several.settings == one.settings
    assert several.pictures == one.pictures == [f"pictures/untrained/davis-{name}.png" for name in "abc"]
    for picture in one.pictures:
        assert (tmp_path / "2" / picture).read_bytes() == (tmp_path / "0" / picture).read_bytes()


def test_a_worker_refuses_other_weights():
    inputs = Inputs("untrained:test_vit", load_target("untrained:test_vit").digest)
    assert isinstance(inputs.load(), Backbone)
    with pytest.raises(UserError, match="the weights changed during the evaluation"):
        replace(inputs, digest="0" * 16).load()


def test_protocols_that_are_not_divided_run_on_one_worker(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So that a job on a head without a GPU computes nothing there."""
    sent: list[tuple[str, int]] = []

    def ranks(function: Any, job: Job, *, workers: int, gpus: bool, note: Any) -> Any:
        sent.append((type(job.measurement.protocol).__name__.lower(), workers))
        return function(pickle.loads(pickle.dumps(job)), note)

    monkeypatch.setattr(on_workers, "ray_ranks", ranks)
    names = ("correspondence", "neighbours", "throughput")
    found = {}
    for workers in (0, 2):
        settings = {"size": "32", "throughput.batch": "2"}
        out = tmp_path / str(workers)
        request = evaluate.Request(
            "untrained:test_vit", names, test=str(shards / "test"), settings=settings, workers=workers, out=str(out)
        )
        report = evaluate.evaluate(request)
        assert report.refused == []
        found[workers] = report.results
    assert sent == [(name, 1) for name in names]
    for one, other in zip(found[0], found[2], strict=True):
        assert other.numbers.keys() == one.numbers.keys()
        assert (other.settings, other.data_digest) == (one.settings, one.data_digest)
        assert other.pictures == one.pictures
        assert one.protocol == "throughput" or other.numbers == one.numbers
    assert (tmp_path / "2" / "pictures" / "untrained" / "neighbours.png").exists()


def test_features_are_kept_in_the_format_of_the_recipe(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run itself measured its backbone with `evaluate.bank` so."""

    def of_recipe(name: str, architecture: str | None) -> Target:
        target = load_target(name, architecture)
        return replace(target, settings=replace(target.settings, bank=bank))

    monkeypatch.setattr(evaluate, "load_target", of_recipe)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found, sizes = {}, []
    for bank in ("fp32", "bf16"):
        found[bank], lines = probed(shards, tmp_path / bank, 0, *PROBES)
        assert [line[:10] for line in lines if "features" in line] == ["320 images", "80 images "]
        files = set(feature_cache.folder().iterdir())
        sizes.append(sum(path.stat().st_size for path in files) - sum(sizes))
    assert sizes[1] < 0.6 * sizes[0]
    for name, one in found["bf16"].items():
        assert one.settings["bank"] == "bf16"
        assert "bank" not in found["fp32"][name].settings
        assert one.numbers[f"{name}/top1"] == pytest.approx(found["fp32"][name].numbers[f"{name}/top1"], abs=5)


@pytest.mark.parametrize("name", ["linear_augmented", "semi_supervised", "segmentation", "detection"])
def test_a_training_of_another_network_with_equal_weights_is_not_continued(
    name: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as vit_base_patch16_clip_224 and vit_base_patch16_clip_quickgelu_224, which one file of tensors fits."""
    folders = {"masks": masks(tmp_path / "masks"), "coco": coco(tmp_path / "coco")}
    settings = {"size": "32", "resize": "32", "steps": "1", "width": "16", "epochs": "1", "batch": "16"}
    settings |= {"labels": "0.5", "schedule": str(tmp_path / "coco" / "schedule.yaml")}
    searched: list[str] = []

    def newest(folder: str, _: Path) -> None:
        searched.append(folder)
        raise UserError("this is far enough")

    monkeypatch.setattr(fine_tuning.checkpoint, "newest", newest)
    for half in (OURS, OURS, Pixels((0.5,) * 3, (0.5,) * 3)):
        monkeypatch.setattr(evaluate, "load_target", lambda *name, p=half: replace(load_target(*name), pixels=p))
        request = evaluate.Request(
            "untrained:test_vit",
            [name],
            str(shards / "train"),
            folders={k: str(v) for k, v in folders.items()},
            settings={k: v for k, v in settings.items() if k in evaluate.PROTOCOLS[name].settings},
            out=str(tmp_path / "out"),
        )
        assert evaluate.evaluate(request).refused == [f"{name}: this is far enough"]
    assert searched[0] == searched[1] != searched[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["segmentation", "detection"])
def test_networks_are_fine_tuned_by_ranks_on_ray(name: str, tmp_path: Path):
    """Two workers learn what one process learns of segmentation; one process continues from their checkpoint."""
    folder = {"segmentation": masks, "detection": coco}[name](tmp_path / "set", 2)
    settings = {"schedule": str(folder / "schedule.yaml")}
    if name == "segmentation":
        settings = {"steps": "6", "segmentation.size": "32", "width": "16", "batch": "2", "lr": "1e-3"}
    several = run(name, tmp_path / "out", folder, 2, settings)
    again = run(name, tmp_path / "out", folder, 0, settings)
    assert again.numbers == several.numbers
    assert again.pictures == several.pictures == [several.pictures[0]]
    assert again.settings == several.settings
    assert len(list((tmp_path / "out").glob(f"pictures/untrained/{name}*/step-*.pt"))) == 1


@pytest.mark.slow
def test_classifiers_of_random_crops_are_trained_by_ranks(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without --test, so that each rank holds out the same tenth; checkpoints are beside the results."""

    def ranks(function: Any, task: Any, *, workers: int, gpus: bool, note: Any) -> Any:
        (tmp_path / "stores").mkdir(exist_ok=True)
        return on_ranks(workers, function, tmp_path / "stores", task, print)[0]

    monkeypatch.setattr(on_workers, "ray_ranks", ranks)
    names = ("linear_augmented", "semi_supervised")
    settings = {"epochs": "2", "batch": "50", "size": "32", "resize": "32", "rates": "0.1", "labels": "0.5"}
    found = {}
    for workers in (0, 2):
        out = tmp_path / str(workers)
        request = evaluate.Request("untrained:test_vit", names, str(shards / "train"), settings=settings, out=str(out))
        report = evaluate.evaluate(replace(request, workers=workers))
        assert report.refused == []
        found[workers] = report.results
        assert all(len(list(out.glob(f"pictures/untrained/{name}-*/step-*.pt"))) == 1 for name in names)
    for one, several in zip(found[0], found[2], strict=True):
        assert several.numbers == pytest.approx(one.numbers, abs=3.2)  # an image of 32 is 3.1 %
        assert (several.settings, several.data, several.data_digest) == (one.settings, one.data, one.data_digest)
        assert one.settings["train_images"] == 144


PROBES = {"knn": 0.0, "logistic": 1e-3, "linear": 2.0}  # by how much several ranks may differ from one, in percent
QUICK = {"linear.epochs": "3", "linear.rates": "0.1", "size": "32", "resize": "32"}


def probed(shards: Path, out: Path, workers: int, *names: str) -> tuple[dict[str, Any], list[str]]:
    """Run protocols on frozen features; return their results by name, and the lines that were noted."""
    lines: list[str] = []
    train, test = str(shards / "train"), str(shards / "test")
    request = evaluate.Request("untrained:test_vit", names, train, test, settings=QUICK, workers=workers, out=str(out))
    report = evaluate.evaluate(request, lines.append)
    assert report.refused == []
    return {r.protocol: r for r in report.results}, lines


def assert_same(several: dict[str, Any], one: dict[str, Any]) -> None:
    """Compare the results of several ranks with those of one process."""
    for name, tolerance in PROBES.items():
        assert several[name].numbers == pytest.approx(one[name].numbers, abs=tolerance), name
        fixed = {k: v for k, v in one[name].settings.items() if k != "iterations"}
        assert {k: v for k, v in several[name].settings.items() if k != "iterations"} == fixed
        assert several[name].data_digest == one[name].data_digest


@pytest.mark.slow
def test_probes_on_ranks_find_what_one_process_finds(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first of three ranks has no image, the others have a batch each; the test set is the last one's alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    one, lines = probed(shards, tmp_path / "one", 0, *PROBES)
    assert [line[:10] for line in lines if "features" in line] == ["320 images", "80 images "]

    def ranks(function: Any, task: Any, *, workers: int, gpus: bool, note: Any) -> Any:
        said: list[str] = []
        (tmp_path / "stores").mkdir(exist_ok=True)

        def work() -> Any:
            return function(task, said.append), said

        result, lines = on_ranks(workers, work, tmp_path / "stores", start="fork")[0]
        for line in lines:
            note(line)
        return result

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setattr(on_workers, "ray_ranks", ranks)
    several, lines = probed(shards, tmp_path / "several", 3, *PROBES)
    assert_same(several, one)
    assert [line[:10] for line in lines if "features" in line] == ["320 images", "80 images "], "extracted once"
    stored = {path.stat().st_size for path in feature_cache.folder().iterdir()}
    assert len(stored) > 2, "each rank keeps its own share"
    assert max(stored) < max(p.stat().st_size for p in (tmp_path / "alone" / "eagleray" / "features").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_probes_on_ranks_of_ray(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, several = (probed(shards, tmp_path / str(n), n, *PROBES)[0] for n in (0, 2))
    assert_same(several, one)


def test_files_that_settings_name_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.yaml").write_text("epochs: 1\n")
    monkeypatch.chdir(tmp_path)
    parse = evaluate.PROTOCOLS["detection"].parse
    assert parse({"schedule": "own.yaml"}) == {"schedule": str(tmp_path / "own.yaml")}
    assert parse({"schedule": "1x"}) == {"schedule": "1x"}
