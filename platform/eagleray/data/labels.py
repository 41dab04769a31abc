"""Whether the labels of some shards are those of a classifier."""

import numpy as np

from eagleray.base.errors import UserError
from eagleray.data.index import Index


def check_labels(key: str, index: Index, classes: int, *, every: bool) -> None:
    """Raises UserError where the data that the recipe names at `key` have a label that is no class, and, with `every`,
    where an image has none or there are more classes than labels."""
    if not index.labelled:
        raise UserError(f"{key}: has no labels, and the method learns from them")
    label = index.label
    wrong = (label >= classes) | ((label < 0) & every)
    found = np.unique(label[label >= 0])
    top = int(found[-1])
    have = f"there are {len(found)} labels, {found[0]} to {top}"
    if wrong.any():
        sample = int(wrong.argmax())
        what = f"label {label[sample]}" if label[sample] >= 0 else "no label"
        raise UserError(
            f"{key}: {what} at {index.key(sample)} in {index.rows(sample, sample + 1).blob.url}, and so on at "
            f"{wrong.sum()} of {len(label)} images; {have}, and method.classes={classes} takes 0 to {classes - 1}"
        )
    if every and len(found) == top + 1 < classes:  # with gaps, some classes may well be missing at the end too
        raise UserError(f"method.classes={classes}: {have}, in {key}; expected method.classes={top + 1}")
