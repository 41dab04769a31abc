"""What `eagleray prepare` makes of each named set and split: the same keys, classes, labels and order as ever.

`python tests/datasets/test_digests.py` writes digests.json again.
"""

import hashlib
import json
import tarfile
import tempfile
from pathlib import Path

import pytest
from helpers import drloc_sets, suite_sets
from helpers.layouts import run_prepare

from eagleray.data.decode import decode
from eagleray.datasets.catalogue import DATASETS

DIGESTS = Path(__file__).with_name("digests.json")
SETS = drloc_sets.SETS | suite_sets.SETS
CASES = [f"{name} {split}" for name in SETS for split in DATASETS[name].splits]


def digest(case: str, folder: Path) -> str:
    """The digest of the names of the classes and of the shards' members in their order. Of a PNG, the pixels count, as
    the bytes depend on the version of zlib; of a JPEG, which is the layout's own, the name alone."""
    name, split = case.split()
    SETS[name](folder / "in", split)
    card = run_prepare(name, folder / "in", folder / "out", split=split)
    of_all = hashlib.sha256(json.dumps([card["class_names"], card["listed"], card["dropped"]]).encode())
    for shard in sorted((folder / "out").glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                of_all.update(member.name.encode())
                file = tar.extractfile(member)
                assert file
                if not member.name.endswith(".jpg"):
                    of_all.update(decode(data).numpy().tobytes() if _is_png(data := file.read()) else data)
    return of_all.hexdigest()[:16]


def _is_png(data: bytes) -> bool:
    return data.startswith(b"\x89PNG")


@pytest.mark.parametrize("case", CASES)
def test_a_set_becomes_what_it_has_always_become(case: str, tmp_path: Path):
    if case.startswith("pcam"):
        pytest.importorskip("h5py")
    expected = json.loads(DIGESTS.read_text())
    assert expected.keys() == set(CASES)
    assert digest(case, tmp_path) == expected[case]


if __name__ == "__main__":
    found = {}
    for each in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            found[each] = digest(each, Path(scratch))
    DIGESTS.write_text(json.dumps(found, indent=0) + "\n")
