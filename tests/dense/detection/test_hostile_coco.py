"""Annotations in COCO's layout from a stranger are objects, or one line that names the file."""

import json
from pathlib import Path
from random import Random

import pytest
from helpers import annotated
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.mutations import change_bytes, change_tree

from eagleray.dense.detection.data import Coco


@pytest.mark.parametrize("count", counts(150))
def test_changed_annotations_end_in_objects_or_a_line(count: int | None, tmp_path: Path):
    annotated.coco(tmp_path / "coco")
    path = tmp_path / "coco" / "annotations" / "instances_train.json"
    text = path.read_bytes()
    runs = json.loads(text)
    for annotation in runs["annotations"]:
        annotation["segmentation"] = {"size": [32, 32], "counts": [100, 200, 724]}

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with one_line(str(tmp_path)):
            split = Coco.of(tmp_path / "coco", "train")
            for i in split.trainable():
                target = split[i].target
                assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"])

    def changed(rng: Random) -> bytes:
        return json.dumps(change_tree(rng, rng.choice([json.loads(text), runs]))).encode()

    trees = generators(count).map(changed)
    examples(trees | generators(count).map(lambda rng: change_bytes(rng, text)), check, count, many=400)
