"""Starts: what a run takes over from another run or from an authors' checkpoint, and what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.bucket import CountingBucket
from helpers.checkpoints import save
from helpers.recipes import small_recipe
from torch import nn

import eagleray
from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.engine import export
from eagleray.evaluation.target import load_target
from eagleray.methods.method import Method
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.checks import check_start
from eagleray.runs.recipe import Recipe
from eagleray.runs.start import Started, build_started, take_progress
from eagleray.storage import store

IMAGES = 40


def recipe_of(folder: Path, method: str, *overrides: str) -> Recipe:
    (folder / "small.yaml").write_text(small_recipe(method))
    return recipes.load(str(folder / "small.yaml"), overrides)


def learnt(recipe: Recipe) -> Method:
    """A method with values that no seed gives."""
    method = build_method(recipe)
    method.allocate(IMAGES)
    torch.manual_seed(5)
    with torch.no_grad():
        for tensor in method.state_dict().values():
            if tensor.is_floating_point():
                nn.init.normal_(tensor)
    return method


def run_of(folder: Path, method: str, *overrides: str) -> tuple[str, Method]:
    """Write a checkpoint like that of a run."""
    recipe = recipe_of(folder, method, *overrides)
    trained = learnt(recipe)
    state = {"recipe": config.dump(recipe), "method": trained.state_dict(), "images": IMAGES, "step": 3}
    save(folder / "run" / "checkpoints", 3, state)
    return str(folder / "run"), trained


def started(folder: Path, source: str, method: str, *overrides: str, what: str = "method") -> Started:
    return build_started(recipe_of(folder, method, f"start.from={source}", f"start.what={what}", *overrides), IMAGES)


def part(method: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in method.state_dict().items() if k.startswith(prefix)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return bool(a) and a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def test_esvit_takes_over_all_of_dino(tmp_path: Path):
    source, dino = run_of(tmp_path, "dino")
    esvit, *_ = now = started(tmp_path, source, "esvit")
    for prefix in "student.backbone.", "student.head.", "teacher.backbone.", "teacher.head.":
        assert same(part(dino, prefix), part(esvit, prefix)), prefix
    assert torch.equal(dino.center, esvit.center)
    fresh = build_method(recipe_of(tmp_path, "esvit"))
    assert same(part(fresh, "student.region_head."), part(esvit, "student.region_head."))
    lines = now.notes[0].said
    assert lines[0] == f"started from {source} (a run of dino after 3 steps)"
    rows = {line.split()[0]: line.split(None, 1)[1] for line in lines[2:]}
    assert rows["teacher.backbone"].split(None, 1) == ["teacher.backbone", "30 tensors matched"]
    assert rows["center"].split() == ["center", "1", "tensors"]
    assert rows["student.region_head"].strip() == "new: the source has none"


def test_ranks_start_from_one_checkpoint_of_a_run_that_still_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, _ = run_of(tmp_path, "dino")
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, mine.replace("3 steps", "4 steps")])
    with pytest.raises(RuntimeError, match="ranks read different checkpoints"):
        started(tmp_path, source, "dino")


def test_another_method_takes_over_what_both_have(tmp_path: Path):
    source, theirs = run_of(tmp_path, "moby")
    ours, *_ = now = started(tmp_path, source, "byol", "method.dim=12", "method.hidden=16")
    assert same(part(theirs, "online.backbone."), part(ours, "online.backbone."))
    assert same(part(theirs, "target.backbone."), part(ours, "target.backbone."))
    # MoBY's projector has biases beside its batch norms, and BYOL's has none.
    assert not same(part(theirs, "online.head."), part(ours, "online.head."))
    text = "\n".join(now.notes[0].said)
    assert "student.head" in text
    assert "new: 0.bias is none, in the source 16" in text
    assert "queue1" in text
    assert "not taken over: the method has none" in text


def test_the_aggregation_of_selfpatch_is_taken_over(tmp_path: Path):
    """Also from the authors' names. It belongs to the method, and not to the backbone that the method exports."""
    source, theirs = run_of(tmp_path, "selfpatch", "backbone.pool=mean")
    names = {"backbone.aggregation.token": "ca_head.cls_token", "backbone.aggregation.blocks.": "ca_head.cls_blocks."}
    names |= {"backbone.aggregation.": "ca_head.", "backbone.model.": "backbone.", "patch_head.": "p_head."}
    names |= {"head.": "c_head."}
    written: dict[str, Any] = {"dino_loss": {k: getattr(theirs, k) for k in ("center", "patch_center")}}
    for role in "student", "teacher":
        written[role] = {}
        for key, value in part(theirs, f"{role}.").items():
            ours = next(name for name in names if key.startswith(name))
            authors = key.replace(ours, names[ours], 1).replace("last.parametrizations.weight.original", "last_layer.")
            written[role][authors.replace("layer.0", "layer.weight_g").replace("layer.1", "layer.weight_v")] = value
    torch.save(written, tmp_path / "checkpoint.pth")
    for given, about in (source, "a run of selfpatch"), (str(tmp_path / "checkpoint.pth"), "SelfPatch's authors"):
        method, *_ = now = started(tmp_path, given, "selfpatch", "backbone.pool=mean")
        assert same(theirs.state_dict(), method.state_dict())
        assert about in now.notes[0].said[0]
        assert "new: " not in "\n".join(now.notes[0].said)


