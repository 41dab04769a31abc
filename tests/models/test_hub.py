"""Names of the Hugging Face Hub and of timm: from the cache, and refused at once where the Hub does not give them."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers.networks import network
from huggingface_hub import constants
from safetensors.torch import save_file

from eagleray.base.errors import UserError
from eagleray.evaluation.target import load_target
from eagleray.models.backbone import Backbone
from eagleray.models.pixels import OURS
from eagleray.models.weights import fill
from eagleray.runs.restore import public_weights

NAME = "somebody/some-vit"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def refused(source: str) -> str:
    start = time.monotonic()
    with pytest.raises(UserError) as e:
        public_weights(source, "start.from")
    assert time.monotonic() - start < 20
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("source", [f"hf:{NAME}", "timm:vit_small_patch16_224.dino"])
def test_without_a_network_a_name_is_refused_at_once(source: str, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    line = refused(source)
    assert line.startswith(
        f"start.from={source}: not in the Hub's cache on this machine, and {nobody} cannot be reached"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "and HF_HUB_OFFLINE is set" in refused(source)


def cached(tmp_path: Path, tensors: dict[str, torch.Tensor], files: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Put a repository into the Hub's cache, and return its commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    save_file(tensors, folder / "snapshots" / commit / "model.safetensors")
    for name, content in files.items():
        (folder / "snapshots" / commit / name).write_text(json.dumps(content))
    return commit


def test_a_file_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    theirs, ours = network(seed=1), network()
    commit = cached(tmp_path, theirs.model.state_dict())
    weights = public_weights(f"hf:{NAME}", "start.from")
    assert weights is not None
    assert fill(ours, weights, whole=True).share == 1
    assert torch.equal(ours.model.cls_token, theirs.model.cls_token)
    assert public_weights(f"hf:{NAME}@{commit}", "start.from") is not None


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"preprocessor_config.json": {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}}, ((0.5,) * 3, (0.25,) * 3)),
        ({"preprocessor_config.json": {"do_normalize": False, "image_mean": [0.5] * 3}}, ((0.0,) * 3, (1.0,) * 3)),
        ({"config.json": {"pretrained_cfg": {"mean": [0.1] * 3, "std": [1] * 3}}}, ((0.1,) * 3, (1.0,) * 3)),
        ({"preprocessor_config.json": {"size": 224}, "config.json": {"mean": OURS.mean, "std": OURS.std}}, OURS),
        ({}, None),
        ({"config.json": {"model_type": "vit"}}, None),
        ({"config.json": {"mean": [0.5], "std": [0.5]}}, None),
        ({"config.json": ["mean"]}, None),
    ],
)
def test_a_repository_says_the_colours_of_its_weights(
    files: dict[str, Any], want: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(tmp_path, network().model.state_dict(), files)
    weights = public_weights(f"hf:{NAME}", "start.from")
    assert weights is not None
    assert weights.pixels == want
    warning = fill(network(), weights).warning
    if want is None:
        assert warning.startswith(f"start.from=hf:{NAME}: its repository says no mean and deviation of pixels")
    else:
        assert not warning


def test_a_repository_says_how_many_heads_its_weights_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    stated = {"num_hidden_layers": 2, "num_attention_heads": 12}
    cached(tmp_path, network().model.state_dict(), {"config.json": stated})
    weights = public_weights(f"hf:{NAME}", "start.from")
    assert weights is not None
    with pytest.raises(UserError, match=r"blocks\.0\.attn has 12 attention heads in the weights, but 3 in the model"):
        fill(network(), weights)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BaseHTTPRequestHandler]]:
    """A Hub that answers every question with 401 and the error code of its class."""

    class Gate(BaseHTTPRequestHandler):
        code = "GatedRepo"

        def do_HEAD(self) -> None:
            self.send_response(401)
            self.send_header("X-Error-Code", self.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Gate) as server:
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", here)
        template = here + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Gate
        server.shutdown()


def test_a_repository_that_needs_a_token_says_so(gate: type[BaseHTTPRequestHandler]):
    assert "accept its terms there and set HF_TOKEN to a token that may read it" in refused(f"hf:{NAME}")
    gate.code = "RepoNotFound"  # type: ignore[attr-defined]
    assert "no such repository, or a private one; set HF_TOKEN" in refused(f"hf:{NAME}")


def test_an_evaluation_asks_for_the_architecture_and_takes_the_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^hf:a/b: needs --architecture NAME, the timm model that its weights fit$"):
        load_target("hf:a/b")
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    theirs = Backbone("resnet18")
    cached(tmp_path, theirs.model.state_dict(), {"preprocessor_config.json": half})
    found = load_target(f"hf:{NAME}", "resnet18")
    assert found.pixels == ((0.5,) * 3, (0.5,) * 3)
    assert torch.equal(found.backbone.model.conv1.weight, theirs.model.conv1.weight)
