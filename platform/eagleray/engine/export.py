"""Exports a backbone to a safetensors file, which a new process loads and compares before the file is kept.

timm loads the file where timm can build the backbone; otherwise this package does.
"""

import ast
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
from eagleray.base.errors import UserError
from eagleray.base.files import durable_path, write_atomic
from eagleray.config import plugins
from eagleray.engine.export_files import FILE
from eagleray.models import vit
from eagleray.models.backbone import ANY_SIZE, Backbone, check_option
from eagleray.models.network import Network
from eagleray.views.preprocessing import Preprocessing

TOLERANCE = 1e-4  # relative to the largest output

# Runs in a new process. What describes the model comes as JSON and is never run as code.
CHECK = """
import json, sys, torch
call, probe, *plugin = sys.argv[1:]
call = json.loads(call)
torch.set_num_threads(1)
if plugin:
    from pathlib import Path
    from eagleray.config import plugins
    plugins.load(plugin[0], Path(plugin[1]))
if call["function"] == "timm.create_model":
    import timm
    model = timm.create_model(*call["arguments"], **call["keywords"])
else:
    import eagleray
    model = eagleray.load(*call["arguments"])
x, want = torch.load(probe, weights_only=True)
with torch.inference_mode():
    out = model.eval()(x)
    print(float((getattr(out, "pooled", out) - want).abs().max() / want.abs().max()))
"""


def to_timm(
    backbone: Backbone,
    network: Network,
    folder: Path,
    preprocessing: Preprocessing | None = None,
    origin: Mapping[str, str] | None = None,
) -> Path:
    """Write `backbone.safetensors` and `backbone.json`, which describes how to create the model.

    A new process loads the file with the line of `snippet`, which is plain timm wherever timm can build the model. The
    line also tells timm the `preprocessing` of images, where it is known. `origin` are digests of what the weights come
    from, which the description keeps. Raises UserError when the outputs differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    state = {k: v.detach().cpu().contiguous() for k, v in backbone.model.state_dict().items()}
    description = describe(network)
    if preprocessing:
        description["preprocessing"] = preprocessing.plain()
        if "timm" in description:
            description["options"] = any_size(backbone, network, preprocessing.size) | description["options"]
    with durable_path(path, part=path.with_name(".part.safetensors")) as part:  # timm reads the format off the suffix
        save_file(state, part)
        beside = part.with_suffix(".json")  # a new process looks for the description here
        try:
            beside.write_text(json.dumps(description))
            part.chmod(beside.stat().st_mode)  # the umask decides; safetensors lets nobody else read
            difference = compare(backbone, description, part)
        finally:
            beside.unlink(missing_ok=True)
        if not difference <= TOLERANCE:
            raise UserError(f"{path}: timm's outputs differ from ours by {difference:.2g} of the largest; not exported")
    description |= {"network": keys_of(network), "features": backbone.dim, "difference": difference}
    description |= {"origin": dict(origin)} if origin else {}
    write_atomic(path.with_suffix(".json"), json.dumps(description, indent=1))
    return path


def describe(network: Network) -> dict[str, Any]:
    """Return the name and options of a `timm` model or, if timm cannot build the network, the arguments of Backbone."""
    ours = timm.model_entrypoint(network.name.partition(".")[0]).__module__.startswith("eagleray.")
    if network.norm == network.stem == network.patch_norm == "timm" and not ours:
        arguments = [vit.ARGUMENTS.get(key, {}) for key in (("position", network.position), ("pool", network.pool))]
        return {"timm": network.name, "options": {**arguments[0], **arguments[1], **network.options}}
    return {"backbone": keys_of(network)}


def keys_of(network: Network) -> dict[str, Any]:
    """Return the arguments with which Backbone builds a network, except those that equal the defaults."""
    keys = ("name", "position", "pool", "norm", "stem", "patch_norm", "options")
    return {key: value for key in keys if (value := getattr(network, key)) not in ("timm", {})}


def any_size(backbone: Backbone, network: Network, size: int) -> dict[str, Any]:
    """Return the arguments with which timm's model takes images of this size, where it is not the model's own."""
    own = getattr(getattr(backbone.model, "patch_embed", None), "img_size", None)
    if own is None or tuple(own) == (size, size):
        return {}
    family = timm.model_entrypoint(network.name.partition(".")[0]).__module__.rpartition(".")[2]
    return {"img_size": list(own)} | ANY_SIZE.get(family, {})


class Export(NamedTuple):
    """An exported backbone that was read again, in evaluation mode."""

    backbone: Backbone
    network: Network
    preprocessing: Preprocessing | None  # None: of an export that does not say


def read_export(path: Path) -> Export:
    """Read an export, created as the backbone.json beside it says. Raises UserError."""
    beside = path.with_suffix(".json")
    try:
        description = json.loads(beside.read_text())
        keys = description.get("network") or description["backbone"]
    except (OSError, ValueError, KeyError, AttributeError) as e:
        raise UserError(f"{beside}: not a description written by `eagleray export` ({type(e).__name__})") from None
    network = config.check(Network, keys, str(beside))
    known = description.get("preprocessing")
    preprocessing = config.check(Preprocessing, known, str(beside)) if known else None
    backbone = Backbone(**keys_of(network))
    try:
        backbone.model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as e:
        raise UserError(f"{path}: cannot be loaded: {' '.join(str(e).split())[:200]}") from None
    return Export(backbone.eval(), network, preprocessing)


def compare(backbone: Backbone, description: dict[str, Any], weights: Path) -> float:
    """Return the largest difference of a new process's outputs from ours, relative to the largest output."""
    size = getattr(getattr(backbone.model, "patch_embed", None), "img_size", None) or (224, 224)
    x = torch.randn(2, backbone.channels, *size, generator=torch.Generator().manual_seed(0))
    call = load_call(description, weights)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        # Backbone's own pooling: the aggregation that SelfPatch adds is in the checkpoint only.
        want = Backbone._pooled(copy.deepcopy(backbone).cpu().eval(), x)
        torch.save((x, want), probe := Path(scratch) / "probe.pt")
        plugin = plugins.plugin_of(description.get("timm", ""), "backbone")
        for sources in plugins.pack([plugin] if plugin else []).values():
            plugins.write(Path(scratch), sources)
        of_plugin = [plugin.name, scratch] if plugin else []
        done = run_check([json.dumps(call), str(probe), *of_plugin])
    if done.returncode:
        raise UserError(f"{weights}: cannot be loaded: {child.words(done)}")
    return float(done.stdout.split()[-1])


