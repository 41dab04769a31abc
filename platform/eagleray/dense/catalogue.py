"""List the protocols that fine-tune detectors and segmenters, and the one that tracks objects in videos.

The module that does a protocol's work is imported only when it runs, so that listing settings does not load PyTorch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from eagleray.protocols.catalogue import File
from eagleray.protocols.needs import Folder
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Listed, Protocol, SizedProtocol, Workspace

if TYPE_CHECKING:
    from eagleray.models.backbone import Backbone


class Detection(Protocol[Path]):
    """Fine-tune a detector on a copy of the backbone, on a data set in COCO's layout."""

    about = "Mask R-CNN or Cascade Mask R-CNN, fine-tuned on a dataset in COCO's layout"
    ranks = True
    schedule: File = "1x"  # name of a file in pipelines/detection, or a YAML file with the same settings

    def data(self) -> Folder:
        return Folder("coco")

    def run(self, backbone: "Backbone", data: Path, workspace: Workspace) -> Outcome:
        from eagleray.dense.detection.detection import detection

        return detection(backbone, data, self, workspace)


class Positives(SizedProtocol[Path]):
    """Count the neighbours of a patch that show the same objects, and how often its most similar neighbours do."""

    about = "neighbouring patches with the same objects, and how often the most similar ones are such, as in SelfPatch"
    patches = True
    size: PositiveInt = 224
    chosen: Annotated[int, Field(ge=1, le=8)] = 4  # how many of its most similar neighbours are counted for a patch

    def data(self) -> Folder:
        return Folder("coco")

    def run(self, backbone: "Backbone", data: Path, workspace: Workspace) -> Outcome:
        from eagleray.dense.detection.positives import positives

        return positives(backbone, data, self)


class Segmentation(Protocol[Path]):
    """Fine-tune a segmenter on a copy of the backbone, on images with masks."""

    about = "Semantic FPN or UPerNet, fine-tuned on images with masks"
    ranks = True
    head: str = "fpn"
    steps: int | None = None  # number of training steps; None: as in the head's paper
    batch: int = 16
    size: int = 512  # side of training crops, and short side of test images, in pixels
    lr: PositiveFloat = 6e-5
    weight_decay: NonNegativeFloat = 0.01
    width: int | None = None  # number of channels of the head; None: as in its paper
    multi_scale: bool = False  # whether to test also with predictions averaged over six sizes and mirror images
    seed: NonNegativeInt = 0

    def data(self) -> Folder:
        return Folder("masks")

    def run(self, backbone: "Backbone", data: Path, workspace: Workspace) -> Outcome:
        from eagleray.dense.segmentation.segmentation import segmentation

        return segmentation(backbone, data, self, workspace)


class Davis(SizedProtocol[Path]):
    """Propagate the object masks of a video's first frame to its other frames by the similarity of patches."""

    about = "object masks propagated through videos, without training"
    ranks = True
    patches = True
    split: str = "val"
    size: PositiveInt = 480  # short side of the frames, in pixels
    n_last_frames: NonNegativeInt = 7  # number of previous frames, besides the first, from which masks are propagated
    topk: PositiveInt = 5  # number of most similar patches that vote on the label of a patch
    size_mask_neighborhood: NonNegativeInt = 12  # largest shift of a patch, in rows and columns; 0: any

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
