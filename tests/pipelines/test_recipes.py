"""The recipes of pipelines/ as a collection: no two alike, none longer than it need be, all of them in the docs."""

import functools
import importlib.util
import itertools
import json
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import timm
import torch
import yaml
from helpers.blank import blank
from helpers.walks import check_all

from eagleray import config
from eagleray.config import bundled, tables
from eagleray.config.published import METRICS
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.view import APPLIED
from eagleray.datasets.catalogue import DATASETS
from eagleray.models.backbone import Backbone, Encoder
from eagleray.runs import recipe
from eagleray.runs.build import build_backbone, scaled_lr
from eagleray.runs.checks import check_method
from eagleray.views.sampling import order_of

ROOT = Path(__file__).parents[2]
NAMES = bundled.names()
load = functools.cache(recipe.load)
FILES = sorted({r.file for r in bundled.recipes().values()})
DATA = (
    "in1k",
    "coco",
    "imagenette",
    "in22k",
    "openimages",
    "webvision",
    "shapes",
    *(d.short for d in DATASETS.values()),
)
NAME = (
    r"(?:published_)?(?P<method>[a-z0-9_]+?)_(?P<backbone>vit(?P<size>xs|[sblh])(?P<patch>\d+)(?P<kind>[a-z]*)|[a-z0-9]+)"
    r"_(?P<data>" + "|".join(DATA) + r")_(?:(?P<length>ep|ft)(?P<epochs>\d+)|demo)(?P<variant>_.+)?"
)
SIZES = {"xs": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}
KINDS = {"": ("timm", "timm"), "bn": ("batch", "timm"), "conv": ("timm", "conv")}


class Row(NamedTuple):
    """A pretraining in a paper's table: what is printed of it, and million parameters where that is a column."""

    recipe: str
    printed: str
    params: int | None = None


