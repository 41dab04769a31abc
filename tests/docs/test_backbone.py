"""The backbone that ships in docs/backbone is small, and timm alone loads it as the pages say."""

import re
from pathlib import Path

import pytest
import timm
import torch

import eagleray

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "backbone"


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


def test_it_is_small():
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 5e6
