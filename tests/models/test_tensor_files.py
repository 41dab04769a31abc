"""Files of tensors as the training scripts of others store them: read whole, or refused in a line, and nothing runs."""

import argparse
import collections
import datetime
import functools
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.networks import network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.models.tensor_files import load_tensors, mappings, unwrap_name
from eagleray.models.weights import FillReport, fill, from_tensors
from eagleray.runs.start import weights_of

State = dict[str, Tensor]
THEIRS: State = network(seed=1).model.state_dict()


def under(*prefixes: str) -> State:
    """The tensors below each prefix: those of the first as they are, the others' with another sign."""
    out = {}
    for number, prefix in enumerate(prefixes):
        out |= {prefix + k: -v if number else v for k, v in THEIRS.items()}
    return out


OTHERS = under("", "x.")
OTHER = {k.removeprefix("x."): v for k, v in OTHERS.items() if k.startswith("x.")}
HEAD = {"module.head.mlp.0.weight": torch.ones(8, 24)}
BLOCK = "blocks.0."
FILES: dict[str, Any] = {
    # wrappers in wrappers
    "ddp of compiled": {"model": under("module._orig_mod.")},
    "compiled of ddp": {"model": under("_orig_mod.module.")},
    "compiled inside": {"model": under("backbone._orig_mod.")},
    "ddp inside": {"model": under("backbone.module.")},
    "twice module": {"state_dict": under("module.module.")},
    "lightning, compiled": {"state_dict": under("model._orig_mod."), "pytorch-lightning_version": "2.5"},
    "fabric": {"model": under("_forward_module.")},
    "checkpointing": {k.replace(BLOCK, f"{BLOCK}_checkpoint_wrapped_module."): v for k, v in THEIRS.items()},
    "fsdp": {f"_fsdp_wrapped_module.{k.replace(BLOCK, f'{BLOCK}_fsdp_wrapped_module.')}": v for k, v in THEIRS.items()},
    "fsdp of all": {f"module._fsdp_wrapped_module.{k.replace('attn.', 'attn.module.')}": v for k, v in THEIRS.items()},
    "averaged model": {"model": under("module.") | {"n_averaged": torch.tensor(3)}},
    # places
    "i-jepa": {"encoder": OTHER, "predictor": under("module.x."), "target_encoder": under("module."), "epoch": 3},
    "msn": {"target_encoder": under("module."), "epoch": 3},
    "mae": {"model": THEIRS, "optimizer": {}, "args": argparse.Namespace(lr=1e-3)},
    **{key: {key: THEIRS, "epoch": 3} for key in ("net", "weights", "model_state", "model_state_dict", "backbone")},
    "encoder": {"encoder": THEIRS},
    "deepspeed": {"module": THEIRS, "dp_world_size": 8},
    "vissl": {"classy_state_dict": {"base_model": {"model": {"trunk": under("_feature_blocks."), "heads": HEAD}}}},
    "a list": [{"epoch": 3}, {"model": THEIRS}],
    "in a list": {"models": [{"state_dict": THEIRS}, {"loss": 0.5}]},
    "an optimiser's moments by name": {"optimizer": {"exp_avg": OTHER}, "weights": THEIRS},
    "an optimiser's moments by number": {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "net": THEIRS},
    # prefixes
    "solo-learn": {"state_dict": under("backbone.", "momentum_backbone.") | {"projector.0.weight": torch.ones(8, 24)}},
    "simsiam": {"state_dict": under("module.encoder.") | {"module.predictor.0.weight": torch.ones(8, 8)}},
    "byol": {"state_dict": under("online_encoder.net.", "target_encoder.net.")},
    "barlow twins": {"model": under("module.backbone.") | HEAD},
    "swav": under("module.") | {"module.projection_head.0.weight": torch.ones(8, 24)},
    "mmpretrain": {"state_dict": under("backbone."), "meta": {}},
    "lightly": {"state_dict": under("teacher_backbone.", "student_backbone.")},
    "lightly-train": {
        "state_dict": under(*(f"{role}_embedding_model.wrapped_model._model." for role in ("teacher", "student")))
    },
    "dino in one mapping": {"model": under("teacher.backbone.", "student.backbone.")},
    "vit": {"model": under("vit.")},
    "open_clip": {"state_dict": under("visual.trunk.") | {"logit_scale": torch.ones(())}},
    "image encoder": {"model": under("image_encoder.")},
    "feature extractor": {"state_dict": under("feature_extractor.")},
    "dinov2's teacher": {"teacher": under("backbone.") | {"dino_head.mlp.0.weight": torch.ones(8, 24)}},
    "teacher": {"teacher": THEIRS},
    "an empty teacher": {"teacher": {}, "model": THEIRS},
    # beside the tensors
    "numpy's scalars": {"state_dict": under("module."), "best_acc": np.float64(71.2), "epoch": np.int64(3)},
    "numpy's arrays": {"model": {k: v.numpy() for k, v in THEIRS.items()}},
    "numpy's arrays, column-major": {"model": {k: np.asfortranarray(v.numpy()) for k, v in THEIRS.items()}},
    "numpy's arrays, big-endian": {"model": {k: v.numpy().astype(">f4") for k, v in THEIRS.items()}},
    "texts and objects of numpy": {"model": THEIRS, "names": np.array(["a", "bc"]), "any": np.array([{}, None])},
    "dtypes and devices": {"model": THEIRS, "dtype": torch.float16, "device": torch.device("cpu")},
    "defaultdict": {"log": collections.defaultdict(list, loss=[0.5]), "model": collections.defaultdict(int, THEIRS)},
    "deque": {"model": THEIRS, "losses": collections.deque([1.0, 2.0], maxlen=3)},
    "counter": {"model": THEIRS, "seen": collections.Counter("aab")},
    "paths and dates": {"args": {"out": Path("/data"), "at": datetime.datetime(2026, 1, 2)}, "model": THEIRS},
    "sets and bytes": {"model": THEIRS, "seen": {1}, "frozen": frozenset({2}), "raw": b"\xff", "c": 1j, "r": range(3)},
    "partial": {"model": THEIRS, "make": functools.partial(torch.optim.AdamW, lr=0.1), "f": functools.partial(eval)},
    "methods": {"model": THEIRS, "best": collections.Counter.most_common},
    "parameters": {"model": {k: torch.nn.Parameter(v) for k, v in THEIRS.items()}},
}


