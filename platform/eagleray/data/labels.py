"""Checks that the labels of a data set are valid classes."""

from collections import Counter

import numpy as np

from eagleray.base.errors import UserError
from eagleray.data.index import Index
from eagleray.data.index_file import name
from eagleray.data.tar_scan import UNLABELLED


def unread_labels(index: Index) -> str:
    """Return text with the number of labels that cannot be read, or an empty text if there are none."""
    files = zip(index.shards, index.files, strict=True)
    count = sum(file.passed.get(name(blob), Counter())[UNLABELLED] for blob, file in files)
    return f"{count} of {len(index)} images have a .cls that is not a whole number from 0 on" if count else ""


def check_labels(key: str, index: Index, classes: int, *, every: bool) -> None:
    """Check that every label of the data set at the recipe key `key` is a class from 0 to `classes` - 1.

    With `every`, each image needs a label, and labels 0 to n - 1 without gaps need `classes` = n: 0 to 9 with 20
    classes is an error. Raises UserError, also when there are no labels."""
    if not index.labelled:
        unread = unread_labels(index)
        raise UserError(f"{key}: has no labels, which the method needs" + f"; {unread}" * bool(unread))
    label = index.label
    wrong = (label >= classes) | ((label < 0) & every)
    labels = np.unique(label[label >= 0])
    top = int(labels[-1])
    have = f"there are {len(labels)} labels, {labels[0]} to {top}"
    if wrong.any():
        sample = int(wrong.argmax())
        what = f"label {label[sample]}" if label[sample] >= 0 else "no label"
        raise UserError(
            f"{key}: {what} at {index.key(sample)} in {index.rows(sample, sample + 1).blob.url}, and so on at "
            f"{wrong.sum()} of {len(label)} images; {have}, and method.classes={classes} takes 0 to {classes - 1}"
        )
    if every and len(labels) == top + 1 < classes:  # a set with gaps may lack the last classes, too
        raise UserError(f"method.classes={classes}: {have}, in {key}; expected method.classes={top + 1}")