# Every row that is a pretraining of ours. Left out, as we lack them: iGPT and masked patches on JFT-300M (table 1), and
# what is supervised.
ESVIT = {
    1: [
        Row("swav_resnet50w5_in1k_ep400", "78.5 67.1", 586),
        Row("byol_resnet200w2_in1k_ep1000", "79.6 73.9", 250),
        Row("simclr_resnet152w3sk_in1k_ep800_v2", "79.8 73.1", 794),
        Row("dino_vits8_in1k_ep800", "79.7 78.3", 21),
        Row("dino_vitb8_in1k_ep300", "80.1 77.4", 85),
        Row("mocov3_vitb7bn_in1k_ep600", "79.5", 85),
        Row("mocov3_vitl7bn_in1k_ep300", "81.0", 304),
        Row("esvit_swint14_in1k_ep300", "78.7 77.0", 28),
        Row("dino_swint14_in1k_ep300", "77.9 75.5", 28),
        Row("esvit_swins14_in1k_ep300", "80.8 79.1", 49),
        Row("dino_swins14_in1k_ep300", "79.4 77.3", 49),
        Row("esvit_swinb14_in1k_ep300", "81.3 79.3", 87),
        Row("dino_swinb14_in1k_ep300", "80.5 78.3", 87),
        Row("dino_vits16_in1k_ep800", "77.0 74.5", 21),
        Row("dino_vitb16_in1k_ep400", "78.2 76.1", 85),
        Row("mocov3_vitb16_in1k_ep600", "76.7", 85),
        Row("mocov3_vith14bn_in1k_ep300", "79.1", 632),
        Row("moby_swint_in1k_ep300", "75.1", 28),
        Row("esvit_swint_in1k_ep300", "78.1 75.7", 28),
        Row("dino_swint_in1k_ep300", "77.0 74.2", 28),
        Row("esvit_swins_in1k_ep300", "79.5 77.7", 49),
        Row("dino_swins_in1k_ep300", "79.2 76.8", 49),
        Row("esvit_swinb_in1k_ep300", "80.4 78.9", 87),
        Row("dino_swinb_in1k_ep300", "79.6 77.7", 87),
    ],
    3: [
        Row("esvit_swint_in1k_ep300", "78.0 75.7 80.66"),
        Row("dino_swint_in1k_ep300_bs1024", "77.1 73.7"),
        Row("esvit_swint_webvision_ep150_bs1024", "75.9 71.2 80.00"),
        Row("dino_swint_webvision_ep150_bs1024", "75.4 69.4"),
        Row("esvit_swint_openimages_ep50_bs1024", "70.6 62.0 77.97"),
        Row("dino_swint_openimages_ep50_bs1024", "69.6 60.3"),
        Row("esvit_swint_in22k_ep30_bs1024", "75.0 67.9 81.03"),
        Row("dino_swint_in22k_ep30_bs1024", "73.5 66.1"),
    ],
    4: [
        Row("dino_vits16_in1k_ep300_bs1024", "75.9 73.2", 21),
        Row("dino_resnet50_in1k_ep800", "75.3 67.5", 24),
        Row("dino_resnet50_in1k_ep300_bs1024", "75.0 69.3", 24),
        Row("esvit_resnet50_in1k_ep300_bs1024", "75.7 71.2", 24),
        Row("dino_swint_in1k_ep300_bs1024", "77.1 73.7", 28),
        Row("esvit_swint_in1k_ep300_bs1024", "77.6 75.4", 28),
        Row("dino_vil_in1k_ep300_bs1024", "77.3 73.9", 28),
        Row("esvit_vil_in1k_ep300_bs1024", "77.5 74.5", 28),
        Row("dino_cvt_in1k_ep300_bs1024", "77.6 74.8", 29),
        Row("esvit_cvt_in1k_ep300_bs1024", "78.5 76.7", 29),
        Row("dino_pvt_in1k_ep300_bs1024", "75.4 72.0", 24),
        Row("esvit_pvt_in1k_ep300_bs1024", "76.3 72.9", 24),
    ],
    5: [
        Row("moco_resnet50_in1k_ep200", "67.5 55.6 38.7 33.9"),
        Row("densecl_resnet50_in1k_ep200", "63.6 48.6 39.1 34.2"),
        Row("dino_resnet50_in1k_ep200_2crops", "69.2 59.9 37.8 33.1"),
        Row("esvit_resnet50_in1k_ep200_2crops", "69.9 61.7 38.0 33.2"),
    ],
    7: [
        Row("pirl_resnet50_in1k_ep800", "63.6"),
        Row("densecl_resnet50_in1k_ep200", "63.6"),
        Row("pixpro_resnet50_in1k_ep200_instance", "66.3"),
        Row("esvit_resnet50_in1k_ep200_2crops", "69.9"),
    ],
    12: [
        Row("moco_resnet50_in1k_ep200", "67.5"),
        Row("densecl_resnet50_in1k_ep200", "63.6"),
        Row("detco_resnet50_in1k_ep200", "68.6"),
        Row("dino_resnet50_in1k_ep200_2crops", "69.2"),
        Row("esvit_resnet50_in1k_ep200_2crops", "69.9"),
        Row("moco_resnet50_in1k_ep800_v2plus", "72.2"),
        Row("swav_resnet50_in1k_ep800", "75.3"),
        Row("barlow_twins_resnet50_in1k_ep1000", "73.2"),
        Row("vicreg_resnet50_in1k_ep1000", "73.2"),
        Row("simsiam_resnet50_in1k_ep800", "71.3"),
        Row("byol_resnet50_in1k_ep1000", "74.3"),
        Row("dino_resnet50_in1k_ep300_bs1024", "75.0"),
        Row("esvit_resnet50_in1k_ep300_bs1024", "75.7"),
    ],
}
# Heads, window and number of the blocks, as table 6 draws them; of ViL what the authors' code has.
TABLE_6 = {
    "swint": [(3, 7, 2), (6, 7, 2), (12, 7, 6), (24, 7, 2)],
    "swins": [(3, 7, 2), (6, 7, 2), (12, 7, 18), (24, 7, 2)],
    "swinb": [(4, 7, 2), (8, 7, 2), (16, 7, 18), (32, 7, 2)],
    "swint14": [(3, 14, 2), (6, 14, 2), (12, 14, 6), (24, 7, 2)],
    "swins14": [(3, 14, 2), (6, 14, 2), (12, 14, 18), (24, 7, 2)],
    "vil": [(3, 7, 2), (6, 7, 2), (12, None, 6), (24, None, 2)],
    "cvt": [(1, 7, 2), (3, 7, 2), (6, 7, 6), (12, 7, 2)],
}
TABLE_13 = {"in1k": (300, 10), "openimages": (50, 2), "in22k": (30, 1)}  # epochs, of which warm-up
SELFPATCH = {  # of the supplement
    1: [Row("dino_vits16_in1k_ep300_vissl", "38.3 42.3"), Row("selfpatch_vits16_in1k_ep200", "41.2 43.2")],
    2: [
        Row("mocov3_vits16_in1k_ep300", "73.2"),
        Row("moby_deits16_in1k_ep300", "72.8"),
        Row("dino_vits16_in1k_ep300_vissl", "75.1"),
        Row("selfpatch_vits16_in1k_ep300", "75.6"),
    ],
    3: [
        Row("dino_vitxs16_coco_ep200", "28.0 26.9 24.9 55.1"),
        Row("selfpatch_vitxs16_coco_ep200", "30.7 28.6 29.5 57.0"),
        Row("esvit_vitxs16_coco_ep200", "27.9 26.9 26.0 53.5"),
    ],
    4: [
        Row("dino_vitxs16_coco_ep200", "55.1"),
        Row("selfpatch_vitxs16_coco_ep200", "57.0"),
        Row("dino_vitxs16_coco_ep200_nopos", "51.7"),
        Row("selfpatch_vitxs16_coco_ep200_nopos", "52.9"),
    ],
    5: [
        Row("dino_vitxs32_in10_ep200", "24.9 76.0"),
        Row("dino_vitxs16_coco_ep200", "37.6 83.8"),
        Row("dino_vitxs8_in10_ep200", "48.7 85.0"),
        Row("selfpatch_vitxs32_in10_ep200_k1", "34.9 80.0"),
        Row("selfpatch_vitxs16_in10_ep200_k1", "46.5 85.0"),
        Row("selfpatch_vitxs8_in10_ep200_k1", "50.6 87.0"),
        Row("selfpatch_vitxs32_in10_ep200_k2", "36.5 80.2"),
        Row("selfpatch_vitxs16_in10_ep200_k2", "52.9 86.0"),
        Row("selfpatch_vitxs8_in10_ep200_k2", "57.3 88.0"),
        Row("selfpatch_vitxs32_in10_ep200", "36.3 75.0"),
        Row("selfpatch_vitxs16_coco_ep200", "53.1 85.8"),
        Row("selfpatch_vitxs8_in10_ep200", "61.7 88.4"),
        Row("selfpatch_vitxs32_in10_ep200_k6", "36.3 75.6"),
        Row("selfpatch_vitxs16_in10_ep200_k6", "52.6 85.0"),
        Row("selfpatch_vitxs8_in10_ep200_k6", "62.0 87.4"),
        Row("selfpatch_vitxs32_in10_ep200_k8", "33.2 75.2"),
        Row("selfpatch_vitxs16_in10_ep200_k8", "50.4 82.6"),
        Row("selfpatch_vitxs8_in10_ep200_k8", "60.4 87.2"),
    ],
}
SETS = ("cifar10", "cifar100", "flowers", "svhn", *("clipart", "infograph", "painting", "quickdraw", "real", "sketch"))
DRLOC_3 = {  # 100 epochs from scratch, one column for each of the ten sets
    "supervised_cvt13": "89.02 73.50 54.29 91.47 60.34 19.39 54.79 70.10 76.33 56.98",
    "drloc_cvt13": "90.30 74.51 56.29 95.36 60.64 20.05 55.26 70.36 77.05 57.56",
    "supervised_swint": "59.47 53.28 34.51 71.60 38.05 8.20 35.92 24.08 73.47 11.97",
    "drloc_swint": "83.89 66.23 39.37 94.23 47.47 10.16 41.86 69.41 75.59 38.55",
    "supervised_t2t14": "84.19 65.16 31.73 95.36 43.55 6.89 34.24 69.83 73.93 31.51",
    "drloc_t2t14": "87.56 68.03 34.35 96.49 52.36 9.51 42.78 70.16 74.63 51.95",
}
DRLOC_3_CIFAR = {name: " ".join(line.split()[:2]) for name, line in DRLOC_3.items()}
DRLOC_4 = {  # fine-tuned from ImageNet-1k
    "supervised_swint": "97.95 88.22 98.03 96.10 73.51 41.07 72.99 75.81 85.48 72.37",
    "drloc_swint": "98.37 88.40 98.21 97.87 79.51 46.10 73.28 76.01 85.61 72.86",
    "supervised_t2t14": "98.37 87.33 97.98 97.03 74.59 38.53 72.29 74.16 84.56 72.18",
    "drloc_t2t14": "98.52 87.65 98.08 98.20 78.22 45.69 72.42 74.27 84.57 72.29",
}


