"""The forecast of a run: what limits it, what it costs, and what to change when it does not fit."""

from dataclasses import replace

import pytest
import yaml
from helpers.recipes import small_recipe

from eagleray.base.errors import UserError
from eagleray.config.curriculum import Phase
from eagleray.runs import accelerators
from eagleray.runs import recipe as recipes
from eagleray.runs.accelerators import ATTENTION, CONV, MATMUL, MOVE, Rates
from eagleray.runs.forecast import (
    EXCHANGE,
    HOST,
    INPUT,
    MODEL,
    STORE,
    Devices,
    TrainingSet,
    devices_of,
    duration,
    forecast,
    precision_of,
    refusal,
)
from eagleray.runs.forecast_text import advice
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import StepTrace, Work

GIB = 2**30
H100 = accelerators.find("h100")
DATA = TrainingSet(1_000_000, 100_000.0, core_rate=1000.0)


@pytest.fixture
def small() -> Recipe:
    return recipes.check(yaml.safe_load(small_recipe("mocov3")), "small")


def traced(seconds: float = 0.1, gradients: int = 10**6, memory: int = GIB) -> StepTrace:
    """A step of matrix products that take an H100 so long."""
    flops = int(seconds * accelerators.REACHED[MATMUL] * H100.half * 1e12)
    work = {Work(MATMUL, False, flops, 0): 1.0}
    return StepTrace(8, {"activations": memory}, gradients, flops, 0.0, work, 1.0)


def test_an_operation_takes_the_time_of_its_flops_or_its_bytes():
    rates = Rates({(MATMUL, False): 100.0}, {MATMUL: 10.0, MOVE: 20.0}, launch=1.0)
    work = {Work(MATMUL, False, 1000, 10): 1.0, Work(MATMUL, False, 10, 50): 2.0, Work(MOVE, True, 0, 40): 3.0}
    assert rates.seconds(replace(traced(), work=work)) == (10 + 1) + 2 * (5 + 1) + 3 * (2 + 1)
    assert rates.slowed(2.0).seconds(replace(traced(), work=work)) == 2 * 32


def test_rates_that_are_fitted_to_two_steps_find_the_speed_of_work_and_the_time_of_an_operation():
    rates = Rates({(MATMUL, False): 100.0}, {MATMUL: 10.0}, launch=1.0)
    few, many = ({Work(MATMUL, False, n, 0): 7.0} for n in (100, 400))
    short, long, other = (replace(traced(), work=w) for w in (few, many, {Work(MATMUL, False, 50, 0): 30.0}))
    truth = replace(rates.slowed(2.0), launch=0.25)
    fitted = rates.fitted(short, truth.seconds(short), long, truth.seconds(long))
    assert fitted.seconds(other) == pytest.approx(truth.seconds(other))
    alike = rates.fitted(short, 28.0, short, 28.0)
    assert alike.seconds(other) == pytest.approx(2 * rates.seconds(other))
    faster = rates.fitted(short, 28.0, long, 14.0)  # no rates explain that more work takes less time
    assert faster.seconds(long) == pytest.approx(14.0)


@pytest.mark.slow
def test_auto_takes_parts_of_the_batch_only_where_the_whole_does_not_fit(small: Recipe):
    auto = replace(small, optim=replace(small.optim, batch=8192, micro_batch="auto"))
    whole = forecast(replace(auto, optim=replace(auto.optim, micro_batch=None)), devices_of("h100", H100, 1), DATA)
    assert forecast(auto, devices_of("h100", H100, 1), DATA).memory_needed == whole.memory_needed
    tight = replace(devices_of("h100", H100, 1), memory=whole.memory_needed - 1)
    assert forecast(auto, tight, DATA).fits
    assert forecast(auto, replace(tight, memory=1), DATA).memory_needed == whole.memory_needed


@pytest.mark.parametrize(
    ("data", "gradients", "limit", "key"),
    [
        (replace(DATA, core_rate=1e6), 10**6, MODEL, ""),
        (DATA, 10**6, INPUT, "data.workers=2"),
        (replace(DATA, core_rate=1e6, store_rate=1e6), 10**6, STORE, "data.cache"),
        (replace(DATA, core_rate=1e6), 10**12, EXCHANGE, "workers=8"),
    ],
)
def test_the_slowest_part_limits_a_run_and_its_key_is_named(
    small: Recipe, data: TrainingSet, gradients: int, limit: str, key: str
):
    batch = replace(small, optim=replace(small.optim, batch=160), data=replace(small.data, workers=1))
    found = forecast(batch, devices_of("h100", H100, 16), data, traced(0.005, gradients))
    assert found.limit == limit
    assert found.images_per_s == min(found.rates.values())
    assert " ".join(advice(found)).startswith(key)


