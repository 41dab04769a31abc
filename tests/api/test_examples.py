"""Every example in a docstring of the API and in docs/python.md runs as it is written."""

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.recipes import SMALL

import eagleray
from eagleray.api import jobs
from eagleray.cluster.jobs import Job
from eagleray.datasets.shapes import image
from eagleray.methods.method import Method
from eagleray.runs import checks

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def documented() -> dict[str, Any]:
    """Functions, and classes with their methods, by name; not plain errors and data that need no example."""
    things: dict[str, Any] = {}
    for name in eagleray.__all__:
        thing = getattr(eagleray, name)
        if inspect.isfunction(thing):
            things[name] = thing
        elif inspect.isclass(thing) and thing.__module__.startswith("eagleray.api."):
            things |= {f"{name}.{n}": m for n, m in vars(thing).items() if inspect.isfunction(m) and example(m)}
            things |= {name: thing} if example(thing) else {}
    return things


def example(thing: Any) -> str:
    """The code of an Example block."""
    _, _, block = (inspect.getdoc(thing) or "").partition("Example:\n")
    return textwrap.dedent(block)


@pytest.fixture(scope="module")
def home(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with what the examples name: shards/, photos/, runs/a and sweep.yaml."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "shards").mkdir()
    for path in (shards / "train").iterdir():
        os.link(path, folder / "shards" / path.name)
    for i in range(128):
        path = folder / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image(0, i)[0].save(path)
    (folder / "small.yaml").write_text(SMALL)
    (folder / "sweep.yaml").write_text(
        yaml.safe_dump(
            {
                "recipe": "small.yaml",
                "space": {"optim.lr.value": {"log": [1.0e-4, 1.0e-2]}},
                "objective": {"key": "monitor/knn"},
                "fixed": {"monitor.every": 4, "evaluate.probe_epochs": 0},
            }
        )
    )
    before = Path.cwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)  # which takes seconds
        run = eagleray.pretrain(
            "mocov3_vitxs8_shapes_demo",
            {"data.train": "shards/", "data.lanes": 8, "optim.batch": 32, "evaluate.probe_epochs": 1},
            out="runs/a",
            workers=0,
            max_steps=2,
        )
        assert run.finished
    yield folder
    os.chdir(before)


class OneJob:
    """A cluster that runs whatever it is given, as far as one may ask."""

    address = "http://head:8265"
    known = Job("first-00000000", "running", "dino", "s3://bucket/runs/first", "d", 0.0, 1.0, None, "")

    def __init__(self, address: str | None) -> None:
        pass

    def jobs(self) -> list[Job]:
        return [self.known]

    def job(self, name: str) -> Job:
        return self.known

    def waits(self, job: Job, known: Sequence[Job] = ()) -> str:
        return ""

    def logs(self, name: str) -> str:
        return "step 1\n"


SLOW = {"check_method", "export", "finetune", "tune"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in documented()])
def test_the_example_of(name: str, home: Path, monkeypatch: pytest.MonkeyPatch):
    thing = documented()[name]
    first = (inspect.getdoc(thing) or "").split("\n\n")[0]
    assert first.rstrip().endswith("."), "a first sentence"
    code = example(thing)
    assert code, f"{name} has no example"
    monkeypatch.setattr(jobs.cluster_jobs, "Cluster", OneJob)
    monkeypatch.setattr(jobs.cluster_jobs, "submit", lambda cluster, package, *more, **keys: OneJob.known.id)
    monkeypatch.setattr(checks, "check_method", lambda recipe: Method)  # of a large model
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", OneJob.address)
    torch.manual_seed(0)
    exec(compile(code, name, "exec"), {"eagleray": eagleray})


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(home: Path, capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    written = PAGE.read_text().partition("<!-- from here on written by")[0]  # the rest are the docstrings
    blocks = re.findall(r"```python\n(.*?)```", written, re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["position"] == {"step": 20}
    assert "optim.btach: unknown key; did you mean 'optim.batch'?" in capsys.readouterr().out


def test_the_page_names_every_function():
    text = PAGE.read_text()
    assert not [name for name in eagleray.__all__ if inspect.isfunction(getattr(eagleray, name)) and name not in text]
