"""The card of an export lists what was measured of the exported weights, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.exports import source
from helpers.networks import VIT

from eagleray.exports import card


@pytest.mark.parametrize(("steps", "shown"), [(100, True), (120, False), (None, False)])
def test_numbers_of_an_earlier_end_are_not_those_of_newer_weights(steps: int | None, shown: bool, tmp_path: Path):
    """A run of 100 steps was continued with a larger max_steps, and stopped before its new end."""
    found = replace(source(tmp_path, "vit_tiny_patch16_224", options=VIT), steps=steps)
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 100, "images": 3200, "epochs": 1.0, "knn/top1": 31.5, "linear/top1": 40.0})
    )
    assert bool(list(card.measured(found))) == shown
    lines = [line for line in card.origin(found) if line.startswith("training")]
    assert (
        lines == {100: ["training: 100 steps, 3200 images, 1.0 epochs"], 120: ["training: 120 steps"], None: []}[steps]
    )
