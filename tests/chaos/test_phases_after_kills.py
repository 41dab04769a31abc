"""Ten kills at random moments of a run through DINOv3's phases, also while they change: the weights are those of a run
that nobody killed, bit by bit."""

import os
import random
from pathlib import Path

import pytest
from helpers.killed_runs import assert_same_story, train_with_kills
from helpers.recipes import small_recipe
from helpers.runs import assert_same

from eagleray.base.files import read_lines
from eagleray.engine import checkpoint
from eagleray.runs import layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, KILLS = 60, 10
# Epochs have ten steps, and there are forty: larger views from step 20 and 40 on, the Gram teacher's of the start from
# step 10 on, and new ones after 25 and 40.
PHASES = (
    "backbone={name: vit_small_patch16_dinov3, options: {img_size: 16, patch_size: 4, embed_dim: 24, depth: 2, "
    "num_heads: 2, num_reg_tokens: 1, global_pool: token, rope_rescale_coords: 2.0}}",
    "curriculum=[{until: 0.05, sizes: [12, 4, 12, 4, 8]}, {until: 0.1, sizes: [12, 16, 12, 16, 8]}]",
    "method.gram_start=1",
    "method.gram_teacher=0.5",
    "method.gram_every=1.5",
    "method.gram_refreshes=2",
    "method.koleo_weight=0.1",
)


def test_all_phases_of_dinov3_are_the_same_after_kills(shards: Path, tmp_path: Path) -> None:
    lines = small_recipe("dinov3").splitlines()
    (recipe := tmp_path / "dinov3.yaml").write_text("\n".join(x for x in lines if not x.startswith("backbone")))
    args = [str(recipe), *(f"data.{s}={shards / s}" for s in ("train", "test")), f"max_steps={STEPS}", *PHASES]
    rng, caches = random.Random(int(os.environ.get("SEED") or 5)), [tmp_path / "cache"]
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    assert train_with_kills(args, whole, 0, rng, caches) == 0
    assert train_with_kills(args, killed, KILLS, rng, caches, STEPS) == KILLS, "it had ended before the last kill"
    assert_same_story(killed, whole, tmp_path)
    states = [checkpoint.newest(f"{out}/checkpoints", tmp_path / "state") for out in (whole, killed)]
    assert all(state is not None and state["step"] == STEPS for state in states)
    assert_same(*(state["method"] for state in states if state))
    begun = {line["step"] for line in read_lines(Path(killed) / layout.STARTS) if "ranks" in line}
    # Some attempt began after each change of the views. How many did depends on how fast checkpoints are written.
    assert {step // 20 for step in begun} >= {0, 1, 2}, f"kills were not all over the run: started from {sorted(begun)}"
