"""Exports are loaded by the library that they are for, in a process without eagleray, and compute the same."""

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.exports import only, source
from helpers.networks import RESNET, SWIN, VIT

from eagleray.base.errors import UserError
from eagleray.engine.export import to_timm
from eagleray.exports import compare as comparing
from eagleray.exports import hugging_face, libraries, timm_files, traced, write
from eagleray.exports.source import with_own_grid
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network

TINY = VIT | {"img_size": 32}
DINOV2 = TINY | {"init_values": 1.0, "reg_tokens": 2, "no_embed_class": True}
ROTARY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "rope_rescale_coords": 2.0}
NETWORKS: dict[str, dict[str, Any]] = {
    "vit": {"name": "vit_tiny_patch16_224", "options": TINY},
    "dino": {"name": "vit_tiny_patch16_224", "options": VIT, "position": "dino"},  # another size than its own
    "mean": {"name": "vit_tiny_patch16_224", "options": TINY, "pool": "norm_mean"},
    "layer scale": {"name": "vit_tiny_patch16_224", "options": TINY | {"init_values": 1.0}},
    "registers": {"name": "vit_tiny_patch16_224", "options": DINOV2},
    "embedded registers": {"name": "vit_tiny_patch16_224", "options": TINY | {"reg_tokens": 2, "qkv_bias": False}},
    "swin": {"name": "swin_tiny_patch4_window7_224", "options": SWIN | {"depths": (2, 2)}},
    "resnet": {
        "name": "resnet50",
        "options": RESNET | {"layers": (2, 1, 1, 2), "channels": (8, 8, 16, 16)},
        "size": 64,
    },
    "resnet18": {"name": "resnet18", "size": 64, "resize": 64},
    "dinov3": {"name": "vit_small_patch16_dinov3", "options": ROTARY},
}

FILES = {"README.md", "config.json", "model.safetensors", "provenance.json"}
# From the file on, where the library resizes as we do; Pillow rounds otherwise.
WHOLE = dict.fromkeys(("transformers", "torch.export"), 1e-4)


def written(tmp_path: Path, to: str, kind: str, **keys: Any) -> write.Written:
    return write.write(source(tmp_path / "run", **NETWORKS[kind], **keys), to, tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "kind"),
    [
        pytest.param("timm-hub", "dino", marks=pytest.mark.slow),
        ("transformers", "vit"),
        pytest.param("torch.export", "vit", marks=pytest.mark.slow),
    ],
)
def test_a_library_computes_the_same(to: str, kind: str, tmp_path: Path):
    done = written(tmp_path, to, kind)
    assert done.difference.same < 1e-5
    assert done.difference.whole <= WHOLE.get(to, 1e-2)
    names = {f.name for f in done.files}
    assert names == {p.name for p in (tmp_path / "out").iterdir()}
    assert "README.md" in names
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ("32 x 32 pixels", "None were measured", "images: unknown", "## Licence", "mocov3"):
        assert text in card, text
    assert str(tmp_path) not in card
    if to == "transformers":
        assert (
            done.line == f"transformers.AutoModel.from_pretrained({str(tmp_path / 'out')!r}, add_pooling_layer=False)"
        )
        assert "AutoModel.from_pretrained(folder, add_pooling_layer=False)" in card


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("to", ["timm", "timm-hub", "transformers", "torch.export"])
def test_every_network_in_every_library(to: str, kind: str, tmp_path: Path):
    if (to, kind) in (("transformers", "mean"), ("transformers", "dinov3")):
        pytest.skip("refused: another test")
    if (to, kind) == ("timm", "dino"):
        with pytest.raises(UserError, match="its features differ"):
            written(tmp_path, to, kind)
        return
    assert written(tmp_path, to, kind).difference.same < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "dino", "registers", "swin", "resnet"])
def test_onnx_takes_batches_and_sizes(kind: str, tmp_path: Path):
    import onnxruntime

    done = written(tmp_path, "onnx", kind)
    assert done.difference.same < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "out" / traced.ONNX)
    [images] = session.get_inputs()
    assert images.name == "images"
    assert images.shape[0] == "batch"
    assert done.step == {"vit": 8, "dino": 8, "registers": 8, "resnet": 32}.get(kind)
    if done.step:
        assert images.shape[2:] == ["height", "width"]
    assert json.loads(session.get_modelmeta().custom_metadata_map["size"]) == NETWORKS[kind].get("size", 32)


