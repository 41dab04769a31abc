"""List the protocols that classify images, match patches, draw features and measure speed.

The module that does a protocol's work is imported only when it runs, so that listing settings does not load PyTorch."""

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from eagleray.config.types import Share
from eagleray.protocols.needs import Labelled, Nothing, Suite
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import (
    FeatureProtocol,
    FrozenProtocol,
    ImageProtocol,
    Listed,
    PatchProtocol,
    Protocol,
    Workspace,
)
from eagleray.protocols.settings import BATCH, EPOCHS, RATES, Evaluate

if TYPE_CHECKING:
    from eagleray.data.index import Index
    from eagleray.models.backbone import Backbone
    from eagleray.protocols.features import FrozenFeatures, SuiteFeatures
    from eagleray.protocols.probes import ProbeSets


def absolute(path: str) -> str:
    """Return the absolute path of a file, so that workers with another working directory find it."""
    from eagleray.storage import store

    return store.absolute(path)


Rates = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]  # learning rates for batches of 256 images
Keys = Annotated[str, AfterValidator(absolute)]  # path of a file with the keys of images
File = Annotated[str, AfterValidator(lambda name: absolute(name) if os.path.isfile(name) else name)]  # or another name


class Knn(FeatureProtocol):
    """Classify an image by the weighted vote of its k nearest training images. DINO reports the default `ks`."""

    about = "weighted vote of the k nearest training images, as in DINO and InstDisc"
    ranks = True
    k: PositiveInt = Evaluate.k
    ks: tuple[PositiveInt, ...] = (10, 20, 100, 200)  # further values of k for which top-1 is measured
    temperature: PositiveFloat = Evaluate.temperature
    recipe = ("k", "temperature", "size", "resize")

    def run(self, backbone: "Backbone", data: "FrozenFeatures", workspace: Workspace) -> Outcome:
        from eagleray.protocols.knn import knn

        numbers = knn(data.train, data.test, k=self.k, ks=self.ks, temperature=self.temperature)
        return Outcome(numbers, {"k": self.k, "ks": list(self.ks), "temperature": self.temperature})


class Linear(FeatureProtocol):
    """Train a linear classifier on cached features, with a sweep of learning rates."""

    about = "linear classifier on cached features, its learning rate picked on held-out training images"
    ranks = True
    epochs: PositiveInt = EPOCHS
    batch: PositiveInt = BATCH
    rates: Rates = RATES
    scaled: bool = True  # whether features are centred and divided by their mean standard deviation
    seed: NonNegativeInt = 0

    @classmethod
    def of_recipe(cls, evaluate: Evaluate) -> dict[str, Any]:
        return {"epochs": evaluate.probe_epochs or EPOCHS} | super().of_recipe(evaluate)

    def run(self, backbone: "Backbone", data: "FrozenFeatures", workspace: Workspace) -> Outcome:
        from eagleray.protocols.linear import linear

        settings = {name: getattr(self, name) for name in ("epochs", "batch", "rates", "scaled", "seed")}
        return Outcome(linear(data.train, data.test, **settings), settings | {"rates": list(self.rates)})


class CropProtocol(Protocol["ProbeSets"]):
    """A protocol that trains on random crops of labelled images, and tests on centre crops."""

    ranks = True
    size: PositiveInt = Evaluate.size  # side of the square crops, in pixels
    resize: PositiveInt = Evaluate.resize  # short side of test images, in pixels
    epochs: PositiveInt
    batch: PositiveInt
    labels: float | Keys  # share of the labels, or a file with the keys of the images to train on
    seed: NonNegativeInt = 0
    recipe = ("size", "resize")

    def data(self) -> Labelled:
        return Labelled()


