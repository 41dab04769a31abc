"""Extract the features of a frozen backbone for the images in shards. Each rank extracts those of a share of them.

The features are of three types: the pooled vector, alone or with the mean of the patches, and vectors of the last four
blocks, as in DINO and EsViT."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError, named, reworded
from eagleray.config.types import Format
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index
from eagleray.engine.precision import autocast
from eagleray.models.backbone import Backbone
from eagleray.models.stages import stage_outputs, stages
from eagleray.protocols.digests import digest
from eagleray.protocols.eval_mode import NOT_FINITE, explain_failure, in_eval_mode
from eagleray.protocols.image_batches import BATCH, THREADS, Reading, batches
from eagleray.protocols.settings import Bank
from eagleray.views.crop import centre_crop
from eagleray.views.photometric import normalise

KINDS = {
    "pooled": "the class token, or the mean patch where there is none",
    "last4": "the last 4 blocks: class tokens of a ViT, mean patches of a pyramid's blocks (EsViT); a ResNet's pooled",
    "avgpool": "pooled, and the mean patch beside it (DINO's ViT-B)",
}
BLOCKS = 4
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LabelledFeatures(NamedTuple):
    """Features and classes of n images."""

    x: Tensor  # (n, D) features, not normalised
    y: Tensor  # (n,) classes


class Extracted(NamedTuple):
    """The features of a training set and of a test set: those of this rank's share, or all of them."""

    train: LabelledFeatures
    test: LabelledFeatures
    images: tuple[int, int]  # numbers of training and of test images on all ranks


@dataclass(frozen=True)
class FrozenFeatures:
    """The frozen features of labelled images. They are extracted when they are first read."""

    extract: Callable[[], Extracted]
    digest: str = ""  # digest of the images and their labels
    bank: Bank = "fp32"  # number format in which the features are kept

    @cached_property
    def _extracted(self) -> Extracted:
        return self.extract()

    @property
    def train(self) -> LabelledFeatures:
        """The features to train on, with classes counted from 0."""
        return self._extracted.train

    @property
    def test(self) -> LabelledFeatures:
        """The features to test on."""
        return self._extracted.test

    @property
    def images(self) -> tuple[int, int]:
        """The numbers of training and of test images, on all ranks."""
        return self._extracted.images


@dataclass(frozen=True)
class SuiteFeatures:
    """Frozen features of many data sets. Those of a data set are extracted when it is read."""

    root: str  # folder or URL of the data sets
    read: Callable[[str], LabelledFeatures]  # function that returns the features of the shards at a URL
    model: str = ""  # timm name of the backbone
    digests: list[str] = field(default_factory=list)  # digests of the data sets that were read
    bank: Bank = "fp32"  # number format in which the features are kept

    @property
    def digest(self) -> str:
        """The digest of all data sets that were read."""
        return digest(sorted(self.digests))


@dataclass(frozen=True)
class Shard:
    """The rows of a table that this rank holds: `rows` of the `total` rows, from the row `first` on."""

    first: int
    rows: int
    total: int

    @classmethod
    def of(cls, rows: int) -> "Shard":
        """Return the shard of this rank, which holds `rows` rows. Called by all ranks together."""
        counts = dist.gather_objects(rows)
        return cls(sum(counts[: dist.rank()]), rows, sum(counts))

    @property
    def last(self) -> int:
        """The index after the last row of this rank."""
        return self.first + self.rows

    def own(self, rows: Tensor) -> Tensor:
        """Return those of the given `rows` of the table that this rank holds, as indices into this rank's rows."""
        if self.rows == self.total:
            return rows
        return rows[(rows >= self.first) & (rows < self.last)] - self.first

    def read(self, x: Tensor, first: int, last: int) -> Tensor:
        """Return the rows `first` to `last` (excluded) of the table on every rank, from the rows `x` of this rank.

        Called by all ranks together. Floating-point numbers are returned in float32."""
        dtype = torch.float32 if x.is_floating_point() else x.dtype
        if dist.size() == 1:  # a rank that holds all rows must send them to the others, so `rows == total` is no test
            return x[first:last].to(dtype)
        out = x.new_zeros(last - first, *x.shape[1:], dtype=dtype)
        begin, end = max(first, self.first), min(last, self.last)
        if begin < end:
            out[begin - first : end - first] = x[begin - self.first : end - self.first]
        return dist.total(out)  # the rows of other ranks are zero here, so the sum has all rows