CONSUMERS = {
    "timm-hub": ["timm", "pillow"],
    "transformers": ["transformers", "torch", "torchvision", "pillow"],
    "onnx": ["onnxruntime", "numpy", "pillow"],
    "torch.export": ["torch", "torchvision", "numpy", "pillow"],
}
# Swin is traced for a minute; test_onnx_takes_batches_and_sizes has a small one.
REAL = [(to, name) for to in CONSUMERS for name in ("small", "vit_small_patch16_224", "resnet50")]
REAL += [(to, "swin_tiny_patch4_window7_224") for to in ("timm-hub", "transformers")]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "name"), REAL)
def test_where_only_the_consumer_is_installed(to: str, name: str, tmp_path: Path):
    """The program of the card, started by an interpreter that finds no packages but those of one library."""
    packages = only(CONSUMERS[to], tmp_path / "packages")
    keys: dict[str, Any] = NETWORKS["vit"] if name == "small" else {"name": name, "size": 224, "resize": 256}
    found = source(tmp_path / "run", **keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "compare", lambda *_, **__: comparing.Difference(0, 0, 0))
        write.write(found, to, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    program = card.partition("# this one\n\n")[2].partition("```")[0]
    alone = f"import sys; sys.path.append({str(packages)!r})\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "CHECK", alone + comparing.CHECK)
        patch.setattr(comparing, "PYTHON", (sys.executable, "-I", "-S", "-c"))
        side = found.preprocessing.size
        sizes = [(1, side, side), (2, side, side), (3, side, side)]
        if to in ("onnx", "torch.export"):
            sizes += [(1, 128, 192), (3, 128, 192)]
        difference = comparing.compare(found, tmp_path / "out", program, sizes=sizes)
    print(f"{name} in {to}: {difference}")
    assert difference.same <= 1e-4
    assert difference.whole <= WHOLE.get(to, 1e-2)


@pytest.mark.parametrize(
    ("to", "keys", "wanted"),
    [
        ("timm-hub", {"name": "vil_tiny"}, "timm cannot build vil_tiny, which is ours; --to timm is for eagleray.load"),
        ("timm-hub", {"name": "vit_tiny_patch16_224", "options": TINY, "norm": "batch"}, "with norm=batch"),
        ("transformers", NETWORKS["dinov3"], "no class fits vit_small_patch16_dinov3: it has ViT, Dinov2, Swin"),
        ("transformers", NETWORKS["mean"], "no class fits vit_tiny_patch16_224: its classes pool by the class token"),
        ("transformers", {"name": "vil_tiny"}, "no class fits vil_tiny: it has ViT, Dinov2, Swin and ResNet"),
    ],
)
def test_a_network_that_a_library_lacks(to: str, keys: dict[str, Any], wanted: str, tmp_path: Path):
    with pytest.raises(UserError, match=wanted):
        write.write(source(tmp_path / "run", size=32, **keys), to, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_network_whose_patches_know_no_image_size_has_no_class(tmp_path: Path):
    found = source(tmp_path / "run", **NETWORKS["vit"])
    found = replace(found, backbone=Backbone("hiera_tiny_224"), network=Network(name="hiera_tiny_224"))
    with pytest.raises(UserError, match="no class fits hiera_tiny_224: it has ViT, Dinov2, Swin and ResNet"):
        hugging_face.write(found, tmp_path)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        pytest.param(
            ('"interpolation": "bicubic"', '"interpolation": "bilinear"'),
            "pixels that differ by",
            marks=pytest.mark.slow,
        ),
        pytest.param(("0.485", "0.5"), "pixels that differ by", marks=pytest.mark.slow),
        (('"num_heads": 3', '"num_heads": 2'), "its features differ from ours"),
    ],
)
def test_what_is_wrong_in_an_export_is_seen(change: tuple[str, str], wanted: str, tmp_path: Path):
    found = source(tmp_path / "run", **NETWORKS["vit"])
    program = timm_files.write_hub(found, tmp_path).text
    settings = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(settings.replace(*change))
    assert settings.replace(*change) != settings
    with pytest.raises(UserError, match=wanted):
        comparing.compare(found, tmp_path, program)


@pytest.mark.slow
def test_a_photograph_that_stays_on_its_side_is_seen(tmp_path: Path):
    found = source(tmp_path / "run", **NETWORKS["vit"])
    program = timm_files.write_hub(found, tmp_path).text
    lying = program.replace("ImageOps.exif_transpose(Image.open(file))", "Image.open(file)")
    assert lying != program
    with pytest.raises(UserError, match="pixels that differ by"):
        comparing.compare(found, tmp_path, lying)


def test_a_process_of_the_check_has_no_eagleray(tmp_path: Path):
    found = source(tmp_path / "run", **NETWORKS["vit"])
    with pytest.raises(UserError, match=r"cannot be loaded: ModuleNotFoundError: .*eagleray"):
        comparing.compare(found, tmp_path, "import eagleray")


def test_a_check_that_is_killed_is_one_line(tmp_path: Path):
    found = source(tmp_path / "run", **NETWORKS["vit"])
    with pytest.raises(UserError, match=r"cannot be loaded: its process ended with status -9$"):
        comparing.compare(found, tmp_path, "import os; os.kill(os.getpid(), 9)")


