"""What the checks of a method find, on methods of ours, which pass them, and on methods that are wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.plugins import write_plugin
from helpers.recipes import METHODS, small_recipe

import eagleray
from eagleray import config
from eagleray.base.errors import PluginError, UserError
from eagleray.config import plugins
from eagleray.runs.method_checks import check_no_wait
from eagleray.runs.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:Overwriting vit_of_a_plugin")
LOSS = '{"loss": -(z1 * z2).sum(1).mean() + self.spread * z1.mean(0).square().sum()}'
STEP = "z1, z2 = F.normalize(self.encoder(batch.views), dim=1).chunk(2)\n"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    plugins.unload()


@pytest.mark.parametrize("method", METHODS)
def test_no_method_of_ours_waits_for_the_device(method: str, tmp_path: Path):
    (path := tmp_path / "small.yaml").write_text(small_recipe(method))
    check_no_wait(config.load(Recipe, path), (24,))


WRONG = {
    "it reads a number": (
        "return {",
        "float(z1.sum())\n        return {",
        "it reads a number from a tensor (my_m",
    ),
    "it reads a list": (
        "return {",
        "z1.tolist()\n        return {",
        "makes the host wait for the device: Tensor.tolist",
    ),
    "it picks by a mask": (
        "return {",
        "z1[z1 > 0]\n        return {",
        "makes the host wait for the device: index (my_m",
    ),
    "a parameter is idle": (
        "self.spread = spread",
        "self.spread, self.idle = spread, nn.Linear(2, 2)",
        "no gradient reaches idle.weight, idle.bias; use it, or freeze it",
    ),
    "state is not in the checkpoint": (
        "return {",
        "self.spread = self.spread + 1\n        return {",
        "a run that is resumed from a checkpoint ends with another encoder",
    ),
    "the loss is not finite": ("return {", "z1 = z1 / 0\n        return {", "a loss is not finite: [nan"),
    "a step fails": ("return {", "z1 @ z2\n        return {", "a step fails: RuntimeError: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case: str, tmp_path: Path):
    old, new, wanted = WRONG[case]
    path = write_plugin(tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(PluginError) as e:
        eagleray.check_method({"name": "cosine_pairs", "dim": 8}, plugins=[path])
    assert wanted in str(e.value)
    assert "\n" not in str(e.value)


def test_a_loss_of_each_rank_alone_is_found(tmp_path: Path):
    """The plug-in's own loss squares the mean over this rank's rows, which is another number on two ranks."""
    with pytest.raises(
        PluginError, match="two processes with 12 and 12 images compute something else than one process with 24"
    ):
        eagleray.check_method({"name": "cosine_pairs", "dim": 8}, plugins=[write_plugin(tmp_path)])


@pytest.mark.slow
def test_a_method_that_gathers_passes(tmp_path: Path):
    path = write_plugin(tmp_path)
    text = path.read_text().replace("z1.mean(0).square()", "dist.gather_with_grad(z1, batch.rows).mean(0).square()")
    path.write_text(text.replace("import torch\n", "import torch\nfrom eagleray.base import dist\n", 1))
    report = eagleray.check_method({"name": "cosine_pairs", "dim": 8}, plugins=[path])
    assert report.two_ranks < 1e-5
    assert report.micro_batches is not None
    assert report.micro_batches < 1e-5
    assert len(report.losses) == 4
    assert "two ranks differ from one by" in str(report)


def test_an_unknown_method_and_a_wrong_key():
    with pytest.raises(UserError, match="unknown 'simclrr'; did you mean 'simclr'"):
        eagleray.check_method("simclrr")
    with pytest.raises(UserError, match=r"method\.dims: unknown key"):
        eagleray.check_method({"name": "simclr", "dims": 3})
