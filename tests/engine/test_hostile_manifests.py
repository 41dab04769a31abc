"""A manifest beside a checkpoint, whatever it says, makes the checkpoint count or not, and nothing else happens."""

import json
from pathlib import Path

import pytest
from helpers.checkpoints import Place, assert_full_of, keep_one
from helpers.fuzzing import counts, examples, generators
from helpers.mutations import change_bytes, change_tree


@pytest.mark.parametrize("count", counts(100))
def test_a_changed_manifest_costs_its_own_checkpoint_at_most(count: int | None, tmp_path: Path):
    place = Place(str(tmp_path / "checkpoints"), tmp_path / "scratch")
    for step in (1, 2):
        keep_one(place.writer(), step)
    path = tmp_path / "checkpoints" / "step-000000002.json"
    text = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        state = place.newest()
        assert state is not None
        assert_full_of(state, state["step"])

    trees = generators(count).map(lambda rng: json.dumps(change_tree(rng, json.loads(text))).encode())
    examples(trees | generators(count).map(lambda rng: change_bytes(rng, text)), check, count, many=400)
