"""The command that evaluates: what it accepts, what it refuses and goes on, what it keeps and prints."""

import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import refused
from helpers.features import clusters
from helpers.networks import KINDS, network
from typer.testing import CliRunner

import eagleray
from eagleray import config
from eagleray.api import pretrain as api
from eagleray.api.evaluate import Scores
from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.config import bundled
from eagleray.data.digests import data_digest
from eagleray.data.index import open_index
from eagleray.datasets.shapes import image
from eagleray.datasets.shards import Sample, encode, write_shards
from eagleray.evaluation import evaluate, extraction, feature_cache, results
from eagleray.evaluation.extraction import Task, join_shares
from eagleray.evaluation.registry import PROTOCOLS
from eagleray.evaluation.results import Result
from eagleray.evaluation.target import Inputs, Target, expect, load_target
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.models.pixels import Pixels
from eagleray.protocols.catalogue import Knn
from eagleray.protocols.features import (
    LabelledFeatures,
    block_vector,
    check_kind,
    extract_features,
    extract_pooled,
    labelled_samples,
    read_kinds,
)
from eagleray.protocols.knn import knn
from eagleray.protocols.linear import linear
from eagleray.protocols.needs import Extraction
from eagleray.protocols.settings import Evaluate
from eagleray.runs import mlflow_run, pretrain, recipe
from eagleray.runs.tracking import Tracking
from eagleray.views.colours import MEAN, STD

UPDATE = mlflow_run.update
CROP = Extraction("pooled", 16, 16)
STAGES = {"dims": (8, 16, 24), "depths": (1, 2, 2), "heads": (1, 1, 2)}
DEEP = {
    "vit_tiny_patch16_224": KINDS["vit_tiny_patch16_224"] | {"depth": 5},
    "swin_tiny_patch4_window7_224": KINDS["swin_tiny_patch4_window7_224"]
    | {"depths": (2, 2, 2), "num_heads": (2, 2, 4)},
    "cvt_tiny_esvit": STAGES | {"mlp_ratios": (2, 2, 2), "windows": (2, 2, 2)},
    "vil_tiny": STAGES | {"img_size": 32, "patches": (4, 2, 2), "tokens": (1, 1, 0), "windows": (None, None, None)},
}

