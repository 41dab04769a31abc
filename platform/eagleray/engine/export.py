"""Exports a backbone to a safetensors file, and renames it once a new process has computed the same outputs.

timm loads the export if it can build the network, otherwise eagleray does."""

import copy
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagleray import config
from eagleray.base import child
from eagleray.base.errors import UserError, explained
from eagleray.base.files import durable_path, write_atomic
from eagleray.config import plugins
from eagleray.engine.export_files import ADAPTERS, CONFIG, FILE
from eagleray.models import variants
from eagleray.models.backbone import ANY_SIZE, Backbone
from eagleray.models.network import Network
from eagleray.views.preprocessing import Preprocessing

TOLERANCE = 1e-4  # largest accepted difference of outputs, relative to the largest output

# The program that checks an export in a new process. Values reach it only in arguments and files, never as code.
CHECK = """
import sys, torch
from pathlib import Path
folder, probe, ours, *plugin = sys.argv[1:]
torch.set_num_threads(1)
if plugin:
    from eagleray.config import plugins
    plugins.load(plugin[0], Path(plugin[1]))
if ours:  # the folder of our package, which need not be installed
    sys.path.append(ours)
    from eagleray.engine.export import read_export
    model = read_export(Path(folder, "backbone.safetensors")).backbone
else:
    import timm
    model = timm.create_model("local-dir:" + folder, pretrained=True)
x, want = torch.load(probe, weights_only=True)
with torch.inference_mode():
    out = model.eval()(x)
    print(float((getattr(out, "pooled", out) - want).abs().max() / want.abs().max()))
"""


def to_timm(backbone: Backbone, network: Network, folder: Path, preprocessing: Preprocessing | None = None) -> Path:
    """Write `backbone.safetensors` and `backbone.json`, which says how to create the model. If timm can build it, also
    write `config.json`, from which timm creates it.

    First, a new process loads the files as in the line of `snippet`. Raises UserError when its outputs differ.
    `preprocessing` of images, if known, is written too. Adapters are merged into the weights, and also stored in their
    own file."""
    from eagleray.models.lora import merged  # imported here, as a run needs it only at its end

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    plain = merged(backbone)
    state = {k: v.detach().cpu().contiguous() for k, v in plain.model.state_dict().items()}
    description = describe(network) | {"network": keys_of(network), "features": backbone.dim}
    files = {path.with_suffix(".json").name: description}
    if preprocessing:
        description["preprocessing"] = preprocessing.plain()
    if "timm" in description:
        own = any_size(backbone, network)
        files[CONFIG] = timm_config(backbone, network, own | description["options"], preprocessing)
        if preprocessing and own and own["img_size"] != [preprocessing.size] * 2:
            if network.position == "dino":  # timm would resample its positions in another way
                description["backbone"] = description["network"]
                del description["timm"]
            description["options"] = own | description["options"]
    with durable_path(path, part=path.with_name(".part.backbone")) as part:  # left if killed; timm must not load it
        save_file(state, part, {"format": "pt"})
        difference = compare(backbone, files, part)
        if not difference <= TOLERANCE:
            raise UserError(f"{path}: timm's outputs differ from ours by {difference:.2g} of the largest; not exported")
    description["difference"] = difference
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, indent=1))
    if plain.merged:
        tensors = {k: v.cpu().contiguous() for k, v in plain.merged.tensors.items()}
        with durable_path(folder / ADAPTERS, part=folder / ".part.lora") as part:
            save_file(tensors, part, plain.merged.about)
    path.chmod(path.with_suffix(".json").stat().st_mode)  # safetensors makes the file readable for its owner only
    return path


def describe(network: Network) -> dict[str, Any]:
    """Return the name and options of a `timm` model or, if timm cannot build the network, the arguments of Backbone."""
    ours = timm.model_entrypoint(network.name.partition(".")[0]).__module__.startswith("eagleray.")
    if network.norm == network.stem == network.patch_norm == "timm" and not ours:
        arguments = [
            variants.ARGUMENTS.get(key, {}) for key in (("position", network.position), ("pool", network.pool))
        ]
        return {"timm": network.name, "options": {**arguments[0], **arguments[1], **network.options}}
    return {"backbone": keys_of(network)}


