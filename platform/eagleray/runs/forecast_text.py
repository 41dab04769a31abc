"""Write the text that `eagleray plan` prints about a forecast, with advice on what to change."""

import math
from collections.abc import Iterator

from eagleray.data.loader_processes import LEFT
from eagleray.runs.forecast import EXCHANGE, GIB, HOST, INPUT, OF_INPUT, OF_STEP, STORE, Forecast, duration

WORTH = 1.2  # smallest speed-up by data.decode=scaled that is worth mentioning


def report(result: Forecast) -> Iterator[str]:
    """Yield the lines that `eagleray plan` prints."""
    recipe, data = result.recipe, result.data
    place = f"{result.ranks} x {result.device}" if result.ranks > 1 else result.device
    yield f"{recipe.method.name} on {recipe.backbone.name}, {place}, {result.precision}"
    parts = ", ".join(f"{k} {n / GIB:.2f}" for k, n in sorted(result.memory.items(), key=lambda kn: -kn[1]))
    need, have = result.memory_needed / GIB, result.memory_of_device / GIB
    yield f"memory    {need:.1f} of {have:.1f} GiB on each device: {parts}"
    gflop = result.flops_per_image / 1e9
    yield f"work      {gflop:.4g} GFLOP per image, {result.images_per_rank} images on each device"
    for phase in result.phases:
        rate = f", {phase.images_per_s:.0f} images/s" if phase.images_per_s else ""
        sizes = ", ".join(map(str, phase.sizes)) + (f", {phase.keep:.0%} of patches" if phase.keep < 1 else "")
        yield f"          before epoch {phase.until}, views of {sizes}: {phase.flops_per_image / 1e9:.4g} GFLOP{rate}"
    if result.step_seconds is not None and result.images_per_s:
        mfu = f", {result.mfu:.0%} of the device's peak" if result.mfu else ""
        yield f"speed     {result.images_per_s:.0f} images/s{mfu}; the {result.limit} limits it"
        yield f"step      {result.step_rate:.0f} images/s, {1000 * result.step_seconds:.4g} ms: {ways(result, OF_STEP)}"
        loaders = data.loaders(recipe)
        told = f" with {loaders} loader processes for each device" if loaders else ""
        unknown = "not known; --cpus N tells how many CPU cores each device has"
        yield "input     " + (
            f"{result.input_rate:.0f} images/s{told}: {ways(result, OF_INPUT)}" if result.input_rate else unknown
        )
    terabytes = result.data_bytes / 1e12
    yield f"data      {data.images} images, {result.steps} steps of {result.batch}, {terabytes:.3g} TB read"
    if result.images_per_s:
        yield f"          {result.images_per_s * data.image_bytes / 1e6:.0f} MB/s from the store"
    if result.hours:
        money = f", {result.cost:,.0f} at {result.price:g} an hour" if result.cost else ""
        hours = result.hours * result.ranks
        yield f"duration  {duration(result.hours)}, {hours:,.{int(hours < 10)}f} device-hours{money}"
    yield from (f"advice    {line}" for line in advice(result))


def ways(result: Forecast, parts: tuple[str, ...]) -> str:
    """Return as text the images/s that each of the parts could do alone, the slowest part first."""
    known = sorted((result.rates[part], part) for part in parts if part in result.rates)
    return ", ".join(f"{part} {rate:.0f}" for rate, part in known)


def advice(result: Forecast) -> Iterator[str]:
    """Yield what to change about a run that fits, each as a sentence that names the key."""
    recipe, data = result.recipe, result.data
    rate, used = result.step_rate, result.memory_needed / result.memory_of_device
    if rate and result.limit == INPUT and data.core_rate:
        workers = math.ceil(rate / data.core_rate / result.ranks)
        if (data.scaled_rate or 0) > WORTH * data.core_rate:
            times = (data.scaled_rate or 0) / data.core_rate
            yield f"data.decode=scaled: these images, which are large, would be decoded {times:.1f} times as fast"
        if data.cpus and workers > data.cpus:
            yield f"CPU cores: {workers + LEFT} for each device would keep up with the model"
        else:
            yield f"data.workers={workers}: as many loader processes on each rank would keep up with the model"
    if result.limit == STORE:
        yield f"data.cache=FOLDER: the store gives less than the {rate or 0:.0f} images/s that the model takes"
    if result.limit == EXCHANGE:
        yield f"workers={max(result.ranks // 2, 1)}: devices wait for each other's numbers in much of a step"
    if result.limit == HOST:
        yield f"workers={max(result.ranks // 2, 1)}: the host dispatches operations more slowly than they are done"
    o = recipe.optim
    parts = isinstance(o.micro_batch, int)
    if (parts or o.checkpointing) and used < 0.5:
        keys = ["optim.micro_batch=null"] * parts + ["optim.checkpointing=false"] * o.checkpointing
        yield f"{' '.join(keys)}: memory is there to compute nothing twice"
    if recipe.precision == "fp32" and result.peak_flops:
        yield "precision=auto: half precision is several times as fast"
