"""The `backbone` section of a recipe names a timm model and the changes to it."""

from dataclasses import field, fields
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT
from eagleray.config.types import Share

# Backbones that the tests run forward, backward and through an export. Recipes may name any other model of timm.
TESTED = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "deit_small_patch16_224",
    "swin_tiny_patch4_window7_224",
    "resnet50",
    *("esvit_swin_tiny_w7", "vil_tiny", "cvt_tiny_esvit", "pvt_small", "cvt_13", "t2t_vit_14", "resnet50_sk"),
)


TIMM, HF = "timm:", "hf:"  # prefixes of the names of weights from timm and from the Hugging Face Hub


def is_public(source: str) -> bool:
    """Return whether a source of weights is a name at timm or at the Hugging Face Hub."""
    return source.startswith((TIMM, HF))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lora:
    """Low-rank adapters, described in docs/finetune.md: only they are trained, not the backbone's own weights."""

    rank: PositiveInt = 16  # rank of the matrices that are added to the weights
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16.0  # the matrices are added with weight alpha / rank
    blocks: PositiveInt | None = None  # number of last blocks that get adapters; None: every block
    # Linear layers of a block that get adapters; where a model divides qkv or fc1 into several layers, all of these do
    targets: Annotated[tuple[Literal["qkv", "proj", "fc1", "fc2"], ...], Field(min_length=1)] = ("qkv", "proj")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Network:
    """The backbone of a run: a timm model and the changes to it."""

    name: str = "vit_small_patch16_224"  # a model of timm
    # Initial weights of fine-tuning: a run, a checkpoint, a file of tensors, or timm:NAME; None: random. Those of
    # pretraining are in the section `start`
    weights: str | None = None
    drop_path: Share = 0.0  # rate of stochastic depth in the trained network; momentum copies drop nothing
    init: Literal["timm", "moco", "mae"] = "timm"  # the initial weights of a ViT: as in timm, MoCo v3 or MAE
    # A ViT's position table. timm, dino: trained, and resampled to any size as timm or DINO does; sincos: fixed (MoCo
    # v3); or none
    position: Literal["timm", "sincos", "dino", "none"] = "timm"
    # A ViT's pooled vector. timm: as the timm model pools; mean: of the patches, without class token and final norm;
    # norm_mean: mean of the patches after the final norm, without class token
    pool: Literal["timm", "mean", "norm_mean"] = "timm"
    norm: Literal["timm", "batch"] = "timm"  # batch: batch norm before a ViT's MLPs, over images and tokens (ViT-BN)
    # conv: four 3x3 convolutions instead of the projection of 16-pixel patches; wide: a ResNet with other `channels`
    # than timm's gets a stem as wide as its first stage
    stem: Literal["timm", "conv", "wide"] = "timm"
    freeze_patch: bool = False  # the random patch projection is not trained (MoCo v3)
    # Norm of a ViT's patch projection. batch: batch norm of the tokens; weight: weight norm (Salimans and Kingma)
    patch_norm: Literal["timm", "batch", "weight"] = "timm"
    options: dict[str, Any] = field(default_factory=dict)  # arguments of timm.create_model

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments with which `Backbone` builds the network, without weights and adapters."""
        return {f.name: getattr(self, f.name) for f in fields(Network) if f.name != "weights"}  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainedNetwork(Network):
    """The backbone that a run trains, which may get adapters."""

    # Low-rank adapters, which need a `start` (docs/finetune.md#adapters); None: all weights are trained
    lora: Lora | None = None
