"""The linear probe on random crops: against a plain loop with torchvision's transforms, on ranks, after a stop."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import labelled_images
from helpers.networks import network
from helpers.ranks import on_ranks
from PIL import Image
from torchvision import transforms as T

from eagleray.base.errors import UserError
from eagleray.data.index import open_index
from eagleray.models.backbone import Backbone
from eagleray.protocols import crop_training, fine_tuning
from eagleray.protocols.catalogue import LinearAugmented
from eagleray.protocols.crop_training import AugmentedBatches
from eagleray.protocols.features import LabelledFeatures, extract_features, extract_pooled
from eagleray.protocols.linear import linear
from eagleray.protocols.linear_augmented import linear_augmented
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.probes import ProbeSets, renumber
from eagleray.protocols.protocol import Workspace
from eagleray.views.colours import MEAN, STD

CPU = torch.device("cpu")
TRAIN, TEST, SIZE, RESIZE = 180, 600, 16, 20
PROBE: dict[str, Any] = {"size": SIZE, "resize": RESIZE, "epochs": 8, "batch": 36, "rates": (0.5,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and test/ shards of images of six classes."""
    folder = tmp_path_factory.mktemp("labelled")
    for seed, (split, count) in enumerate((("train", TRAIN), ("test", TEST))):
        labelled_images.write(folder / split, seed, count)
    return folder


def sets(folder: Path) -> ProbeSets:
    train, test = (open_index(str(folder / split), note=lambda _: None) for split in ("train", "test"))
    out = ProbeSets.of(train, test, None)
    assert out is not None
    return out


def backbone() -> Backbone:
    return network(seed=1, options={"embed_dim": 48}).eval()


@pytest.fixture(autouse=True)
def few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crop_training, "processes", lambda *_: 0)


def probe(folder: Path, out: Path, settings: dict[str, Any], stop: int = 0) -> Outcome:
    """Train with a checkpoint after every step; end early after `stop` steps, if it is not 0."""
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        if stop and f"step {stop}/" in line:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine_tuning, "SAVE_SECONDS", -1.0)
        patch.setattr(fine_tuning, "LINES", 10**9)
        patch.setattr(crop_training, "processes", lambda *_: 0)  # in new processes, too
        try:
            outcome = linear_augmented(
                backbone(), sets(folder), LinearAugmented(**{**PROBE, **settings}), Workspace(out, note)
            )
        except KeyboardInterrupt:
            return Outcome({}, {"notes": notes})
    return Outcome(outcome.numbers, {**outcome.settings, "notes": notes})