def test_the_photographs_are_ten_and_differ(tmp_path: Path):
    paths = comparing.photographs(tmp_path)
    assert len({p.read_bytes() for p in paths}) == 10


def test_the_grid_of_another_size_is_what_the_backbone_resamples(tmp_path: Path):
    for kind in ("dino", "vit", "registers", "mean"):
        found = source(tmp_path / kind, **NETWORKS[kind])
        sized = with_own_grid(found.backbone, found.network, 56)
        assert sized.model.patch_embed.img_size == (56, 56)
        x = torch.randn(2, 3, 56, 56)
        torch.testing.assert_close(sized.pooled(x), found.backbone.pooled(x), atol=1e-5, rtol=1e-4)


def test_modes_follow_the_umask_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "compare", lambda *_, **__: comparing.Difference(0, 0, 0))
    before = os.umask(0o027)
    try:
        written(tmp_path, "timm-hub", "vit")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()} == {0o640}
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES

    def fails(*_: Any, **__: Any) -> None:
        raise UserError("no")

    monkeypatch.setattr(write, "compare", fails)
    content = (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UserError, match="no"):
        written(tmp_path, "timm-hub", "vit")
    assert (tmp_path / "out" / "README.md").read_text() == content
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES


def test_files_of_others_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "compare", lambda *_, **__: comparing.Difference(0, 0, 0))
    out = tmp_path / "out"

    def refused(to: str, said: str) -> None:
        before = {p.name: p.read_bytes() for p in out.iterdir()}
        with pytest.raises(UserError) as e:
            written(tmp_path, to, "vit")
        assert str(e.value) == f"{out}: has {said}; give another --destination"
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before

    out.mkdir()
    (out / "config.json").write_text("{}")
    refused("timm-hub", "config.json already, not from an export --to timm-hub")
    (out / "README.md").write_text("---\nlibrary_name: timm\n---\n# Mine\n")
    refused("timm-hub", "README.md, config.json already, not from an export --to timm-hub")
    for path in out.iterdir():
        path.unlink()
    for to, other in (("timm-hub", "transformers"), ("transformers", "timm-hub")):
        written(tmp_path, to, "vit")
        card = out / "README.md"
        card.write_text(card.read_text().replace("library_name", "license: mit\nlibrary_name"))  # by who publishes it
        refused(other, f"README.md, config.json, model.safetensors, provenance.json already, from an export --to {to}")
        written(tmp_path, to, "vit")
        for path in out.iterdir():
            path.unlink()


def test_the_export_that_a_run_leaves_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "compare", lambda *_, **__: comparing.Difference(0, 0, 0))
    found = source(tmp_path / "run", **NETWORKS["vit"])
    to_timm(found.backbone, found.network, tmp_path / "out", found.preprocessing)
    written(tmp_path, "timm", "vit")
    assert "library_name: timm" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["model.safetensors", "DINO.safetensors"])
def test_an_export_is_not_put_beside_weights_that_timm_would_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eagleray.engine.export.compare", lambda *_: 0.0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).touch()
    with pytest.raises(UserError, match=f"out: has {name}, which timm would load instead; give another --destination"):
        written(tmp_path, "timm", "vit")
    assert [p.name for p in (tmp_path / "out").iterdir()] == [name]


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[Path] = []
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: synced.append(Path(os.readlink(f"/proc/self/fd/{d}"))) or flush(d))
    with write.staged(tmp_path / "out") as stage:
        (stage / "README.md").write_text("text")
    assert synced == [stage / "README.md", tmp_path / "out"]


def test_a_disk_that_is_full_leaves_the_folder_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flush(path: Path) -> None:
        if path.name == "backbone.safetensors":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "sync_file", flush)
    staged = write.staged(tmp_path / "out")
    stage = staged.__enter__()
    for name in ("README.md", "backbone.safetensors"):
        (stage / name).write_text("new")
    with pytest.raises(UserError, match="No space left on device"):
        staged.__exit__(None, None, None)
    assert not list((tmp_path / "out").iterdir())


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None if name != "onnx" else object())
    assert libraries.NEEDS.keys() == write.TARGETS.keys()
    with pytest.raises(UserError, match=r"--to onnx: needs onnxscript, onnxruntime: pip install 'eagleray\[export\]'"):
        libraries.check_target("onnx")
    with pytest.raises(UserError, match="--to jax: unknown; expected timm, timm-hub, transformers"):
        libraries.check_target("jax")
    libraries.check_target("timm")


def test_the_lines_that_load_are_python(tmp_path: Path):
    folder = tmp_path / 'it\'s "here"'
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["ViTModel"]}')
    for line in (timm_files.hub_line, hugging_face.line, traced.onnx_line, traced.torch_line):
        compile(line(folder), "line", "eval")
