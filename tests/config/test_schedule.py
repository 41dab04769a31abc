"""Numbers that move over training."""

import pytest

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.runs import recipe as recipes
from eagleray.runs.recipe import Optim


def test_drops_divide_by_ten_at_their_epochs():
    lr = Schedule(value=0.03, drops=(120, 160))
    at = [0, 1199, 1200, 1599, 1600, 1999]
    assert [lr(Progress(step, 10, 200)) for step in at] == pytest.approx([0.03, 0.03, 3e-3, 3e-3, 3e-4, 3e-4])


def test_drops_come_after_the_warm_up():
    lr = Schedule(value=1.0, warmup=10, drops=(5, 20))
    assert lr(Progress(50, 10, 40)) == 0.5
    assert lr(Progress(100, 10, 40)) == pytest.approx(0.1)
    assert lr(Progress(200, 10, 40)) == pytest.approx(0.01)


def test_drops_or_a_cosine():
    with pytest.raises(ValueError, match=r"drops=\[60\] and end=0.0: expected only one of them"):
        Schedule(value=1.0, end=0.0, drops=(60,))
    with pytest.raises(UserError, match=r"lr: .*drops=.* and end="):
        config.check(Optim, {"lr": {"value": 0.03, "drops": [120, 160], "end": 0}}, "r")
    assert config.check(Optim, {"lr": {"value": 0.03, "drops": [120, 160]}}, "r").lr.drops == (120, 160)


def test_timm_is_a_step_behind_and_its_cosine_begins_with_training():
    lr = Schedule(value=1.0, warmup_from=0.2, warmup=1, end=0.0, timm=True)
    cosine = Schedule(value=1.0, end=0.0)
    at = [Progress(step, 4, 3) for step in range(12)]
    assert [lr(a) for a in at[:5]] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8])
    assert [lr(a) for a in at[5:]] == pytest.approx([cosine(a) for a in at[4:-1]])
    assert max(map(lr, at)) < 1


def test_an_inclusive_warm_up_of_a_fraction_does_not_exceed_its_value():
    temperature = Schedule(value=0.07, warmup_from=0.04, warmup=2.1, inclusive=True, per_epoch=True)
    found = [temperature(Progress(10 * epoch, 10, 21)) for epoch in range(4)]
    assert found == pytest.approx([0.04, 0.04 + 0.03 / 1.1, 0.07, 0.07])


def test_a_temperature_is_above_zero_in_every_step():
    keys = ["data.train=none", "method.teacher_temp.value=0.07", "method.teacher_temp.warmup=30"]
    with pytest.raises(UserError, match=r"teacher_temp.*warmup_from"):
        recipes.load("dino_vits16_in1k_ep100", keys)
    recipes.load("dino_vits16_in1k_ep100", [*keys, "method.teacher_temp.warmup_from=0.04"])
