"""Fine-tuning on a few labels: the whole network learns, on any number of ranks, and after a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import labelled_images
from helpers.ranks import on_ranks

from eagleray.data.index import open_index
from eagleray.models.backbone import Backbone
from eagleray.protocols import crop_training, fine_tuning
from eagleray.protocols.catalogue import SemiSupervised
from eagleray.protocols.probes import ProbeSets
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.semi_supervised import semi_supervised

SETTINGS: dict[str, Any] = {"size": 32, "resize": 32, "labels": 0.5, "epochs": 2, "batch": 15, "lr": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labelled")
    for seed, (split, count) in enumerate((("train", 60), ("test", 60))):
        labelled_images.write(folder / split, seed, count)
    return folder


def frozen_resnet() -> Backbone:
    """A network with batch norm, without gradients as the momentum teacher of a run."""
    torch.manual_seed(0)
    return Backbone("test_resnet").requires_grad_(False)


def tune(folder: Path, out: Path, stop: int = 0) -> tuple[dict[str, float], list[str]]:
    """Fine-tune with a checkpoint after every step; end early after `stop` steps, if it is not 0."""
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        if stop and f"step {stop}/" in line:
            raise KeyboardInterrupt

    train, test = (open_index(str(folder / split), note=lambda _: None) for split in ("train", "test"))
    sets = ProbeSets.of(train, test, None)
    assert sets is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine_tuning, "SAVE_SECONDS", -1.0)
        patch.setattr(crop_training, "processes", lambda *_: 0)
        try:
            return dict(
                semi_supervised(frozen_resnet(), sets, SemiSupervised(**SETTINGS), Workspace(out, note)).numbers
            ), notes
        except KeyboardInterrupt:
            return {}, notes


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint of a training."""
    state: dict[str, torch.Tensor] = torch.load(max(out.glob("*/step-*.pt")), weights_only=True)["net"]
    return state


@pytest.mark.slow
def test_the_whole_network_learns_the_same_on_ranks_and_after_a_stop(folder: Path, tmp_path: Path):
    numbers, _ = tune(folder, tmp_path / "1")
    assert numbers.keys() == {"semi_supervised/top1", "semi_supervised/top5"}
    after, [name, stem] = weights(tmp_path / "1"), next(frozen_resnet().named_parameters())
    assert not torch.equal(stem, after[f"backbone.{name}"])
    first, second = on_ranks(2, tune, tmp_path, folder, tmp_path / "2")
    assert first[0] == second[0] == pytest.approx(numbers, abs=3.5)  # an image or two of 60
    for name, x in weights(tmp_path / "2").items():
        torch.testing.assert_close(x, after[name], rtol=1e-2, atol=1e-4, msg=name)
    assert tune(folder, tmp_path / "3", stop=3)[0] == {}
    again, notes = tune(folder, tmp_path / "3")
    assert "semi_supervised: continues after step 2 of 4" in notes
    assert again == numbers
    assert all(torch.equal(x, after[name]) for name, x in weights(tmp_path / "3").items())
