"""Measure predicted masks of a video with DAVIS's region similarity J and contour accuracy F: Perazzi et al. 2016
(CVPR), section 5."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt, find_objects

Mask = NDArray[np.bool_]  # (H, W)

TOLERANCE = 0.008  # largest distance of matching contour pixels, as a share of the image's diagonal


def region(prediction: Mask, truth: Mask) -> float:
    """Return J, the intersection over union; 1 if both masks are empty."""
    union = np.count_nonzero(prediction | truth)
    return np.count_nonzero(prediction & truth) / union if union else 1.0


def boundary(prediction: Mask, truth: Mask, tolerance: float = TOLERANCE) -> float:
    """Return F, the harmonic mean of the precision and recall of contour pixels; 1 if both contours are empty.

    Contour pixels match if they are at most `tolerance` apart, rounded up to whole pixels."""
    one, other = contour(prediction), contour(truth)
    if not one.any() or not other.any():
        return float(one.any() == other.any())
    reach = math.ceil(tolerance * math.hypot(*prediction.shape))
    [box] = find_objects((one | other).astype(np.uint8))  # bounding box of both contours, to save time
    one, other = one[box], other[box]
    # To compare distances with `reach` gives the same as to dilate the contours with a disk of this radius.
    precision = np.mean(distance_transform_edt(~other)[one] <= reach)
    recall = np.mean(distance_transform_edt(~one)[other] <= reach)
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def contour(mask: Mask) -> Mask:
    """Return the contour (H, W) of a mask: the pixels that differ from their right, lower or lower right neighbour.

    Pixels beyond the border count as equal to the nearest pixel in the image."""
    wide = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    return (mask != wide[:-1, 1:]) | (mask != wide[1:, :-1]) | (mask != wide[1:, 1:])
