"""Compare the classes of two data sets by their names, as equal numbers may stand for different classes."""

from typing import Any

import numpy as np

from eagleray.base.errors import Outage, UserError
from eagleray.data.file_names import from_text, readable
from eagleray.data.image_folder import is_folder_blob
from eagleray.data.index import Index
from eagleray.datasets import card
from eagleray.storage import store


def class_names(index: Index) -> dict[int, set[str]]:
    """Return the names of classes by their numbers, as far as the data says them; several where its parts differ.

    The classes of a folder of images are named by its subfolders, and those of shards by their dataset.json."""
    known = [_of_images(index, shard) for shard, blob in enumerate(index.shards) if is_folder_blob(blob)]
    folders = {store.parent(blob.url) for blob in index.shards if not is_folder_blob(blob)}
    known += [_of_card(folder) for folder in sorted(folders)]
    out: dict[int, set[str]] = {}
    for number, name in (item for names in known for item in names.items()):
        out.setdefault(number, set()).add(name)
    return out


def check_class_names(train: Index, test: Index, keys: tuple[str, str] = ("--train", "--test")) -> None:
    """Check that each number is the same class in the training set and in the test set, as far as both name their
    classes. `keys` are the options or keys that gave the two sets.

    Raises UserError when a number has two names, and when the training set lacks a class of the test set."""
    ours, theirs = class_names(train), class_names(test)
    if lacking := _lacking(train, ours, theirs):
        raise UserError(f"{keys[1]}: {keys[0]} has no class {lacking[0]}; expected classes of the same names in both")
    for number in sorted(ours.keys() & theirs.keys()):
        if len(ours[number] | theirs[number]) > 1:
            here, there = (" or ".join(sorted(names[number])) for names in (theirs, ours))
            raise UserError(
                f"{keys[1]}: class {number} is {here}, and in {keys[0]} it is {there}: classes are numbered in the "
                "order of their names; expected the same names in both, such as folders of links to the shared ones"
            )


def _lacking(train: Index, ours: dict[int, set[str]], theirs: dict[int, set[str]]) -> list[str]:
    """Return the names that the training set has nowhere, unless a part of it that names no classes may have them."""
    known = set[str]().union(*ours.values())
    strange = {number: min(names - known) for number, names in theirs.items() if known and names - known}
    if not strange:
        return []
    unnamed = set(np.unique(train.label).tolist()) - ours.keys()
    return sorted(name for number, name in strange.items() if number not in unnamed)


def _of_images(index: Index, shard: int) -> dict[int, str]:
    """Return the names of a folder's subfolders by the numbers of their classes."""
    table = index.column(shard, ["key", "label"])
    numbers, first = np.unique(table["label"].to_numpy(), return_index=True)
    paths = map(from_text, table["key"].take(first).to_pylist())
    return {
        number: readable(path.partition("/")[0])
        for number, path in zip(numbers.tolist(), paths, strict=True)
        if number >= 0
    }


def _of_card(folder: str) -> dict[int, str]:
    """Return the names of classes in the dataset.json of a folder of shards; none if the file is not ours."""
    try:
        names: Any = (card.find(folder) or {}).get("class_names")
    except (UserError, OSError, Outage):  # of a stranger, or in a store that refuses to tell that there is none
        return {}
    known = names if isinstance(names, list) else []
    return {number: name for number, name in enumerate(known) if name and isinstance(name, str)}