class Options:
    """An object of a class that the reader does not know."""

    def __init__(self, **keys: Any) -> None:
        self.__dict__.update(keys)


class Settings(dict[str, Any]):
    """A mapping of such a class, as configurations are."""


FILES["objects"] = {"model": THEIRS, "options": Options(lr=0.1, more=[Options()])}
FILES["configurations"] = {"config": Settings(lr=0.1, inner=Settings()), "hyper_parameters": Settings(model=THEIRS)}
FILES["holding itself"] = {"model": THEIRS}
FILES["holding itself"]["again"] = [FILES["holding itself"]]


def stored(folder: Path, content: Any, name: str = "file.pth", **keys: Any) -> Path:
    torch.save(content, folder / name, **keys)
    return folder / name


def read(file: Path) -> tuple[State, FillReport]:
    ours = network()
    report = fill(ours, from_tensors(str(file), load_tensors(file)), whole=True)
    return ours.model.state_dict(), report


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


@pytest.mark.parametrize("kind", FILES)
def test_files_of_any_trainer_are_read_whole(kind: str, tmp_path: Path):
    for legacy in (False, True):
        file = stored(tmp_path, FILES[kind], _use_new_zipfile_serialization=not legacy)
        state, report = read(file)
        assert report.share == 1
        assert not [*report.missing, *report.resized]
        if kind == "dino in one mapping":
            assert "taken from model.teacher.backbone; as well would fit model.student.backbone" in str(report)
        assert equal(state, THEIRS), kind
    ours = network()
    fill(ours, weights_of(str(file), "start.from"), whole=True)
    assert equal(ours.model.state_dict(), THEIRS), "backbone.weights and start.from read different tensors"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_tensors_of_half_precision_are_read(kind: torch.dtype, tmp_path: Path):
    state, report = read(stored(tmp_path, {"model": {k: v.to(kind) for k, v in THEIRS.items()}}))
    assert report.share == 1
    assert equal(state, {k: v.to(kind).float() for k, v in THEIRS.items()})


WRAPPERS = st.lists(
    st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"]),
    max_size=3,
)
NAMES = st.sampled_from(["model", "backbone", "encoder", "net", "trunk", "base_model", "visual", "vit", "x_y"])
INSIDE = st.lists(NAMES | st.sampled_from(["module", "_orig_mod"]), max_size=4)
KEYS = st.sampled_from(["model", "state_dict", "net", "weights", "encoder", "target_encoder", "model_ema", "0", "any"])
BESIDE = st.sampled_from(
    [
        ("epoch", 3),
        ("args", argparse.Namespace(out=Path("/x"))),
        ("best", np.float32(0.5)),
        ("log", collections.defaultdict(list)),
        ("optimizer", {"state": {0: {"exp_avg": torch.ones(24)}}, "param_groups": [{"lr": 0.1}]}),
        ("queue", torch.ones(24, 64)),
        ("options", Options(lr=np.ones(3))),
    ]
)


