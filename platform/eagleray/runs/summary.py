"""Read the numbers of summary.json, which a run writes at its end and which may come from a stranger."""

import json
from pathlib import Path
from typing import Any

from eagleray.base.errors import UserError, explained
from eagleray.base.files import LARGE, is_number
from eagleray.runs import layout

# Keys of the step whose weights a run with `start.keep_best` exports, and of whether `start.stop_below` ended it.
EXPORTED, EARLY = "exported_step", "ended_early"
COUNTS = ("steps", "images", layout.EVALUATION_STARTS, EXPORTED, EARLY)
HEALTH, VERDICT, CHECKED, UNCHECKED = "health", "verdict", "checked", "unchecked"  # keys of lists of sentences
SENTENCES = (HEALTH, VERDICT, CHECKED, UNCHECKED)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the numbers at the end of a run and its lists of sentences; nothing while it has not ended.
    Values of other types are left out. Raises UserError when the file is not a JSON object."""
    path = folder / layout.SUMMARY
    return parse_summary(path.read_bytes() if path.exists() else None, str(path))


def parse_summary(text: str | bytes | None, name: str) -> dict[str, Any]:
    """Return the numbers in the text of the file `name`, as `read_summary` does."""
    with explained(f"{name}: not valid JSON", ValueError, RecursionError, why=False):
        content = json.loads(text or "{}")
    if not isinstance(content, dict):
        raise UserError(f"{name}: expected a JSON object, got a {type(content).__name__}")
    return {key: value for key, value in content.items() if _fits(key, value)}


def finished(folder: Path, steps: int = 0) -> dict[str, Any] | None:
    """Return the summary of a run whose evaluation at the end is done, if it took at least `steps` steps or was ended
    early by a rule, such as `start.stop_below`; None for other runs."""
    return if_finished(read_summary(folder), steps)


def if_finished(summary: dict[str, Any], steps: int) -> dict[str, Any] | None:
    """Return a summary if the run that wrote it is finished in the sense of `finished`, else None."""
    enough = summary.get("steps", -1) >= steps or summary.get(EARLY, 0) > 0
    return summary if enough and layout.EVALUATION_STARTS not in summary else None


def _fits(key: str, value: Any) -> bool:
    if key in COUNTS:
        return type(value) is int and 0 <= value < LARGE
    if key in SENTENCES:
        return isinstance(value, list) and all(isinstance(sentence, str) for sentence in value)
    return is_number(value)
