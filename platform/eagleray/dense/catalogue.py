"""List the protocols that fine-tune detectors and segmenters, and the one that tracks objects in videos.

Each class imports the module that computes its numbers in `run`, so that listing settings does not load PyTorch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from eagleray.protocols.needs import Folder
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Listed, Protocol, SizedProtocol, Workspace

if TYPE_CHECKING:
    from eagleray.models.backbone import Backbone


class Detection(Protocol[Path]):
    """A detector on a copy of the backbone, fine-tuned on a data set in COCO's layout."""

    about = "Mask R-CNN or Cascade Mask R-CNN, fine-tuned on a dataset in COCO's layout"
    ranks = True
    schedule: str = "1x"  # name of a file in pipelines/detection, or a YAML file with the same settings

    def data(self) -> Folder:
        return Folder("coco")

    def run(self, backbone: "Backbone", data: Path, workspace: Workspace) -> Outcome:
        from eagleray.dense.detection.detection import detection

        return detection(backbone, data, self, workspace)


class Positives(SizedProtocol[Path]):
    """Count the neighbours of a patch that show the same objects, and their share of its most similar neighbours."""

    about = "neighbouring patches with the same objects, and how often the most similar ones are such, as in SelfPatch"
    patches = True
    size: PositiveInt = 224
    chosen: Annotated[int, Field(ge=1, le=8)] = 4  # number of most similar neighbours that count

    def data(self) -> Folder:
        return Folder("coco")

    def run(self, backbone: "Backbone", data: Path, workspace: Workspace) -> Outcome:
        from eagleray.dense.detection.positives import positives

        return positives(backbone, data, self)


class Segmentation(Protocol[Path]):
    """A segmenter on a copy of the backbone, fine-tuned on images with masks."""

    about = "Semantic FPN or UPerNet, fine-tuned on images with masks"
    ranks = True
    head: str = "fpn"
    steps: int | None = None  # None: the steps of the head's paper
    batch: int = 16
    size: int = 512  # side of the crops and short side of the images, in pixels
    lr: PositiveFloat = 6e-5
    weight_decay: NonNegativeFloat = 0.01
    width: int | None = None  # channels of the head; None: as in its paper
    multi_scale: bool = False  # whether predictions are also averaged over six sizes and mirror images
    seed: NonNegativeInt = 0

    def data(self) -> Folder:
        return Folder("masks")

    def run(self, backbone: "Backbone", data: Path, workspace: Workspace) -> Outcome:
        from eagleray.dense.segmentation.segmentation import segmentation

        return segmentation(backbone, data, self, workspace)


class Davis(SizedProtocol[Path]):
    """Object masks of a video's first frame, propagated by the similarity of patches."""

    about = "object masks propagated through videos, without training"
    ranks = True
    patches = True
    split: str = "val"
    size: PositiveInt = 480  # short side of the frames, in pixels
    n_last_frames: NonNegativeInt = 7  # number of last frames that pass on their masks, beside the first frame
    topk: PositiveInt = 5  # number of most similar patches that vote
    size_mask_neighborhood: NonNegativeInt = 12  # most rows and columns that a patch may move; 0: any number

    def data(self) -> Folder:
        return Folder("davis")

    def run(self, backbone: "Backbone", data: Path, workspace: Workspace) -> Outcome:
        from eagleray.dense.video.davis import davis

        return davis(backbone, data, self, workspace)


SHIPPED = {
    "detection": Listed(Detection),
    "positives": Listed(Positives),
    "segmentation": Listed(Segmentation),
    "davis": Listed(Davis),
}