def run_check(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run CHECK in a new process, so that the export needs nothing that is only in this one."""
    return child.run_python(CHECK, arguments, text=True)


def snippet(folder: Path) -> str:
    """Return one line of Python that loads the export in a folder."""
    call = load_call(json.loads((folder / FILE).with_suffix(".json").read_text()), folder / FILE)
    return str(ast.unparse(call_expression(**call)))


def load_call(description: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the function, arguments and keywords that load a file of weights with this description. Raises UserError
    for an option that is no argument of a model."""
    if "timm" not in description:
        return {"function": "eagleray.load", "arguments": [str(file)], "keywords": {}}
    for name in description["options"]:
        check_option(name)
    keywords = {"num_classes": 0, "checkpoint_path": str(file)} | description["options"]
    if known := description.get("preprocessing"):
        keywords["pretrained_cfg_overlay"] = config.check(Preprocessing, known, str(file)).timm()
    return {"function": "timm.create_model", "arguments": [description["timm"]], "keywords": keywords}


def call_expression(function: str, arguments: list[Any], keywords: dict[str, Any]) -> ast.Call:
    """Return a call as a syntax tree, from which Python quotes every value by itself."""
    values = [ast.keyword(arg=name, value=ast.Constant(value)) for name, value in keywords.items()]
    return ast.Call(ast.parse(function, mode="eval").body, [ast.Constant(a) for a in arguments], values)
