"""Embed image files with an exported backbone: the code inside the model that a run stores in MLflow.

`runs/mlflow_model.py` puts a copy of this file, and of the modules of eagleray that it imports, into each model. If
timm can build the backbone, the model loads without eagleray, and MLflow needs only timm and torchvision."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray

from eagleray.data.decode import BadImage, decode
from eagleray.views.crop import centre_crop

COLUMN = "image"  # name of the column with image files in the model's input table
BATCH = 64  # images per forward pass


def build(folder: Path) -> torch.nn.Module:
    """Return the backbone in a folder with backbone.safetensors and backbone.json, in evaluation mode."""
    weights = folder / "backbone.safetensors"
    description = json.loads((folder / "backbone.json").read_text())
    if "timm" in description:
        options = {"num_classes": 0, "checkpoint_path": str(weights)} | description["options"]
        return timm.create_model(description["timm"], **options).eval()
    import eagleray  # imported only for backbones that timm lacks, or resizes in another way

    return eagleray.load(weights).eval()


class Embedder:
    """A frozen backbone with the preprocessing of the run's own evaluation."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`folder` holds backbone.safetensors and backbone.json. `settings` are `size` and `resize` in pixels, the
        `mean` and `std` of each channel and, for images that are not in red, green and blue, their `channels`."""
        self.settings = settings
        self.channels = [SimpleNamespace(**channel) for channel in settings.get("channels", ())]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build(folder).to(self.device)

    def predict(self, table: Any, params: dict[str, Any] | None = None) -> NDArray[np.float32]:
        """Return the pooled features (N, D) of N images, each a file's bytes in the column `image` of a
        pandas.DataFrame. Raises ValueError for a row that is not an image."""
        starts = range(0, len(table), BATCH)
        return np.concatenate([self._embed(i, list(table[COLUMN].iloc[i : i + BATCH])) for i in starts])

    def _embed(self, first: int, files: list[bytes]) -> NDArray[np.float32]:
        images = torch.stack([self._crop(row, data) for row, data in enumerate(files, first)])
        mean, std = (torch.tensor(self.settings[k]).view(-1, 1, 1) for k in ("mean", "std"))
        images = (images.float().div_(255) - mean) / std
        with torch.inference_mode():
            out = self.model(images.to(self.device))
        return getattr(out, "pooled", out).float().cpu().numpy()

    def _crop(self, row: int, data: bytes) -> torch.Tensor:
        """Return the centre crop (C, size, size), uint8, of an image file. Raises ValueError if it is no image."""
        try:
            image = decode(data, self.channels)  # type: ignore[arg-type]  # objects with the attributes of a Channel
        except BadImage as e:
            raise ValueError(f"row {row}: {e}") from None
        return centre_crop(image, resize=self.settings["resize"], size=self.settings["size"])


def _load_pyfunc(path: str, model_config: dict[str, Any]) -> Embedder:
    """Return the model in a folder. MLflow calls this function by its name."""
    return Embedder(Path(path), model_config)
