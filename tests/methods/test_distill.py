"""Distillation: the loss, the teacher that nothing moves, and runs whose teacher is any of the sources of a start."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.commands import refused
from helpers.recipes import small_recipe, teacher_file
from helpers.runs import FAST, arguments, split, weights
from numpy.typing import NDArray

from eagleray import config
from eagleray.api import pretrain as api
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine.loop import Trainer
from eagleray.methods.distill import Distill, match, on_grid
from eagleray.models.backbone import Backbone, Features
from eagleray.models.network import Network
from eagleray.models.pixels import OURS, Pixels, conversion
from eagleray.models.weights import Weights
from eagleray.runs import start
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.recipe import Recipe

RESNET = Network(name="resnet50", options={"layers": [1, 1, 1, 1], "base_width": 16})


def test_patches_are_matched_by_cosine_and_smooth_l1() -> None:
    torch.manual_seed(0)
    s, t = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    cosines = torch.stack([s[b, n] @ t[b, n] / s[b, n].norm() / t[b, n].norm() for b in range(2) for n in range(3)])
    d = (s - t).abs()
    smooth = torch.where(d < 1, d**2 / 2, d - 0.5).mean()
    torch.testing.assert_close(match(s, t), 0.9 * (1 - cosines.mean()) + 0.1 * smooth)
    assert match(t, t) < 1e-12


def test_the_teacher_s_patches_come_to_the_student_s_grid() -> None:
    patches = torch.arange(16.0).view(1, 16, 1).repeat(2, 1, 3)  # a plane that rises by 4 a row and 1 a column
    features = Features(torch.zeros(2, 3), patches, (4, 4))
    assert on_grid(features, (4, 4)) is patches
    # A patch of 2 x 2 begins in the middle of four.
    torch.testing.assert_close(on_grid(features, (2, 2))[0, :, 0], torch.tensor([2.5, 4.5, 10.5, 12.5]))


def method_of(tmp_path: Path, *overrides: str) -> tuple[Recipe, Distill]:
    (path := tmp_path / "small.yaml").write_text(small_recipe("distill"))
    recipe = config.load(Recipe, path, ["data.train=none", *overrides])
    method = build_method(recipe)
    assert isinstance(method, Distill)
    return recipe, method


def test_nothing_moves_the_teacher(tmp_path: Path) -> None:
    """Nor do its batch norms take the statistics of what the student learns from."""
    given = f"method.teacher={{name: resnet50, weights: x, options: {json.dumps(RESNET.options)}}}"
    recipe, method = method_of(tmp_path, "method.teacher.options={}", given, "optim.weight_decay.value=0.5")
    before = {k: v.clone() for k, v in method.teacher.state_dict().items()}
    images = torch.randn(8, 3, 32, 32)
    steps = ((Progress(s, 4, 2), Batch([images], torch.arange(8), torch.zeros(8).long(), (8,))) for s in range(4))
    trainer = Trainer(method, build_optimizer(recipe, method), lr=lambda _: 0.1, weight_decay=lambda _: 0.5)
    for _ in trainer.steps(steps):
        pass
    assert all(torch.equal(before[k], v) for k, v in method.teacher.state_dict().items())
    want = method.teacher.eval()(images).pooled
    method.train()
    assert torch.equal(method.teacher(images).pooled, want)


def test_the_teacher_sees_the_colours_that_it_was_trained_with() -> None:
    pixels, mean, std = torch.rand(2, 3, 8, 8), torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    ours = (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    name = "vit_base_patch16_224.augreg_in21k"
    assert timm.get_pretrained_cfg(name).mean == (0.5, 0.5, 0.5)
    known = timm.get_pretrained_cfg(name)
    factor, summand = conversion(Pixels(known.mean, known.std)).float().view(2, 3, 1, 1)
    torch.testing.assert_close(ours * factor + summand, (pixels - 0.5) / 0.5, rtol=1e-5, atol=1e-5)
    factor, summand = conversion(OURS).float().view(2, 3, 1, 1)
    assert torch.equal(ours * factor + summand, ours)


def test_a_teacher_s_weights_stay_and_its_colours_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its first layer is; a source that says nothing gets ours."""
    recipe, method = method_of(tmp_path)
    trained = Backbone(**recipe.teacher.arguments).model if recipe.teacher else None
    assert trained is not None
    for pixels in (Pixels((0.5,) * 3, (0.25, 0.5, 1.0)), None):
        given = Weights("x", trained.state_dict(), {}, pixels=pixels)
        monkeypatch.setattr(start, "weights_of", lambda *_, given=given: given)
        start.teach(method, "x")
        assert all(torch.equal(v, trained.state_dict()[k]) for k, v in method.teacher.model.state_dict().items())
        want = conversion(pixels or OURS).float().view(2, 3, 1, 1)
        assert torch.equal(method.colours, want)


