"""What records mean."""

import pytest

from eagleray.runs.health import GRACE, KINDS, LATE, LOOKS, Finding, Health, Spikes, words

GOOD = {
    "lr": 1e-3,
    "skipped_steps": 0,
    "health/update": 2e-3,
    "health/input_mean": 0.1,
    "health/input_std": 1.1,
    "health/projector_std": 0.8,
    "health/projector_rank": 20.0,
    "health/uniformity": -2.0,
    "health/backbone_std": 0.4,
    "health/backbone_rank": 12.0,
    "health/same_views": 0.01,
    "health/ema_distance": 0.01,
    "gain": 1.5,
    "health/growth": 1.01,
}


def told(*changes: dict[str, float], looks: int = 12) -> list[Finding]:
    """What is found in `looks` records that are GOOD but for the changes, the last of which stays."""
    health, found = Health(Spikes(["patch_embed"])), []
    for i in range(looks):
        changed = changes[min(i, len(changes) - 1)] if changes else {}
        found += health.look(GOOD | changed | {"step": 10 * (i + 1)})
    return found


def test_a_healthy_run_is_left_alone():
    assert told() == []
    assert words([]) == "no findings"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"health/projector_std": 0.01}, "collapse"),
        ({"health/projector_rank": 1.1}, "collapse"),
        ({"health/uniformity": -0.1}, "collapse"),
        ({"usage": 0.02}, "collapse"),
        ({"entropy": 0.9999}, "uniform output"),
        ({"gain": 0.001}, "uniform output"),
        ({"health/update": 0.3, "health/ema_distance": 3.0}, "too large steps"),
        ({"health/growth": 3.0}, "too large steps"),
        ({"health/update": 0.0}, "frozen encoder"),
        ({"health/ema_distance": 0.002}, "no momentum"),
        ({"health/input_mean": 120.0, "health/input_std": 60.0}, "inputs"),
        ({"health/same_views": 1.0}, "same views"),
        ({"skipped_steps": 2}, "non-finite"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, float], kind: str):
    found = told(change)
    assert {f.kind for f in found} == {kind}
    assert kind in KINDS
    if kind != "non-finite":  # each time it happens
        assert len(found) == 1


def test_nothing_is_judged_before_anything_can_have_been_learnt():
    """In a warm-up of epochs features are still what the random weights made them."""
    health = Health(Spikes(["patch_embed"]), lr=1.0)
    stuck = GOOD | {"gain": 0.0, "health/projector_std": 0.01}
    assert not [f for i in range(50) for f in health.look(stuck | {"step": i, "lr": 0.1})]
    assert {f.kind for i in range(LOOKS) for f in health.look(stuck | {"step": i, "lr": 0.3})} == {
        *("uniform output", "collapse")
    }


def test_prototypes_are_judged_by_what_is_chosen():
    cone = {"health/projector_std": 0.15, "health/uniformity": -0.1, "health/projector_rank": 2.6}
    assert told(cone | {"usage": 0.8}) == []
    assert {f.kind for f in told(cone)} == {"collapse"}


def test_features_that_were_spread_are_sooner_called_collapsed():
    bad = {"health/projector_std": 0.01, "health/uniformity": -0.01, "health/projector_rank": 1.1}
    [never] = told(bad, looks=30)
    [after] = told({}, {}, {}, bad, looks=30)
    assert never.step == 10 * (GRACE + LATE)
    assert after.step == 10 * (3 + LOOKS)


def test_a_passing_look_is_no_finding():
    bad = {"health/projector_std": 0.01}
    assert told(*[bad, {}] * 6) == []
    assert told({}, {}, {}, {}, *[bad] * (LOOKS - 1), {}) == []
    assert told({}, {}, {}, {}, *[bad] * LOOKS, {}) != []


def test_records_between_looks_change_nothing():
    health = Health(Spikes(["patch_embed"]))
    record = {k: v for k, v in GOOD.items() if not k.startswith("health/")} | {"step": 1, "entropy": 0.9999}
    assert not any(health.look(record) for _ in range(50))


CURVE = [20.0, 21, 20.5, 22, 23, 22.5, 24, 24.5, 25, 24.8, 26]


def dips(curve: list[float], error: float = 0.5) -> list[int]:
    health, found = Health(Spikes([])), []
    for i, top1 in enumerate(curve):
        found += health.look({"step": i, "monitor/knn": top1, "monitor/knn_error": error})
    return [f.step for f in found]


def test_dips_of_the_knn_curve_are_found_beyond_its_noise():
    assert dips(CURVE) == []
    assert dips([*CURVE, 15, 16, 24, 26]) == [len(CURVE)]  # once, where it falls
    assert dips([*CURVE, 15, 16, 24, 26], error=4.0) == []  # of few crops
    noisy = [30, 20, 32, 18, 31, 22, 29, 19, 33, 21, 30, 18]
    assert dips(noisy) == []
    assert dips([top1 * 0.3 for top1 in CURVE]) == []  # a small change in points


def test_the_first_steps_of_a_backbone_that_was_frozen_are_no_spike():
    norms = [[0.0]] * 40 + [[1.0]] * 60
    assert Health(Spikes(["patch_embed"]), frozen=40).gradients(1, norms) == []
    [found] = Health(Spikes(["patch_embed"])).gradients(1, norms)
    assert (found.step, found.kind) == (41, "spike")
