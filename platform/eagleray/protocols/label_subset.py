"""Choose the labelled images of semi-supervised learning: the same number of each class, drawn by the seed, as Chen et
al. 2020 (SimCLR, arXiv:2002.05709, section 6) draw 1 % and 10 % of ImageNet, or those of a list such as theirs."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data.index import Index
from eagleray.protocols.probes import ProbeSets
from eagleray.storage import store


def choose(sets: ProbeSets, labels: float | str, seed: int) -> ProbeSets:
    """Return the sets with a part of the training images: the share `labels`, or those that the file `labels` names.

    Raises UserError when the share or the file cannot be used, and when a class is left without an image."""
    if isinstance(labels, str):
        chosen = listed(sets.train, sets.train_samples, labels)
    elif labels == 1:
        return sets
    elif 0 < labels < 1:
        chosen = balanced(sets.train.label, sets.train_samples, labels, seed)
    else:
        raise UserError(f"--labels {labels:g}: expected a share above 0 and at most 1, or a file with keys of images")
    out = replace(sets, train_samples=chosen)
    out.check()
    return out


def balanced(label: NDArray[np.int64], samples: NDArray[np.int64], share: float, seed: int) -> NDArray[np.int64]:
    """Draw a share of the samples, in their order, with equally many of each class, or one more. A class with fewer
    samples than that keeps them all. `label` (N,) are the classes of all samples.

    Raises UserError when there is not one for each class."""
    classes, of = np.unique(label[samples], return_inverse=True)
    total = round(share * len(samples))
    if total < len(classes):
        raise UserError(
            f"--labels {share:g}: {total} of {len(samples)} images for {len(classes)} classes; expected one of each"
        )
    rng = np.random.default_rng(seed)
    wanted = np.full(len(classes), total // len(classes))
    wanted[rng.permutation(len(classes))[: total % len(classes)]] += 1
    shuffled = rng.permutation(len(samples))
    by_class = shuffled[np.argsort(of[shuffled], kind="stable")]
    first = np.cumsum(np.bincount(of)) - np.bincount(of)
    position = np.arange(len(samples)) - first[of[by_class]]  # of each sample among those of its class
    return np.sort(samples[by_class[position < wanted[of[by_class]]]])


def listed(index: Index, samples: NDArray[np.int64], url: str) -> NDArray[np.int64]:
    """Return the samples that a text file names, one in each line: by the key, or without the folders in the key. What
    follows the first dot of a name, such as .JPEG, does not count.

    Raises UserError when the file cannot be read, or a line does not name exactly one of the samples."""
    try:
        lines = store.store(url).get(store.absolute(url)).decode().split("\n")
    except FileNotFoundError:
        raise UserError(f"--labels {url}: no such file; expected a share of the labels or a file with keys") from None
    except UnicodeDecodeError:
        raise UserError(f"--labels {url}: not a text file; expected one key of an image in each line") from None
    names = {without_extension(line.strip()) for line in lines} - {""}
    keys = [without_extension(key) for key in index.keys(0, len(index))]
    may = np.zeros(len(index), bool)
    may[samples] = True
    found = [(n, k if k in names else k.rpartition("/")[2]) for n, k in enumerate(keys) if may[n]]
    found = [(n, name) for n, name in found if name in names]
    if missing := sorted(names - {name for _, name in found}):
        raise UserError(
            f"--labels {url}: {len(missing)} of {len(names)} names are not those of labelled images to train on, such "
            f"as {missing[0]}"
        )
    if len(found) != len(names) or not names:
        raise UserError(f"--labels {url}: {len(names)} names for {len(found)} images; expected one image for each")
    return np.array([n for n, _ in found])


def without_extension(name: str) -> str:
    """Return a name up to the first dot after its folders."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]
