"""A run through DINOv3's three phases is the same with and without stops between and at the changes."""

from pathlib import Path

import pytest
import torch
from helpers.recipes import LARGE, SHARP, small_recipe
from helpers.runs import FAST, arguments, assert_same, split, weights

from eagleray import config
from eagleray.api.pretrain import pretrain
from eagleray.runs.method_checks import difference, rehearse, rehearse_on_ranks
from eagleray.runs.recipe import Recipe

pytestmark = pytest.mark.usefixtures("quick_runs")
SIZES = "curriculum=[{until: 0.34, sizes: [12, 4, 12, 4, 8]}, {until: 0.67, sizes: [12, 16, 12, 16, 8]}]"
NETWORK = (
    "backbone={name: vit_small_patch16_dinov3, drop_path: 0.2, options: {img_size: 16, patch_size: 4, embed_dim: 24, "
    "depth: 2, num_heads: 2, num_reg_tokens: 1, global_pool: token, rope_rescale_coords: 2.0}}"
)


def written(folder: Path) -> Path:
    """A recipe of DINOv3 with small views, without a backbone."""
    text = small_recipe("dinov3")
    assert LARGE in text
    assert SHARP in text
    (path := folder / "dinov3.yaml").write_text("\n".join(x for x in text.splitlines() if x[:8] != "backbone"))
    return path


@pytest.mark.slow
def test_ranks_draw_the_same_positions_and_groups(tmp_path: Path) -> None:
    """Every block moves its positions, and groups of five images lie across the border of two ranks."""
    network = NETWORK.replace("drop_path: 0.2, ", "")
    recipe = config.load(Recipe, written(tmp_path), ["data.train=none", network, "method.koleo_group=5"])
    one = rehearse(recipe, (24,))
    for two in rehearse_on_ranks({"dinov3": recipe}, [(12, 12), (15, 9)]).values():
        assert difference(two.gradient, one.gradient) < 1e-5
        torch.testing.assert_close(two.losses, one.losses, rtol=1e-4, atol=0)


@pytest.mark.slow
def test_stopping_between_the_phases_equals_no_stop(shards: Path, tmp_path: Path) -> None:
    """Epochs of ten steps: anchored from step 10 on, new Gram teachers after 12 and 14, larger views from 20 on."""
    once, twice, other = tmp_path / "once", tmp_path / "twice", tmp_path / "other"
    path = written(tmp_path)
    keys = [NETWORK, SIZES, "optim.epochs=3", "method.gram_start=1", "method.gram_every=0.2", *FAST]
    keys += ["method.gram_teacher=0.5", "method.koleo_weight=0.1"]

    def run(out: Path, steps: int, *more: str) -> dict[str, torch.Tensor]:
        pretrain(*split(arguments(path, shards, out, f"max_steps={steps}", *keys, *more)))
        return weights(out)

    whole = run(once, 22, "method.gram_refreshes=2")
    for steps in (4, 5, 9, 10, 11, 12, 14, 19, 20, 21, 22):
        rest = run(twice, steps, "method.gram_refreshes=2")
    assert_same(whole, rest)
    fewer = run(other, 22, "method.gram_refreshes=1")
    name = "gram.model.norm.weight"
    assert not torch.equal(fewer[name], whole[name])
    log = (once / "train.log").read_text()
    assert "curriculum: before epoch 1, views of 12, 4, 12, 4, 8 pixels" in log
    assert "before epoch 2, views of 12, 16, 12, 16, 8 pixels" in log