class LinearAugmented(CropProtocol):
    """Train a linear classifier on the features that a frozen backbone has for random crops."""

    about = "linear classifier on random crops and flips of all labelled images, the backbone running in every step"
    epochs: PositiveInt = 100
    batch: PositiveInt = 1024
    labels: float | Keys = 1.0
    features: str = "pooled"
    rates: Rates = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

    def run(self, backbone: "Backbone", data: "ProbeSets", workspace: Workspace) -> Outcome:
        from eagleray.protocols.linear_augmented import linear_augmented

        return linear_augmented(backbone, data, self, workspace)


class SemiSupervised(CropProtocol):
    """Train a copy of the backbone and a linear classifier together, on a few labels."""

    about = "the whole backbone fine-tuned on 1 % of the labels, as in SimCLR"
    epochs: PositiveInt = 60
    batch: PositiveInt = 4096
    labels: float | Keys = 0.01
    lr: PositiveFloat = 0.05  # learning rate for a batch of 256; it is scaled linearly with the batch

    def run(self, backbone: "Backbone", data: "ProbeSets", workspace: Workspace) -> Outcome:
        from eagleray.protocols.semi_supervised import semi_supervised

        return semi_supervised(backbone, data, self, workspace)


class Logistic(FeatureProtocol):
    """Fit logistic regression to frozen features of images that have one class each."""

    about = "logistic regression with L-BFGS, its lambda picked on held-out training images, as in EsViT"
    ranks = True
    metric: Literal["top1", "mean_per_class", "roc_auc"] = "top1"
    seed: NonNegativeInt = 0

    def run(self, backbone: "Backbone", data: "FrozenFeatures", workspace: Workspace) -> Outcome:
        from eagleray.protocols.logistic import logistic

        return logistic(data.train, data.test, self, workspace.note)


class SuiteOf18(FrozenProtocol["SuiteFeatures"]):
    """Run the logistic protocol on all data sets of EsViT's suite that have shards in ROOT/NAME/SPLIT, for --suite
    ROOT."""

    about = "the logistic protocol on the 18 datasets of EsViT"
    reference: str | None = None  # folder of another evaluation, to compare with its results of the suite
    seed: NonNegativeInt = 0

    def data(self) -> Suite:
        return Suite(self.features, self.size, self.resize)

    def run(self, backbone: "Backbone", data: "SuiteFeatures", workspace: Workspace) -> Outcome:
        from eagleray.protocols.suite import suite

        return suite(data, self, workspace.note)


class Correspondence(PatchProtocol):
    """Measure how often a patch is matched to itself in the mirrored image."""

    about = "how often a patch is matched to itself in the mirrored image, as in EsViT"
    size: PositiveInt = Evaluate.size
    resize: PositiveInt = Evaluate.resize
    limit: PositiveInt = 50_000  # largest number of images; as in the paper, that of ImageNet's validation set
    recipe = ("size", "resize")

    def run(self, backbone: "Backbone", data: "Index", workspace: Workspace) -> Outcome:
        from eagleray.protocols.correspondence import correspondence

        return correspondence(backbone, data, self)


class Attention(ImageProtocol):
    """Draw the attention maps of the heads in the last block, and measure their entropies."""

    about = "attention maps of the last block, head by head"
    size: PositiveInt = 480
    limit: PositiveInt = 64  # largest number of images over which entropies are averaged
    mass: Share = 0.6  # the fewest patches that hold this share of the attention are drawn
    heads: PositiveInt = 6  # number of heads to draw
    query: tuple[Share, ...] = ()  # x and y of the patch whose attention is drawn; empty: the class token
    points: tuple[Share, ...] = (0.5, 0.5, 0.25, 0.25, 0.75, 0.25, 0.25, 0.75, 0.75, 0.75)  # x, y of each query patch

    def run(self, backbone: "Backbone", data: "Index", workspace: Workspace) -> Outcome:
        from eagleray.protocols.visual.attention import attention

        return attention(backbone, data, self, workspace)