def columns(of: dict[str, str], sets: tuple[str, ...], length: str) -> list[Row]:
    """A row for each column of a table."""
    named = ((name, short, n) for name, line in of.items() for short, n in zip(sets, line.split(), strict=True))
    return [Row(f"{name}_{short}_{length}", printed) for name, short, printed in named]


DRLOC = {
    1: [
        Row("supervised_swint_in100_ep100", "82.76"),
        Row("drloc_swint_in100_ep100", "84.02"),
        Row("drloc_swint_in100_ep100_signed", "83.14"),
        Row("drloc_swint_in100_ep100_ce", "83.86"),
        Row("drloc_swint_in100_ep100_reg", "83.24"),
        Row("drloc_swint_in100_ep100_all", "81.88"),
    ],
    2: [
        Row("supervised_swint_cifar100_ep100", "53.28"),
        Row("drloc_swint_cifar100_ep100", "66.23"),
        Row("supervised_cvt13_in100_ep100", "85.62"),
        Row("drloc_cvt13_in100_ep100", "85.98"),
        Row("supervised_swint_in100_ep100", "82.76"),
        Row("drloc_swint_in100_ep100", "84.02"),
        Row("supervised_t2t14_in100_ep100", "82.74"),
        Row("drloc_t2t14_in100_ep100", "83.90"),
        Row("supervised_cvt13_in100_ep300", "90.16"),
        Row("drloc_cvt13_in100_ep300", "90.28"),
        Row("supervised_swint_in100_ep300", "89.68"),
        Row("drloc_swint_in100_ep300", "90.32"),
        Row("supervised_t2t14_in100_ep300", "87.76"),
        Row("drloc_t2t14_in100_ep300", "88.16"),
    ],
    3: columns(DRLOC_3, SETS, "ep100")
    + columns(DRLOC_3_CIFAR, SETS[:2], "ep300_stop101")
    + columns({name: line for name, line in DRLOC_3_CIFAR.items() if "drloc" in name}, SETS[:2], "ep100_text"),
    4: columns(DRLOC_4, SETS, "ft100"),
    7: [Row("drloc_swint_cifar100_ep100", "66.23"), Row("drloc_swint_cifar100_ep100_exhaustive", "64.40")],
}
TRANSFER = ("cifar10", "cifar100", "flowers", "pets")
SLIDES = {  # of MoCo v3: fine-tuning
    5: [Row(f"supervised_vit{size}16_in1k_ft50", n) for size, n in (("s", "81.4"), ("b", "83.2"), ("l", "84.1"))]
    + [Row(f"supervised_vit{size}16_in1k_ep100", n) for size, n in (("s", "79.9"), ("b", "81.8"))],
    6: columns({"supervised_vitb16": "98.9 90.5 97.7 93.2"}, TRANSFER, "ft100")
    + columns({"supervised_vitb16": "77.8 48.5 54.4 40.1"}, TRANSFER, "ft100")
    + columns({"supervised_vitl16": "99.1 91.1 98.6 93.7"}, TRANSFER, "ft100")
    + columns({"supervised_vitl16": "77.1 48.3 54.3 42.8"}, TRANSFER, "ft100")
    + columns({"supervised_vith14": "99.1 91.2 98.8 94.2"}, TRANSFER, "ft100")
    + columns({"supervised_vith14": "75.9 48.0 52.8 40.4"}, TRANSFER, "ft100")
    + columns({"supervised_vitb16": "98.1 87.1 89.5 93.8"}, TRANSFER, "ft100_sup")
    + columns({"supervised_vitl16": "97.9 86.4 89.7 93.6"}, TRANSFER, "ft100_sup"),
}
PAPERS = {"esvit": ESVIT, "selfpatch": SELFPATCH, "drloc": DRLOC, "moco v3": SLIDES}
ROWS = [(paper, n, row) for paper, of in PAPERS.items() for n in of for row in of[n]]


