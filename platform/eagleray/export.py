"""A backbone as a file that others load: safetensors for timm, read back and compared before it counts."""

import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from eagleray.errors import UserError
from eagleray.models.backbone import Backbone

if TYPE_CHECKING:
    from eagleray.recipe import Network

TOLERANCE = 1e-4  # relative to the largest output

CHECK = """
import json, sys, timm, torch
name, options, weights, probe = sys.argv[1:]
torch.set_num_threads(1)
model = timm.create_model(name, num_classes=0, checkpoint_path=weights, **json.loads(options)).eval()
x, want = torch.load(probe, weights_only=True)
with torch.inference_mode():
    print(float((model(x) - want).abs().max() / want.abs().max()))
"""


def to_timm(backbone: Backbone, network: "Network", folder: Path) -> Path:
    """Write `backbone.safetensors` and `backbone.json`, which says how to create the model. A fresh process loads it
    with plain timm and must get the same outputs. Raises UserError when it does not."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "backbone.safetensors"
    state = {k: v.detach().cpu().contiguous() for k, v in backbone.model.state_dict().items()}
    part = path.with_name(".part.safetensors")
    save_file(state, part)
    difference = compare(backbone, network.name, network.options, part)
    if not difference <= TOLERANCE:
        raise UserError(f"{path}: timm's outputs differ from ours by {difference:.2g} of the largest; not exported")
    part.replace(path)
    description = {"timm": network.name, "options": network.options, "features": backbone.dim, "difference": difference}
    (folder / "backbone.json").write_text(json.dumps(description, indent=1))
    return path


def compare(backbone: Backbone, name: str, options: dict[str, Any], weights: Path) -> float:
    """The largest difference of timm's outputs, in a fresh process, relative to the largest output."""
    size = getattr(getattr(backbone.model, "patch_embed", None), "img_size", None) or (224, 224)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        want = copy.deepcopy(backbone).cpu().eval()(x).pooled
        torch.save((x, want), probe := Path(scratch) / "probe.pt")
        done = subprocess.run(
            [sys.executable, "-c", CHECK, name, json.dumps(options), str(weights), str(probe)],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise UserError(f"{weights}: timm cannot load it: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def snippet(folder: Path) -> str:
    """One line of Python that loads an export."""
    about = json.loads((folder / "backbone.json").read_text())
    options = "".join(f", {k}={v!r}" for k, v in about["options"].items())
    file = str(folder / "backbone.safetensors")
    return f"timm.create_model({about['timm']!r}, num_classes=0, checkpoint_path={file!r}{options})"
