"""A run is forecast before it begins: one line, a stored plan, and no start where memory cannot suffice."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.bucket import CountingBucket
from helpers.pictures import jpeg
from helpers.runs import arguments, split

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.config.channels import Channel
from eagleray.data.decode_crops import decode_boxes
from eagleray.reports import read, sections
from eagleray.runs import accelerators, local_forecast
from eagleray.runs import recipe as recipes
from eagleray.runs.checks import make_plan
from eagleray.runs.forecast import Devices, devices_of
from eagleray.runs.plan import Plan
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import resolve_paths
from eagleray.runs.step_log import utilisation
from eagleray.storage import store


def gpu(memory: float) -> Devices:
    return devices_of("h100", accelerators.find("h100")._replace(memory=memory), 1)


@pytest.fixture
def plan(small: Path, shards: Path, tmp_path: Path) -> Plan:
    name, overrides = split(arguments(small, shards, tmp_path / "run"))
    return make_plan(resolve_paths(recipes.load(name, overrides)), note=lambda _: None)


def test_a_small_run_on_a_cpu_is_not_traced(plan: Plan, tmp_path: Path):
    lines: list[str] = []
    local_forecast.check_fit(plan, lines.append)
    assert lines == []
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_forecast_is_printed_stored_and_not_made_again(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_forecast, "local_devices", lambda _: gpu(80))
    first: list[str] = []
    local_forecast.check_fit(plan, first.append)
    [line] = first
    assert line.startswith("plan: 1.5 of 80.0 GiB on h100")
    stored = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert stored["peak_flops"] == 989e12
    monkeypatch.setattr(local_forecast, "forecast", None)
    local_forecast.check_fit(plan, first.append)
    assert first == [line, line]
    rate = utilisation(stored, 1000.0, 2, epoch=0.5)
    assert rate == pytest.approx(1000 * stored["flops_per_image"] / 2 / 989e12)


def test_utilisation_is_that_of_the_views_of_the_epoch():
    stored = {"peak_flops": 1e6, "flops_per_image": 800.0, "phases": [{"until": 2, "flops_per_image": 200.0}]}
    rates = [utilisation(stored, 100.0, 1, epoch) for epoch in (0.0, 1.9, 2.0, 3.0)]
    assert rates == pytest.approx([0.02, 0.02, 0.08, 0.08])


def test_a_run_that_cannot_fit_begins_only_if_the_user_insists(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eagleray.runs.forecast.remedies", lambda *_: ())
    monkeypatch.setattr(local_forecast, "local_devices", lambda _: gpu(1))
    with pytest.raises(UserError, match=r"needs 1.5 GiB on each h100, which has 1.0 GiB.*--insist"):
        local_forecast.check_fit(plan, lambda _: None)
    local_forecast.check_fit(plan, lambda _: None, insist=True)


def test_a_cpu_with_too_little_memory_is_a_warning(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eagleray.runs.forecast.remedies", lambda *_: ())
    monkeypatch.setattr(local_forecast, "local_devices", lambda _: Devices("cpu", 1, None, 10**5))
    lines: list[str] = []
    local_forecast.check_fit(plan, lines.append)
    assert lines[1].startswith("warning: ")


@pytest.mark.parametrize("place", ["folder", pytest.param("store", marks=pytest.mark.slow)])
def test_a_run_writes_its_utilisation_and_a_profile_and_reports_plan_and_fact(
    place: str,
    small: Path,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    url = str(tmp_path / "run") if place == "folder" else "s3://runs/run"
    out = run_store(url).view
    monkeypatch.setattr(local_forecast, "local_devices", lambda _: replace(gpu(80), name="pretended"))
    pretrain(*split(arguments(small, shards, url, "max_steps=4", "profile=2..3")))
    text = capsys.readouterr()
    assert "on pretended" in text.out + text.err
    table = (out / "profile" / "operations.txt").read_text()
    assert "aten::" in table
    assert table in text.out + text.err
    events = json.loads((out / "profile" / "trace.json").read_text())["traceEvents"]
    assert sum(e.get("name") == "Optimizer.step#AdamW.step" and e.get("ph") == "X" for e in events) == 2
    assert all(0 < line["mfu"] < 1 for line in read_lines(out / "metrics.jsonl"))
    [fact] = sections.plan_and_fact(read.read(url))
    assert [row[0] for row in fact.rows] == ["images/s", "memory of tensors, GiB", "model FLOP utilisation"]
    assert all(row[1] is not None for row in fact.rows)


@pytest.mark.parametrize("text", ["3..2", "0..1", "a..b"])
def test_wrong_steps_of_a_profile_are_one_line(small: Path, text: str):
    with pytest.raises(UserError, match=r"profile: .*expected the first and the last step, such as 10..12"):
        recipes.load(str(small), [f"profile={text}"])


def test_nothing_is_said_of_devices_that_are_elsewhere(small: Path, monkeypatch: pytest.MonkeyPatch):
    assert local_forecast.local_devices(recipes.load(str(small), ["workers=2", "gpus=true"])) is None
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert local_forecast.local_devices(recipes.load(str(small), ["workers=2"])) is None
    assert local_forecast.local_devices(recipes.load(str(small), ["workers=0"])) is not None


def test_images_that_do_not_decode_are_not_timed(small: Path, monkeypatch: pytest.MonkeyPatch):
    """Training reads others in their place."""
    decoded: list[bytes] = []

    def decode(data: bytes, *args: Any, **more: Any) -> Any:
        decoded.append(data)
        return decode_boxes(data, *args, **more)

    monkeypatch.setattr(local_forecast, "decode_boxes", decode)
    monkeypatch.setattr(local_forecast, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    monkeypatch.setattr(local_forecast, "SECONDS", 4)
    made = recipes.load(str(small))
    good, bad = jpeg(0), b"no image"
    local_forecast.loader_rate(made, [good, bad, good, bad], gpu=False)
    assert decoded == [good, bad, good, good, good]
    decoded.clear()
    bands = replace(made, data=replace(made.data, channels=(Channel(mean=0.0, std=1.0),) * 6))
    local_forecast.loader_rate(bands, [good], gpu=False)
    assert decoded == [good, *[local_forecast.photograph()] * 3]


def test_a_run_of_other_length_or_with_another_bank_is_forecast_again(plan: Plan):
    made = plan.recipe
    changed = replace(made, max_steps=3), replace(made, monitor=replace(made.monitor, bank=10**6))
    keys = [local_forecast._key(one, gpu(80)) for one in (made, *changed)]
    assert keys[0] not in keys[1:]