def docs() -> ModuleType:
    """docs/recipes.py, which is a script and no module of the package."""
    spec = importlib.util.spec_from_file_location("docs_recipes", ROOT / "docs" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_two_recipes_are_the_same_experiment():
    seen: dict[tuple[str, int | None], str] = {}
    for name in NAMES:
        r = load(name)
        experiment = recipe.digest(r), r.max_steps  # a run that ends early is another experiment with the same identity
        assert experiment not in seen, f"{name} and {seen[experiment]}"
        seen[experiment] = name


def repeated(over: dict[str, Any], under: dict[str, Any]) -> list[str]:
    """Keys that a tree states although the one below it has the same value there."""
    flat = config.flatten(under)
    return [k for k, value in config.flatten(tables.own_keys(over)).items() if k in flat and flat[k] == value]


def test_a_recipe_repeats_nothing_of_its_base_and_a_row_nothing_of_its_file():
    def check(path: Path) -> None:
        tree = yaml.safe_load(path.read_text())
        shared = {k: v for k, v in tree.items() if k not in tables.LAYOUT}
        if "base" in tree:
            assert not repeated(shared, bundled.tree(tree["base"]))
            shared = config.merge(bundled.tree(tree["base"]), shared)
        rows = {name: repeated(row, shared) for name, row in tree.get("recipes", {}).items()}
        for axis, values in tree.get("axes", {}).items():
            rows |= {f"{axis}: {value}": repeated(over, shared) for value, over in values.items()}
        assert not {name: keys for name, keys in rows.items() if keys}

    check_all(check, FILES)


def test_a_file_of_recipes_begins_with_what_it_holds():
    assert not [path for path in FILES if not re.match(r"# .+\.\n[^#]", path.read_text())]


def test_no_recipe_lies_loose_and_no_base_has_a_base():
    assert not list(bundled.folder("pipelines").glob("*.yaml"))
    bases = {r.base for r in bundled.recipes().values() if r.base}
    assert bases
    assert not [name for name in bases if bundled.recipe(name).base]


def test_a_name_says_what_is_in_the_recipe():
    check_all(name_fits, [name for name in NAMES if not name.startswith("continue_")])


def test_recipes_that_continue_public_weights_start_from_what_they_name():
    names = [name for name in NAMES if name.startswith("continue_") and name != "continue_vitxs8"]
    assert len(names) == 6
    for name in names:
        r, [_, family, size] = load(name), name.split("_")
        assert r.start
        assert r.start.source.startswith(f"timm:{r.backbone.name}.")
        assert family in r.backbone.name
        assert r.backbone.name.startswith(f"vit_{SIZES[size[3]]}_patch{size[4:]}_")
        assert r.start.keep_best
        assert r.start.stop_below == 1


def name_fits(name: str) -> None:
    r, said = load(name), re.fullmatch(NAME, name)
    assert said, "<method>_<backbone>_<data>_<length>[_<variant>]"
    assert r.method.name == said["method"]
    assert said["epochs"] in (str(r.optim.epochs), None)
    if said["size"]:
        assert r.backbone.name.startswith(f"vit_{SIZES[said['size']]}_patch")
        drawn_for = re.search(r"patch(\d+)", r.backbone.name)
        assert drawn_for
        assert int(said["patch"]) == r.backbone.options.get("patch_size", int(drawn_for[1]))
        assert (r.backbone.norm, r.backbone.stem) == KINDS[said["kind"]]
    variant = dict(re.findall(r"_(lr|bs)([\de-]+)", said["variant"] or ""))
    assert float(variant.get("lr", r.optim.lr.value)) == r.optim.lr.value
    assert int(variant.get("bs", r.optim.batch)) == r.optim.batch


def test_the_study_of_moco_v3_freezes_the_patch_projection_unless_the_name_says_learned():
    for name in NAMES:
        if re.match(r"(mocov3|simclr|byol|swav)_vit[sblh]\d+(bn)?_in1k", name):
            assert load(name).backbone.freeze_patch != ("_learned" in name), name


@pytest.mark.parametrize("method", ["mocov3", "simclr", "byol", "swav"])
def test_projectors_of_the_study_of_moco_v3_are_those_of_its_section_5(method: str):
    """A projector has three layers with 4096 channels between them and 256 at the end, in all four frameworks."""
    for name in (f"{method}_vits16_in1k_ep300", f"{method}_vitb16_in1k_ep300"):
        r = load(name)
        with blank():
            encoders = [m for m in r.method.build(build_backbone(r)).modules() if isinstance(m, Encoder)]
        for encoder in encoders:
            widths = [m.out_features for m in encoder.head if isinstance(m, torch.nn.Linear)]
            norms = [m.affine for m in encoder.head if isinstance(m, torch.nn.BatchNorm1d)]
            assert widths == [4096, 4096, 256]
            assert norms == {"byol": [True, True], "swav": []}.get(method, [True, True, False]), "the appendix"


@pytest.mark.parametrize(
    ("name", "smallest", "first", "last"),
    [
        ("swav_resnet50_in1k_ep800_2crops", 0.08, 0.3, 0.0048),
        ("swav_resnet50_in1k_ep800", 0.14, 0.3, 0.0048),
        ("swav_resnet50w5_in1k_ep400", 0.14, 0.1875, 0.0),
    ],
)
def test_swav_is_as_in_its_authors_scripts(name: str, smallest: float, first: float, last: float):
    """The first warm-up step has `start_warmup`, the last one the whole rate; no residual branch begins as zero."""
    r = load(name)
    assert r.views[0].scale == (smallest, 1.0)
    assert r.backbone.options["zero_init_last"] is False
    steps = 1281167 // r.optim.batch
    rates = [r.optim.lr(Progress(i, steps, r.optim.epochs)) for i in (0, 10 * steps - 1, r.optim.epochs * steps)]
    assert rates == pytest.approx([first, 4.8, last])


def test_the_rate_of_vicreg_ends_at_a_thousandth_of_the_highest():
    r = load("vicreg_resnet50_in1k_ep1000")
    highest, last = (scaled_lr(r)(Progress(epoch, 1, r.optim.epochs)) for epoch in (10, 1000))
    assert (highest, last) == pytest.approx((1.6, 0.0016))


def test_views_of_instdisc_are_grey_before_their_colours_are_jittered():
    """So a grey view keeps its brightness, which a jitter of the hue would change; MoCo v1 has the same views."""
    names = [name for name in NAMES if name.startswith("instdisc_resnet50")] + ["moco_resnet50_in1k_ep200_v1"]
    assert len(names) == 4
    for name in names:
        assert [APPLIED[i] for i in order_of(load(name).views[0])[:3]] == ["gray", "jitter", "flip"], name


def test_every_method_has_a_recipe_for_two_cores():
    small = {load(name).method.name for name in NAMES if name.endswith("_cifar10_ep2")}
    assert small == set(config.parts("eagleray.methods"))


def test_the_pages_of_recipes_are_up_to_date():
    pages = docs().pages()
    assert {path.stem for path in (ROOT / "docs" / "recipes").iterdir()} == set(pages)
    for name, text in pages.items():
        assert (ROOT / "docs" / "recipes" / f"{name}.md").read_text() == text, "run `python docs/recipes.py`"
    for name in NAMES:
        assert "".join(pages.values()).count(f"\n| `{name}` |") == 1
    assert all(text.count("\n| `") <= 100 for text in pages.values()), "a phone can open each page"


def test_the_page_of_recipes_names_every_key_of_a_schedule():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert not [field.name for field in fields(Schedule) if f"| `{field.name}`" not in page]


def labelled(*methods: str) -> list[str]:
    return [name for name in NAMES if load(name).method.name in methods]


def test_recipes_with_labels_fit_their_sets():
    check_all(fits_its_set, labelled("supervised", "drloc"))


def fits_its_set(name: str) -> None:
    """Classes and places are those of the set in the name; what is fine-tuned says from what."""
    said = re.fullmatch(NAME, name)
    assert said
    r = load(name)
    dataset, short = next((n, d) for n, d in DATASETS.items() if d.short == said["data"])
    assert r.method.args["classes"] == short.classes
    train, test = list(short.splits)[:2]
    assert r.data.train
    assert r.data.test
    assert (r.data.train[0].url, r.data.test[0].url) == (f"data/{dataset}/{train}", f"data/{dataset}/{test}")
    assert (r.backbone.weights is not None) == (said["length"] == "ft")
    if r.backbone.weights and r.backbone.weights.startswith("runs/"):  # where such a run is left
        source = load(r.backbone.weights.removeprefix("runs/"))
        assert structure(source) == structure(r)
    if r.backbone.weights and r.backbone.weights.startswith("timm:"):
        assert structure_in_timm(r.backbone.weights.removeprefix("timm:")) == structure(r)


STRUCTURES: dict[str, Any] = {}  # of what many recipes have in common


def structure(r: recipe.Recipe) -> tuple[dict[str, torch.Size], list[int]]:
    """Of its backbone: shapes of tensors, and attention heads, which they do not tell."""
    what = repr((r.backbone.arguments, r.optim.micro_batch, r.optim.checkpointing, r.curriculum))
    if what not in STRUCTURES:
        with blank():
            STRUCTURES[what] = shapes_and_heads(build_backbone(r).model)
    return STRUCTURES[what]


@functools.cache
def structure_in_timm(name: str) -> tuple[dict[str, torch.Size], list[int]]:
    with blank():
        return shapes_and_heads(timm.create_model(name, num_classes=0))


def shapes_and_heads(model: torch.nn.Module) -> tuple[dict[str, torch.Size], list[int]]:
    """Of a model: shapes of tensors, and attention heads, which they do not tell."""
    heads = [m.num_heads for m in model.modules() if hasattr(m, "num_heads")]
    return {k: v.shape for k, v in model.state_dict().items()}, heads


def test_drloc_differs_from_its_twin_in_the_method_alone():
    check_all(is_its_twin_but_for_the_method, [name for name in labelled("drloc") if name.startswith("drloc_")])


def is_its_twin_but_for_the_method(name: str) -> None:
    said = re.fullmatch(NAME, name)
    assert said
    twin = name.replace("drloc_", "supervised_")
    twin = twin if twin in NAMES else twin.removesuffix(said["variant"] or "")
    here, there = (recipe.identity(load(n)) for n in (name, twin))
    differ = {k for k in here.keys() | there.keys() if here.get(k) != there.get(k)}
    shared = {f"method.{key}" for key in load(twin).method.args}
    assert all(k.startswith("method.") for k in differ)
    assert not differ & shared


def test_a_recipe_says_what_a_table_prints_of_it():
    check_all(says_what_is_printed, ROWS)


def says_what_is_printed(paper: str, table: int, row: Row) -> None:
    """Its numbers beside that table's, and the paper's name unless the method is its own."""
    published = docs().published_words(bundled.recipe(row.recipe).published)
    said = {float(number) for number in re.findall(r"\d+\.\d+|\d+", published)}
    assert not [number for number in row.printed.split() if float(number) not in said], published
    assert re.search(rf"\btables? [\d, and]*\b{table}\b", published), published
    own = load(row.recipe).method.name == paper
    assert own or paper in published.lower(), published


def test_backbones_have_the_sizes_that_tables_print():
    """Which are rounded or cut off, and of MoCo v3's ViT-H with the classifier of ImageNet."""
    printed: dict[str, set[int]] = {}
    for _, _, row in ROWS:
        if row.params:
            b = load(row.recipe).backbone
            printed.setdefault(json.dumps([b.name, b.norm, b.stem, b.options]), set()).add(row.params)
    for key, sizes in printed.items():
        name, norm, stem, options = json.loads(key)
        with blank():
            backbone = Backbone(name, norm=norm, stem=stem, options=options)
        millions = sum(p.numel() for p in backbone.parameters()) / 1e6
        assert [millions] * len(sizes) == pytest.approx(sorted(sizes), abs=1, rel=0.01), key


@pytest.mark.slow  # every start checks its own
def test_backbones_take_the_images_of_their_recipes():
    """As every start checks first, without memory for weights."""
    last_of = {bundled.recipe(n).keys.get("backbone", {}).get("name"): n for n in NAMES}
    for name in last_of.values():
        check_method(load(name))


@pytest.mark.parametrize("drawn", TABLE_6)
@pytest.mark.parametrize("method", ["dino", "esvit"])
def test_backbones_of_esvit_are_those_of_its_table_6(method: str, drawn: str):
    name = next(n for n in NAMES if re.fullmatch(rf"{method}_{drawn}_in1k_ep300(_bs1024)?", n))
    with blank():
        model = Backbone(load(name).backbone.name).model
    blocks = [attention(m) for m in model.modules() if type(m).__name__.endswith("Attention")]
    assert [(*block, len([*same])) for block, same in itertools.groupby(blocks)] == TABLE_6[drawn]


def attention(layer: Any) -> tuple[int, int | None]:
    """Its heads, and the side of its windows; none where every token sees all."""
    heads = getattr(layer, "num_heads", None) or layer.heads
    window = getattr(layer, "window_size", None) or getattr(layer, "window", None)
    return heads, window[0] if isinstance(window, tuple) else window


@pytest.mark.parametrize("data", TABLE_13)
@pytest.mark.parametrize("method", ["dino", "esvit"])
def test_runs_of_esvit_on_other_data_are_as_long_as_in_its_table_13(method: str, data: str):
    name = next(n for n in NAMES if re.fullmatch(rf"{method}_swint_{data}_ep\d+(_bs1024)?", n))
    optim = load(name).optim
    assert (optim.epochs, optim.lr.warmup) == TABLE_13[data]


def test_what_is_said_of_a_recipe_is_a_sentence_and_known_keys():
    check_all(is_a_sentence_and_known_keys, NAMES)


def is_a_sentence_and_known_keys(name: str) -> None:
    """`eagleray list recipes` shows the sentence; a key with a spelling mistake would be lost silently."""
    said = bundled.recipe(name)
    assert re.fullmatch(r"(iBOT|[A-Z]).+\.", said.about), said.about
    assert "{" not in said.about
    for entry in said.published:
        assert entry.keys() <= {*METRICS, "source", "data", "epochs", "note"}
        assert entry["source"]
    assert said.cost.keys() <= {"hours", "gpus", "tpus", "kind", "source", "note"}
    assert said.ours.keys() <= {*METRICS, "untrained", "deviation", "note"}
    assert said.ours.get("untrained", {}).keys() <= METRICS.keys()