CROP = Extraction("pooled", 16, 16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mlflow_run, "update", lambda *_: None)  # MLflow takes seconds to begin


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a few steps."""
    from helpers.recipes import SMALL

    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.yaml").write_text(SMALL.replace("depth: 2", "depth: 4"))
    given = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={folder / 'run'}", "max_steps=3"]
    with pytest.MonkeyPatch.context() as patch:  # what takes seconds and is not looked at
        patch.setitem(sys.modules, "mlflow", None)
        patch.setattr(pretrain, "write_export", lambda *_: None)
        api.pretrain(str(folder / "small.yaml"), given)
    return folder / "run"


@pytest.fixture
def request_(trained: Path, shards: Path, tmp_path: Path) -> Callable[..., evaluate.Report]:
    def ask(*names: str, **keys: Any) -> evaluate.Report:
        given = {"train": str(shards / "train"), "test": str(shards / "test"), "out": str(tmp_path / "out")} | keys
        return evaluate.evaluate(evaluate.Request(given.pop("backbone", str(trained)), names, **given))

    return ask


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Images that went through a backbone, in each forward pass of more than the one that tries it."""
    seen: list[int] = []
    plain = Backbone.pooled

    def counting(self: Backbone, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 1:
            seen.append(len(images))
        return plain(self, images)

    monkeypatch.setattr(Backbone, "pooled", counting)
    return seen


@pytest.mark.parametrize("name", DEEP)
def test_the_last_blocks_end_with_the_pooled_vector(name: str):
    torch.manual_seed(0)
    backbone = Backbone(name, options=DEEP[name]).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        found = read_kinds(backbone, images, ["pooled", "last4", "avgpool"])
        torch.testing.assert_close(found["pooled"], backbone(images).pooled)
        torch.testing.assert_close(found["last4"][:, -backbone.dim :], found["pooled"])
        torch.testing.assert_close(found["avgpool"][:, backbone.dim :], backbone(images).patches.mean(1))
        if name.startswith("vit"):
            last = backbone.model.forward_intermediates(
                images, indices=4, norm=True, return_prefix_tokens=True, intermediates_only=True
            )
            torch.testing.assert_close(found["last4"], torch.cat([prefix[:, 0] for _, prefix in last], 1))
        else:  # two blocks of each of the last two stages
            assert found["last4"].shape[1] == 2 * sum(backbone.dims("stages")[-2:])


@pytest.mark.parametrize("registers", [1, 4])
def test_registers_are_neither_class_tokens_nor_patches(registers: int):
    torch.manual_seed(0)
    mean = {"class_token": False, "global_pool": "avg", "fc_norm": False, "reg_tokens": registers}
    backbone = Backbone("vit_tiny_patch16_224", options=DEEP["vit_tiny_patch16_224"] | mean).eval()
    with torch.no_grad():
        found = read_kinds(backbone, torch.randn(3, 3, 32, 32), ["pooled", "last4"])
    torch.testing.assert_close(found["last4"][:, -backbone.dim :], found["pooled"])


def test_blocks_before_the_class_token_give_the_mean_of_their_patches():
    """CaiT, XCiT and ConViT add it after some blocks, whose first token is a patch."""
    model, x = SimpleNamespace(num_features=0, num_prefix_tokens=1, cls_token=1), torch.randn(2, 17, 8)
    assert torch.equal(block_vector(model, x), x[:, 0])
    assert torch.equal(block_vector(model, x[:, 1:]), x[:, 1:].mean(1))


def test_a_backbone_with_too_few_blocks():
    with pytest.raises(UserError, match="has 2 blocks; expected 4 or more"):
        check_kind(network(), "last4", 16)
    with pytest.raises(UserError, match=r"--features polled: unknown; did you mean 'pooled'\?"):
        check_kind(network(), "polled", 16)
    assert read_kinds(network("resnet50").eval(), torch.zeros(2, 3, 32, 32), ["last4"])["last4"].shape == (
        2,
        32,
    )


def test_all_kinds_come_from_one_pass(shards: Path, forwards: list[int]):
    index, backbone = open_index(str(shards / "test")), network(options={"depth": 4})
    found = extract_features(backbone, index, labelled_samples(index), size=16, resize=16, kinds=["last4", "pooled"])
    assert sum(forwards) == len(index)
    torch.testing.assert_close(
        found["pooled"].x, extract_pooled(backbone, index, labelled_samples(index), size=16, resize=16).x
    )


def test_several_k_at_once_are_each_by_itself():
    train, test = clusters(300, spread=1.5, seed=0), clusters(100, spread=1.5, seed=1)
    found = knn(train, test, k=7, ks=(1, 30, 900), temperature=0.1)
    for k in (1, 30, 900):
        assert found[f"knn/top1_k{k}"] == knn(train, test, k=k, temperature=0.1)["knn/top1"]
    assert found["knn/top5"] == knn(train, test, k=7, temperature=0.1)["knn/top5"]


def test_the_best_epoch_is_beside_the_last():
    train, test = clusters(500, spread=2.0, seed=0), clusters(200, spread=2.0, seed=1)
    found = linear(train, test, epochs=6)
    assert found["linear/best"] >= found["linear/top1"]
    assert 1 <= found["linear/best_epoch"] <= 6
    shifted = LabelledFeatures(test.x, (test.y + 1) % 5)
    assert linear(train, shifted, epochs=6)["linear/lr"] == found["linear/lr"]


def test_a_digest_is_of_weights_and_architecture(trained: Path):
    one, again = load_target(str(trained)), load_target(str(trained))
    fresh = load_target(f"untrained:{trained}")
    assert one.digest == again.digest
    assert one.architecture == fresh.architecture
    assert len({one.digest, fresh.digest, load_target("untrained:resnet18").digest}) == 3
    newest = max((trained / "checkpoints").glob("*.pt"))
    assert load_target(str(newest)).digest == one.digest
    assert load_target(str(newest)).run == str(trained)


def test_a_file_of_tensors_needs_its_architecture(tmp_path: Path):
    torch.save(Backbone("resnet18").model.state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match="a file of tensors needs --architecture NAME"):
        load_target(str(tmp_path / "w.pth"))
    found = load_target(str(tmp_path / "w.pth"), "resnet18")
    assert found.digest != load_target("untrained:resnet18").digest
    with pytest.raises(UserError, match=r"^resnt18: timm has no such model"):
        load_target(str(tmp_path / "w.pth"), "resnt18")


def test_pixels_are_as_the_weights_want_them():
    plain, other = network("resnet50").eval(), network("resnet50").eval()
    expect(other, Pixels((0.5, 0.5, 0.5), (0.25, 0.5, 1.0)))
    raw = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    theirs = (raw - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(other.pooled((raw - mean) / std), plain.pooled(theirs), rtol=1e-4, atol=1e-5)


def test_features_are_made_once_and_damaged_ones_again(tmp_path: Path):
    made: list[list[str]] = []

    def make(missing: Any) -> dict[str, LabelledFeatures]:
        made.append(list(missing))
        return {k: LabelledFeatures(torch.full((2, 3), float(len(k))), torch.tensor([4, 5])) for k in missing}

    def ask(backbone: str, *names: str, how: tuple[int, ...] = (16,)) -> dict[str, LabelledFeatures]:
        return feature_cache.cached(backbone, "data", names, how=how, make=make, note=lambda _: None)

    first = ask("a", "pooled")
    assert torch.equal(ask("a", "pooled", "last4")["pooled"].x, first["pooled"].x)
    assert made == [["pooled"], ["last4"]]
    ask("b", "pooled")
    ask("a", "pooled", how=(32,))
    assert len(made) == 4
    for file in feature_cache.folder().iterdir():
        file.write_bytes(file.read_bytes()[:40])
    assert torch.equal(ask("a", "pooled")["pooled"].x, first["pooled"].x)
    assert len(made) == 5
    assert not [f for f in feature_cache.folder().iterdir() if f.suffix != ".safetensors"]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_workers_give_the_features_of_one_process(
    trained: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, one, found = str(shards / "test"), load_target(str(trained)), []
    index = open_index(url, note=lambda _: None)
    task = Task(Inputs(one.name, one.digest), url, labelled_samples(index), CROP, ("pooled",))
    for workers in (0, 2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(workers)))
        found.append(extraction.features(one, index, task, workers=workers, note=print)["pooled"])
    assert found[0].y.equal(found[1].y)
    torch.testing.assert_close(found[1].x, found[0].x)


def test_a_worker_refuses_other_weights_than_were_asked_for(trained: Path, shards: Path):
    one = load_target(str(trained))
    task = Task(Inputs(one.name, one.digest), str(shards / "test"), np.arange(2), CROP, ("pooled",))
    assert len(extraction.share(task)[1]["pooled"].y) == 2
    with pytest.raises(UserError, match="the weights changed during the evaluation"):
        extraction.share(replace(task, inputs=replace(task.inputs, digest="0" * 16)))


def test_a_worker_refuses_other_images_than_were_asked_for(trained: Path, tmp_path: Path):
    """One image more may be in the middle of the others, which then have other numbers."""
    (folder := tmp_path / "photos").mkdir()
    for number in range(4):
        image(0, number)[0].save(folder / f"{number}.png")
    one, data = load_target(str(trained)), data_digest(open_index(str(folder), note=lambda _: None), np.arange(0))
    task = Task(Inputs(one.name, one.digest), str(folder), np.arange(4), CROP, ("pooled",), data=data)
    assert len(extraction.share(task)[1]["pooled"].y) == 4
    image(1, 1)[0].save(folder / "new.png")
    with pytest.raises(UserError, match="photos: the data changed meanwhile"):
        extraction.share(task)


def test_a_data_digest_knows_every_image(tmp_path: Path):
    """Also one in the middle of a shard whose name, size, beginning and end stay as they are."""
    digests = set()
    for which in range(2):
        pixels = np.random.default_rng(0).integers(0, 255, (9, 40, 40, 3), dtype=np.uint8)
        pixels[4, 0, 0] += which
        images = [b"P6 40 40 255\n" + x.tobytes() for x in pixels]
        write_shards((Sample(f"{i}", "ppm", x, i) for i, x in enumerate(images)), str(tmp_path / str(which)))
        index = open_index(str(tmp_path / str(which)), note=lambda _: None)
        digests.add(data_digest(index, labelled_samples(index)))
    assert len(digests) == 2


def test_a_data_digest_is_of_the_images_not_of_their_folder(shards: Path, tmp_path: Path):
    index = open_index(str(shards / "test"))
    (tmp_path / "moved").mkdir()
    for file in (shards / "test").glob("*.tar"):
        (tmp_path / "moved" / file.name).write_bytes(file.read_bytes())
    moved, samples = open_index(str(tmp_path / "moved"), note=lambda _: None), labelled_samples(index)
    assert data_digest(index, samples) == data_digest(moved, samples)
    assert data_digest(index, samples) != data_digest(index, samples[1:])


def test_a_second_protocol_costs_no_forward_pass(request_: Callable[..., evaluate.Report], forwards: list[int]):
    first = request_("knn")
    assert sum(forwards) == 400
    again = request_("linear", "linear@mocov3", "knn", settings={"epochs": "2"})
    assert sum(forwards) == 400
    assert [r.protocol for r in again.results] == ["linear", "linear@mocov3", "knn"]
    assert again.results[2].numbers == first.results[0].numbers
    request_("linear@dino", "knn", settings={"epochs": "2"})
    assert sum(forwards) == 800
    assert len(results.load(first.folder)) == 6


def test_a_run_says_the_same(request_: Callable[..., evaluate.Report], trained: Path):
    """What a run measured at its end is what the command measures of its last checkpoint."""
    said = json.loads((trained / "summary.json").read_text())
    found = {k: v for r in request_("knn", "linear").results for k, v in r.numbers.items()}
    assert all(found[k] == said[k] for k in ("knn/top1", "knn/top5", "linear/top1", "linear/lr"))


def test_the_untrained_backbone_is_beside_it(request_: Callable[..., evaluate.Report], trained: Path):
    report = request_("knn", untrained=True)
    said = json.loads((trained / "summary.json").read_text())
    [row] = [r for r in report.rows if (r.protocol, r.number) == ("knn", "knn/top1")]
    assert len(report.results) == 2
    assert not [r for r in report.rows if "untrained" in r.protocol], "they are beside the others"
    assert (row.value, row.untrained) == (
        results.format_number(said["knn/top1"]),
        results.format_number(said["knn/top1_untrained"]),
    )
    [later] = [r for r in request_("knn").rows if r.number == "knn/top1"]  # from results.json
    assert later.untrained == row.untrained
    [other] = [r for r in request_("knn", settings={"k": "3"}).rows if r.number == "knn/top1"]
    assert not other.untrained, "measured with other settings"


REFUSED = [
    ({"folders": {}}, "segmentation", "segmentation: needs --masks DIR"),
    ({"train": None, "test": None}, "correspondence", "correspondence: needs --train or --test URL"),
    ({"train": "/nowhere"}, "knn", "knn: /nowhere: cannot be read: No such file or directory"),
    ({"settings": {"k": "many"}}, "knn", "knn: --k: input should be a valid integer"),
    ({"settings": {"size": "32", "resize": "16"}}, "linear", "linear: --resize 16: smaller than the crop"),
    ({"settings": {"attention.size": "33"}}, "attention", "attention: VisionTransformer cannot take images of --size"),
    ({"settings": {"pairs.size": "33"}}, "pairs", "pairs: VisionTransformer has no patch tokens for"),
    ({"settings": {"limit": "-1"}}, "correspondence", "correspondence: --limit: input should be greater than 0"),
    ({"settings": {"rates": "[]"}}, "linear", "linear: --rates: tuple should have at least 1 item"),
    ({"settings": {"logistic.seed": "-1"}}, "logistic", "logistic: --seed: input should be greater than or equal to 0"),
    ({}, "knnn", "--protocol knnn: unknown; did you mean 'knn'?"),
    ({"train": None}, "linear_augmented", "linear_augmented: needs --train URL of labelled shards"),
    ({}, "linear_augmented", "linear_augmented: --batch 1024: more than the 320 labelled images to train on"),
    ({"settings": {"labels": "0"}}, "linear_augmented", "linear_augmented: --labels 0: expected a share above 0"),
    ({"settings": {"labels": "2"}}, "semi_supervised", "semi_supervised: --labels 2: expected a share above 0"),
    ({"settings": {"labels": "a.txt"}}, "semi_supervised@10", "semi_supervised@10: --labels /"),
    (
        {"settings": {"semi_supervised@10.size": "33"}},
        "semi_supervised@10",
        "semi_supervised@10: VisionTransformer cannot take images of",
    ),
]


@pytest.mark.parametrize(("keys", "name", "line"), REFUSED)
def test_one_is_refused_and_the_others_go_on(
    keys: dict[str, Any], name: str, line: str, request_: Callable[..., evaluate.Report], capsys
):
    report = request_(name, "throughput", **keys)
    assert len(report.refused) == 1
    assert report.refused[0].startswith(line)
    assert [r.protocol for r in report.results] == ["throughput"]
    assert capsys.readouterr().err == f"error: {report.refused[0]}\n"


def test_pictures_need_no_settings(request_: Callable[..., evaluate.Report]):
    """Each with the size that is its own, neighbours with that of the run, but few images."""
    few = {"limit": "2", "images": "1", "queries": "1"}
    report = request_("attention", "components", "neighbours", "pairs", settings=few)
    assert not report.refused
    sizes = {"attention": 480, "components": 448, "neighbours": 16, "pairs": 224}
    assert {r.protocol: r.settings["size"] for r in report.results} == sizes


def test_results_that_cannot_be_kept_are_known_before_any_work(
    request_: Callable[..., evaluate.Report], forwards: list[int], tmp_path: Path
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text('[{"a": 1}]')
    with pytest.raises(UserError, match="expected a list of results"):
        request_("knn")
    assert not forwards


def test_a_backbone_that_diverged_has_no_numbers(
    request_: Callable[..., evaluate.Report], monkeypatch: pytest.MonkeyPatch
):
    net = network().eval()
    for p in net.parameters():
        p.data.fill_(torch.nan)
    one = Target("diverged", net, Network(), Evaluate(size=16, resize=16))
    monkeypatch.setattr(evaluate, "load_target", lambda *_: one)
    report = request_("knn", "correspondence", "neighbours", settings={"neighbours.size": "16"}, backbone="diverged")
    assert not report.results
    assert [line.endswith("its features are not finite numbers") for line in report.refused] == [True] * 3


def test_labels_that_do_not_match(shards: Path, tmp_path: Path, request_: Callable[..., evaluate.Report]):
    drawn = [(f"{i:02d}", "png", *image(3, i)) for i in range(60)]
    for name, kept in {"some": (0, 1, 2), "one": (0,)}.items():
        write_shards((Sample(k, e, encode(x), y) for k, e, x, y in drawn if y in kept), str(tmp_path / name))
    write_shards((Sample(k, e, encode(x)) for k, e, x, _ in drawn), str(tmp_path / "none"))
    assert "classes in these shards are not in --train" in request_("knn", train=str(tmp_path / "some")).refused[0]
    assert "1 class(es) in these shards" in request_("knn", train=str(tmp_path / "one")).refused[0]
    assert "these shards have no labels" in request_("knn", train=str(tmp_path / "none")).refused[0]
    assert "--test: these shards have no labels" in request_("knn", test=str(tmp_path / "none")).refused[0]
    assert "is also in --train" in request_("knn", test=str(shards / "train")).refused[0]
    assert "these shards have no labels" in request_("linear_augmented", train=str(tmp_path / "none")).refused[0]


def test_a_setting_that_no_protocol_has(request_: Callable[..., evaluate.Report]):
    with pytest.raises(UserError, match="--kk: not a setting of knn"):
        request_("knn", settings={"kk": "3"})


def test_a_backbone_without_patch_tokens(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mixer = Backbone("mixer_s32_224", options={"img_size": 32}).eval()
    one = Target("mixer", mixer, Network(), Evaluate(size=32, resize=32))
    monkeypatch.setattr(evaluate, "load_target", lambda *_: one)
    given = {"train": str(shards / "train"), "test": str(shards / "test"), "out": str(tmp_path)}
    report = evaluate.evaluate(evaluate.Request("mixer", ["correspondence", "knn"], **given))
    assert "MlpMixer has no grid of patches" in report.refused[0]
    assert [r.protocol for r in report.results] == ["knn"]


def result(**keys: Any) -> Result:
    whole: dict[str, Any] = {
        "protocol": "knn",
        "numbers": {"knn/top1": 50.0},
        "settings": {"k": 20},
        "backbone": "b",
    }
    whole |= {"untrained": False}
    whole |= {"backbone_digest": "1", "architecture": "a", "data": {}, "data_digest": "d", "date": "", "seconds": 1.0}
    return Result(**(whole | keys))


def test_results_only_grow(tmp_path: Path):
    results.add(str(tmp_path), result())
    results.add(str(tmp_path), result(numbers={"knn/top1": 60.0}))
    assert [r.numbers["knn/top1"] for r in results.load(str(tmp_path))] == [50, 60]
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(UserError, match="expected a list of results"):
        results.add(str(tmp_path), result())
    assert (tmp_path / "results.json").read_text() == "{"
    (tmp_path / "results.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="expected a list of results"):
        results.load(str(tmp_path))


def test_a_line_for_each_protocol_holds_what_differs():
    numbers = {"knn/top1": 12.345, "knn/top5": 3.0, "knn/top1_k10": 12.0}
    suite = {f"suite/s{i}": i for i in range(9)}
    both = [result(protocol="knn", numbers=numbers), result(protocol="suite", numbers=suite)]
    lines = results.table(both, list(results.rows(both, [], {"knn/top1": 70.0})), "text").splitlines()
    assert lines == [
        "knn    top1 12.35 (paper 70.00), top5 3.00",
        "suite  s0 0, s1 1, s2 2, s3 3, s4 4, s5 5, and 3 more",
    ]


def test_results_of_a_file_come_into_a_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    target = SimpleNamespace(name="/somewhere/deep/backbone", run=None)
    place = evaluate.folder(evaluate.Request("backbone", ["knn"]), target)  # type: ignore[arg-type]
    assert re.fullmatch(re.escape(str(tmp_path)) + r"/evaluations/backbone-[0-9a-f]{8}", place)


def test_tables_hold_every_number():
    many = result(numbers={"a_b/x": 12.345, "a_b/n": 3}, settings={"ks": [1, 2], "odd": "50 % | {x}"})
    table = list(results.rows([many], [], {"a_b/x": 70.0}))
    assert [r.value for r in table] == ["12.35", "3"]
    assert [r.published for r in table] == ["70.00", ""]
    lines = results.markdown(table).splitlines()
    assert len(lines) == 4
    assert all(line.replace(r"\|", "").count("|") == len(results.HEAD) + 1 for line in lines)
    body = results.latex(table).splitlines()[4:-2]
    assert all(line.replace(r"\&", "").count("&") == len(results.HEAD) - 1 for line in body)
    assert r"50 \% | \{x\}" in body[0]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("dino_vits16_in1k_ep100", {"knn/top1": 69.3, "linear_augmented/best": 74.0}),
        ("byol_resnet50_in1k_ep800", {"linear_augmented/best": 74.3}),
        ("mocov3_vitxs8_cifar10_ep2", {}),
        (
            "esvit_swint_in1k_ep300",
            {"knn/top1": 75.7, "linear_augmented/best": 78.1, "suite/average": 80.66}
            | {"detection/box_ap": 46.2, "detection/mask_ap": 41.6},
        ),
        (
            "selfpatch_vitxs16_coco_ep200",  # not what was published for another set
            {"detection/box_ap": 30.7, "detection/mask_ap": 28.6, "segmentation/miou": 29.5, "davis/J&F": 57.0},
        ),
    ],
)
def test_published_numbers_are_read_from_recipes(name: str, found: dict[str, float]):
    assert results.published_numbers(bundled.recipe(name).published) == found


def test_only_a_run_of_the_same_recipe_is_set_beside_the_paper():
    name, places = "dino_vits16_in1k_ep100", ["data.train=s3://a/b-{0..9}.tar", "data.lanes=8", "workers=3"]
    command = ["eagleray", "pretrain", name, *places]
    there = results.published(command, config.to_plain(recipe.load(name, places)))
    assert there == {"knn/top1": 69.3, "linear_augmented/best": 74.0}
    for other in ("optim.lr.value=1e-3", "max_steps=3"):
        assert not results.published(command, config.to_plain(recipe.load(name, [*places, other])))
    assert not results.published(["eagleray", "pretrain", "own.yaml"], config.to_plain(recipe.load(name, places)))


def test_shares_are_put_together_in_order():
    samples = np.arange(10)
    parts = list(Task(Inputs("", ""), "", samples, CROP).shares(["pooled"], 3))
    assert [len(p.samples) for p in parts] == [4, 3, 3]
    rows = [torch.from_numpy(p.samples) for p in parts]
    done = [(p.number, {"pooled": LabelledFeatures(r.float()[:, None], r)}) for p, r in zip(parts, rows, strict=True)]
    assert join_shares([done[2], done[0], done[1]])["pooled"].y.tolist() == samples.tolist()


def test_ranks_compute_in_the_format_of_their_gpu(monkeypatch: pytest.MonkeyPatch):
    """Such as float16 on a V100 or a T4, which have no bfloat16: kNN and the probes were refused there."""
    monkeypatch.setattr(extraction, "format_name", lambda device: "float16")
    task = Task(Inputs("", "", gpus=True), "", np.arange(1), CROP)
    assert task.precision(torch.device("cuda")) == "float16"
    assert task.precision(torch.device("cpu")) == "bfloat16", "of Ray tasks, whose GPUs this process does not see"


def test_every_protocol_can_be_listed_and_run():
    rows = json.loads(CliRunner().invoke(main.app, ["list", "protocols", "--json"]).stdout)
    assert rows.keys() == PROTOCOLS.keys()
    assert "--k 20" in rows["knn"]
    assert "--epochs 90" in rows["linear@mocov3"]


def test_the_command(trained: Path, shards: Path, tmp_path: Path, capsys):
    given = [str(trained), "--train", str(shards / "train"), "--test", str(shards / "test"), "--out", str(tmp_path)]
    done = CliRunner().invoke(main.app, ["evaluate", *given, "--protocol", "knn", "--k", "5", "--temperature=0.1"])
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stdout.splitlines() if line.startswith("knn ")]
    assert re.fullmatch(r"knn  top1 \S+, top5 \S+", line)
    assert done.stdout.splitlines()[-1] == f"results   {tmp_path}/results.json: all numbers and settings"
    table = CliRunner().invoke(main.app, ["evaluate", *given, "--protocol", "knn", "--k", "5", "--format", "markdown"])
    assert "| knn | knn/top1 |" in table.stdout
    assert "k 5, ks 10/20/100/200, temperature 0.07" in table.stdout
    latex = CliRunner().invoke(main.app, ["evaluate", *given, "--protocol", "knn", "--format", "latex"])
    assert r"\toprule" in latex.stdout
    several = ["--protocol", "linear,linear@mocov3", "--epochs", "1", "--json"]
    found = json.loads(CliRunner().invoke(main.app, ["evaluate", *given, *several]).stdout)
    assert {"linear/top1", "linear@mocov3/top1"} <= found.keys()
    form = CliRunner().invoke(main.app, ["evaluate", *given, "--protocol", "knn,nothing", "--format", "json"])
    assert form.exit_code == 2
    assert [r["protocol"] for r in json.loads(form.stdout)] == ["knn"]
    assert "expected --SETTING VALUE" in refused(capsys, "evaluate", *given, "--k")
    assert "expected the backbone before all options" in refused(capsys, "evaluate", "--k", "3", *given)
    assert "--trian: not a setting" in refused(capsys, "evaluate", *given, "--trian", "x")


def test_an_untrained_backbone_by_itself_has_its_numbers(request_: Callable[..., evaluate.Report], trained: Path):
    alone = Scores(request_("knn", backbone=f"untrained:{trained}"))
    both = request_("knn", untrained=True)
    assert alone["knn/top1"] == both.results[1].numbers["knn/top1"]
    assert Scores(both)["knn/top1"] == both.results[0].numbers["knn/top1"]


def test_workers_find_the_same_features(
    request_: Callable[..., evaluate.Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def elsewhere(function: Any, tasks: Any, *, workers: int, gpus: bool) -> Any:
        sent = [pickle.loads(pickle.dumps(task)) for task in tasks]
        assert len(sent) == workers
        return map(function, reversed(sent))  # which come as they are done

    alone = request_("knn").results[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(extraction, "ray_map", elsewhere)
    monkeypatch.setattr(Knn, "ranks", False)  # as a plug-in's protocol, which needs all features
    assert request_("knn", workers=3).results[0].numbers == alone.numbers
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of GPUs"))
    if not torch.cuda.is_available():
        assert "finds no accelerator" in request_("knn", workers=3, gpus=True).refused[0]
    with pytest.raises(UserError, match="--gpus: is for the Ray tasks of --workers"):
        eagleray.evaluate("untrained:timm:resnet18", protocols="knn", gpus=True)


def test_a_protocol_that_fails_costs_its_numbers_alone(
    request_: Callable[..., evaluate.Report], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("eagleray.protocols.linear.linear", broken)
    report = request_("linear", "knn", settings={"k": "5"})
    assert [r.protocol for r in report.results] == ["knn"]
    [line] = report.refused
    assert line.startswith("linear: failed: ZeroDivisionError: division by zero (test_evaluate.py, line ")


@pytest.mark.slow
def test_numbers_join_the_run_in_mlflow(tmp_path: Path):
    from mlflow import MlflowClient

    tracking = Tracking(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tmp_path / "run").mkdir()
    note = tmp_path / "run" / "mlflow.json"
    with pytest.raises(UserError, match="was not tracked"):
        UPDATE(tracking, note, {"a/b": 1.0})
    number = mlflow_run.parent_run(tracking, note, "a run", {})
    (tmp_path / "results.json").write_text("[]")
    for value in (1.0, 2.0):
        UPDATE(tracking, note, {"evaluation/knn/top1": value}, [tmp_path / "results.json"])
    client = MlflowClient(tracking.uri)
    assert [m.value for m in client.get_metric_history(number, "evaluation/knn/top1")] == [1.0, 2.0]
    assert client.get_run(number).info.status == "RUNNING"  # as it was
    assert [f.path for f in client.list_artifacts(number)] == ["results.json"]


def test_the_line_of_davis_begins_with_the_mean_of_all_videos():
    one = result(protocol="davis", numbers={"davis/J&F": 50.0, "davis/a/J&F": 40.0, "davis/b/J&F": 60.0})
    line = results.table([one], list(results.rows([one], [], {"davis/J&F": 57.0})), "text")
    assert line == "davis  J&F 50.00 (paper 57.00), a/J&F 40.00, b/J&F 60.00"
