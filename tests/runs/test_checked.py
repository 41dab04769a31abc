"""What a run was checked for, how often, and what could not be."""

from eagleray.runs.health import checked

LOOK = {"lr": 1.0, "health/update": 1e-3, "health/input_mean": 0.0, "health/input_std": 1.0, "health/growth": 1.0}
LOOK |= {"health/projector_std": 1.0, "health/projector_rank": 20.0, "health/uniformity": -2.0}


def test_nothing_is_checked_where_nothing_was_measured():
    done, missing = checked([], lr=1.0)
    assert done == []
    assert missing[0] == "inputs, too large steps (0 of the 1 measurement that it takes)"
    assert missing[-1] == "kNN dip (0 of the 6 measurements that it takes)"


def test_what_was_measured_is_counted():
    score = {"monitor/knn": 9.0, "monitor/knn_error": 1.0}
    records = [LOOK | score | {"step": 10 * i} for i in range(1, 9)]
    done, missing = checked(records, lr=1.0)
    assert done == [
        "inputs, too large steps (8 measurements)",
        "non-finite (80 steps)",
        "spike (50 steps)",
        "collapse, frozen encoder (6 measurements)",
        "kNN dip (8 measurements)",
    ]
    assert missing == []
    slow = [record | {"lr": 0.1} for record in records]
    assert checked(slow, lr=1.0, labelled=False).missing == [
        "collapse, frozen encoder (0 of the 3 measurements that it takes)",
        "kNN dip (no labels)",
    ]


def test_a_spike_is_not_found_in_the_first_steps_of_a_run():
    def spikes(steps: int, first: int) -> list[str]:
        found = checked([LOOK | {"step": steps}], lr=1.0, first=first)
        return [line for line in found.done + found.missing if line.startswith("spike")]

    assert spikes(20, 0) == ["spike (0 of the 1 step that it takes)"]
    assert spikes(100, 60) == ["spike (10 steps)"]
