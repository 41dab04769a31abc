"""Check the types and ranges of the values in a COCO file, because data files are not trusted."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

SIDE = 2**16  # largest side of an image in pixels; images that decode are smaller
MOST_TURNS = 100  # largest length of a polygon's outline, relative to height + width of its image
PIXELS = 178_956_970  # largest number of pixels of an image that decodes


def wrong_values(tree: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield a line of text for each value of a wrong type or out of range. Rows must have all required keys."""
    for i, image in enumerate(tree["images"]):
        if not is_id(image["id"]):
            yield f"images[{i}].id is {shown(image['id'])}, expected a number or a text"
        if not is_inside(image["file_name"]):
            yield f"images[{i}].file_name is {shown(image['file_name'])}, expected a path within the folder of images"
        for key in ("height", "width"):
            if not is_whole(image[key], 1, SIDE):
                yield f"images[{i}].{key} is {shown(image[key])}, expected pixels from 1 to {SIDE}"
        if image["height"] * image["width"] > PIXELS:
            yield f"images[{i}] has {image['width']} x {image['height']} pixels, expected at most {PIXELS}"
    for i, category in enumerate(tree["categories"]):
        if not is_whole(category["id"], 0, 2**31) or not isinstance(category["name"], str):
            yield f"categories[{i}] is {shown(category)}, expected a number as id and a text as name"
    for i, a in enumerate(tree["annotations"]):
        if not is_id(a["image_id"]) or not is_id(a["category_id"]):
            yield f"annotations[{i}] has an image_id or category_id that is neither a number nor a text"
        if a.get("iscrowd", 0) not in (0, 1):
            yield f"annotations[{i}].iscrowd is {shown(a['iscrowd'])}, expected 0 or 1"
        if "area" in a and not is_numbers([a["area"]], 1):
            yield f"annotations[{i}].area is {shown(a['area'])}, expected a number"


def is_id(value: Any) -> bool:
    """Return whether a value can be the id of a row: an integer or a text."""
    return isinstance(value, int | str) and not isinstance(value, bool)


def is_whole(value: Any, least: int, most: int) -> bool:
    """Return whether a value is an integer from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_inside(name: Any) -> bool:
    """Return whether a value is a relative path that does not leave its folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def is_numbers(value: Any, least: int) -> bool:
    """Return whether a value is a list of at least `least` finite numbers."""
    return (
        isinstance(value, list)
        and len(value) >= least
        and all(isinstance(v, int | float) and abs(v) < 2**53 and math.isfinite(v) for v in value)
    )


def is_mask(segmentation: Any, size: Sequence[int]) -> bool:
    """Return whether a value is a mask of an image of `size` (H, W): polygons, or runs that add up to H * W."""
    if isinstance(segmentation, dict):
        counts: Any = segmentation.get("counts")
        if isinstance(counts, str):
            counts = run_lengths(counts)
        whole = is_numbers(counts, 1) and min(counts) >= 0 and sum(counts) == size[0] * size[1]
        return segmentation.get("size") == list(size) and whole
    return isinstance(segmentation, list) and bool(segmentation) and all(is_polygon(p, size) for p in segmentation)


def is_polygon(value: Any, size: Sequence[int]) -> bool:
    """Return whether a value is [x, y, x, y, ...], 3 or more points near the image, and short enough to be drawn."""
    if not is_numbers(value, 6) or len(value) % 2:
        return False
    side = sum(size)
    xs, ys = value[::2], value[1::2]
    length = sum(abs(b - a) for v in (xs, ys) for a, b in itertools.pairwise(v))
    return min(value) >= -side and max(value) <= 2 * side and length <= MOST_TURNS * side


def run_lengths(text: str) -> list[int]:
    """Return the runs of one of COCO's compressed masks, or an empty list if `text` is not such a mask.

    A run is written in groups of five bits, the lowest first. The character of a group is 48 + bits, or 32 more if
    another group follows. The fifth bit of the last group is the sign. From the fourth run on, the difference of a run
    to the run two before is stored (COCO's maskApi.c, rleFrString)."""
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 30:
            return []
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return [] if shift else runs


def shown(value: Any) -> str:
    """Return the first 60 characters of the repr of a value, for error messages."""
    return repr(value)[:60]
