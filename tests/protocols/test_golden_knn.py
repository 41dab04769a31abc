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
        found = knn(train, test, k=int(k), temperature=temperature).numbers
        both = torch.tensor([found["knn/top1"], found["knn/top5"]], dtype=torch.float64)
        case.equal(both, case["results"][row, 2:], f"top-1 and top-5 at k={k:.0f}, T={temperature}")


@cases("knn_weighted")
def test_instdisc(case: Case) -> None:
    k, temperature, classes = case.hyper["k"], case.hyper["sigma"], case.hyper["classes"]
    train, test = (
        LabelledFeatures(case["train"], case["train_labels"]),
        LabelledFeatures(case["test"], case["test_labels"]),
    )
    votes = vote(test.x @ train.x.T, train.y, classes=classes, k=k, temperature=temperature)
    case.check(votes, "scores")
    case.check(knn(train, test, k=k, temperature=temperature).numbers["knn/top1"] / 100, "top1")
