"""Trials of a sweep on the simulated device, one after the other in one process as on a GPU."""

from pathlib import Path
from typing import Any

import pytest
from helpers.runs import weights
from helpers.simulated_device import DEVICE, MEMORY, simulated
from helpers.simulated_runs import small_run

from eagleray import config
from eagleray.engine.world import World
from eagleray.runs.tracking import Tracking
from eagleray.sweeps import trial as trials
from eagleray.sweeps.sweep import put
from eagleray.sweeps.trial import Trial


@pytest.mark.slow
def test_trials_run_on_the_device_and_leave_its_memory_free(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain = trials.pretrain.pretrain

    def on_device(*args: Any, **kwargs: Any) -> Any:
        with simulated():  # in the thread of the trial's run
            return pretrain(*args, **kwargs)

    monkeypatch.setattr(trials.pretrain, "pretrain", on_device)
    monkeypatch.setattr(trials.pretrain, "write_export", lambda *_: None)
    monkeypatch.setattr(trials.world, "local", lambda gpus: World(DEVICE))
    r = small_run("mocov3", shards, tmp_path / "out", "max_steps=8", "evaluate.probe_epochs=0")
    shared = {
        "recipe": config.to_plain(r),
        "plugins": {},
        "objective": "health/backbone_rank",
        "after": 0.0,
        "command": "c",
    }
    kept = []
    for name, rate in (("000", 1e-3), ("001", 1e-2)):
        tree = put(shared["recipe"], {"optim.lr.value": rate})
        own = {"folder": str(tmp_path), "sweep": "sweep", "recipe": tree, "threads": 1}
        trial = Trial(name, shared | own, Tracking("none"))
        result = trial.next()
        while not result.get("done"):
            result = trial.next()
        assert trial.failure == ""
        assert result["percent"] == 100
        assert all(x.device.type == "cpu" for x in weights(tmp_path / name).values())
        trial.end()
        kept.append(MEMORY.now)
    assert kept[0] == kept[1] < MEMORY.peak / 10, "constants alone may stay"