def test_the_loss_is_what_numpy_computes_in_float64(tmp_path: Path) -> None:
    _, method = method_of(tmp_path)
    method = method.double().eval()
    views = [torch.randn(3, 3, 16, 16, dtype=torch.float64) for _ in range(2)]
    have = method(Batch(views, torch.arange(3), torch.zeros(3).long(), (3,)), Progress(0, 1, 1))

    def cosines(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)

    pooled, patch = [], []
    with torch.no_grad():
        for x in views:
            s, t = method.student.backbone(x), method.teacher(x)
            pairs = (method.student.head(s.pooled), t.pooled), (method.patch_head(s.patches), on_grid(t, s.grid))
            (a, b), (p, q) = ([z.numpy() for z in pair] for pair in pairs)
            pooled.append(np.mean(1 - cosines(a, b)))
            d = np.abs(p - q)
            smooth = np.where(d < 1, d**2 / 2, d - 0.5).mean()
            patch.append(0.9 * np.mean(1 - cosines(p, q)) + 0.1 * smooth)
    assert have["pooled"].item() == pytest.approx(np.mean(pooled), rel=1e-10)
    assert have["patch"].item() == pytest.approx(np.mean(patch), rel=1e-10)
    assert have["loss"].item() == pytest.approx(np.mean(pooled) + method.patch_weight * np.mean(patch), rel=1e-10)


@pytest.mark.usefixtures("quick_runs")
def test_a_student_comes_near_its_teacher(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own teacher, that is: the pooled vectors of another one stay far away. A run goes on without the file."""
    (file := tmp_path / "t.safetensors").write_bytes(Path(teacher_file()).read_bytes())
    (path := tmp_path / "distill.yaml").write_text(small_recipe("distill").replace(teacher_file(), str(file)))
    given = arguments(path, shards, tmp_path / "out", *FAST, "optim.lr={value: 0.01}", "optim.epochs=8", "log_steps=1")
    api.pretrain(*split([*given, "max_steps=30"]))
    assert f"teacher: {file}: " in capsys.readouterr().out
    assert "matched    cls_token" in (tmp_path / "out" / "teacher.txt").read_text()
    file.unlink()
    api.pretrain(*split(given))
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 80
    assert lines[-1]["pooled"] < 0.25 * lines[0]["pooled"]
    assert lines[-1]["patch"] < 0.6 * lines[0]["patch"]
    state = weights(tmp_path / "out")
    student = {k.removeprefix("teacher.model."): v for k, v in state.items() if k.startswith("teacher.model.")}
    loaded = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2
    )
    loaded.load_state_dict(student)


@pytest.mark.usefixtures("quick_runs")
def test_a_run_of_another_method_teaches(shards: Path, tmp_path: Path) -> None:
    (path := tmp_path / "dino.yaml").write_text(small_recipe("dino"))
    api.pretrain(*split(arguments(path, shards, tmp_path / "dino", *FAST, "max_steps=2")))
    (path := tmp_path / "distill.yaml").write_text(small_recipe("distill"))
    given = arguments(path, shards, tmp_path / "out", *FAST, "max_steps=1", "method.teacher.options.patch_size=8")
    options = ["method.teacher.options.embed_dim=24", "method.teacher.options.depth=2"]
    options += ["method.teacher.options.num_heads=3", f"method.teacher.weights={tmp_path / 'dino'}"]
    api.pretrain(*split([*given, *options]))
    theirs, ours = weights(tmp_path / "dino"), weights(tmp_path / "out")
    for name, tensor in Backbone(name="vit_tiny_patch16_224").state_dict().items():
        assert tensor is not None
        if f"teacher.backbone.{name}" in theirs:
            assert torch.equal(theirs[f"teacher.backbone.{name}"], ours[f"teacher.{name}"]), name


@pytest.mark.usefixtures("quick_runs")
def test_wrong_teachers_are_refused_in_a_line(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "distill.yaml").write_text(small_recipe("distill"))
    given = arguments(path, shards, tmp_path / "out", *FAST)

    def line(*overrides: str) -> str:
        return refused(capsys, "pretrain", *given, *overrides)

    assert line("method.teacher.weights=null").startswith("error: method.teacher.weights: missing; expected what")
    assert f"method.teacher.weights={tmp_path}/no: no such run, checkpoint or file" in line(
        f"method.teacher.weights={tmp_path}/no"
    )
    assert f"method.teacher.weights={teacher_file()}: has " in line("method.teacher.options.embed_dim=48")
    assert "method.teacher.name: cannot take 16 pixel images" in line(
        "method.teacher.options={}",
        "method.teacher.name=swin_tiny_patch4_window7_224",
        "method.teacher.options.strict_img_size=true",
    )
    assert "method.teacher.name=vit_tinny: timm has no such model" in line("method.teacher.name=vit_tinny")
    assert "method.teacher.colour: unknown key" in line("method.teacher.colour=1")
    assert not (tmp_path / "out" / "recipe.yaml").exists()
