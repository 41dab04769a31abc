"""What a run has recorded of a step, where its files are damaged or a stranger's."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagleray.base.errors import UserError
from eagleray.runs import layout
from eagleray.runs.step_record import find_record


@pytest.mark.parametrize("norm", [{}, {"grad_norm": "x"}, {"grad_norm": None}])
def test_a_line_without_a_number_is_named(norm: dict[str, Any], tmp_path: Path):
    (tmp_path / layout.STEPS).write_text(json.dumps({"step": 2, "loss": 1.0, **norm}) + "\n")
    with pytest.raises(UserError, match=r"step 2: .*has recorded no number for its grad_norm"):
        find_record(tmp_path, 2)


def test_a_skipped_step_without_keys_is_a_record(tmp_path: Path):
    (tmp_path / layout.STEPS).write_text('{"step": 2, "loss": NaN, "grad_norm": NaN}\n')
    (tmp_path / layout.SKIPPED).write_text('{"step": 2}\n')
    assert find_record(tmp_path, 2).skipped is None
