"""Values that fit a number of images, and what a run says whose data is too small."""

import json
from pathlib import Path

import pytest

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.runs import fit, recipe
from eagleray.runs.checks import check_method, make_plan
from eagleray.runs.sources import resolve_paths

BASES = ["dino_vits16_in1k_ep100", "moco_resnet50_in1k_ep200", "mocov3_vits16_in1k_ep300", "moby_swint_in1k_ep300"]


def values(base: str, images: int, **given: int) -> dict[str, object]:
    return {v.key: v.value for v in fit.values_for(recipe.load(base), images, **given)}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize("images", [300, 2_000, 60_000, 20_000_000])
def test_values_fit_the_images_and_each_other(base: str, gpus: int, images: int):
    changed = values(base, images, gpus=gpus)
    r = recipe.load(base, [f"{key}={json.dumps(value)}" for key, value in changed.items()])
    ranks = max(gpus, 1)
    assert r.optim.batch <= images / 8
    assert r.optim.batch % r.data.lanes == 0
    assert r.optim.batch % ranks == 0
    assert 10 <= r.optim.epochs <= 800
    assert r.optim.lr.warmup <= r.optim.epochs / 10
    queue = r.method.args.get("queue")
    assert not queue or queue <= images
    group = r.method.args.get("norm_group")
    assert not group or (r.optim.batch // ranks) % group == 0


def test_few_images_are_seen_more_often_and_many_keep_the_batch_of_the_recipe():
    few, many = values("dino_vits16_in1k_ep100", 2_000), values("dino_vits16_in1k_ep100", 20_000_000, gpus=8)
    assert (few["optim.batch"], few["optim.epochs"], few["method.prototypes"]) == (64, 800, 1024)
    assert "optim.batch" not in many
    assert many["optim.epochs"] == 25
    assert values("moco_resnet50_in1k_ep200", 2_000)["method.queue"] == 512


def test_schedules_fit_the_length_of_the_run():
    drops = values("instdisc_resnet50_in1k_ep200", 2_000)["optim.lr"]
    assert drops == {"value": 0.03, "drops": [480, 640]}
    assert values("dino_vits16_in1k_ep100", 20_000_000, gpus=8)["optim.lr"]["warmup"] == 2.5  # type: ignore[index]
    assert "method.momentum" not in values("dino_vits16_in1k_ep100", 20_000)
    slow = values("moco_resnet50_in1k_ep200", 256)["method.momentum"]
    assert 0.99 < slow["value"] < 0.999  # type: ignore[index]


def test_the_views_of_a_curriculum_shrink_with_the_others():
    base = "dinov2_vitb16_in1k_ep200_curriculum"
    changed = values(base, 60_000, size=96)
    assert changed["curriculum"] == [{"until": 0.75, "sizes": [48, 48, 24], "keep": 1.0}]
    keys = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
    assert [phase.views[0].size for phase in recipe.load(base, keys).phases] == [48, 96]
    assert "curriculum" not in values(base, 60_000)


def test_small_images_have_small_crops_and_patches():
    small = values("mocov3_vits16_in1k_ep300", 2_000, size=32)
    assert (small["backbone.options.patch_size"], small["backbone.options.img_size"]) == (4, 32)
    assert [view["size"] for view in small["views"]] == [32, 32]  # type: ignore[attr-defined]
    crops = values("dino_vits16_in1k_ep100", 2_000, size=96)["views"]
    assert [view["size"] for view in crops] == [96, 96, 40]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("size", "patch"), [(16, 4), (32, 9), (150, 41)])
def test_the_patches_of_a_jigsaw_shrink_with_their_view(size: int, patch: int):
    base = "pirl_resnet50_in1k_ep200"
    changed = values(base, 2_000, size=size)
    assert changed["method.patch"] == patch
    check_method(recipe.load(base, [f"{key}={json.dumps(value)}" for key, value in changed.items()]))
    assert "method.patch" not in values(base, 2_000)


def test_too_few_images_are_an_error():
    with pytest.raises(
        UserError, match=r"^40 images are too few to pretrain on; expected at least 256, .* `eagleray embed"
    ):
        values("dino_vits16_in1k_ep100", 40, gpus=8)
    with pytest.raises(UserError, match=r"300 images do not fill a batch of 512 worker\(s\); expected at least 512"):
        values("dino_vits16_in1k_ep100", 300, gpus=512)


def test_a_run_on_too_little_data_names_values_that_fit(shards: Path, small: Path, tmp_path: Path):
    def plan(*overrides: str) -> None:
        train = f"data.train={shards / 'train'}"
        make_plan(resolve_paths(recipe.load(str(small), [train, f"out={tmp_path / 'out'}", *overrides])))

    plan()
    expected = r"320 images do not fill one batch of optim\.batch=512; (.*) would fit, or `eagleray init --images 320`"
    with pytest.raises(UserError, match=expected) as error:
        plan("optim.batch=512", "data.lanes=128")
    assert "\n" not in str(error.value)
    fitting = str(error.value).partition("; ")[2].partition(" would fit")[0].split()
    assert "optim.batch=16" in fitting
    plan("optim.batch=512", "data.lanes=128", *fitting)


def test_a_queue_longer_than_the_data_is_reported():
    moco = recipe.load("moco_resnet50_in1k_ep200")
    assert fit.long_queue(moco, 1_000_000) is None
    said = fit.long_queue(moco, 2_000)
    assert said
    assert "method.queue=65536: longer than the 2000 images" in said
    assert said.endswith("method.queue=512 would fit")
    assert fit.long_queue(recipe.load("dino_vits16_in1k_ep100"), 10) is None
    assert config.flatten(config.to_plain(moco))["method.queue"] == 65536