def test_step_and_input_have_rates_of_their_own_and_cores_decode(small: Recipe):
    auto = replace(small, data=replace(small.data, workers="auto"))
    target, trace = devices_of("h100", H100, 2), traced(0.001)
    unknown = forecast(auto, target, DATA, trace)
    assert unknown.input_rate is None
    assert "--cpus" in str(unknown)
    fed = forecast(auto, target, replace(DATA, cpus=3), trace)  # one process, and two cores for training
    assert fed.input_rate == 2 * 1000
    assert fed.step_rate == unknown.step_rate == unknown.images_per_s
    assert fed.images_per_s == min(fed.step_rate, fed.input_rate) == fed.input_rate
    assert "CPU cores: 18 for each device" in " ".join(advice(fed))  # 16 processes for 32,000 images/s
    few = forecast(replace(small, data=replace(small.data, workers=8)), target, replace(DATA, cpus=4), trace)
    assert few.input_rate == 2 * 4 * 1000  # more processes than cores decode no more


def test_each_exchange_of_a_step_and_the_agreement_of_hosts_take_time(small: Recipe):
    target, plain, data = devices_of("h100", H100, 16), traced(0.001), replace(DATA, core_rate=None)
    batch = replace(small, optim=replace(small.optim, batch=160))
    alone, waiting = (forecast(batch, target, data, t) for t in (plain, replace(plain, exchanges={8: 100.0})))
    seconds = [160 / f.rates[EXCHANGE] for f in (alone, waiting)]
    assert (alone.limit, waiting.limit) == (MODEL, EXCHANGE)
    assert alone.images_per_s == alone.rates[EXCHANGE] <= alone.rates[MODEL]
    assert seconds[1] - seconds[0] == pytest.approx(100 * accelerators.reduce_seconds(H100, 16, 8))
    agreed = accelerators.agree_seconds(16)
    assert 160 / alone.rates[HOST] == pytest.approx(plain.operations * accelerators.DISPATCH + agreed)
    assert agreed == 15 * accelerators.agree_seconds(2)


