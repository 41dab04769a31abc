"""Weighted k-nearest neighbours against DINO's and InstDisc's code."""

import torch
from helpers.golden_cases import Case, cases

from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.knn import knn, vote


@cases("dino_knn")
def test_dino(case: Case) -> None:
    train = LabelledFeatures(case["train_features"], case["train_labels"])
    test = LabelledFeatures(case["test_features"], case["test_labels"])
    for row, (k, temperature) in enumerate(case["results"][:, :2].tolist()):
        found = knn(train, test, k=int(k), temperature=temperature)
        both = torch.tensor([found["knn/top1"], found["knn/top5"]], dtype=torch.float64)
        case.equal(both, case["results"][row, 2:], f"top-1 and top-5 at k={k:.0f}, T={temperature}")


def test_a_low_temperature_leaves_the_nearest_its_vote():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 4
    x = 20 + torch.eye(4)[y] + 0.1 * torch.randn(40, 4, generator=g)  # all cosines are above 0.99
    found = knn(LabelledFeatures(x, y), LabelledFeatures(x, y), k=40, temperature=0.001)
    assert found["knn/top1"] == 100


@cases("knn_weighted")
def test_instdisc(case: Case) -> None:
    k, temperature, classes = case.hyper["k"], case.hyper["sigma"], case.hyper["classes"]
    train, test = (
        LabelledFeatures(case["train"], case["train_labels"]),
        LabelledFeatures(case["test"], case["test_labels"]),
    )
    votes = vote(test.x @ train.x.T, train.y, classes=classes, k=k, temperature=temperature)
    case.check(votes, "scores")
    case.check(knn(train, test, k=k, temperature=temperature)["knn/top1"] / 100, "top1")