class Components(PatchProtocol):
    """Draw principal components of patches as colours. They are computed for the patches of several images together."""

    about = "principal components of the patches, shown as colours"
    size: PositiveInt = 448
    images: PositiveInt = 6

    def run(self, backbone: "Backbone", data: "Index", workspace: Workspace) -> Outcome:
        from eagleray.protocols.visual.explore import components

        return components(backbone, data, self, workspace)


class Neighbours(ImageProtocol):
    """Draw a sheet of query images, each with the images nearest to it."""

    about = "contact sheets of nearest images"
    recipe = ("size",)
    size: PositiveInt = Evaluate.size
    limit: PositiveInt = 1000  # largest number of images among which neighbours are searched
    queries: PositiveInt = 8
    k: PositiveInt = 8

    def run(self, backbone: "Backbone", data: "Index", workspace: Workspace) -> Outcome:
        from eagleray.protocols.visual.neighbours import neighbours

        return neighbours(backbone, data, self, workspace)


class Pairs(PatchProtocol):
    """Draw the most similar pairs of patches between two views of an image, and between two images."""

    about = "most similar patches of two views and of two images"
    size: PositiveInt = 224
    images: PositiveInt = 3
    limit: PositiveInt = 64  # largest number of images among which the nearest one is searched
    one: File = ""  # `one` and `other`: two images to compare as well, each a file or the key of a sample
    other: File = ""

    def run(self, backbone: "Backbone", data: "Index", workspace: Workspace) -> Outcome:
        from eagleray.protocols.visual.explore import pairs

        return pairs(backbone, data, self, workspace)


class Throughput(Protocol[None]):
    """Measure the speed, size and memory of a backbone."""

    about = "images/s, parameters, multiply-adds and memory"
    size: PositiveInt = Evaluate.size
    batch: PositiveInt | None = None  # images in a batch; None: 128, or 4 on a CPU
    rounds: PositiveInt = 10
    recipe = ("size",)

    def data(self) -> Nothing:
        return Nothing()

    def run(self, backbone: "Backbone", data: None, workspace: Workspace) -> Outcome:
        from eagleray.protocols.throughput import throughput

        return throughput(backbone, self, workspace.note)


# Settings of the papers' scripts that differ from those of `Linear`. The scripts do not scale features. Their learning
# rates lie within the ranges of `rates`.
DINO = {"epochs": 100, "batch": 1024, "scaled": False, "rates": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)}
MOCO = {"epochs": 90, "batch": 1024, "scaled": False, "rates": (0.1, 0.3, 1.0, 3.0, 10.0)}
LAST = {"features": "last4"}
PAPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mocov3": ("MoCo v3", MOCO),
    "dino": ("DINO, on the last 4 blocks", DINO | LAST),
    "esvit": ("EsViT, on the last 4 blocks", DINO | LAST),
    "selfpatch": ("SelfPatch", DINO),
}
CACHED = "linear classifier on cached features, with the settings of"
SHIPPED = {
    "knn": Listed(Knn),
    "linear": Listed(Linear),
    **{f"linear@{name}": Listed(Linear, f"{CACHED} {title}", preset) for name, (title, preset) in PAPERS.items()},
    "linear_augmented": Listed(LinearAugmented),
    **{
        f"linear_augmented@{name}": Listed(
            LinearAugmented,
            f"the same, with the settings of {title}",
            {key: value for key, value in preset.items() if key != "scaled"},
        )
        for name, (title, preset) in PAPERS.items()
    },
    "semi_supervised": Listed(SemiSupervised),
    "semi_supervised@10": Listed(SemiSupervised, "the same on 10 % of the labels", {"labels": 0.1, "epochs": 30}),
    "correspondence": Listed(Correspondence),
    "logistic": Listed(Logistic),
    "suite": Listed(SuiteOf18),
    "attention": Listed(Attention),
    "components": Listed(Components),
    "neighbours": Listed(Neighbours),
    "pairs": Listed(Pairs),
    "throughput": Listed(Throughput),
}
