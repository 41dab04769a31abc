"""The backbones that ship in docs/ are small, and timm alone loads them as the pages say."""

import re
from pathlib import Path

import pytest
import timm
import torch

import eagleray
from eagleray.exports.verify import verify

ROOT = Path(__file__).parents[2]
FOLDER, VIT = ROOT / "docs" / "backbone", ROOT / "docs" / "vit"


def test_the_line_of_the_page_loads_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    [lines] = re.findall(r"^model = .*", (FOLDER / "README.md").read_text(), re.M)
    exec(lines, names := {"timm": timm})
    model = names["model"].eval()
    ours = eagleray.load(FOLDER)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = model(x)
        torch.testing.assert_close(features, ours(x).pooled)
        fresh = timm.create_model("resnet10t", num_classes=0, channels=[32, 64, 128, 240]).eval()
        assert (fresh(x) - features).abs().max() > 0.01, "its weights are loaded"
    assert features.shape == (2, 240)


def test_the_vit_is_as_it_was_written_and_timm_loads_it():
    facts = verify(VIT).facts
    assert (facts.method, facts.steps, facts.licence) == ("simclr", 3120, "apache-2.0")
    model = timm.create_model(f"local-dir:{VIT}", pretrained=True).eval()
    x = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(x), eagleray.load(VIT)(x).pooled)


@pytest.mark.parametrize("folder", [FOLDER, VIT])
def test_they_are_small(folder: Path):
    assert sum(p.stat().st_size for p in folder.iterdir()) < 5e6
