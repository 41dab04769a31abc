"""Store a run's backbone on an MLflow server as a model that embeds images, and register it under a name.

MLflow loads the model with `mlflow.pyfunc.load_model`, or with `mlflow.pytorch.load_model` as a module, and serves it
with `mlflow models serve`. The model holds the export as it is, and a copy of files of this package as its code, so
that it loads where this package is not installed."""

import importlib.metadata
import io
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from eagleray.base.contexts import on_error
from eagleray.base.errors import explained
from eagleray.data.tiff import write_pages
from eagleray.runs import layout
from eagleray.runs.embedder import build
from eagleray.runs.metrics import CLASSIFIER_TOP1, KNN_TOP1, LINEAR_TOP1
from eagleray.runs.summary import read_summary
from eagleray.views.colours import MEAN, STD

log = logging.getLogger(__name__)
NAME = "backbone"  # the model's name in its run
COMMIT = "mlflow.source.git.commit"
BEST = "best"  # alias of the best version; MLflow itself calls the last version NAME/latest
SCORES = (KNN_TOP1, CLASSIFIER_TOP1, LINEAR_TOP1)  # scores by which versions are compared: the first that a run has
STEP, DATA, SCORE, MODEL = (f"eagleray.{tag}" for tag in ("step", "data", "score", "model"))  # tags of a model
PACKAGES = ("mlflow", "timm", "torch", "torchvision", "pillow", "safetensors", "numpy", "pandas")
COLUMN = "image"  # name of the column with image files in the model's input table
ROOT = Path(__file__).parents[1]
# Maps files of this package to the names of their copies in a model's code, names that no other package has.
CODE = {"runs/embedder.py": "eagleray_embedder", "data/decode.py": "eagleray_decode"}
CODE |= {"data/pixels.py": "eagleray_pixels", "views/crop.py": "eagleray_crop", "data/tiff.py": "eagleray_tiff"}
CODE |= {"data/channels.py": "eagleray_channels", "views/colours.py": "eagleray_colours"}
CODE |= {"data/costs.py": "eagleray_costs"}


class Backbone(NamedTuple):
    """A backbone that becomes a model: the run's folder, with its export and summary, and how images are prepared."""

    out: Path
    size: int  # side of the centre crop in pixels
    resize: int  # short side of an image in pixels before the crop
    data: str = ""  # digest of the data that its scores depend on
    register: str | None = None  # the name of a registered model

    @property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.out)


def log_model(client: Any, run_id: str, backbone: Backbone) -> bool:
    """Store a finished run's backbone as a model of its run, with the run's parameters and last numbers, and register
    it if `backbone.register` names a registered model. Returns whether the model was missing.

    A second call changes nothing. Raises UserError when the model cannot be made, and what MLflow's client raises."""
    from mlflow.entities import LoggedModelOutput, Metric

    run, step = client.get_run(run_id), backbone.summary["steps"]
    model = known_model(client, run, step)
    if model is None:
        tags = {STEP: str(step), DATA: backbone.data} | {k: run.data.tags[k] for k in (COMMIT,) if k in run.data.tags}
        params = {k: v for k, v in run.data.params.items() if v}
        model = client.create_logged_model(run.info.experiment_id, NAME, run_id, tags, params, model_type=NAME)
    if missing := str(model.status) != "READY":
        with tempfile.TemporaryDirectory() as scratch:
            failed = on_error(lambda: client.finalize_logged_model(model.model_id, "FAILED"))
            with failed, explained("it cannot be made", Exception):  # a package may be missing
                save_model(Path(scratch) / "model", backbone, model_id=model.model_id, run_id=run_id)
            client.log_model_artifacts(model.model_id, str(Path(scratch) / "model"))
        client.finalize_logged_model(model.model_id, "READY")
    last = [m for m in run.data._metric_objs if not m.key.startswith("system/")]  # MLflow stores equal ones only once
    if {m.key for m in last} - {m.key for m in model.metrics or ()}:
        given = [Metric(m.key, m.value, m.timestamp, m.step, model_id=model.model_id) for m in last]
        client.log_batch(run_id, given)
    shown = run.outputs.model_outputs if run.outputs else []
    if model.model_id not in [m.model_id for m in shown]:
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    if backbone.register:
        register(client, model, backbone.register, backbone.summary)
    return missing


def known_model(client: Any, run: Any, step: int | None = None) -> Any:
    """Return the model that a run stored at `step` or, with None, the one of its last step; None if there is none."""
    there = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    steps = {int(m.tags[STEP]): m for m in there if STEP in m.tags}
    return steps.get(max(steps, default=0) if step is None else step)