def test_a_new_part_has_no_moments_of_the_one_that_did_not_fit(tmp_path: Path):
    """Some tensors of the two have one shape, such as the bias of the bottleneck and the prototypes."""
    source, dino = run_of(tmp_path, "dino")
    trained = build_optimizer(recipe := recipe_of(tmp_path, "dino"), dino)
    for p in dino.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    trained.step()
    state = {"recipe": config.dump(recipe), "method": dino.state_dict(), "images": IMAGES, "step": 4}
    save(f"{source}/checkpoints", 4, state | {"optimizer": trained.state_dict()})
    wider = recipe_of(tmp_path, "dino", f"start.from={source}", "start.what=all", "method.hidden=40")
    ours, *_ = now = build_started(wider, IMAGES)
    assert "student.head" in "\n".join(line for line in now.notes[0].said if "new: " in line)
    plan: Any = SimpleNamespace(recipe=wider, steps=9)
    optimizer = build_optimizer(wider, ours)
    assert take_progress(plan, now, optimizer) == 4
    kept = {name for name, p in ours.named_parameters() if optimizer.state.get(p)}
    assert kept == {n for n, p in dino.named_parameters() if p.requires_grad and n.startswith("student.backbone.")}


def test_a_head_of_another_size_is_new(tmp_path: Path):
    source, dino = run_of(tmp_path, "dino")
    ours, *_ = now = started(tmp_path, source, "dino", "method.prototypes=32")
    assert same(part(dino, "teacher.backbone."), part(ours, "teacher.backbone."))
    assert same(
        part(build_method(recipe_of(tmp_path, "dino", "method.prototypes=32")), "teacher.head."),
        part(ours, "teacher.head."),
    )
    assert "new: last.parametrizations.weight.original0 is 32x1, in the source 64x1" in "\n".join(now.notes[0].said)


def test_a_backbone_starts_every_copy_of_it(tmp_path: Path):
    source, dino = run_of(tmp_path, "dino")
    ours, *_ = now = started(tmp_path, source, "mocov3", what="backbone")
    for prefix in "base_encoder.backbone.", "momentum_encoder.backbone.":
        assert same(part(dino, "teacher.backbone."), part(ours, prefix))
    assert "student.head" in "\n".join(now.notes[0].said)


@pytest.mark.parametrize("method", ["instdisc", "pirl"])
def test_a_bank_of_other_images_is_new_with_its_constant(method: str, tmp_path: Path):
    """The constant grows with the number of images, and a run estimates it only while it is zero."""
    source, theirs = run_of(tmp_path, method)
    recipe = recipe_of(tmp_path, method, f"start.from={source}", "start.what=method")
    for images, kept in (IMAGES, True), (IMAGES + 1, False):
        ours = build_started(recipe, images).method
        assert same(part(theirs, "encoder."), part(ours, "encoder."))
        assert torch.equal(theirs.get_buffer("bank.rows"), ours.get_buffer("bank.rows")) == kept
        assert float(ours.get_buffer("Z")) == (float(theirs.get_buffer("Z")) if kept else 0)


