"""Subsets of the labels for semi-supervised learning."""

from pathlib import Path

import numpy as np
import pytest
from helpers import labelled_images

from eagleray.base.errors import UserError
from eagleray.data.index import open_index
from eagleray.protocols.crop_training import balanced, choose
from eagleray.protocols.probes import ProbeSets


def test_a_share_has_equally_many_images_of_each_class():
    label = np.repeat([7, 3, 20], (500, 300, 5))
    samples = np.flatnonzero(np.arange(len(label)) % 10 != 0)  # the others are held out
    for seed in range(3):
        drawn = balanced(label, samples, 0.1, seed)
        assert set(drawn) <= set(samples)
        assert (np.diff(drawn) > 0).all()
        counts = {y: int((label[drawn] == y).sum()) for y in (3, 7, 20)}
        assert sorted((counts[3], counts[7])) in ([24, 24], [24, 25])  # 72 images of three classes
        assert counts[20] == np.isin(np.flatnonzero(label == 20), samples).sum(), "all of a small class"
        assert (balanced(label, samples, 0.1, seed) == drawn).all()
    assert (balanced(label, samples, 0.1, 0) != balanced(label, samples, 0.1, 1)).any()


def test_imagenets_subsets_have_their_published_sizes():
    """12,811 and 128,116 images; 12 or 13 and 128 or 129 of each of 1,000 classes."""
    label = np.arange(1_281_167) % 1000
    for share, total, each in ((0.01, 12_812, 12), (0.1, 128_117, 128)):
        drawn = balanced(label, np.arange(len(label)), share, 0)
        counts = np.bincount(label[drawn])
        assert abs(len(drawn) - total) <= 1
        assert (counts.min(), counts.max()) == (each, each + 1)


def test_a_list_names_images_by_their_keys(tmp_path: Path):
    index = open_index(labelled_images.write(tmp_path / "train", 0, 60), note=lambda _: None)
    sets = ProbeSets.of(index, open_index(labelled_images.write(tmp_path / "test", 1, 12), note=lambda _: None), None)
    assert sets is not None
    keys = [index.key(sample) for sample in range(len(index))]
    listed = tmp_path / "percent.txt"
    lines = [keys[3], *(f"{key.rpartition('/')[2]}.JPEG" for key in keys[6:20])]
    listed.write_text("\n".join([*lines, "", ""]))
    assert choose(sets, str(listed), 0).train_samples.tolist() == [3, *range(6, 20)]
    assert choose(sets, 1, 0) is sets
    for text, line in (
        ("nothing.JPEG", "1 of 1 names are not those of labelled images to train on, such as nothing"),
        ("", "0 names for 0 images; expected one image for each"),
    ):
        listed.write_text(text)
        with pytest.raises(UserError) as error:
            choose(sets, str(listed), 0)
        assert str(error.value) == f"--labels {listed}: {line}"
    with pytest.raises(UserError, match=r"missing\.txt: no such file; expected a share of the labels"):
        choose(sets, str(tmp_path / "missing.txt"), 0)
    listed.write_text("\n".join(key for key in keys if index.label[keys.index(key)] != 10))
    with pytest.raises(UserError, match="--test: 1 of the 6 classes in these shards are not in --train: 10"):
        choose(sets, str(listed), 0)