def head(out: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint of a training keeps: the classifiers and their curves, and nothing of the backbone."""
    state: dict[str, torch.Tensor] = torch.load(max(out.glob("*/step-*.pt")), weights_only=True)["net"]
    assert state.keys() == {"head.weight", "head.bias", "curve"}
    return state


MANY: dict[str, Any] = {**PROBE, "epochs": 10, "batch": 72}


def plain_loop(seed: int, count: int) -> tuple[float, float]:
    """Return the accuracy after the last epoch and the highest one, from torchvision, PIL and PyTorch alone."""
    net, ends = backbone(), [T.ToTensor(), T.Normalize(MEAN, STD)]
    crop = T.Compose([T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), *ends])
    centre = T.Compose([T.Resize(RESIZE, T.InterpolationMode.BICUBIC), T.CenterCrop(SIZE), *ends])
    pictures, y = labelled_images.draw(0, count)
    tests, truth = labelled_images.draw(1, TEST)
    images, labels = [Image.fromarray(x) for x in pictures], torch.from_numpy(y)
    torch.manual_seed(seed)
    layer = torch.nn.Linear(net.dim, labelled_images.CLASSES)
    torch.nn.init.normal_(layer.weight, std=0.01)
    torch.nn.init.zeros_(layer.bias)
    epochs, batch, [rate] = MANY["epochs"], MANY["batch"], MANY["rates"]
    optimizer = torch.optim.SGD(layer.parameters(), rate * batch / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    with torch.no_grad():
        test = net.pooled(torch.stack([centre(Image.fromarray(x)) for x in tests]))
    curve = []
    for _ in range(epochs):
        for at in torch.randperm(count).split(batch):
            with torch.no_grad():
                x = net.pooled(torch.stack([crop(images[i]) for i in at]))
            optimizer.zero_grad()
            F.cross_entropy(layer(x), labels[at]).backward()
            optimizer.step()
        schedule.step()
        curve.append(100 * float((layer(test).argmax(1) == torch.from_numpy(truth)).float().mean()))
    return curve[-1], max(curve)


@pytest.mark.slow
def test_accuracies_are_those_of_a_plain_loop_and_not_those_of_centre_crops(folder: Path, tmp_path: Path):
    """Means over three seeds. The probe on cached features of centre crops is another one, with the same settings."""
    labelled_images.write(tmp_path / "train", 0, 720)
    (tmp_path / "test").symlink_to(folder / "test")
    ours = [probe(tmp_path, tmp_path / str(seed), {**MANY, "seed": seed}).numbers for seed in range(3)]
    theirs = [plain_loop(seed, 720) for seed in range(3)]
    for column, name in enumerate(("top1", "best")):
        mine = np.mean([numbers[f"linear_augmented/{name}"] for numbers in ours])
        assert mine == pytest.approx(np.mean([pair[column] for pair in theirs]), abs=0.5), (name, ours, theirs)
    some, net = sets(tmp_path), backbone()
    parts = ((some.train, some.train_samples), (some.test, some.test_samples))
    train, test = (extract_pooled(net, *part, size=SIZE, resize=RESIZE) for part in parts)
    settings: dict[str, Any] = {name: MANY[name] for name in ("epochs", "batch", "rates")}
    cached = linear(*renumber(train, test, CPU), **settings, scaled=False)["linear/top1"]
    assert abs(cached - np.mean([numbers["linear_augmented/top1"] for numbers in ours])) > 1, (cached, ours)


SHORT: dict[str, Any] = {"epochs": 2, "batch": 35, "rates": (0.1, 1.0)}


def same_heads(one: Path, other: Path) -> None:
    """Compare the classifiers of two trainings; one test image of 600 may be on the other side of a boundary."""
    for name, x in head(one).items():
        rtol, atol = (0, 0.2) if name == "curve" else (1e-4, 1e-5)
        torch.testing.assert_close(x, head(other)[name], rtol=rtol, atol=atol)


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(folder: Path, tmp_path: Path):
    """Batches that do not divide evenly; of several rates one is picked. A stop in the middle of the second epoch
    changes nothing either, nor another number of ranks after it."""
    one = probe(folder, tmp_path / "1", SHORT)
    first, second = on_ranks(2, probe, tmp_path, folder, tmp_path / "2", SHORT)
    assert first.numbers == second.numbers == pytest.approx(one.numbers, abs=0.2)
    same_heads(tmp_path / "1", tmp_path / "2")
    assert probe(folder, tmp_path / "3", SHORT, stop=7).numbers == {}
    again = probe(folder, tmp_path / "3", SHORT)
    assert "linear_augmented: continues after step 6 of 10" in again.settings["notes"]
    assert again.numbers == one.numbers
    assert all(torch.equal(x, head(tmp_path / "1")[name]) for name, x in head(tmp_path / "3").items())


def batches(folder: Path, **keys: Any) -> Iterator[torch.Tensor]:
    """Yield the views of all batches, each image where its number says, (N, 3, S, S)."""
    some = sets(folder)
    settings: dict[str, Any] = {"size": SIZE, "batch": 36, "epochs": 2, "seed": 0, "device": CPU, "note": print} | keys
    described = AugmentedBatches.of(some.train, some.train_samples, **settings)
    for _, batch in described(0):
        views = torch.zeros(len(some.train), 3, SIZE, SIZE)
        views[batch.index] = batch.views[0]
        yield views


def test_crops_follow_from_the_seed_the_epoch_and_the_image(folder: Path):
    """An epoch shows every image once, in crops that no other epoch and no other seed shows."""
    every = list(batches(folder))
    first, second = (torch.stack(every[i : i + 5]).sum(0) for i in (0, 5))
    assert all((views.abs().sum((1, 2, 3)) > 0).all() for views in (first, second))
    differ = (first - second).abs().flatten(1).amax(1) > 1e-3
    assert differ.float().mean() > 0.95
    assert torch.equal(first, torch.stack(list(batches(folder, epochs=1))).sum(0))
    assert torch.equal(first, torch.stack(list(batches(folder, epochs=1, batch=90))).sum(0)), "another order, the same"
    other = torch.stack(list(batches(folder, epochs=1, seed=1))).sum(0)
    assert ((first - other).abs().flatten(1).amax(1) > 1e-3).float().mean() > 0.95


def test_the_backbone_stays_as_it_is(folder: Path, tmp_path: Path):
    """Also its batch norms, and its mode."""
    torch.manual_seed(0)
    net = Backbone("test_resnet")
    before = {name: x.clone() for name, x in net.state_dict().items()}
    settings = {**PROBE, "epochs": 1, "size": 32, "resize": 32, "labels": 0.5}
    outcome = linear_augmented(net, sets(folder), LinearAugmented(**settings), Workspace(tmp_path, print))
    assert outcome.settings["train_images"] == TRAIN // 2
    assert net.training
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_the_rate_is_picked_without_the_test_set_and_costs_no_label(folder: Path, tmp_path: Path):
    """A classifier beside another rate is the one that it is alone."""
    net, some = backbone(), sets(folder)
    alone = probe(folder, tmp_path / "alone", {**SHORT, "rates": (1.0,)})
    assert alone.numbers["linear_augmented/lr"] == 1.0
    outcome = probe(folder, tmp_path / "several", {**SHORT, "rates": (1e-6, 1.0)})
    assert outcome.numbers == pytest.approx(alone.numbers, abs=0.2)
    flipped = ProbeSets(some.train, some.train_samples, some.test, some.test_samples[::6])  # of one class
    picked = linear_augmented(
        net, flipped, LinearAugmented(**{**PROBE, **SHORT, "rates": (1e-6, 1.0)}), Workspace(tmp_path, print)
    )
    assert picked.numbers["linear_augmented/lr"] == 1.0


def test_few_classes_have_no_top_5(tmp_path: Path):
    for split in ("train", "test"):
        labelled_images.write(tmp_path / split, 0, 40, classes=4)
    outcome = probe(tmp_path, tmp_path / "out", {"epochs": 1, "batch": 20})
    assert {name.partition("/")[2] for name in outcome.numbers} == {"top1", "best", "best_epoch", "lr"}
    assert "no top-5 accuracy: 4 classes" in outcome.settings["notes"]


def test_test_images_that_do_not_decode_are_not_counted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def without_the_first(*args: Any, **keys: Any) -> dict[str, LabelledFeatures]:
        return {kind: LabelledFeatures(f.x[1:], f.y[1:]) for kind, f in extract_features(*args, **keys).items()}

    monkeypatch.setattr(crop_training, "extract_features", without_the_first)
    assert probe(folder, tmp_path, {"epochs": 1}).settings["test_images"] == TEST - 1


def test_wrong_settings_are_refused(folder: Path, tmp_path: Path):
    for settings, line in (
        ({"batch": 181}, "--batch 181: more than the 180 labelled images to train on"),
        ({"labels": 0.1}, "--batch 36: more than the 18 labelled images to train on"),
        ({"labels": 0.0}, "--labels 0: expected a share above 0 and at most 1, or a file with keys of images"),
        ({"labels": 2.0}, "--labels 2: expected a share above 0 and at most 1, or a file with keys of images"),
        ({"labels": 0.01}, "--labels 0.01: 2 of 180 images for 6 classes; expected one of each"),
        ({"features": "last5"}, "--features last5: unknown; did you mean 'last4'?"),
    ):
        with pytest.raises(UserError) as error:
            probe(folder, tmp_path, settings)
        assert str(error.value) == line
