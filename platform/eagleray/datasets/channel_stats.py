"""Measures the mean and the standard deviation of each channel of images in shards, for a recipe."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.config.channels import Channel
from eagleray.data.channels import read_channels
from eagleray.data.costs import BadImage
from eagleray.data.index import Note, open_shown

SAMPLE = 1000  # most images that are measured
DIGITS = 6  # significant digits of a printed number


class Measured(NamedTuple):
    """The channels of a data set, and the number of images on which they were measured."""

    channels: tuple[Channel, ...]
    images: int
    left_out: Counter[str]  # number of images by the reason why they were not measured

    def lines(self) -> Iterator[str]:
        """Yield the lines of a recipe, preceded by comments on images that were left out."""
        for reason, count in self.left_out.most_common():
            yield f"# not measured  {count:,}: {reason}"
        yield f"data:  # measured on {self.images:,} images drawn at random"
        yield "  channels:"
        for channel in self.channels:
            yield f"  - {{mean: {channel.mean:.{DIGITS}g}, std: {channel.std:.{DIGITS}g}}}"


def measure_channels(url: str, spare: Path, note: Note = print) -> Measured:
    """Return the mean and standard deviation of each channel over the values of SAMPLE random images, the same ones in
    every call. Images with another number of channels than the first image are left out. If no index can be written
    beside the shards, it is written to the folder `spare`.

    Raises UserError when no image can be read."""
    index, moments, left_out = open_shown(url, spare, note=note), list[NDArray[Any]](), Counter[str]()
    for sample in np.random.default_rng(0).permutation(len(index))[:SAMPLE].tolist():
        try:
            values = read_channels(index.read(sample, sample + 1), len(moments[0][1]) if moments else None)
            of_image = values.reshape(-1, values.shape[2]).astype(np.float64)
            if not np.isfinite(of_image).all():
                raise BadImage("values that are not finite numbers")
        except BadImage as e:
            left_out[str(e)] += 1
            continue
        count = np.full(values.shape[2], float(len(of_image)))
        moments.append(np.stack([count, of_image.mean(0), of_image.var(0)]))
    if not moments:
        raise UserError(f"{index.shards[0].url}: no image can be read: {left_out.most_common(1)[0][0]}")
    weight, means, variances = np.stack(moments, 1)  # (n, C) each, for n images of C channels
    mean = np.average(means, 0, weight)
    std = np.sqrt(np.average(variances + (means - mean) ** 2, 0, weight))
    std[std == 0] = 1  # a constant channel must not be divided by 0
    channels = tuple(Channel(mean=m, std=s) for m, s in zip(mean.tolist(), std.tolist(), strict=True))
    return Measured(channels, len(moments), left_out)
