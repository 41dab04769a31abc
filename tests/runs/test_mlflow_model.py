"""A run's backbone as a model of MLflow: it embeds as our evaluation does, loads without us, and has a name."""

import base64
import io
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import mlflow_server
from helpers.processes import free_port
from helpers.tiffs import BANDS, CHANNELS, scene, tiff
from mlflow import MlflowClient, pyfunc, pytorch
from PIL import Image

import eagleray
from eagleray.config.channels import Channel
from eagleray.data.decode import decode
from eagleray.engine.export import snippet, to_timm
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.runs import mlflow_model
from eagleray.runs.embedder import build
from eagleray.runs.mlflow_log import MLflow
from eagleray.runs.mlflow_run import register_run
from eagleray.runs.tracking import DataInput, Tracking
from eagleray.views.crop import centre_crop
from eagleray.views.photometric import normalise
from eagleray.views.preprocessing import Preprocessing

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SETTINGS = {"evaluate.size": 16, "evaluate.resize": 20}
DATA = (DataInput("training", "shapes", "0123", "local", '{"uri": "/shapes"}', '{"images": 3}'),)


def photographs() -> list[bytes]:
    """A JPEG that is turned by its EXIF data, a grey PNG, and a PNG with 16 bits."""
    ramp = np.linspace(0, 255, 40, dtype=np.uint8)
    colours = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :30], ramp[::-1, None]), axis=-1)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = []
    for picture, form, more in (
        (Image.fromarray(colours), "JPEG", {"exif": exif}),
        (Image.fromarray(colours[..., 0]), "PNG", {}),
        (Image.fromarray(colours[..., 1].astype(np.uint16) * 257), "PNG", {}),
    ):
        picture.save(file := io.BytesIO(), form, **more)
        files.append(file.getvalue())
    return files


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended, as far as a model needs it."""
    return run_folder(tmp_path_factory.mktemp("runs") / "a", 61.5, 10)


def run_folder(out: Path, knn: float, steps: int, **network: Any) -> Path:
    torch.manual_seed(steps)
    used = Network(name="vit_tiny_patch16_224", options=TINY, **network)
    to_timm(Backbone(used.name, options=TINY, norm=used.norm), used, out / "export")
    (out / "summary.json").write_text(json.dumps({"steps": steps, "knn/top1": knn}))
    return out


def ours(out: Path) -> np.ndarray[Any, Any]:
    """The features of the photographs as our evaluation computes them."""
    crops = torch.stack([centre_crop(decode(data), resize=20, size=16) for data in photographs()])
    with torch.inference_mode():
        features = eagleray.load(out / "export").pooled(normalise(crops, torch.device("cpu")))
    return features.numpy()


def test_the_model_embeds_as_our_evaluation_and_loads_without_this_package(finished: Path, tmp_path: Path):
    mlflow_model.save_model(tmp_path / "model", mlflow_model.Backbone(finished, 16, 20))
    table = pd.DataFrame({"image": photographs()})
    np.testing.assert_allclose(pyfunc.load_model(str(tmp_path / "model")).predict(table), ours(finished), atol=1e-5)
    module, images = pytorch.load_model(str(tmp_path / "model")), torch.randn(2, 3, 16, 16)
    assert isinstance(module, torch.nn.Module)
    assert not module.training
    torch.testing.assert_close(module(images), eagleray.load(finished / "export").pooled(images))
    (tmp_path / "files.json").write_text(json.dumps([base64.b64encode(f).decode() for f in photographs()]))
    code = (
        "import base64, json, sys, pandas as pd; sys.modules['eagleray'] = None; from mlflow import pyfunc\n"
        "files = [base64.b64decode(f) for f in json.load(open('files.json'))]\n"
        "print(pyfunc.load_model('model').predict(pd.DataFrame({'image': files})).tolist())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), ours(finished), atol=1e-5)


def test_a_model_of_five_channels_embeds_as_our_evaluation(tmp_path: Path):
    channels = tuple(Channel(**c) for c in CHANNELS)
    used, images = Network(options=TINY | {"in_chans": BANDS}), Preprocessing.of(16, 20, channels)
    to_timm(Backbone(used.name, options=used.options), used, tmp_path / "export", images)
    mlflow_model.save_model(tmp_path / "model", mlflow_model.Backbone(tmp_path, 16, 20))
    model, files = pyfunc.load_model(str(tmp_path / "model")), [tiff(scene(n)) for n in range(3)]
    with torch.inference_mode():
        wanted = eagleray.load(tmp_path / "export").pooled(torch.stack([images(decode(f, channels)) for f in files]))
    np.testing.assert_allclose(model.predict(pd.DataFrame({"image": files})), wanted.numpy(), atol=1e-5)
    assert model.predict(model.input_example).shape == (1, wanted.shape[1])


def test_the_model_says_what_it_takes_gives_and_needs(finished: Path, tmp_path: Path):
    mlflow_model.save_model(tmp_path / "model", mlflow_model.Backbone(finished, 16, 20))
    model = pyfunc.load_model(str(tmp_path / "model"))
    assert model.metadata.signature.inputs.input_names() == ["image"]
    assert [t.name for t in model.metadata.signature.inputs.input_types()] == ["binary"]
    assert model.metadata.signature.outputs.inputs[0].shape == (-1, 24)
    assert model.predict(model.input_example).shape == (1, 24)
    needs = (tmp_path / "model" / "requirements.txt").read_text()
    assert "timm==" in needs
    assert "eagleray" not in needs
    with pytest.raises(Exception, match="row 65: cannot identify image file"):
        model.predict(pd.DataFrame({"image": [*photographs()[:1] * 65, b"no image"]}))


def test_a_backbone_that_timm_cannot_build_needs_this_package(tmp_path: Path):
    out = run_folder(tmp_path / "b", 50.0, 3, norm="batch")
    mlflow_model.save_model(tmp_path / "model", mlflow_model.Backbone(out, 16, 20))
    assert "eagleray==" in (tmp_path / "model" / "requirements.txt").read_text()
    table = pd.DataFrame({"image": photographs()})
    np.testing.assert_allclose(pyfunc.load_model(str(tmp_path / "model")).predict(table), ours(out), atol=1e-5)
    module, images = pytorch.load_model(str(tmp_path / "model")), torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(module(images).pooled, eagleray.load(out / "export").pooled(images))


def test_positions_that_timm_would_resample_in_another_way_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eagleray.engine.export.compare", lambda *_: 0.0)
    used = Network(name="vit_tiny_patch16_224", options=TINY, position="dino")
    backbone = Backbone(used.name, options=TINY, position="dino").eval()
    for size, loaded in ((16, "timm.create_model("), (24, "eagleray.load(")):
        to_timm(backbone, used, folder := tmp_path / str(size), Preprocessing.of(size, 32))
        assert snippet(folder).startswith(loaded)
        images = torch.randn(2, 3, size, size)
        with torch.inference_mode():
            out = build(folder)(images)
            torch.testing.assert_close(getattr(out, "pooled", out), backbone.pooled(images))


def logged(out: Path, uri: str, register: str | None = None) -> MLflow:
    """The history of a run that has ended, sent."""
    history = MLflow(out, Tracking(uri, key=out.name), SETTINGS | {"track.register": register}, DATA)
    history.log({"step": 11, **json.loads((out / "summary.json").read_text())})
    history.close("FINISHED", [])
    return history


@pytest.fixture(scope="module", params=["file", pytest.param("postgresql", marks=pytest.mark.slow)])
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An SQLite file without a server, and a server on PostgreSQL."""
    root = tmp_path_factory.mktemp("mlflow")
    if request.param == "file":
        yield f"sqlite:///{root / 'mlflow.db'}"
    else:
        with mlflow_server.postgres() as database, mlflow_server.running(root, database) as server:
            yield server.uri