def keys_of(network: Network) -> dict[str, Any]:
    """Return the arguments with which Backbone builds a network, without those that equal the defaults."""
    keys = ("name", "position", "pool", "norm", "stem", "patch_norm", "options")
    return {key: value for key in keys if (value := getattr(network, key)) not in ("timm", {})}


def any_size(backbone: Backbone, network: Network) -> dict[str, Any]:
    """Return timm's arguments that set the model's image size and allow other sizes; {} if no size is fixed."""
    own = getattr(getattr(backbone.model, "patch_embed", None), "img_size", None)
    family = timm.model_entrypoint(network.name.partition(".")[0]).__module__.rpartition(".")[2]
    return {"img_size": list(own)} | ANY_SIZE.get(family, {}) if own else {}


def timm_config(
    backbone: Backbone, network: Network, arguments: Mapping[str, Any], preprocessing: Preprocessing | None
) -> dict[str, Any]:
    """Return the content of the `config.json` from which timm creates a model with the given arguments."""
    name = {"architecture": network.name.partition(".")[0], "num_classes": 0}
    known = getattr(backbone.model, "pretrained_cfg", {})  # has the image size, if the model takes one only
    own = {key: known[key] for key in ("input_size", "fixed_input_size") if known.get(key)}
    about = name | own | (preprocessing.timm() if preprocessing else {})
    return {**name, "num_features": backbone.dim, "model_args": dict(arguments), "pretrained_cfg": about}


class Export(NamedTuple):
    """An exported backbone in evaluation mode, with the descriptions of its network and preprocessing."""

    backbone: Backbone
    network: Network
    preprocessing: Preprocessing | None  # None if the export does not record it


def read_export(path: Path) -> Export:
    """Build a backbone as backbone.json beside `path` says, and load its weights. Raises UserError if that fails."""
    beside = path.with_suffix(".json")
    unlike = OSError, ValueError, KeyError, AttributeError
    with explained(f"{beside}: not a description written by `eagleray export`", *unlike):
        description = json.loads(beside.read_text())
        keys = description.get("network") or description["backbone"]
    network = config.check(Network, keys, str(beside))
    known = description.get("preprocessing")
    preprocessing = config.check(Preprocessing, known, str(beside)) if known else None
    backbone = Backbone(**keys_of(network))
    with explained(f"{path}: cannot be loaded", OSError, SafetensorError, RuntimeError):
        backbone.model.load_state_dict(load_file(path))
    return Export(backbone.eval(), network, preprocessing)


def compare(backbone: Backbone, files: Mapping[str, Mapping[str, Any]], weights: Path) -> float:
    """Return the largest difference between outputs of `backbone` and those of a new process that loads the file
    `weights`, relative to the largest output. `files` has the contents of the export's other files, by name."""
    size = getattr(getattr(backbone.model, "patch_embed", None), "img_size", None) or (224, 224)
    x = torch.randn(2, backbone.channels, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        (folder := Path(scratch) / "export").mkdir()
        (folder / FILE).symlink_to(weights.absolute())
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        # Outputs of Backbone's own pooling are compared, as an export lacks SelfPatch's aggregation.
        want = Backbone._pooled(copy.deepcopy(backbone).cpu().eval(), x)
        torch.save((x, want), probe := Path(scratch) / "probe.pt")
        plugin = plugins.plugin_of(files.get(CONFIG, {}).get("architecture", ""), "backbone")
        for sources in plugins.pack([plugin] if plugin else []).values():
            plugins.write(Path(scratch), sources)
        of_plugin = [plugin.name, scratch] if plugin else []
        ours = "" if CONFIG in files else str(Path(__file__).parents[2])
        done = run_check([str(folder), str(probe), ours, *of_plugin])
    if done.returncode:
        raise UserError(f"{weights}: cannot be loaded: {child.words(done)}")
    return float(done.stdout.split()[-1])


def run_check(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run CHECK in a new process, which shows that the export needs nothing of this process's state."""
    return child.run_python(CHECK, arguments, text=True)


def snippet(folder: Path) -> str:
    """Return the line of Python that loads the export in a folder."""
    if "timm" in json.loads((folder / FILE).with_suffix(".json").read_text()):
        return f"timm.create_model({f'local-dir:{folder}'!r}, pretrained=True)"
    return f"eagleray.load({str(folder / FILE)!r})"