def refused(folder: Path, source: str, *overrides: str, what: str = "backbone", method: str = "dino") -> str:
    with pytest.raises(UserError) as e:
        started(folder, source, method, *overrides, what=what)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_a_source_that_has_less_is_refused(tmp_path: Path):
    source, _ = run_of(tmp_path, "dino")
    torch.save(build_method(recipe_of(tmp_path, "dino")).export().model.state_dict(), tmp_path / "plain.pth")
    file = str(tmp_path / "plain.pth")
    line = refused(tmp_path, file, what="method")
    assert line == f"start.from={file}: a file of tensors, which has no heads; start.what=backbone takes it over"
    torch.save({"teacher": torch.load(file), "student": torch.load(file)}, tmp_path / "dino.pth")
    line = refused(tmp_path, str(tmp_path / "dino.pth"), what="all")
    assert "a checkpoint of DINO's authors, whose moments and step cannot be taken over; start.what=method can" in line
    assert "no such run, checkpoint or file" in refused(tmp_path, str(tmp_path / "none"))
    assert refused(tmp_path, source, "backbone.options.embed_dim=48").startswith(f"start.from={source}: has 0.0% of")
    assert refused(tmp_path, str(tmp_path)).startswith(f"start.from={tmp_path}: its checkpoints/ holds no intact")


def test_files_that_are_damaged_or_run_code_are_refused(tmp_path: Path):
    file = tmp_path / "w.pth"
    torch.save(build_method(recipe_of(tmp_path, "dino")).export().model.state_dict(), file)
    file.write_bytes(file.read_bytes()[:2000])
    assert refused(tmp_path, str(file)).startswith(f"start.from={file}: cannot be read")

    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"teacher": Touch()}, file)
    assert "store its state dict alone" in refused(tmp_path, str(file))
    assert not (tmp_path / "touched").exists()


def test_a_deeper_backbone_is_refused(tmp_path: Path):
    """Of which the first blocks would fit: its features are others."""
    source, _ = run_of(tmp_path, "dino", "backbone.options.depth=3")
    line = refused(tmp_path, source)
    assert line.startswith(f"start.from={source}: has blocks.2.")
    assert "another architecture" in line


def test_keys_that_exclude_a_start(tmp_path: Path):
    def line(method: str, *overrides: str) -> str:
        recipe = recipe_of(tmp_path, method, "start.from=runs/a", *overrides)
        with pytest.raises(UserError) as e:
            check_start(recipe, build_method(recipe))
        return str(e.value)

    assert "backbone.weights names other weights; give one of the two" in line("dino", "backbone.weights=runs/b")
    assert "supervised learns from labels; backbone.weights is for fine-tuning" in line("supervised")
    assert "does not work with parallel=fsdp" in line("dino", "start.what=all", "parallel=fsdp")


def test_the_key_is_from(tmp_path: Path):
    """A word of Python, so its field has another name, which no recipe may use."""
    recipe = recipe_of(tmp_path, "dino", "start.from=runs/a")
    assert "start:\n  from: runs/a\n  what: backbone\n" in config.dump(recipe)
    assert recipes.identity(recipe)["start.from"] == "runs/a"
    with pytest.raises(UserError, match=r"start\.form: unknown key; did you mean 'start\.from'\?"):
        recipe_of(tmp_path, "dino", "start={from: a, form: b}")
    with pytest.raises(UserError, match=r"start\.source: unknown key"):
        recipe_of(tmp_path, "dino", "start={from: a, source: b}")


def test_an_export_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = recipe_of(tmp_path, "dino")
    theirs = learnt(recipe).export()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "compare", lambda *_: 0.0)
        export.to_timm(theirs, recipe.backbone, tmp_path / "export")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    for folder in str(tmp_path / "export"), "s3://export":
        for source in folder, f"{folder}/backbone.safetensors":
            ours, *_ = started(tmp_path, source, "dino", what="backbone")
            assert same(theirs.state_dict(), part(ours, "student.backbone.")), source
            for loaded in eagleray.load(source), load_target(source).backbone:
                assert same(theirs.model.state_dict(), loaded.model.state_dict()), source
    line = refused(tmp_path, str(tmp_path / "export"), "backbone.options.num_heads=2")
    assert "blocks.0.attn has 3 attention heads in the weights, but 2 in the model" in line