def test_hours_bytes_and_money_follow_from_the_rate(small: Recipe):
    data = replace(DATA, core_rate=None)
    found = forecast(small, devices_of("h100", H100, 2), data, traced())
    assert found.images_per_s == pytest.approx(32 / 0.1, rel=1e-3)
    assert found.steps == 2 * (1_000_000 // 32)
    assert found.hours == pytest.approx(found.steps * 0.1 / 3600, rel=1e-3)
    assert replace(found, price=2.5).cost == pytest.approx(5 * found.hours)
    assert found.data_bytes == 2e11
    short = forecast(replace(small, max_steps=100), devices_of("h100", H100, 2), data, traced())
    assert short.data_bytes == 100 * 32 * 100_000
    assert found.mfu == pytest.approx(accelerators.REACHED[MATMUL], rel=1e-3)
    text = str(replace(found, price=2.5))
    assert "device-hours" in text
    assert f"{replace(found, price=2.5).cost:,.0f} at 2.5" in text


def test_hours_add_up_over_phases_with_views_of_several_sizes(small: Recipe):
    """Memory and rates are those of the last phase, which is that of the recipe without a curriculum."""
    target, data = devices_of("h100", H100, 1), replace(DATA, core_rate=None)
    early = (Phase(until=0.25, sizes=(8, 8)), Phase(until=0.5, sizes=(16, 16)))
    full = replace(small, optim=replace(small.optim, epochs=8))
    whole, phased = (forecast(replace(full, curriculum=c), target, data) for c in ((), early))
    assert replace(phased, phases=()) == whole
    assert [(p.until, p.sizes, p.steps) for p in phased.phases] == [(2, (8, 8), 62_500), (4, (16, 16), 62_500)]
    first, second = phased.phases
    assert first.flops_per_image < second.flops_per_image == whole.flops_per_image
    rates = [first.images_per_s, second.images_per_s, whole.images_per_s]
    seconds = sum(images / rate for images, rate in zip((2e6, 2e6, 4e6), rates, strict=True))
    assert 3600 * phased.hours == pytest.approx(seconds)
    assert "before epoch 2, views of 8, 8: " in str(phased)
    short = forecast(replace(full, curriculum=early, max_steps=70_000), target, data)
    assert [p.steps for p in short.phases] == [62_500, 7_500]


def test_a_phase_with_half_of_the_patches_costs_less(small: Recipe):
    target, data = devices_of("h100", H100, 1), replace(DATA, core_rate=None)
    full = replace(small, optim=replace(small.optim, epochs=8))
    for until in (0.25, 0.75):  # a plan looks at a step in the middle
        phased = forecast(replace(full, curriculum=(Phase(until=until, keep=0.5),)), target, data)
        assert replace(phased, phases=()) == forecast(full, target, data)
        [early] = phased.phases
        assert (early.until, early.keep) == (8 * until, 0.5)
        assert early.flops_per_image < 0.9 * phased.flops_per_image  # whose momentum encoder sees all
        assert ", 50% of patches: " in str(phased)


def test_what_does_not_fit_is_one_line_with_keys_that_would(small: Recipe, monkeypatch: pytest.MonkeyPatch):
    tight = replace(small, optim=replace(small.optim, batch=4096), data=replace(small.data, lanes=1))
    target = devices_of("h100", H100, 1)
    found = forecast(tight, target, DATA)
    target = replace(target, memory=0.99 * found.memory_needed)
    found = replace(found, memory_of_device=round(target.memory), devices=target)
    assert not found.fits
    text = str(refusal(found))
    assert "\n" not in text
    assert "a step of 4096 images needs" in text
    assert all(key in text for key in ("optim.checkpointing=true", "optim.micro_batch=1024", "workers=2"))
    monkeypatch.setattr("eagleray.runs.forecast.remedies", lambda *_: ())
    assert "a device with more memory" in str(refusal(found))


def test_a_cpu_is_not_told_to_share_its_memory_nor_a_model_without_blocks_to_recompute_them(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
):
    def refuses(model: object) -> None:
        raise UserError("backbone.name: DenseNet has neither stages nor blocks to read tokens from")

    monkeypatch.setattr("eagleray.runs.build.checkpoint_blocks", refuses)
    tight = replace(small, optim=replace(small.optim, batch=4096), data=replace(small.data, lanes=1))
    found = forecast(tight, Devices("cpu", 1, None, 1e15), DATA)
    target = Devices("cpu", 1, None, 0.99 * found.memory_needed)
    found = replace(found, memory_of_device=round(target.memory), devices=target)
    text = str(refusal(found))
    assert "a step of 4096 images needs" in text
    assert "optim.micro_batch=1024" in text
    assert not any(key in text for key in ("checkpointing", "workers", "DenseNet"))


def test_the_precision_is_one_that_the_device_has(small: Recipe):
    v100, cpu = (
        devices_of("v100", accelerators.find("v100"), 1),
        replace(devices_of("cpu", H100, 1), accelerator=None),
    )
    assert precision_of(small, v100) == "fp16"
    assert precision_of(small, devices_of("h100", H100, 1)) == "bf16"
    assert precision_of(small, cpu) == "fp32"
    with pytest.raises(UserError, match="precision=bf16: v100 has no bfloat16"):
        precision_of(replace(small, precision="bf16"), v100)
    with pytest.raises(UserError, match="precision=fp16: a CPU"):
        precision_of(replace(small, precision="fp16"), cpu)


def test_a_run_in_fp32_is_planned_without_tf32(small: Recipe):
    flops = int(H100.full * 1e12)
    trace = replace(traced(), work={Work(MATMUL, True, flops, 0): 1.0}, flops=flops)
    full, half = (
        forecast(replace(small, precision=form), devices_of("h100", H100, 1), replace(DATA, core_rate=None), trace)
        for form in ("fp32", "bf16")
    )
    assert full.step_seconds == pytest.approx(1 / accelerators.REACHED[MATMUL], rel=1e-3)
    assert half.step_seconds == pytest.approx(H100.full / H100.wide / accelerators.REACHED[MATMUL], rel=1e-3)
    assert full.mfu == pytest.approx(accelerators.REACHED[MATMUL], rel=1e-3)


def test_an_unknown_gpu_is_named_with_a_close_one():
    with pytest.raises(UserError, match="--gpu h10: unknown; did you mean 'h100'"):
        accelerators.find("h10")


def test_drivers_names_are_recognised():
    assert accelerators.recognise("NVIDIA H100 80GB HBM3", 79.2) is H100
    assert accelerators.recognise("NVIDIA A100-SXM4-40GB", 39.4) is accelerators.find("a100-40")
    assert accelerators.recognise("NVIDIA A100-SXM4-80GB", 79.1) is accelerators.find("a100-80")
    assert accelerators.recognise("Tesla T4", 14.6) is accelerators.find("t4")
    assert accelerators.recognise("Something New", 79.2) is None


def test_gradients_go_over_the_slowest_link():
    inside, between = accelerators.reduce_seconds(H100, 8, 10**9), accelerators.reduce_seconds(H100, 16, 10**9)
    assert inside == pytest.approx(2 * 7 / 8 / 450 + accelerators.LATENCY)
    assert between > inside
    assert accelerators.reduce_seconds(H100, 1, 10**9) == 0
    assert all(kind in accelerators.REACHED for kind in (MATMUL, CONV, ATTENTION))


def test_durations_read_well():
    assert (duration(0.5), duration(30), duration(72)) == ("30 minutes", "30.0 hours", "3.0 days")
