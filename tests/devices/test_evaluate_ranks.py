"""Protocols whose work two ranks with simulated devices share give the numbers of one process."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from helpers.annotated import coco, masks
from helpers.features import clusters
from helpers.forked import start_ranks
from helpers.processes import free_port
from helpers.simulated_device import DEVICE, simulated
from helpers.simulated_ranks import simulated_group

from eagleray.base import dist
from eagleray.dense.catalogue import Detection, Segmentation
from eagleray.dense.segmentation import heads
from eagleray.engine import precision
from eagleray.models.backbone import Backbone
from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.knn import knn
from eagleray.protocols.linear import linear
from eagleray.protocols.logistic import logistic
from eagleray.protocols.probes import renumber
from eagleray.protocols.protocol import Workspace

Measured = dict[str, tuple[Mapping[str, float], list[float]]]  # numbers and losses by protocol


def classify(device: torch.device, folder: Path) -> Measured:
    """Measure with this rank's half of drawn features."""
    rank, size = dist.rank(), dist.size()
    sets = clusters(400, spread=2.0, seed=0), clusters(200, spread=2.0, seed=1)
    mine = [LabelledFeatures(*(x.chunk(size)[rank] for x in s)) for s in sets]
    train, test = renumber(mine[0], mine[1], device)
    outcomes = knn(train, test, k=7), linear(train, test, epochs=2), logistic(train, test).numbers
    return dict(zip(("knn", "linear", "logistic"), ((numbers, []) for numbers in outcomes), strict=True))


def fine_tune(device: torch.device, folder: Path) -> Measured:
    """Measure with networks that are fine-tuned, without dropout, which each rank draws for itself."""

    def run(protocol: Detection | Segmentation) -> tuple[Mapping[str, float], list[float]]:
        torch.manual_seed(0)
        lines: list[str] = []
        backbone = Backbone("test_resnet").to(device)  # it has batch norm
        data = folder / type(protocol).__name__.lower()
        outcome = protocol.run(backbone, data, Workspace(data / str(dist.size()), lines.append))
        assert all(picture.exists() for picture in outcome.pictures)
        return outcome.numbers, [float(line.split("loss ")[1].split()[0]) for line in lines if "loss " in line]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "DROPOUT", 0.0)
        return {
            "segmentation": run(Segmentation(steps=3, batch=5, size=32, width=16, lr=1e-3)),
            "detection": run(Detection(schedule=str(folder / "detection" / "schedule.yaml"))),
        }


def _rank(rank: int, port: int, work: Callable[[torch.device, Path], Measured], folder: Path) -> None:
    torch.set_num_threads(1)
    with simulated_group(rank, 2, port), simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "compute_dtype", lambda *_: torch.float32)
        torch.save(work(DEVICE, folder), folder / f"{rank}.pt")


def on_two_ranks(work: Callable[[torch.device, Path], Measured], folder: Path) -> list[Measured]:
    """Return what each rank measures."""
    start_ranks(_rank, (free_port(), work, folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_classifiers_of_features_that_ranks_share(tmp_path: Path) -> None:
    first, second = on_two_ranks(classify, tmp_path)
    assert first == second
    for name, (numbers, _) in classify(torch.device("cpu"), tmp_path).items():
        assert first[name][0] == pytest.approx(numbers, abs=1.0), name  # a feature or two of 200


@pytest.mark.slow
def test_networks_that_ranks_fine_tune(tmp_path: Path) -> None:
    masks(tmp_path / "segmentation", count=3)
    coco(tmp_path / "detection", count=3)
    first, second = on_two_ranks(fine_tune, tmp_path)
    assert all(numbers == {} for numbers, _ in second.values()), "rank 0 reports"
    alone = fine_tune(torch.device("cpu"), tmp_path)
    for name, (numbers, losses) in first.items():
        assert numbers.keys() == alone[name][0].keys()
        assert losses[0] == pytest.approx(alone[name][1][0], rel=0.1), name  # a detector draws regions on each rank
    assert first["segmentation"][1] == pytest.approx(alone["segmentation"][1], abs=5e-3)
