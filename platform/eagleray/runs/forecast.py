"""Forecast a run before it begins: whether it fits into memory, how fast it is, what limits it and what it costs."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from eagleray.base.errors import UserError
from eagleray.config.curriculum import PhaseViews
from eagleray.engine.precision import DTYPES
from eagleray.models.backbone import Backbone
from eagleray.runs.accelerators import Accelerator, Rates, reduce_seconds, stated_rates
from eagleray.runs.build import build_backbone
from eagleray.runs.divided import divided, divisible
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import StepTrace, trace_step

GIB = 2**30
CONTEXT = 1.5 * GIB  # an accelerator's context, libraries' work space and buffers of exchanges
SPLIT = 1.05  # the allocator takes more by this factor, as freed pieces do not fit
WORTH = 1.2  # times as fast, below which another way to decode is not worth mentioning
HIDDEN = 0.5  # share of a step, its backward pass, behind which gradients are exchanged
MODEL, INPUT, STORE, EXCHANGE, HOST = "model", "decoding", "store", "exchange of gradients", "host"


@dataclass(frozen=True)
class Target:
    """The devices that a run is planned for."""

    name: str  # the device's name
    ranks: int
    rates: Rates | None  # None: the speed is not known
    memory: float  # bytes of each device
    accelerator: Accelerator | None = None  # None: a CPU, or an unknown one

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def rates_in(self, form: str) -> Rates | None:
        """Return the rates in a number format: a run in fp32 does without TF32 (`engine.numerics`)."""
        return stated_rates(self.accelerator, tf32=False) if self.accelerator and form == "fp32" else self.rates


@dataclass(frozen=True)
class Data:
    """The facts about a training set that a plan needs, with the rate at which it can be read."""

    images: int
    image_bytes: float  # mean bytes of an image file
    core_rate: float | None = None  # images/s that one loader process decodes and crops
    scaled_rate: float | None = None  # the same with data.decode=scaled, where that is not set
    store_rate: float | None = None  # B/s that the store gives to the whole run


@dataclass(frozen=True)
class EarlyPhase:
    """The forecast of a phase of the training in which views are smaller or have fewer patches."""

    until: int  # the epoch before which it ends
    sizes: tuple[int, ...]  # pixels, of each entry of `views`
    steps: int
    flops_per_image: float
    images_per_s: float | None
    keep: float = 1.0  # share of the patches


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run. Rates are of all ranks together."""

    device: str
    ranks: int
    precision: str
    batch: int
    images_per_rank: int
    memory: dict[str, int]  # bytes of each rank at the peak, by kind
    memory_needed: int  # bytes, with what the device needs beside tensors
    memory_of_device: int  # bytes
    flops_per_image: float  # training on one image, without what is computed twice
    peak_flops: float | None  # FLOP/s of one device in this precision, the base of `mfu`
    step_seconds: float | None
    mfu: float | None  # model FLOP utilisation
    rates: dict[str, float]  # images/s that each part could do alone
    steps: int
    data_bytes: float  # read from the store
    phases: tuple[EarlyPhase, ...] = ()  # the other numbers are those of the last phase, which needs the most

    @property
    def fits(self) -> bool:
        return self.memory_needed <= self.memory_of_device

    @property
    def limit(self) -> str | None:
        """Return the part that limits the speed."""
        return min(self.rates, key=lambda part: self.rates[part]) if MODEL in self.rates else None

    @property
    def images_per_s(self) -> float | None:
        return self.rates[self.limit] if self.limit else None

    @property
    def hours(self) -> float | None:
        """Return the hours of all steps, without evaluations."""
        if not self.images_per_s:
            return None
        early = sum(p.steps / p.images_per_s for p in self.phases if p.images_per_s)
        last = (self.steps - sum(p.steps for p in self.phases)) / self.images_per_s
        return (early + last) * self.batch / 3600

    def json(self, price: float | None = None) -> dict[str, Any]:
        """Return the forecast as plain values. `price` is that of one device for an hour."""
        derived: dict[str, Any] = {"fits": self.fits, "limit": self.limit, "images_per_s": self.images_per_s}
        derived |= {"hours": self.hours, "device_hours": self.hours and self.hours * self.ranks}
        return asdict(self) | derived | {"cost": self.cost(price)}

    def cost(self, price: float | None) -> float | None:
        """Return the price of all devices for all hours."""
        return self.hours * self.ranks * price if self.hours and price else None

    def line(self) -> str:
        """Return the forecast in one line."""
        place = f"{self.ranks} x {self.device}" if self.ranks > 1 else self.device
        text = f"plan: {self.memory_needed / GIB:.1f} of {self.memory_of_device / GIB:.1f} GiB on {place}"
        text += f", {self.flops_per_image / 1e9:.4g} GFLOP per image{' of full size' if self.phases else ''}"
        if self.images_per_s and self.hours:
            text += f", {self.images_per_s:.0f} images/s, {duration(self.hours)}; the {self.limit} limits it"
        return text


