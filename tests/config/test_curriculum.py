"""The sizes of views as a function of the epoch, and what is said about a curriculum that cannot be."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from helpers.recipes import CNN_ONLY, METHODS, small_recipe

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.curriculum import Phase, phases
from eagleray.config.view import View
from eagleray.runs import recipe as recipes
from eagleray.runs.checks import check_method
from eagleray.runs.recipe import Recipe

VIEWS = (View(size=224, blur=0.5), View(size=96, count=8, scale=(0.05, 0.3)))


def recipe(method: str, *keys: str) -> Recipe:
    tree = yaml.safe_load(small_recipe(method))
    for key in keys:
        tree = config.merge(tree, config.override(key))
    return recipes.check(tree, "small")


@pytest.mark.parametrize("epochs", [3, 4, 10, 100, 300])
def test_phases_follow_each_other_and_change_sizes_alone(epochs: int) -> None:
    curriculum = [Phase(until=1 / 3, sizes=(64, 32)), Phase(until=0.7, sizes=(112, 48))]
    found = phases(VIEWS, curriculum, epochs)
    ends = [phase.until for phase in found]
    assert ends == [round(epochs / 3), round(0.7 * epochs), epochs]
    assert [tuple(v.size for v in phase.views) for phase in found] == [(64, 32), (112, 48), (224, 96)]
    for phase in found:
        assert tuple(dataclasses.replace(v, size=w.size) for v, w in zip(phase.views, VIEWS, strict=True)) == VIEWS
        assert phase.keep == 1


def test_without_a_curriculum_there_is_one_phase() -> None:
    plain = recipe("mocov3")
    assert plain.phases == ((2, plain.views, 1.0),)


def test_a_curriculum_is_part_of_a_run_s_identity_and_is_read_again(tmp_path: Path) -> None:
    plain, early = recipe("mocov3"), recipe("mocov3", "curriculum=[{until: 0.5, sizes: [8, 8]}]")
    later = recipe("mocov3", "optim.epochs=4", "curriculum=[{until: 0.75, sizes: [8, 8]}]")
    assert len({recipes.digest(r) for r in (plain, early, later)}) == 3
    assert recipes.check(yaml.safe_load(config.dump(early)), "again") == early


@pytest.mark.parametrize(
    ("curriculum", "said"),
    [
        ("[{until: 0, sizes: [8, 8]}]", r"curriculum\.0\.until"),
        ("[{until: 1.5, sizes: [8, 8]}]", r"curriculum\.0\.until"),
        ("[{until: 0.5, sizes: [8, 0]}]", r"curriculum\.0\.sizes\.1"),
        ("[{until: 0.5, sizes: []}]", r"curriculum\.0: expected sizes, keep, or both"),
        ("[{until: 0.5}]", r"curriculum\.0: expected sizes, keep, or both"),
        ("[{until: 0.5, keep: 0}]", r"curriculum\.0\.keep: input should be greater than 0"),
        ("[{until: 0.5, keep: 1.5}]", r"curriculum\.0\.keep: input should be less than or equal to 1"),
        ("[{until: 0.5, keep: 1}]", r"curriculum\.0: expected sizes, keep, or both"),
        ("[{until: 0.5, size: 8}]", r"curriculum\.0\.size"),
        ("[{until: 0.5, sizes: [8]}]", r"curriculum\.0\.sizes=\[8\]: expected 2 sizes, one for each entry of views"),
        (
            "[{until: 0.5, sizes: [8, 16]}]",
            r"curriculum\.0\.sizes: 8 and 16 pixels for views of one size, 16",
        ),
        ("[{until: 0.5, sizes: [24, 24]}]", r"curriculum\.0\.sizes: 24 pixels are more than the 16 of views\.0\.size"),
        ("[{until: 0.1, sizes: [8, 8]}]", r"curriculum\.0\.until=0\.1: is epoch 0 of optim\.epochs=2; expected one"),
        ("[{until: 0.9, sizes: [8, 8]}]", r"curriculum\.0\.until=0\.9: is epoch 2 of optim\.epochs=2; expected one"),
        (
            "[{until: 0.5, sizes: [8, 8]}, {until: 0.4, sizes: [16, 16]}]",
            r"curriculum\.1\.until=0\.4: is epoch 1 of optim\.epochs=2; expected one after 1 and before 2",
        ),
        (
            "[{until: 0.5, sizes: [4, 4]}]",
            r"curriculum: backbone\.name=vit_tiny_patch16_224: cannot take 4 pixel images",
        ),
        ("[{until: 0.5, sizes: [12, 12]}]", r"curriculum: backbone\.name=.*: cannot take 12 pixel images"),
    ],
)
def test_a_wrong_curriculum_is_said_in_one_line(curriculum: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        check_method(recipe("mocov3", f"curriculum={curriculum}"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", ["dino", "dinov2", "lejepa", "selfpatch"])
def test_global_and_local_views_never_have_one_size(method: str) -> None:
    """LeJEPA would take local views for global ones, and others would mask and match local views, too."""
    with pytest.raises(UserError, match=r"curriculum\.0\.sizes=\[8, 8, 8\]: one size for views of 16, 8 pixels") as e:
        check_method(recipe(method, "curriculum=[{until: 0.5, sizes: [8, 8, 8]}]"))
    assert "\n" not in str(e.value)


def test_a_method_whose_positions_have_one_size_refuses() -> None:
    with pytest.raises(
        UserError, match=r"curriculum\.0\.sizes=\[8\]: views: 8 pixels, but the decoder of mae has"
    ) as e:
        check_method(recipe("mae", "curriculum=[{until: 0.5, sizes: [8]}]"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("method", ["dino", "densecl", "distill", "esvit", "lejepa", "moby", "pixpro", "selfpatch"])
def test_methods_that_work_with_any_size_take_a_curriculum(method: str) -> None:
    """Patches of 4 pixels leave a grid of 2 x 2 of the smaller views."""
    plain = recipe(method, "backbone.options.patch_size=4")
    sizes = [view.size // 2 for view in plain.views]
    phased = recipe(method, "backbone.options.patch_size=4", f"curriculum=[{{until: 0.5, sizes: {sizes}}}]")
    check_method(phased)


POOLED_ONLY = sorted(m for m in METHODS if config.part_constant("eagleray.methods", m, "pooled_only"))
KEEP = "curriculum=[{until: 0.5, keep: 0.5}]"


def test_methods_that_read_pooled_vectors_alone_are_those_that_may_lose_patches() -> None:
    assert set(POOLED_ONLY) == {
        *("barlow_twins", "byol", "dino", "instdisc", "lejepa", "moby", "moco", "mocov3", "pirl", "simclr", "simsiam"),
        *("supervised", "swav", "vicreg"),
    }
    for method in POOLED_ONLY:
        assert [phase.keep for phase in recipe(method, KEEP).phases] == [0.5, 1.0]
        check_method(recipe(method, KEEP))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - set(POOLED_ONLY) - set(CNN_ONLY)))
def test_methods_that_read_patches_keep_all_of_them(method: str) -> None:
    reasons = "(reads every patch of a view|can be hidden|(leave|hide) patches)"
    for key, name in ((KEEP, r"curriculum\.0\.keep=0\.5"), ("backbone.options.patch_drop_rate=0.5", ".*")):
        with pytest.raises(UserError, match=rf"^{name}.*{reasons}"):
            check_method(recipe(method, key))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["backbone={name: resnet18}"], "curriculum: ResNet cannot leave patches out, or does so in every phase"),
        (
            ["backbone.options.patch_drop_rate=0.5"],
            "curriculum: VisionTransformer cannot leave patches out, or does so",
        ),
        (["start={from: none, anchor: 0.1}"], r"curriculum\.0\.keep=0\.5: start\.anchor=0\.1 compares every patch"),
    ],
)
def test_what_excludes_leaving_patches_out_is_said_in_one_line(keys: list[str], said: str) -> None:
    tree = yaml.safe_load(small_recipe("mocov3"))
    tree |= {"backbone": {}} if keys[0].startswith("backbone={") else {}
    for key in (KEEP, *keys):
        tree = config.merge(tree, config.override(key))
    with pytest.raises(UserError, match=said) as raised:
        check_method(recipes.check(tree, "small"))
    assert "\n" not in str(raised.value)
