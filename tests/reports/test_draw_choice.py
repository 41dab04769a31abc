"""The images of a page on a data set."""

from pathlib import Path

import numpy as np
from helpers.pictures import encode, picture

from eagleray.data.index import open_index
from eagleray.datasets.shards import Sample, write_shards
from eagleray.reports.draw_choice import images_of


def test_photographs_are_not_kept_in_full_size(tmp_path: Path) -> None:
    """A map of them would take gigabytes."""
    sizes = (2400, 3600), (700, 50)
    write_shards([Sample(f"{h}", "jpg", encode(picture(0, h, w)), 0) for h, w in sizes], str(tmp_path / "s"))
    index = open_index(str(tmp_path / "s"), note=lambda _: None)
    found = dict(images_of(index, np.arange(2)))
    assert sorted(image.shape[:2] for image in found.values()) == [(600, 900), (700, 50)]
