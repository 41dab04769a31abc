"""The values of steps that a line of metrics.jsonl has, also when a run goes on that records others."""

import pytest
import torch

from eagleray.base.errors import PluginError
from eagleray.runs.step_log import OpenLine, StepTable


def table(loss: list[float], **more: float) -> StepTable:
    values = {name: torch.tensor([value] * len(loss)) for name, value in more.items()}
    columns = {"loss": torch.tensor(loss), "skipped": torch.zeros(len(loss))} | values
    return StepTable(list(columns), torch.stack(list(columns.values()), 1))


def test_a_line_has_the_values_that_all_its_steps_have():
    line = OpenLine(["layer"])
    line.add(table([1.0, 3.0], loss_scale=8.0))
    again = OpenLine(["layer"])
    again.load_state_dict(line.state_dict())
    again.add(table([5.0], new=7.0))
    again.add(table([7.0], new=7.0))
    assert again.close().means() == {"loss": 4.0}
    again.add(table([5.0], new=7.0))
    assert again.close().means() == {"loss": 5.0, "new": 7.0}


def test_values_that_only_some_steps_return_are_refused():
    steps = [{"loss": torch.ones(()), "skipped": torch.zeros(())} for _ in range(3)]
    for at in (0, 1, 2):
        given = [step | ({"mine": torch.ones(())} if i == at else {}) for i, step in enumerate(steps)]
        with pytest.raises(PluginError, match=r"^method\.name: only some steps return mine; return it in each$"):
            StepTable.of(given, [4])
