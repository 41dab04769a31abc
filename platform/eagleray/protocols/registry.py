"""List all evaluation protocols by name.

A new protocol is a module with a function, and a line in this file."""

from collections.abc import Sequence

from eagleray import config
from eagleray.config import register
from eagleray.protocols.protocol import Protocol

HERE = "eagleray.protocols"
# Where the papers' scripts differ from protocols/linear.py: all of them leave the features unscaled. Their rates lie in
# the middle of ours.
DINO = {"epochs": 100, "batch": 1024, "scaled": False, "rates": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)}
VARIANTS = {
    "mocov3": {"epochs": 90, "batch": 1024, "scaled": False, "rates": (0.1, 0.3, 1.0, 3.0, 10.0)},
    "dino": DINO,
    "esvit": DINO,
    "selfpatch": DINO,
}
PAPERS = (
    ("mocov3", "MoCo v3", "pooled"),
    ("dino", "DINO, on the last 4 blocks", "last4"),
    ("esvit", "EsViT, on the last 4 blocks", "last4"),
    ("selfpatch", "SelfPatch", "pooled"),
)
SHIPPED = {
    "knn": Protocol(
        "weighted vote of the k nearest training images, as in DINO and InstDisc",
        f"{HERE}.knn:knn",
        ("labels",),
        ranks=True,
    ),
    "linear": Protocol(
        "linear classifier on cached features, its learning rate picked on held-out training images",
        f"{HERE}.linear:linear",
        ("labels",),
        ranks=True,
    ),
    **{
        f"linear@{name}": Protocol(
            f"linear classifier on cached features, with the settings of {title}",
            f"{HERE}.linear:linear",
            ("labels",),
            features,
            VARIANTS[name],
            ranks=True,
        )
        for name, title, features in PAPERS
    },
    "linear_augmented": Protocol(
        "linear classifier on random crops and flips of all labelled images, the backbone running in every step",
        f"{HERE}.linear_augmented:linear_augmented",
        ("labelled",),
        ranks=True,
    ),
    **{
        f"linear_augmented@{name}": Protocol(
            f"the same, with the settings of {title}",
            f"{HERE}.linear_augmented:linear_augmented",
            ("labelled",),
            preset={k: v for k, v in VARIANTS[name].items() if k != "scaled"} | {"features": features},
            ranks=True,
        )
        for name, title, features in PAPERS
    },
    "semi_supervised": Protocol(
        "the whole backbone fine-tuned on 1 % of the labels, as in SimCLR",
        f"{HERE}.semi_supervised:semi_supervised",
        ("labelled",),
        ranks=True,
    ),
    "semi_supervised@10": Protocol(
        "the same on 10 % of the labels",
        f"{HERE}.semi_supervised:semi_supervised",
        ("labelled",),
        preset={"labels": 0.1, "epochs": 30},
        ranks=True,
    ),
    "correspondence": Protocol(
        "how often a patch is matched to itself in the mirrored image, as in EsViT",
        f"{HERE}.correspondence:correspondence",
        ("images", "patches"),
    ),
    "logistic": Protocol(
        "logistic regression with L-BFGS, its lambda picked on held-out training images, as in EsViT",
        f"{HERE}.logistic:logistic",
        ("labels",),
        ranks=True,
    ),
    "suite": Protocol("the logistic protocol on the 18 datasets of EsViT", f"{HERE}.suite:suite", ("suite",)),
    "attention": Protocol(
        "attention maps of the last block, head by head", f"{HERE}.visual.attention:attention", ("images",)
    ),
    "components": Protocol(
        "principal components of the patches, shown as colours",
        f"{HERE}.visual.explore:components",
        ("images", "patches"),
    ),
    "neighbours": Protocol("contact sheets of nearest images", f"{HERE}.visual.explore:neighbours", ("images",)),
    "pairs": Protocol(
        "most similar patches of two views and of two images", f"{HERE}.visual.explore:pairs", ("images", "patches")
    ),
    "video": Protocol(
        "attention and principal components of the frames of a video, as a strip and an animation",
        f"{HERE}.visual.video:video",
        ("frames",),
    ),
    "detection": Protocol(
        "Mask R-CNN or Cascade Mask R-CNN, fine-tuned on a dataset in COCO's layout",
        f"{HERE}.detection.detection:detection",
        ("coco",),
        ranks=True,
    ),
    "positives": Protocol(
        "neighbouring patches with the same objects, and how often the most similar ones are such, as in SelfPatch",
        f"{HERE}.detection.positives:positives",
        ("coco", "patches"),
    ),
    "segmentation": Protocol(
        "Semantic FPN or UPerNet, fine-tuned on images with masks",
        f"{HERE}.segmentation.segmentation:segmentation",
        ("masks",),
        ranks=True,
    ),
    "davis": Protocol(
        "object masks propagated through videos, without training", f"{HERE}.video.davis:davis", ("davis", "patches")
    ),
    "throughput": Protocol("images/s, parameters, multiply-adds and memory", f"{HERE}.throughput:throughput"),
}


def _from_plugin(entry: register.Entry) -> Protocol:
    """Describe a protocol that a plug-in registered as a Protocol."""
    function = f"{entry.module}:{entry.target.__name__}"
    return Protocol(entry.details["about"] or entry.name, function, entry.details["needs"], entry.details["features"])


PROTOCOLS = register.Registry("protocol", SHIPPED, _from_plugin)


def select(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return those names that are protocols, and an error message for each of the others."""
    unique = list(dict.fromkeys(names))
    return [n for n in unique if n in PROTOCOLS], [
        f"--protocol {n}: unknown{config.nearest(n, list(PROTOCOLS))}; see `eagleray list protocols`"
        for n in unique
        if n not in PROTOCOLS
    ]
