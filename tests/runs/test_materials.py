"""A run writes down the licences of its images and weights, and what is made from it has their conditions."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.layouts import fill, run_prepare

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.data.index import open_index
from eagleray.engine.checkpoint_files import sha256
from eagleray.models import hub
from eagleray.runs import materials, provenance
from eagleray.runs.licences import by_name, in_card, is_free, with_terms
from eagleray.runs.provenance import Material, Provenance, Record

IMAGES = Material(key="data.train", source="a/b", digest="0", licences=("ImageNet terms",))
FACTS: dict[str, Any] = {"backbone": "resnet18", "features": 8, "parameters": 9, "method": "dino", "recipe": {}}
DINOV3 = "timm:vit_small_patch16_dinov3.lvd1689m"


def images(*sources: Source) -> Material:
    data = SimpleNamespace(sources=lambda: sources)
    index = open_index(sources, note=lambda _: None)
    plan: Any = SimpleNamespace(index=index, recipe=SimpleNamespace(data=data), origin={"data": "0123"})
    return materials.images_of(plan)


def conditions(*found: Material) -> str:
    return provenance.conditions(Provenance(**FACTS, digests={}, materials=found))


@pytest.mark.parametrize("form", ["", "/", "/*.tar", "/shard-{000000..000000}.tar", "/shard-000000.tar"])
def test_the_cards_beside_the_shards_are_found_by_every_form_of_their_url(form: str, tmp_path: Path):
    for name in ("a", "b", "c"):
        fill(tmp_path / f"photos-{name}", [f"{name}-{i}.jpg" for i in range(2)])
        run_prepare("folder", tmp_path / f"photos-{name}", tmp_path / name)
    (tmp_path / "b" / "dataset.json").write_text("[]")
    known = json.loads((tmp_path / "c" / "dataset.json").read_text())
    (tmp_path / "c" / "dataset.json").write_text(json.dumps(known | {"licence": "CC0"}))
    urls = [f"{tmp_path}/{name}{form}" for name in "abc"]
    assert images(*(Source(url=url) for url in urls)).licences == ("unknown", "CC0")
    # What the recipe says does not outweigh a card.
    found = images(*(Source(url=url, licence="CC BY-NC 4.0") for url in urls))
    assert found.licences == ("CC BY-NC 4.0", "CC0")
    assert found.digest == "0123"
    assert str(tmp_path) not in found.source


def test_only_licences_that_ask_for_something_are_named():
    assert all(map(is_free, ("Apache-2.0", "MIT", "CC BY 4.0", "CC0")))
    assert not any(map(is_free, ("unknown", "dinov3-license", "CC BY-NC 4.0", "CC BY 4.0; images belong to others")))
    assert with_terms("CC BY-NC 4.0") == "CC BY-NC 4.0, which forbids commercial use"
    assert conditions(Material(key="data.train", source="a", digest="", licences=("CC0",))) == ""
    assert conditions(Material(key="data.train", source="a", digest="")) == "images: unknown, as nobody has stated it"


def test_a_name_shows_conditions_and_never_their_absence():
    assert by_name("dinov3_vits16_pretrain_lvd1689m-08c60483.pth") == "dinov3-license"
    assert by_name("facebook/dinov3-convnext-tiny-pretrain-lvd1689m") == "dinov3-license"
    assert by_name("mae_pretrain_vit_base.pth") == "cc-by-nc-4.0"
    for name in ("my_dinov3.pth", "facebook/dinov2-small", "apache-2.0.pth", "dinov3_of_mine.pth"):
        assert by_name(name) == "unknown"


def test_the_licence_of_a_model_card_stands_at_its_head():
    assert in_card("---\nlanguage: en\nlicense: apache-2.0\n---\n# A") == "apache-2.0"
    assert in_card("---\nlicense: other\nlicense_name: dinov3-license\n---\n") == "dinov3-license"
    assert in_card("# A\n\nlicense: mit\n---\n") == in_card("---\na: b\n---\nlicense: mit\n") == ""


def test_weights_of_timm_have_the_licence_that_timm_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (file := tmp_path / "weights").write_bytes(b"0")
    monkeypatch.setattr(hub, "timm_overlay", lambda *_: {"file": str(file)})
    found = materials.weights_of("start.from", DINOV3)
    assert (found.licences, found.digest) == (("dinov3-license",), sha256(file))
    line = conditions(found, IMAGES)
    assert line.startswith(f"start weights ({DINOV3}): dinov3-license, which ")
    assert line.endswith("; images: ImageNet terms")


@pytest.mark.parametrize("stated", ["mit", ""])
def test_weights_of_the_hub_have_the_licence_of_their_card(
    stated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "README.md").write_text(f"---\nlicense: {stated}\n---\n")
    (tmp_path / "model.safetensors").write_bytes(b"0")

    def fetch(repository: str, names: Any = hub.FILES, *, given: str) -> Path:
        if names == ["README.md"] and not stated:
            raise UserError("the repository has no README.md")
        return tmp_path / names[0]

    monkeypatch.setattr(hub, "fetch", fetch)
    found = materials.weights_of("method.teacher.weights", "hf:somebody/vit")
    assert found.licences == (stated or "unknown",)
    assert conditions(found) == ("" if stated else "teacher (hf:somebody/vit): unknown, as nobody has stated it")


def test_weights_pass_on_what_their_run_or_export_was_made_from(tmp_path: Path):
    (file := tmp_path / "export" / "model.safetensors").parent.mkdir()
    file.write_bytes(b"\0" * 8)
    provenance.seal(file.parent, [], Provenance(**FACTS, digests={}, materials=(IMAGES,)))
    assert materials.of_file("start.from", "x", file).licences == ("unknown",)  # of a file that it does not list
    known = config.to_plain(Provenance(**FACTS, digests={}, materials=(IMAGES,), files={file.name: sha256(file)}))
    (file.parent / provenance.NAME).write_text(json.dumps(known))
    found = materials.weights_of("start.from", str(file))
    assert conditions(found) == "images of the start weights: ImageNet terms"
    (checkpoint := tmp_path / "run" / "checkpoints" / "step-000000001.pt").parent.mkdir(parents=True)
    checkpoint.write_bytes(b"0")
    (tmp_path / "run" / "materials.json").write_text(json.dumps(config.to_plain(Record(materials=(found,)))))
    again = materials.weights_of("backbone.weights", str(checkpoint))
    assert conditions(again) == "images of the start weights of the start weights: ImageNet terms"
    (tmp_path / "run" / "materials.json").write_text("[]")
    with pytest.raises(UserError, match=r"materials\.json"):
        materials.weights_of("backbone.weights", str(checkpoint))


def test_a_run_names_the_newest_checkpoint_of_the_run_that_it_starts_from(tmp_path: Path):
    (folder := tmp_path / "checkpoints").mkdir()
    for step, digest in ((1, "a" * 64), (2, "b" * 64)):
        (folder / f"step-{step:09d}.json").write_text(json.dumps({"bytes": 1, "sha256": digest}))
    (tmp_path / "materials.json").write_text(json.dumps(config.to_plain(Record(materials=(IMAGES,)))))
    found = materials.weights_of("start.from", str(tmp_path))
    assert found.digest == "b" * 64
    assert found.made_from == (IMAGES,)
    (tmp_path / "summary.json").write_text(json.dumps({"exported_step": 1}))  # it ended with its best checkpoint
    assert materials.weights_of("start.from", str(tmp_path)).digest == "a" * 64