def test_the_model_has_the_parameters_and_numbers_of_its_run(finished: Path, tmp_path: Path):
    """So that models can be sorted by kNN. The run has each number once, as before."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        history = logged(finished, uri)
    client = MlflowClient(uri)
    run = client.get_run(history.run.id)
    [model] = client.search_logged_models([run.info.experiment_id], order_by=[{"field_name": "metrics.knn/top1"}])
    assert model.params == {"evaluate.size": "16", "evaluate.resize": "20", "track.register": "None"}
    assert {m.key: m.value for m in model.metrics} == {"knn/top1": 61.5, "steps": 10.0}
    assert model.tags["mlflow.source.git.commit"] == run.data.tags["mlflow.source.git.commit"]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "knn/top1")] == [11]


@pytest.mark.parametrize("best", ["1", "2"])
def test_the_best_version_stays_where_a_person_has_put_it(best: str):
    """Versions that were registered by hand have none of our tags, and cannot be compared."""
    client, tags = mock.Mock(), {mlflow_model.STEP: "1", mlflow_model.DATA: "d"}
    client.create_registered_model.return_value = SimpleNamespace(aliases={"best": best})
    client.search_model_versions.return_value = [SimpleNamespace(version=n, tags={}) for n in ("2", "1")]
    ours = SimpleNamespace(version="3", tags=tags | {mlflow_model.SCORE: "knn/top1=9"})
    client.create_model_version.return_value = ours
    model = SimpleNamespace(model_id="m", tags=tags, artifact_location="there", source_run_id="r")
    assert mlflow_model.register(client, model, "shapes", {"knn/top1": 9}) == "3"
    client.set_registered_model_alias.assert_not_called()


@pytest.mark.slow
def test_runs_are_registered_and_the_best_has_an_alias(
    uri: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second run is better, the third is worse."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    history = logged(finished, uri, "shapes")
    better = run_folder(tmp_path / "better", 70.0, 12)
    logged(better, uri, "shapes")
    client = MlflowClient(uri)
    logged(run_folder(tmp_path / "worse", 65.0, 14), uri, "shapes")
    assert int(client.get_model_version_by_alias("shapes", "best").version) == 2  # an integer without a server
    assert {int(v.version) for v in client.search_model_versions("name='shapes'")} == {1, 2, 3}
    table = pd.DataFrame({"image": photographs()})
    for name, out in (("best", better), ("1", finished)):
        address = f"models:/shapes@{name}" if name == "best" else f"models:/shapes/{name}"
        np.testing.assert_allclose(pyfunc.load_model(address).predict(table), ours(out), atol=1e-5)
    assert pyfunc.load_model("models:/shapes/latest").metadata.run_id == client.get_model_version("shapes", "3").run_id
    run = client.get_run(history.run.id)
    [data] = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("shapes", "0123", "training")
    assert json.loads(data.dataset.source) == {"uri": "/shapes"}
    (finished / "mlflow.json").write_text(json.dumps({uri: {"run_id": run.info.run_id}}))  # killed before its end
    logged(finished, uri, "shapes")
    assert len(client.search_model_versions("name='shapes'")) == 3
    assert len(client.get_run(history.run.id).outputs.model_outputs) == 1
    assert register_run(Tracking(uri), tmp_path / "worse" / "mlflow.json", "another") == "1"
    assert client.get_model_version("another", "1").tags["eagleray.score"] == "knn/top1=65.0"


@pytest.mark.slow
def test_a_registered_model_is_served_and_answers_with_features(uri: str, finished: Path, tmp_path: Path):
    logged(finished, uri, "served")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/served@best", "--env-manager", "local"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "-p", str(port)],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ
            | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MLFLOW_TRACKING_URI": uri},
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/ping", server, tmp_path / "log")
        rows = [[base64.b64encode(f).decode()] for f in photographs()]
        body = json.dumps({"dataframe_split": {"columns": ["image"], "data": rows}}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            features = json.load(reply)["predictions"]
    finally:
        os.killpg(server.pid, 9)
        server.wait()
    np.testing.assert_allclose(features, ours(finished), atol=1e-5)


def wait_until_up(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + mlflow_server.START
    while True:
        assert server.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
