"""Protocols on features and on small shards."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import labelled_images
from helpers.features import clusters

from eagleray.base.errors import UserError
from eagleray.data.index import open_index
from eagleray.evaluation.registry import PROTOCOLS
from eagleray.models.backbone import Backbone
from eagleray.protocols.features import (
    Extracted,
    FrozenFeatures,
    LabelledFeatures,
    SuiteFeatures,
    extract_pooled,
    labelled_samples,
    subset,
)
from eagleray.protocols.knn import knn
from eagleray.protocols.linear import Split, linear
from eagleray.protocols.needs import Features, Suite
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.probes import RECORDED, ProbeSets, evaluate, renumber
from eagleray.protocols.protocol import FeatureProtocol, Listed, Workspace, as_option
from eagleray.protocols.settings import Evaluate


@pytest.mark.parametrize("protocol", [
    lambda a, b: knn(a, b, k=10)["knn/top1"],
    lambda a, b: linear(a, b, epochs=20)["linear/top1"],
])  # fmt: skip
def test_classes_that_are_apart_are_told_apart(protocol):
    assert protocol(clusters(500, spread=0.1, seed=0), clusters(100, spread=0.1, seed=1)) == 100
    noise = protocol(clusters(500, spread=100.0, seed=0), clusters(1000, spread=100.0, seed=1))
    assert 10 < noise < 30


def test_the_probe_picks_its_rate_without_the_test_set():
    train, test = clusters(500, spread=2.0, seed=0), clusters(200, spread=2.0, seed=1)
    flipped = LabelledFeatures(test.x, (test.y + 1) % 5)
    rates = [linear(train, x, epochs=5)["linear/lr"] for x in (test, flipped)]
    assert rates[0] == rates[1]


def test_few_images_pick_a_rate_too():
    """One of nine is held out: with none, the accuracies were no numbers, and the first rate was taken."""
    train, test = clusters(9, spread=0.1, seed=0), clusters(50, spread=0.1, seed=1)
    orders = (1e-9, 100.0), (100.0, 1e-9)
    picked = [linear(train, test, epochs=20, seed=2, rates=rates)["linear/lr"] for rates in orders]
    assert picked == [100.0, 100.0]
    assert len(Split.of(clusters(29, spread=0.1, seed=0), test, scaled=True, seed=0).validation.rows) == 2
    with pytest.raises(UserError, match=r"^linear: 1 training image\(s\); expected two or more"):
        linear(clusters(1, spread=0.1, seed=0), test)


def test_a_part_of_the_samples_keeps_every_class():
    samples = np.arange(2000)  # classes taking turns: every k-th sample would be of a few classes only
    part = subset(samples, 200)
    assert len(part) == 200
    assert (np.diff(part) > 0).all()
    assert len(set((part % 20).tolist())) == 20
    assert (part == subset(samples, 200)).all()


def test_without_a_test_set_a_tenth_is_held_out(shards: Path):
    index = open_index(str(shards / "train"))
    sets = ProbeSets.of(index, None, None)
    assert sets is not None
    assert len(sets.test_samples) == len(index) // 10
    assert sorted([*sets.test_samples, *sets.train_samples]) == labelled_samples(index).tolist()


def test_a_held_out_class_without_training_images_is_said_of_the_option_that_was_given(tmp_path: Path):
    index = open_index(labelled_images.write(tmp_path / "train", 0, 20, classes=19), note=lambda _: None)
    sets = ProbeSets.of(index, None, None)
    assert sets is not None
    with pytest.raises(UserError, match=r"^--train: all images of 2 of its 19 classes are held out .*--test URL"):
        sets.check()


def test_a_run_records_what_the_protocols_measure(shards: Path):
    """To the last bit, and nothing else; the further numbers of the protocols do not change these."""
    index = open_index(str(shards / "train"))
    sets = ProbeSets.of(index, open_index(str(shards / "test")), 200)
    assert sets is not None
    backbone = Backbone("vit_tiny_patch16_224", options={"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1})
    settings = Evaluate(size=16, resize=16, k=7, temperature=0.1, probe_epochs=4)
    train = extract_pooled(backbone, index, sets.train_samples, size=16, resize=16)
    test = extract_pooled(backbone, sets.test, sets.test_samples, size=16, resize=16)
    train, test = renumber(train, test, torch.device("cpu"))
    expected = knn(train, test, k=7, temperature=0.1) | linear(train, test, epochs=4)
    assert evaluate(backbone, sets, settings) == {key: expected[key] for key in RECORDED}
    again = evaluate(backbone, sets, settings, protocols=("knn",))
    assert again == {key: expected[key] for key in RECORDED if key.startswith("knn/")}


def test_without_epochs_a_run_trains_no_probe(shards: Path):
    sets = ProbeSets.of(open_index(str(shards / "test")), None, None)
    backbone = Backbone("vit_tiny_patch16_224", options={"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1})
    numbers = evaluate(backbone, sets, Evaluate(size=16, resize=16, probe_epochs=0))
    assert numbers.keys() == {"knn/top1", "knn/top5"}


def test_features_do_not_depend_on_the_batch_and_keep_their_labels(shards: Path):
    index = open_index(str(shards / "test"))
    backbone = Backbone("vit_tiny_patch16_224", options={"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1})
    whole = extract_pooled(backbone, index, labelled_samples(index), size=16, resize=16)
    few = extract_pooled(backbone, index, labelled_samples(index)[7:9], size=16, resize=16)
    torch.testing.assert_close(whole.x[7:9], few.x)
    assert whole.y.tolist() == index.label.tolist()
    assert backbone.training
    head = torch.nn.Linear(whole.x.shape[1], 2)  # a plug-in's protocol may train on all features at once
    head(whole.x).sum().backward()


def test_the_papers_settings_are_described_alike():
    assert str(PROTOCOLS["linear@dino"].about).endswith(", with the settings of DINO, on the last 4 blocks")
    assert PROTOCOLS["linear_augmented@dino"].about == "the same, with the settings of DINO, on the last 4 blocks"


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_defaults_are_shown_as_they_are_typed(name: str):
    protocol = PROTOCOLS[name]
    defaults = protocol.default.model_dump()
    assert set(protocol.settings) == defaults.keys()
    typed = {k: "".join(shlex.split(as_option(v))) for k, v in defaults.items()}
    of_recipe = protocol.kind.of_recipe(Evaluate()).keys() & {"size", "resize"}
    shown = {k: "of the recipe" if k in of_recipe else as_option(v) for k, v in defaults.items()}
    assert all(f"--{k} {v}" in str(protocol) for k, v in shown.items())
    assert protocol.parse(typed) == defaults


class Centroid(FeatureProtocol):
    about = "nearest class mean"
    normalise: bool = True

    def run(self, backbone: Backbone, data: FrozenFeatures, workspace: Workspace) -> Outcome:
        return Outcome({"centroid/images": len(data.test.y)}, {"normalise": self.normalise})


def test_a_protocol_is_a_class_and_a_line(tmp_path: Path):
    protocol = Listed(Centroid)
    assert protocol.settings == ["normalise", "size", "resize", "features"]
    assert str(protocol).startswith("nearest class mean; --train URL of labelled shards; --normalise true, --size of")
    settings = protocol.parse({"normalise": "false"})
    sets = Extracted(*(clusters(10, spread=0.1, seed=seed) for seed in (0, 1)), (10, 10))
    outcome = Centroid(**settings).run(Backbone("resnet10t"), FrozenFeatures(lambda: sets), Workspace(tmp_path))
    assert (outcome.numbers, outcome.settings) == ({"centroid/images": 10}, {"normalise": False})
    kept = Features("pooled", 16, 16).settings(FrozenFeatures(lambda: sets), settings, {})
    assert kept["normalise"] is False, "reports tell results of other settings apart by them"
    assert kept["train_images"] == 10
    assert Suite("pooled", 16, 16).settings(SuiteFeatures("", lambda _: sets.test), {"seed": 1}, {})["seed"] == 1


def test_a_setting_of_a_class_without_a_default_has_to_be_given():
    class Needy(FeatureProtocol):
        scale: float

        def run(self, backbone: Backbone, data: FrozenFeatures, workspace: Workspace) -> Outcome:
            return Outcome({})

    assert "--scale required, --size of the recipe" in str(Listed(Needy))
    with pytest.raises(UserError, match=r"^--scale: missing, and it has no default$"):
        Listed(Needy).parse({"size": "32"})
