"""Spikes are found where they are, and nowhere else."""

import numpy as np
import pytest

from eagleray.runs.health import FACTOR, SPREAD, WARM, Spike, Spikes

LAYERS = ["patch_embed", "blocks.00", "blocks.11"]


def run(norms: np.ndarray) -> list[Spike]:
    """What is found in norms (steps, L), steps counted from 1."""
    spikes = Spikes(LAYERS)
    return [s for i, row in enumerate(norms) if (s := spikes.add(i + 1, row.tolist()))]


@pytest.fixture
def calm() -> np.ndarray:
    return np.exp(0.2 * np.random.default_rng(0).standard_normal((300, 3))) * [0.1, 1.0, 10.0]


def test_noise_and_slow_change_are_no_spikes(calm: np.ndarray):
    drift = np.exp(np.linspace(0, 3, len(calm)))[:, None]
    assert run(calm) == run(calm * drift) == run(calm / drift) == []


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_what_is_usually_noisy_must_jump_farther(noise: float):
    wild = np.exp(noise * np.random.default_rng(1).standard_normal((2000, 3)))
    assert run(wild) == []


def test_a_spike_says_where_it_began_and_how_it_went_on(calm: np.ndarray):
    calm[200:220, 0] *= 100
    calm[212:220, 1] *= 50
    calm[217:230, 2] *= 60
    [spike] = run(calm)
    assert (spike.step, spike.first) == (201, "patch_embed")
    assert [(name, after) for name, after, _ in spike.layers] == list(zip(LAYERS, (0, 12, 17), strict=True))
    assert spike.layers[0][2] == pytest.approx(100, rel=0.9)
    assert spike.lasted is not None
    assert 29 <= spike.lasted <= 31
    assert "first in patch_embed, blocks.11 17 steps later; over after" in str(spike)


def test_all_layers_at_once(calm: np.ndarray):
    calm[150] *= 80
    [spike] = run(calm)
    assert "in all layers at once" in str(spike)
    assert spike.lasted == 1


def test_a_rise_that_stays_is_told_once_and_becomes_usual(calm: np.ndarray):
    calm[150:] *= 50
    [spike] = run(calm)
    assert spike.lasted is None
    assert f"not over in {SPREAD} steps" in str(spike)


def test_a_spike_does_not_hide_the_next(calm: np.ndarray):
    for start in (100, 160, 220):
        calm[start : start + 10, 0] *= 80
    assert [s.step for s in run(calm)] == [101, 161, 221]


def test_nothing_is_judged_before_there_is_a_median(calm: np.ndarray):
    calm[WARM - 1] *= 100
    assert run(calm) == []


def test_skipped_steps_are_left_out(calm: np.ndarray):
    calm[100] = np.inf
    calm[120, 1] = np.nan
    assert run(calm) == []


def test_a_layer_without_gradient_never_spikes(calm: np.ndarray):
    calm[:, 1] = 0
    assert run(calm) == []
    assert FACTOR > 2  # else calm and spike overlap