@given(
    place=st.lists(KEYS | st.just(0), max_size=4),
    prefix=INSIDE,
    wrapper=WRAPPERS,
    point=st.integers(0, len(THEIRS) - 1),
    beside=st.lists(BESIDE, max_size=4),
    array=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_any_wrappers_places_and_prefixes_give_the_same_tensors(
    place: list[str | int], prefix: list[str], wrapper: list[str], point: int, beside: list[Any], array: bool
):
    """Wrappers stand in the middle of the names of one module, prefixes before all, mappings and lists around them."""
    module = ".".join(list(THEIRS)[point].split(".")[:-1])
    before = "".join(f"{part}." for part in prefix)
    content: Any = {}
    for name, value in THEIRS.items():
        own = name
        if module and name.startswith(f"{module}."):
            own = ".".join([module, *wrapper, name.removeprefix(f"{module}.")])
        content[before + own] = value.numpy() if array else value
    for key in place:
        content = [{}, content] if key == 0 else {key: content} | dict(beside)
    if isinstance(content, list):
        content = {"all": content}
    file = io.BytesIO()
    torch.save(content, file)
    assert equal(as_read(file.getvalue()), THEIRS)


def as_read(data: bytes) -> State:
    """The backbone that takes the tensors of a file with these bytes, which has no other place than memory."""
    with open(end := os.memfd_create("weights"), "wb", closefd=False) as file:
        file.write(data)
    try:
        state, report = read(Path(f"/proc/self/fd/{end}"))
    finally:
        os.close(end)
    assert report.share == 1
    return state


def test_wrappers_are_no_part_of_a_name_wherever_they_stand():
    assert unwrap_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.norm.weight") == "blocks.0.norm.weight"
    assert unwrap_name("_fsdp_wrapped_module.module.module.a") == "a"
    assert unwrap_name("modules.my_module.module") == "modules.my_module.module", (
        "no wrapper is the last part of a name"
    )


def test_a_model_with_the_name_of_a_wrapper_among_its_own_is_read(tmp_path: Path):
    theirs, ours = network(seed=1), network()
    for model in theirs.model, ours.model:
        model.blocks[0].module = torch.nn.Linear(3, 3)  # as timm's iFormer has it
    state = {f"module.{k}": v for k, v in theirs.model.state_dict().items()}
    report = fill(ours, from_tensors("file", state), whole=True)
    assert report.share == 1
    assert equal(ours.model.state_dict(), theirs.model.state_dict())


PREFERRED = [
    ({"state_dict_ema": THEIRS, "state_dict": OTHER}, "state_dict_ema"),
    ({"model": OTHER, "model_ema": THEIRS}, "model_ema"),
    ({"model": OTHER, "state_dict": THEIRS}, "state_dict"),
    ({"teacher": OTHER, "model": THEIRS}, "model"),
    ({"student": OTHER, "teacher": THEIRS}, "teacher"),
    ({"encoder": OTHER, "target_encoder": THEIRS}, "target_encoder"),
    ({"target_network": OTHER, "online_network": THEIRS}, "online_network"),
    ({"state_dict": under("base_encoder.", "momentum_encoder.")}, "state_dict.base_encoder"),
    ({"state_dict": under("encoder_q.", "encoder_k.")}, "state_dict.encoder_q"),
    ({"ema": {f"online_model.{k}": v for k, v in OTHER.items()} | under("ema_model.")}, "ema.ema_model"),
    ({"base_model": OTHER, "ema_model": THEIRS}, "ema_model"),
    ({"momentum": OTHER, "any": THEIRS}, "any"),
    ({"a": THEIRS, "b": OTHER}, "a"),  # no rule decides: the first, as the line says
]


@pytest.mark.parametrize(("content", "taken"), PREFERRED, ids=[taken for _, taken in PREFERRED])
def test_of_several_that_fit_one_is_preferred_and_named(content: Any, taken: str, tmp_path: Path):
    state, report = read(stored(tmp_path, content))
    assert equal(state, THEIRS)
    assert f"; taken from {taken}; as well would fit " in str(report)


def test_what_fits_better_is_taken_though_it_is_preferred_less(tmp_path: Path):
    half = {k: v for k, v in OTHER.items() if not k.startswith("blocks.1.")}
    state, report = read(stored(tmp_path, {"model_ema": half, "model": THEIRS}))
    assert report.share == 1
    assert equal(state, THEIRS)


def refused(content: Any, folder: Path, **keys: Any) -> str:
    file = stored(folder, content, **keys)
    with pytest.raises(UserError) as e:
        read(file)
    line = str(e.value)
    assert line.startswith(f"backbone.weights={file}: ")
    assert "\n" not in line
    assert len(line) < 400 + len(str(file))
    return line


def test_a_refusal_names_keys_of_the_file_and_of_the_backbone(tmp_path: Path):
    line = refused({"model": {f"layers.{n}.weight": torch.ones(2) for n in range(9)}}, tmp_path)
    assert "has 0.0% of" in line
    assert "missing: cls_token; pos_embed; patch_embed.proj.weight; and 27 more" in line
    assert "; it has layers.0.weight; layers.1.weight; layers.2.weight; and 6 more" in line
    assert "holds no tensors by name; its keys are epoch; loss" in refused({"epoch": 3, "loss": 0.5}, tmp_path)


def test_the_class_in_the_way_is_named(tmp_path: Path):
    whole = "store its state dict alone (it is a timm.models.vision_transformer.VisionTransformer)"
    assert whole in refused(network().model, tmp_path)
    assert whole.replace("is a", "has a") in refused({"model": network().model, "epoch": 3}, tmp_path)
    moments = {"optimizer": {"exp_avg": {"head.weight": torch.ones(3)}}}
    line = refused(moments | {"model": network().model}, tmp_path)
    assert "a timm.models.vision_transformer.VisionTransformer in it was not read" in line


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(value: float, tmp_path: Path):
    broken = dict(THEIRS) | {"norm.bias": torch.full((24,), value)}
    assert "norm.bias has values that are NaN or infinite" in refused({"model": broken}, tmp_path)
    array = {k: v.numpy() for k, v in broken.items()}
    assert "norm.bias has values that are NaN or infinite" in refused({"model": array}, tmp_path)
    state, report = read(stored(tmp_path, {"model": dict(THEIRS), "queue": torch.full((9,), value)}))
    assert report.share == 1
    assert equal(state, THEIRS)


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def touch(path: str) -> str:
    return f"open({path!r}, 'w')"


HOSTILE: dict[str, Callable[[str], Any]] = {
    "os.system": lambda p: Call(os.system, f"touch {p}"),
    "eval": lambda p: Call(eval, touch(p)),
    "exec": lambda p: Call(exec, touch(p)),
    "open": lambda p: Call(open, p, "w"),
    "Popen": lambda p: Call(subprocess.Popen, ["touch", p]),
    "check_output": lambda p: Call(subprocess.check_output, ["touch", p]),
    "Path.touch": lambda p: Call(Path.touch, Path(p)),
    "getattr, then a call": lambda p: Call(getattr(Path(p), "touch")),  # noqa: B009
    "__import__": lambda p: Call(__import__, "antigravity"),
    "pickle.loads": lambda p: Call(pickle.loads, pickle.dumps(Call(eval, touch(p)))),
    "methodcaller": lambda p: Call(__import__("operator").methodcaller("touch"), Path(p)),
    "sys.exit": lambda p: Call(sys.exit, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_would_run_code_is_refused_and_runs_none(name: str, legacy: bool, tmp_path: Path):
    """Also where its tensors are all there."""
    target = tmp_path / "touched"
    for content in ({"model": THEIRS, "x": [HOSTILE[name](str(target))]}, {"model": HOSTILE[name](str(target))}):
        line = refused(content, tmp_path, _use_new_zipfile_serialization=not legacy)
        assert "holds more than tensors; store its state dict alone (" in line
        assert not target.exists()
    assert "antigravity" not in sys.modules


def test_what_another_package_would_make_is_not_made(tmp_path: Path):
    """A function of a package is not called; the tensors beside it are read."""
    state, _ = read(stored(tmp_path, {"model": THEIRS, "x": Call(stored, tmp_path, {}, "touched")}))
    assert equal(state, THEIRS)
    assert not (tmp_path / "touched").exists()


def test_an_array_cannot_say_more_than_its_bytes_hold(tmp_path: Path):
    """NumPy would take the bytes for addresses of objects; a shape of more values than there are is refused."""
    rebuild, arguments, state = np.zeros(4).__reduce__()
    _, shape, kind, order, data = state

    class Array:
        def __init__(self, *state: Any) -> None:
            self.state = state

        def __reduce__(self) -> Any:
            return rebuild, arguments, self.state

    objects = Array(1, shape, np.dtype("O"), order, data)
    found, _ = mappings(load_tensors(stored(tmp_path, {"a": objects, "b": torch.ones(1)})))
    assert found.keys() == {""}
    assert found[""].keys() == {"b"}
    line = refused({"a": Array(1, (2**40,), kind, order, data)}, tmp_path)
    assert "cannot be read (ValueError: cannot reshape array of size 4" in line


def test_another_protocol_and_another_program_are_named(tmp_path: Path):
    assert "another pickle_protocol" in refused({"model": THEIRS}, tmp_path, pickle_protocol=4)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(UserError, match="TorchScript"):
        read(tmp_path / "script.pt")
