"""Say what a run was checked for, how often, and what could not be.

That there is no finding means little where nothing was looked at.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eagleray.runs.health import DIP, LATE, LOOKS, Health
from eagleray.runs.metrics import MONITOR_KNN, START_CKA
from eagleray.runs.spikes import WARM, Spikes


class Checked(NamedTuple):
    """Names of findings with how often they were looked for, and names of others with the reason why they were not."""

    done: list[str]
    missing: list[str]


def checked(
    records: Sequence[Mapping[str, Any]],
    *,
    lr: float,
    frozen: float = 0.0,
    first: int = 0,
    labelled: bool = True,
    started: bool = False,
) -> Checked:
    """Return what the lines of metrics.jsonl allowed to check. `lr` and `frozen` are as for `Health`; `first` is the
    step that the run began with, and `started` says that it took over what is watched."""
    health = Health(Spikes([]), lr, frozen)
    for record in records:
        health.look(record)
    keys = {key for record in records for key in record}
    steps = int(records[-1]["step"]) if records else 0
    out = Checked([], [])

    def note(names: Sequence[str], times: int, least: int, what: str) -> None:
        words = ", ".join(names)
        if times >= least:
            out.done.append(f"{words} ({times:,} {what}{'s' * (times != 1)})")
        else:
            out.missing.append(f"{words} ({times} of the {least} {what}{'s' * (least != 1)} that it takes)")

    note(["inputs", *["same views"] * ("health/same_views" in keys), "too large steps"], health.looks, 1, "measurement")
    note(["non-finite"], steps, 1, "step")
    note(["spike"], max(steps - first - WARM, 0), 1, "step")
    in_a_row = ["uniform output"] * bool(keys & {"entropy", "gain"}) + ["frozen encoder"]
    in_a_row += ["no momentum"] * ("health/ema_distance" in keys)
    late = LOOKS if health.spread or not health.looks else LATE
    groups = [(["collapse", *in_a_row], LOOKS)] if late == LOOKS else [(["collapse"], LATE), (in_a_row, LOOKS)]
    for names, least in groups:
        note(names, health.settled, least, "measurement")
    if labelled:
        looks = sum(MONITOR_KNN in record for record in records)
        note(["kNN dip"], looks, DIP + 1, "measurement")
    else:
        out.missing.append("kNN dip (no labels)")
    if started:
        note(["start lost"], sum(START_CKA in record for record in records), 1, "measurement")
    return out
