"""Packs the decoded images of a step one after the other, for a device that crops them.

Only the part of an image that its crops show is packed. If this part has more than MOST times the pixels of the crops,
the resized crops are packed instead, which the device's resize to the same size does not change. So a step takes at
most MOST times the memory of its crops, in shared and pinned memory and on the device, and again in the reader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.views.crop import crop
from eagleray.views.sampling import Views

MOST = 3
Boxes = NDArray[np.int64]
Crops = Literal["auto", "cpu", "device"]


@dataclass
class Packed:
    """The decoded images of b rows of a step."""

    pixels: Tensor  # (P, N) uint8, N channels of the P pixels of all images, one after the other
    boxes: Boxes  # (V, b, 4) as in `crop_batch`


class Packer:
    """Copies each image of a step into memory that is reused for every step. If the images were kept until the step's
    end, each would need new memory, and allocating that takes a quarter as long as decoding."""

    def __init__(self, views: Views, channels: int) -> None:
        self.memory = torch.empty(0, channels, dtype=torch.uint8)
        self.begin(views, 0)

    def begin(self, views: Views, rows: int) -> None:
        """Begin a step of `rows` rows with these views."""
        self.views, own = views, int((views.size**2).sum())
        self.most, room = int(MOST * own), int(max(MOST, 1) * own) * rows
        self.boxes, self.row, self.used = np.empty((len(views.views), rows, 4), np.int64), 0, 0
        if len(self.memory) < room:
            self.memory = self.memory.new_empty(room, self.memory.shape[1])

    def add(self, image: Tensor, boxes: Boxes) -> None:
        """Pack the pixels of the next decoded image (N, H, W) that its crops show. The rows of `boxes` (V, 4) are top,
        left, height and width."""
        ends, (top, left) = (boxes[:, :2] + boxes[:, 2:]).max(0), boxes[:, :2].min(0)
        height, width = ends - (top, left)
        if height * width > self.most:
            pixels, placed = self._cropped(image, boxes)
        else:
            pixels = image[:, top : ends[0], left : ends[1]].permute(1, 2, 0)
            first = (boxes[:, 0] - top) * width + boxes[:, 1] - left
            placed = np.stack([first, np.full_like(first, width), boxes[:, 2], boxes[:, 3]], 1)
        begin, self.used = self.used, self.used + pixels.shape[0] * pixels.shape[1]
        self.memory[begin : self.used].view(pixels.shape).copy_(pixels)
        self.boxes[:, self.row] = placed
        self.boxes[:, self.row, 0] += begin
        self.row += 1

    def end(self, new: Callable[..., Tensor]) -> Packed:
        """Return the images of the step, copied into memory that `new(P, N)` allocates."""
        return Packed(new(self.used, self.memory.shape[1]).copy_(self.memory[: self.used]), self.boxes)

    def _cropped(self, image: Tensor, boxes: Boxes) -> tuple[Tensor, Boxes]:
        size = self.views.size
        made = [torch.empty(len(image), side, side, dtype=torch.uint8) for side in size.tolist()]
        crop(image, boxes, self.views.views, made)
        pixels = torch.cat([x.flatten(1).T for x in made])
        return pixels.unsqueeze(1), np.stack([np.cumsum(size**2) - size**2, size, size, size], 1)


def on_device(parts: Sequence[Packed], device: torch.device) -> Packed:
    """Join the packed images of several readers on the device."""
    lengths = [len(part.pixels) for part in parts]
    pixels = torch.empty((sum(lengths), parts[0].pixels.shape[1]), dtype=torch.uint8, device=device)
    boxes = np.concatenate([part.boxes for part in parts], 1)
    boxes[..., 0] += np.repeat(np.cumsum(lengths) - lengths, [part.boxes.shape[1] for part in parts])
    for part, place in zip(parts, pixels.split(lengths), strict=True):
        place.copy_(part.pixels, non_blocking=True)
    return Packed(pixels, boxes)


def packs(crops: Crops, views: Sequence[View], device: torch.device) -> bool:
    """Return whether the device crops. Raises UserError where `crops` demands it, but the device or a view prevents
    it."""
    if crops == "cpu":
        return False
    on_crops = next((key for view in views for key in ("randaugment", "operations") if getattr(view, key)), None)
    if on_crops:
        why = f"a view has {on_crops}, which a CPU applies to crops"
    elif devices.has_streams(device) and devices.has_float64(device):
        return True
    else:
        why = f"{devices.name(device)} is no accelerator that can"
    if crops == "device":
        raise UserError(f"data.crops=device: {why}; use data.crops=auto")
    return False
