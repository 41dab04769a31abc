"""The stream in a loop of one's own is that of a run, on any number of processes, from any step."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eagleray
from eagleray.data.loader import Loader
from eagleray.engine import world
from eagleray.runs import recipe
from eagleray.runs.checks import make_plan
from eagleray.runs.sources import resolve_paths

VIEWS = [{"size": 16, "scale": [0.3, 1.0], "solarize": 0.1}, {"size": 16, "scale": [0.3, 1.0], "blur": 0.5}]

TORCHRUN = """
import os, sys, torch, eagleray
torch.set_num_threads(1)
for ranks_are_of in ("environment", "group"):
    if ranks_are_of == "group":
        torch.distributed.init_process_group("gloo")
    loader = eagleray.loader(sys.argv[1], views=[{"size": 8}], batch=16, start=2, workers=0)
    batches = [batch for batch, _ in zip(loader, range(3))]
    file = f"{sys.argv[2]}/{ranks_are_of}{os.environ['RANK']}.pt"
    torch.save([(b.index, b.views[0], b.rows) for b in batches], file)
"""

# The iterator is closed while the interpreter ends, when no thread can be started any more.
UNFINISHED = """
import sys, eagleray
batches = iter(eagleray.loader(sys.argv[1], views=[{"size": 8}], batch=16, workers=1))
next(batches)
"""

BLACK = """
from eagleray import register

@register.view("black")
def black(crop, seed):
    return crop * 0
"""


def test_it_is_the_stream_of_a_run(small: Path, shards: Path):
    plan = make_plan(resolve_paths(recipe.load(str(small), [f"data.train={shards / 'train'}"])))
    run = Loader(plan.stream, rank=0, ranks=1, workers=0, device=world.local().device).batches(9, 12)
    loader = eagleray.loader(shards / "train", views=VIEWS, batch=32, lanes=8, start=9, workers=0)
    assert (len(loader), loader.samples, loader.epoch) == (10, 320, 0)
    mine = [*loader, *loader][:3]  # to the end of the first epoch, and into the second
    for (batch, _), own in zip(run, mine, strict=True):
        assert torch.equal(batch.index, own.index)
        assert torch.equal(batch.label, own.label)
        assert all(torch.equal(a, b) for a, b in zip(batch.views, own.views, strict=True))


@pytest.mark.slow
def test_a_script_ends_that_has_not_read_to_the_end(shards: Path):
    done = subprocess.run([sys.executable, "-c", UNFINISHED, str(shards / "train")], capture_output=True, timeout=300)
    assert (done.returncode, b"Exception ignored" in done.stderr) == (0, False), done.stderr


def test_a_position_is_kept_and_loaded(shards: Path):
    loader = eagleray.loader(shards / "train", views=[{"size": 8}], batch=64, workers=0)
    stream = iter(loader)
    next(stream)
    state = loader.state_dict()
    want = next(stream).index
    again = eagleray.loader(shards / "train", views=[{"size": 8}], batch=64, workers=0)
    again.load_state_dict(state)
    assert torch.equal(next(iter(again)).index, want)


@pytest.mark.slow
def test_a_plug_in_changes_the_crops(shards: Path, tmp_path: Path):
    (tmp_path / "black.py").write_text(BLACK)
    views = [{"size": 8, "operations": ["black"]}]
    loader = eagleray.loader(shards / "train", views=views, batch=16, workers=2, plugins=[tmp_path / "black.py"])
    view = next(iter(loader)).views[0]
    assert torch.equal(view, view[:1, :, :1, :1].expand_as(view))


@pytest.mark.slow
def test_torchrun_deals_the_global_batches(shards: Path, tmp_path: Path):
    """torchrun and its processes start cold. They know their ranks from the environment, and then from their group."""
    (tmp_path / "script.py").write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(tmp_path / "script.py"), str(shards / "train"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loader = eagleray.loader(shards / "train", views=[{"size": 8}], batch=16, start=2, workers=0)
    whole = [batch for batch, _ in zip(loader, range(3), strict=False)]
    for ranks_are_of in ("environment", "group"):
        ranks = [torch.load(tmp_path / f"{ranks_are_of}{rank}.pt") for rank in range(2)]
        for a, b, batch in zip(*ranks, whole, strict=True):
            assert a[2] == b[2] == (8, 8)
            assert torch.equal(torch.cat([a[0], b[0]]), batch.index)
            assert torch.allclose(torch.cat([a[1], b[1]]), batch.views[0], atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"views": [{"sise": 8}]}, r"views\.0: sise: unknown key; did you mean 'size'"),
        ({"views": []}, "views: expected at least one"),
        ({"views": [{"size": 8}, {"size": 8, "scale": [0.5, 1.0], "same_crop": True}]}, "same_crop: expected"),
        ({"batch": 0}, "batch=0: expected a whole number from 1 on"),
        ({"start": -1}, "start=-1: expected a whole number from 0 on"),
        ({"seed": -1}, "seed=-1: expected a whole number from 0 on"),
        ({"lanes": -4}, "lanes=-4: expected a whole number from 1 on"),
        ({"workers": -1}, "workers=-1: expected a whole number from 0 on"),
        ({"batch": 1000}, "320 samples do not fill one global batch of 1000"),
        ({"lanes": 7}, "the number of lanes must divide it"),
    ],
)
def test_what_is_wrong_is_a_user_error(keys: dict[str, object], message: str, shards: Path):
    with pytest.raises(eagleray.UserError, match=message):
        eagleray.loader(shards / "train", **({"views": [{"size": 8}], "batch": 16} | keys))  # type: ignore[arg-type]
