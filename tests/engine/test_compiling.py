"""A compiled backbone computes what it does otherwise, and what a machine lacks for it is said in one line."""

from pathlib import Path

import pytest
import torch
from helpers.networks import VIT, network
from helpers.recipes import small_recipe
from torch import nn
from torch._dynamo.utils import counters

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.engine.compiling import compile_backbones, compiles
from eagleray.models.backbone import Encoder
from eagleray.models.ema import ema_copy
from eagleray.models.heads import PrototypeHead, projection
from eagleray.models.layer_names import in_adapter
from eagleray.models.lora import adapt
from eagleray.models.network import Lora
from eagleray.runs import recipe as recipes
from eagleray.runs.recipe import Recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"^compile=true: torch.compile needs a C\+\+ compiler \(no-such-compiler\)"):
        compiles(True, CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^compile=true: torch.compile needs Triton"):
        compiles(True, GPU)
    assert not compiles("auto", GPU)
    assert not compiles(False, GPU)


def test_only_accelerators_compile_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagleray.engine.compiling.missing_compiler", lambda _: None)
    assert [compiles(choice, CPU) for choice in ("auto", True, False)] == [False, True, False]
    assert [compiles(choice, GPU) for choice in ("auto", True, False)] == [True, True, False]


def test_a_run_may_continue_compiled(tmp_path: Path) -> None:
    (path := tmp_path / "small.yaml").write_text(small_recipe("mocov3"))
    plain, own = (config.load(Recipe, path, keys) for keys in ([], ["compile=true", "optim.reduce=bf16"]))
    assert (own.compile, own.optim.reduce) == (True, "bf16")
    assert recipes.digest(plain) == recipes.digest(own)


def test_many_sizes_are_compiled_each() -> None:
    """Micro-batches and a curriculum have more of them than PyTorch compiles by default."""
    compiled, before = [], torch._dynamo.config.recompile_limit

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    try:
        compile_backbones(nn.Identity())
        double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
        for size in range(2, 14):
            double(torch.ones(size))
        assert len(compiled) == 12
    finally:
        torch._dynamo.config.recompile_limit = before


def test_a_head_of_prototypes_is_compiled_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    run = torch.compile(projection, backend=backend)
    monkeypatch.setattr("eagleray.models.heads.compiled_projection", lambda: run)
    head = PrototypeHead(6, 40, hidden=8, bottleneck=4)
    rows = [torch.randn(n, 6) for n in (5, 9, 13, 21)]
    want = [head(x) for x in rows]
    compile_backbones(nn.ModuleList([head]))
    torch.testing.assert_close([head(x) for x in rows], want)
    assert len(graphs) == 2  # one is for the first number of rows, one for any


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, Lora(rank=4, targets=("qkv", "proj", "fc1", "fc2"))], ids=["all", "adapters"])
def test_the_same_loss_without_a_graph_break_or_a_second_compilation(lora: Lora | None) -> None:
    torch.manual_seed(0)
    student = Encoder(network(options=VIT | {"dynamic_img_size": True}), nn.Identity())
    if lora:
        adapt(student.backbone, lora)
        for name, p in student.named_parameters():
            nn.init.normal_(p, std=0.1) if in_adapter(name) else None
    teacher, views = ema_copy(student), [torch.randn(3, 3, s, s) for s in (16, 16, 8, 8)]

    def step() -> tuple[float, list[torch.Tensor]]:
        student.zero_grad()
        with torch.no_grad():
            target = teacher(views[:2]).mean()
        loss = (student(views) - target).square().mean()
        loss.backward()
        return float(loss.detach()), [p.grad.clone() for p in student.parameters() if p.grad is not None]

    want, keys = step(), list(student.state_dict())
    counters.clear()
    compile_backbones(nn.ModuleList([student, teacher]))
    graphs = []
    for _ in range(3):
        loss, grads = step()
        graphs.append(counters["stats"]["unique_graphs"])
        assert loss == pytest.approx(want[0], rel=1e-5)
        torch.testing.assert_close(grads, want[1], atol=1e-5, rtol=1e-4)
    assert graphs == [2, 2, 2]  # the student's two sizes together, the teacher's one
    assert not counters["graph_break"]
    assert list(student.state_dict()) == keys


@pytest.mark.slow
def test_dropped_patches_compile_once_for_any_mask() -> None:
    torch.manual_seed(0)
    encoder, images = network(options=VIT), torch.randn(3, 3, 16, 16)
    masks = [torch.rand(3, 4).argsort(1)[:, :2] for _ in range(3)]

    def step(kept: torch.Tensor) -> list[torch.Tensor]:
        encoder.zero_grad()
        pooled, tokens = encoder.visible(images, kept)
        (pooled.square().mean() + tokens.square().mean()).backward()
        return [pooled.detach(), tokens.detach(), *(p.grad.clone() for p in encoder.parameters() if p.grad is not None)]

    want = [step(kept) for kept in masks]
    counters.clear()
    compile_backbones(nn.ModuleList([encoder]))
    for kept, expected in zip(masks, want, strict=True):
        torch.testing.assert_close(step(kept), expected, atol=1e-5, rtol=1e-4)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