def count_classes(*labels: Tensor) -> int:
    """Return the number of classes: one more than the highest label in `labels`, each (n,), of all ranks."""
    return 1 + max(dist.gather_objects(max((int(y.max()) for y in labels if len(y)), default=-1)))


def extract_pooled(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    *,
    size: int,
    resize: int,
    precision: Format = "auto",
    bank: Bank = "fp32",
    reading: Reading = THREADS,
) -> LabelledFeatures:
    """Extract the pooled features of this rank's share of the samples; see `extract_features`."""
    more: dict[str, Any] = {"precision": precision, "bank": bank, "reading": reading}
    return extract_features(backbone, index, samples, size=size, resize=resize, **more)["pooled"]


@in_eval_mode
def extract_features(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    *,
    size: int,
    resize: int,
    kinds: Sequence[str] = ("pooled",),
    precision: Format = "auto",
    bank: Bank = "fp32",
    reading: Reading = THREADS,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, LabelledFeatures]:
    """Extract several types of features of this rank's share of the samples in a single forward pass.

    Images that do not decode are left out. `bank` is the number format of the features. After each batch, `tick` is
    called with the number of its images.

    Raises UserError when the backbone lacks one of the types, or when the device does not compute in this precision."""
    mine = own_samples(samples)
    xs: dict[str, Tensor] = {}  # features (n, D) by type; their first `done` rows are filled
    y = torch.empty(len(mine), dtype=torch.long)
    done = 0

    @torch.no_grad()  # not inference mode, whose tensors no protocol of a plug-in could train on
    def extract() -> None:
        nonlocal done
        for rows, values in embedded(backbone, index, mine, size, resize, kinds, precision, reading):
            new = slice(done, done + len(rows))
            for kind, value in values.items():
                if kind not in xs:
                    xs[kind] = torch.empty(len(mine), value.shape[1], dtype=FORMATS[bank])
                xs[kind][new] = value
            y[new] = torch.from_numpy(index.label[rows])
            done += len(rows)
            tick(len(rows))

    dist.together(extract)
    widths: dict[str, int] = {}  # D by type, also for a rank without images, which gets it from other ranks
    for part in dist.gather_objects({kind: x.shape[1] for kind, x in xs.items()}):
        widths |= part
    nothing = {kind: torch.empty(0, widths.get(kind, backbone.dim), dtype=FORMATS[bank]) for kind in kinds}
    return {kind: LabelledFeatures(xs.get(kind, nothing[kind])[:done], y[:done]) for kind in kinds}