def save_model(folder: Path, backbone: Backbone, *, model_id: str | None = None, run_id: str | None = None) -> None:
    """Write the model as MLflow lays it out: export, code, signature, an example and the packages that it needs. The
    backbone is also pickled as a module beside the export, for `mlflow.pytorch.load_model`."""
    import pandas as pd
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, DataType, Schema, TensorSpec

    export = backbone.out / layout.EXPORT
    description = json.loads((export / "backbone.json").read_text())
    needs = [*PACKAGES, *(["eagleray"] if "timm" not in description else [])]
    known = description.get("preprocessing", {})
    settings: dict[str, Any] = {"size": backbone.size, "resize": backbone.resize}
    settings |= {key: known.get(key, default) for key, default in (("mean", [*MEAN]), ("std", [*STD]))}
    settings |= {"channels": known["channels"]} if "channels" in known else {}
    output = TensorSpec(np.dtype("float32"), (-1, description["features"]), "features")
    with tempfile.TemporaryDirectory() as scratch:
        (data := Path(scratch) / NAME).mkdir()  # a folder for the files of the model alone
        for name in ("backbone.json", "backbone.safetensors"):
            (data / name).symlink_to((export / name).resolve())
        torch.save(build(data), data / "model.pth")
        (data / "pickle_module_info.txt").write_text("pickle")  # name of the module with which MLflow reads model.pth
        model = Model(model_id=model_id, model_uuid=model_id, run_id=run_id)
        model.add_flavor("pytorch", model_data=f"data/{NAME}", pytorch_version=str(torch.__version__))
        pyfunc.save_model(
            folder,
            mlflow_model=model,
            loader_module=CODE["runs/embedder.py"],
            data_path=str(data),
            code_paths=write_code(Path(scratch)),
            model_config=settings,
            signature=ModelSignature(Schema([ColSpec(DataType.binary, COLUMN)]), Schema([output])),
            input_example=pd.DataFrame({COLUMN: [example_image(len(settings.get("channels", ())))]}),
            pip_requirements=[f"{p}=={importlib.metadata.version(p).partition('+')[0]}" for p in needs],
        )


def write_code(folder: Path) -> list[str]:
    """Copy the files of the model's code into a folder, with imports by their new names, and return their paths."""
    for path, name in CODE.items():
        text = (ROOT / path).read_text()
        for other, there in CODE.items():
            module = other.removesuffix(".py").replace("/", ".")
            text = text.replace(f"from eagleray.{module} import", f"from {there} import")
        (folder / f"{name}.py").write_text(text)
    return [str(folder / f"{name}.py") for name in CODE.values()]


def example_image(channels: int = 0) -> bytes:
    """Return the model's example of an input: a small PNG or, with `channels`, a TIFF with this number of channels."""
    ramp = np.linspace(0, 255, 32, dtype=np.uint8)
    if channels:
        write_pages(file := io.BytesIO(), np.broadcast_to(ramp[:, None, None], (32, 32, channels)).astype(np.float32))
        return file.getvalue()
    picture = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], ramp[::-1, None]), axis=-1)
    Image.fromarray(picture).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def register(client: Any, model: Any, name: str, scores: Mapping[str, Any]) -> str:
    """Register a model as a version of `name`, and return the version. A second call finds the same version.

    The alias `best` moves to this version if no version is `best` yet, or if its score is above that of the best one
    so far, measured on the same data."""
    from mlflow.exceptions import MlflowException

    try:
        registered = client.create_registered_model(name)
    except MlflowException as e:
        if e.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        registered = client.get_registered_model(name)
    versions = client.search_model_versions(f"name='{name}'")
    there = {v.tags.get(MODEL): v for v in versions}
    key = next((k for k in SCORES if k in scores), "")
    if model.model_id in there:
        version = there[model.model_id]
    else:
        tags = {k: model.tags[k] for k in (STEP, DATA)} | ({SCORE: f"{key}={scores[key]}"} if key else {})
        version = client.create_model_version(
            name,
            model.artifact_location,  # models:/<id> would be looked up on the environment's server
            run_id=model.source_run_id,
            tags=tags | {MODEL: model.model_id},
            model_id=model.model_id,
        )
    number = (registered.aliases or {}).get(BEST)
    best = next((v for v in versions if str(v.version) == str(number)), None)
    if key and (best is None or is_better(version.tags, best.tags)):
        client.set_registered_model_alias(name, BEST, version.version)
        best = version
    of = f"the best is version {best.version}" if best else "none has a score"
    log.info("registered as version %s of %s; %s", version.version, name, of)
    return str(version.version)


def is_better(tags: Mapping[str, str], best: Mapping[str, str]) -> bool:
    """Return whether the score in a version's `tags` is above that in `best`; False for another metric or data."""
    (key, _, value), (other, _, highest) = (t.get(SCORE, "").partition("=") for t in (tags, best))
    return key == other and tags.get(DATA) == best.get(DATA) and float(value) > float(highest)