def forecast(recipe: Recipe, target: Target, data: Data, trace: StepTrace | None = None) -> Forecast:
    """Forecast a run. Raises UserError when the recipe cannot be built, or not in this precision.

    With `optim.micro_batch=auto` the forecast is that of the whole batch or, where that does not fit, of a micro-batch
    that does.
    """
    if recipe.optim.micro_batch == "auto":
        whole = forecast(replace(recipe, optim=replace(recipe.optim, micro_batch=None)), target, data, trace)
        if whole.fits or target.is_cpu:
            return whole
        return next((result for _, result in smaller_batches(recipe, target, data) if result.fits), whole)
    form = precision_of(recipe, target)
    if trace is None:
        trace = trace_step(replace(recipe, curriculum=()), ranks=target.ranks, dataset=data.images, dtype=DTYPES[form])
    if recipe.parallel == "fsdp":
        trace = divided(recipe, trace, target.ranks)
    batch, peak = recipe.optim.batch, trace.peak
    needed = peak if target.is_cpu else round(peak * SPLIT + CONTEXT)
    steps = recipe.optim.epochs * (data.images // batch)
    steps = min(steps, recipe.max_steps or steps)
    rates: dict[str, float] = {}
    seconds = mfu = None
    if speeds := target.rates_in(form):
        seconds = speeds.seconds(trace)
        exchange = reduce_seconds(target.accelerator, target.ranks, trace.gradients) if target.accelerator else 0.0
        rates[MODEL] = batch / seconds
        if speeds.dispatch:
            rates[HOST] = batch / (trace.operations * speeds.dispatch)
        if target.ranks > 1:
            rates[EXCHANGE] = batch / (seconds + max(exchange - HIDDEN * seconds, 0.0))
    if data.core_rate and recipe.data.workers != "auto":  # what suits the CPUs of machines that are not known here
        rates[INPUT] = data.core_rate * target.ranks * max(recipe.data.workers, 1)
    if data.store_rate:
        rates[STORE] = data.store_rate / data.image_bytes
    top = target.accelerator and 1e12 * (target.accelerator.full if form == "fp32" else target.accelerator.half)
    if top and seconds:
        mfu = trace.flops / (batch / min(rates.values()) * top)
    return Forecast(
        target.name,
        target.ranks,
        form,
        batch,
        trace.images,
        trace.memory,
        needed,
        round(target.memory),
        trace.flops / trace.images,
        top,
        seconds,
        mfu,
        rates,
        steps,
        recipe.optim.epochs * data.images * data.image_bytes,
        tuple(early_phases(recipe, target, data, steps)),
    )


def early_phases(recipe: Recipe, target: Target, data: Data, steps: int) -> Iterator[EarlyPhase]:
    """Yield the forecasts of the phases with smaller views or fewer patches, of a run of so many steps. Decoding is
    taken to be as slow as for full views."""
    begin = 0
    for phase in recipe.phases[:-1]:
        result = forecast(in_phase(recipe, phase), target, data)
        end = min(phase.until * (data.images // recipe.optim.batch), steps)
        sizes = tuple(view.size for view in phase.views)
        yield EarlyPhase(phase.until, sizes, end - begin, result.flops_per_image, result.images_per_s, phase.keep)
        begin = end


def in_phase(recipe: Recipe, phase: PhaseViews) -> Recipe:
    """Return a recipe whose steps are all like those of a phase."""
    network = recipe.backbone
    if phase.keep < 1:
        network = replace(network, options=network.options | {"patch_drop_rate": 1 - phase.keep})
    return replace(recipe, views=phase.views, backbone=network, curriculum=())


def precision_of(recipe: Recipe, target: Target) -> str:
    """Return the number format of a recipe on a target. Raises UserError when the target does not have it."""
    half = "bf16" if target.accelerator is None or target.accelerator.bfloat16 else "fp16"
    form = recipe.precision
    if form == "auto":
        return "fp32" if target.is_cpu else half
    if form == "bf16" and half != "bf16":
        raise UserError(f"precision=bf16: {target.name} has no bfloat16; expected auto, fp16 or fp32")
    if form == "fp16" and target.is_cpu:
        raise UserError("precision=fp16: a CPU trains in fp32 or bf16; expected one of these or auto")
    return form


def target_of(name: str, device: Accelerator, ranks: int) -> Target:
    """Return the target of so many accelerators of a kind, at the speed that is stated for them."""
    return Target(name, ranks, stated_rates(device), device.memory * GIB, device)


def remedies(recipe: Recipe, target: Target, data: Data) -> Iterator[tuple[dict[str, Any], Forecast]]:
    """Yield changes of keys with which a run that does not fit would fit, each with its forecast."""

    def attempt(changed: Recipe) -> Forecast | None:
        result = forecast(changed, target, data)
        return result if result.fits else None

    o = recipe.optim
    if not o.checkpointing and (result := attempt(replace(recipe, optim=replace(o, checkpointing=True)))):
        yield {"optim.checkpointing": "true"}, result
    if target.ranks > 1 and divisible(recipe) and (result := attempt(replace(recipe, parallel="fsdp"))):
        yield {"parallel": "fsdp"}, result
    for size, result in smaller_batches(recipe, target, data) if o.micro_batch != "auto" else ():
        if result.fits:
            yield {"optim.micro_batch": size}, result
            break
    for ranks in (2 * target.ranks, 4 * target.ranks):
        wider = replace(target, ranks=ranks)
        if ranks <= o.batch and (result := forecast(recipe, wider, data)).fits:
            yield {"workers": ranks}, result
            break


def smaller_batches(recipe: Recipe, target: Target, data: Data) -> Iterator[tuple[int, Forecast]]:
    """Yield smaller micro-batches, each with its forecast; none for a backbone whose batch norm needs the whole
    batch."""
    if _meta_backbone(recipe).batch_norm:
        return
    o = recipe.optim
    size = min(o.micro_batch if isinstance(o.micro_batch, int) else o.batch, -(-o.batch // target.ranks))
    for smaller in (size // 4, size // 16, size // 64):
        if smaller:
            yield smaller, forecast(replace(recipe, optim=replace(o, micro_batch=smaller)), target, data)


def _meta_backbone(recipe: Recipe) -> Backbone:
    with torch.device("meta"):
        return build_backbone(replace(recipe, optim=replace(recipe.optim, micro_batch=None)))


def refusal(recipe: Recipe, result: Forecast, target: Target, data: Data) -> UserError:
    """Return the error for a run that does not fit, with the keys that would make it fit."""
    need, have = result.memory_needed / GIB, result.memory_of_device / GIB
    cures = [" ".join(f"{k}={v}" for k, v in keys.items()) + f" ({f.memory_needed / GIB:.1f} GiB)"
             for keys, f in remedies(recipe, target, data)]  # fmt: skip
    cure = f"; {' or '.join(cures)} would fit" if cures else "; it needs a device with more memory, or a smaller model"
    return UserError(
        f"{recipe.backbone.name}: a step of {result.images_per_rank} images needs {need:.1f} GiB on each "
        f"{target.name}, "
        f"which has {have:.1f} GiB{cure}"
    )


def advice(recipe: Recipe, result: Forecast, data: Data) -> Iterator[str]:
    """Yield what to change about a run that fits, each as a sentence that names the key."""
    model, used = result.rates.get(MODEL), result.memory_needed / result.memory_of_device
    if model and result.limit == INPUT and data.core_rate:
        workers = math.ceil(model / data.core_rate / result.ranks)
        if (data.scaled_rate or 0) > WORTH * data.core_rate:
            times = (data.scaled_rate or 0) / data.core_rate
            yield f"data.decode=scaled: these images, which are large, would be decoded {times:.1f} times as fast"
        yield f"data.workers={workers}: as many loader processes on each rank would keep up with the model"
    if result.limit == STORE:
        yield f"data.cache=FOLDER: the store gives less than the {model or 0:.0f} images/s that the model takes"
    if result.limit == EXCHANGE:
        yield f"workers={max(result.ranks // 2, 1)}: gradients are exchanged for longer than the backward pass lasts"
    if result.limit == HOST:
        yield f"workers={max(result.ranks // 2, 1)}: the host dispatches operations more slowly than they are done"
    o = recipe.optim
    parts = isinstance(o.micro_batch, int)
    if (parts or o.checkpointing) and used < 0.5:
        keys = ["optim.micro_batch=null"] * parts + ["optim.checkpointing=false"] * o.checkpointing
        yield f"{' '.join(keys)}: memory is there to compute nothing twice"
    if recipe.precision == "fp32" and result.peak_flops:
        yield "precision=auto: half precision is several times as fast"


def duration(hours: float) -> str:
    """Return hours as text, in minutes or days where these read better."""
    return (
        f"{60 * hours:.0f} minutes" if hours < 1 else f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    )


def report(recipe: Recipe, result: Forecast, data: Data, price: float | None = None) -> Iterator[str]:
    """Yield the lines that `eagleray plan` prints."""
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
        yield f"speed     {result.images_per_s:.0f} images/s{mfu}; a step takes {1000 * result.step_seconds:.4g} ms"
        ways = ", ".join(f"{part} {rate:.0f}" for part, rate in sorted(result.rates.items(), key=lambda pr: pr[1]))
        yield f"limit     {result.limit}; images/s of each part alone: {ways}"
    terabytes = result.data_bytes / 1e12
    yield f"data      {data.images} images, {result.steps} steps of {result.batch}, {terabytes:.3g} TB read"
    if result.images_per_s:
        yield f"          {result.images_per_s * data.image_bytes / 1e6:.0f} MB/s from the store"
    if result.hours:
        cost, money = result.cost(price), ""
        if cost:
            money = f", {cost:,.0f} at {price:g} an hour"
        yield f"duration  {duration(result.hours)}, {result.hours * result.ranks:,.0f} device-hours{money}"
    yield from (f"advice    {line}" for line in advice(recipe, result, data))