def embedded(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    size: int,
    resize: int,
    kinds: Sequence[str],
    precision: Format,
    reading: Reading = THREADS,
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield, for each batch, the indices of the samples that decode and their features (b, D) by type, in float32 on
    the CPU. The caller puts the backbone into evaluation mode, and disables gradients."""
    device = next(backbone.parameters()).device
    for rows, images in batches(index, samples, size, resize, reading=reading, device=device):
        x = normalise(images, device)
        with autocast(device, precision):
            values = read_kinds(backbone, x, kinds)
        yield rows, {kind: value.float().cpu() for kind, value in values.items()}


def own_samples(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return this rank's share of the samples: consecutive batches, so that no batch is split over ranks."""
    batches = -(-len(samples) // BATCH)
    first, last = (BATCH * (batches * rank // dist.size()) for rank in (dist.rank(), dist.rank() + 1))
    return samples[first:last]


def image(index: Index, sample: int, size: int, resize: int) -> Tensor | None:
    """Read the centre crop (3, size, size), uint8, of a sample; return None if the image does not decode."""
    data = index.read(sample, sample + 1)
    with contextlib.suppress(BadImage):
        return centre_crop(decode(data, index.channels), resize=resize, size=size)
    return None


def labelled_samples(index: Index) -> NDArray[np.int64]:
    """Return the samples that have a label, without those that `eagleray forget` excludes."""
    samples = remaining_samples(index)
    return samples[index.label[samples] >= 0]


def remaining_samples(index: Index) -> NDArray[np.int64]:
    """Return all samples but those that `eagleray forget` excludes."""
    samples = np.arange(len(index))
    return np.delete(samples, sorted(index.forgotten)) if index.forgotten else samples


def no_image_error(index: Index) -> UserError:
    """Return the error for shards in which no image decodes."""
    return UserError(f"{index.shards[0].url}: no image in this shard decodes, nor in the shards beside it")


def subset(samples: NDArray[np.int64], count: int | None) -> NDArray[np.int64]:
    """Draw at most `count` of the samples at random, in their order; None: all. Every call draws the same samples.

    Taking every n-th sample instead would miss classes if the classes alternate."""
    if count is None or count >= len(samples):
        return samples
    return np.sort(np.random.default_rng(0).choice(samples, count, replace=False))


def read_kinds(backbone: Backbone, images: Tensor, kinds: Sequence[str]) -> dict[str, Tensor]:
    """Return the feature vectors (B, D) of each type in `kinds` for images (B, 3, H, W), from a single forward pass.

    Raises UserError when the backbone lacks one of the types."""
    blocks = last_blocks(backbone.model) if "last4" in kinds else []
    out = {}
    with stage_outputs(blocks) as seen:
        if "avgpool" in kinds:
            out["pooled"], patches, _ = backbone(images)
            out["avgpool"] = torch.cat([out["pooled"], patches.mean(1)], 1)
        else:
            out["pooled"] = backbone.pooled(images)
    out["last4"] = torch.cat([block_vector(backbone.model, x) for x in seen] or [out["pooled"]], 1)
    return {kind: out[kind] for kind in kinds}


def check_kind(backbone: Backbone, kind: str, size: int) -> None:
    """Raise UserError when the backbone has no features of type `kind` for square images of `size` pixels."""
    if kind not in KINDS:
        raise UserError(f"--features {kind}: unknown{config.nearest(kind, list(KINDS))}")
    x = torch.zeros(1, backbone.channels, size, size, device=next(backbone.parameters()).device)
    lacks = f"gives no {kind} features of images of --size {size}"
    with named(f"--features {kind}"), reworded(("backbone.name: ", "")), explain_failure(backbone, lacks):
        with torch.inference_mode():
            values = read_kinds(backbone, x, [kind]).values()
        if not all(value.isfinite().all() for value in values):
            raise ValueError(NOT_FINITE)


def has_kind(backbone: Backbone, kind: str, size: int) -> bool:
    """Return whether the backbone has features of type `kind` for square images of `size` pixels."""
    try:
        check_kind(backbone, kind, size)
    except UserError:
        return False
    return True


def last_blocks(model: Any) -> list[Any]:
    """Return the last 4 blocks of a model. They may belong to several stages.

    For a ResNet the list is empty, as DINO uses its pooled vector instead. Raises UserError when the model has fewer
    than 4 blocks."""
    parts = stages(model)
    if hasattr(model, "layer4"):
        return []
    blocks = parts if hasattr(model, "blocks") else [block for part in parts for block in blocks_of(part)]
    if len(blocks) < BLOCKS:
        raise UserError(
            f"{type(model).__name__} has {len(blocks)} blocks; expected {BLOCKS} or more, as the last {BLOCKS} are read"
        )
    return blocks[-BLOCKS:]


def blocks_of(stage: Any) -> list[Any]:
    """Return the blocks of a stage. Its downsampling layer, if it begins with one, is left out."""
    inside = stage.blocks if hasattr(stage, "blocks") else stage
    if not hasattr(inside, "__iter__"):
        raise UserError(f"{type(stage).__name__} has no blocks that can be read one by one")
    return [m for m in inside if hasattr(m, "mlp")]


def block_vector(model: Any, tokens: Tensor) -> Tensor:
    """Return one vector (B, C) for each image from the tokens (B, N, C), (B, h, w, C) or (B, C, h, w) of a block.

    The vector is the class token of a ViT, otherwise the mean of the patches. The model's final norm is applied first
    if its width is that of the tokens."""
    if tokens.ndim == 4:
        nchw = getattr(model, "stage_fmt", getattr(model, "output_fmt", "NCHW")) != "NHWC"
        tokens = (tokens.permute(0, 2, 3, 1) if nchw else tokens).flatten(1, 2)
    if tokens.shape[2] == model.num_features:  # the width of the last stage: as in EsViT, only its tokens are normed
        tokens = getattr(model, "norm", nn.Identity())(tokens)
    first = prefix_tokens(model, tokens)
    if first and getattr(model, "cls_token", True) is not None:  # ViL's stages have their global token instead
        return tokens[:, 0]
    return tokens[:, first:].mean(1)


def prefix_tokens(model: Any, tokens: Tensor) -> int:
    """Return how many of the tokens (B, N, C) of a block come before the patches, which form a square.

    They are a class token and registers, or a global token of ViL. CaiT and XCiT add their class token later."""
    known: int = getattr(model, "num_prefix_tokens", 1)
    patches = tokens.shape[1] - known
    return known if int(max(patches, 0) ** 0.5) ** 2 == patches else 0
