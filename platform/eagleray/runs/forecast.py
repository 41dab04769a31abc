"""Forecast a run before it begins: whether it fits into memory, how fast it is, what limits it and what it costs."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from eagleray.base.errors import UserError
from eagleray.config.curriculum import PhaseViews
from eagleray.data.loader_processes import processes
from eagleray.engine.precision import DTYPES
from eagleray.runs.accelerators import Accelerator, Rates, agree_seconds, reduce_seconds, stated_rates
from eagleray.runs.build import build_backbone
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import StepTrace, divided, divisible, trace_step

GIB = 2**30
CONTEXT = 1.5 * GIB  # bytes of an accelerator's context, of libraries' work space and of communication buffers
SPLIT = 1.05  # ratio of the allocator's memory to that of tensors, as new tensors do not always fit into freed blocks
WAITING = 0.9  # share of the model's speed, below which the exchange between ranks counts as the limit of a step
HIDDEN = 0.5  # share of a step's time, that of the backward pass, which overlaps with the exchange of gradients
MODEL, EXCHANGE, HOST, INPUT, STORE = "model", "exchange between ranks", "host", "decoding", "store"
OF_STEP, OF_INPUT = (MODEL, EXCHANGE, HOST), (INPUT, STORE)


@dataclass(frozen=True)
class Devices:
    """The devices that a run is planned for."""

    name: str  # the device's name
    ranks: int
    rates: Rates | None  # None: the speed is not known
    memory: float  # bytes of each device
    accelerator: Accelerator | None = None  # None: a CPU, or an unknown accelerator

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def rates_in(self, form: str) -> Rates | None:
        """Return the rates with the number format `form`, or None if they are unknown. A run in fp32 uses no TF32."""
        return stated_rates(self.accelerator, tf32=False) if self.accelerator and form == "fp32" else self.rates


@dataclass(frozen=True)
class TrainingSet:
    """The facts about a training set that a forecast needs, and the rates at which its images can be read."""

    images: int
    image_bytes: float  # mean bytes of an image file
    core_rate: float | None = None  # images/s that one loader process decodes and crops
    scaled_rate: float | None = None  # images/s with data.decode=scaled, if the recipe does not set it
    store_rate: float | None = None  # B/s that the store gives to the whole run
    cpus: int | None = None  # CPU cores per device

    def loaders(self, recipe: Recipe) -> int | None:
        """Return how many processes of a rank decode, each on a core; None if it depends on unknown `cpus`."""
        asked = recipe.data.workers
        if self.cpus is None:
            return None if asked == "auto" else max(asked, 1)
        return max(min(processes(asked, self.cpus), self.cpus), 1)


@dataclass(frozen=True)
class EarlyPhase:
    """The forecast of a phase of the training in which views are smaller or have fewer patches."""

    until: int  # first epoch after the phase
    sizes: tuple[int, ...]  # sides of the crops in pixels, for each entry of `views`
    steps: int
    flops_per_image: float
    images_per_s: float | None
    keep: float = 1.0  # share of the patches of each view that are not dropped


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run. Rates are sums over all ranks. Printing a forecast shows the text of `eagleray plan`.

    Example:

        forecast = eagleray.plan("mocov3_vits16_in1k_ep300", gpu="h100", gpus=16, input_rate=250)
        forecast.fits, forecast.images_per_s, forecast.hours
        print(forecast)
    """

    device: str
    ranks: int
    precision: str
    batch: int
    images_per_rank: int
    memory: dict[str, int]  # bytes of each rank at the peak, by kind
    memory_needed: int  # bytes of tensors at the peak and of what the device needs beside tensors
    memory_of_device: int  # bytes
    flops_per_image: float  # FLOPs of training on one image, without those of recomputed activations
    peak_flops: float | None  # FLOP/s of one device in this precision, the base of `mfu`
    step_seconds: float | None  # seconds of a step that does not wait for its input
    mfu: float | None  # model FLOP utilisation
    rates: dict[str, float]  # images/s that each part of the run, such as the model or the store, could do alone
    steps: int
    data_bytes: float  # bytes read from the store in the whole run
    phases: tuple[EarlyPhase, ...] = ()  # early phases; other numbers are those of the last phase, which needs the most
    # The inputs of the forecast, which `numbers` leaves out.
    recipe: Recipe = field(kw_only=True, compare=False, repr=False)
    devices: Devices = field(kw_only=True, compare=False, repr=False)
    data: TrainingSet = field(kw_only=True, compare=False, repr=False)
    price: float | None = None  # price of one device for an hour

    @property
    def fits(self) -> bool:
        return self.memory_needed <= self.memory_of_device

    @property
    def limit(self) -> str | None:
        """Return the part of the run that limits its speed, such as the model or the store. The exchange between ranks
        counts as the limit only if it takes at least a tenth of a step."""
        if MODEL not in self.rates:
            return None
        slowest = min(self.rates, key=lambda part: self.rates[part])
        small = slowest == EXCHANGE and self.rates[EXCHANGE] > WAITING * self.rates[MODEL]
        return MODEL if small else slowest

    @property
    def images_per_s(self) -> float | None:
        return min(self.rates.values()) if MODEL in self.rates else None

    @property
    def step_rate(self) -> float | None:
        """Return the images per second of training steps that never wait for input."""
        return self._slowest(OF_STEP)

    @property
    def input_rate(self) -> float | None:
        """Return the images per second that can be read, decoded and cropped, or None if unknown."""
        return self._slowest(OF_INPUT)

    def _slowest(self, parts: tuple[str, ...]) -> float | None:
        return min((self.rates[part] for part in parts if part in self.rates), default=None)

    @property
    def hours(self) -> float | None:
        """Return the duration of all steps in hours, without evaluations."""
        if not self.images_per_s:
            return None
        early = sum(p.steps / p.images_per_s for p in self.phases if p.images_per_s)
        last = (self.steps - sum(p.steps for p in self.phases)) / self.images_per_s
        return (early + last) * self.batch / 3600

    @property
    def cost(self) -> float | None:
        """Return the price of all devices for the whole duration."""
        return self.hours * self.ranks * self.price if self.hours and self.price else None

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the fields of the forecast as plain values, except the recipe, the devices, the data and the price."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.compare and f.name != "price"}
        return plain | {"phases": [asdict(phase) for phase in self.phases]}

    def json(self) -> dict[str, Any]:
        """Return the forecast as plain values, with derived numbers such as `hours` and `cost`."""
        derived: dict[str, Any] = {"fits": self.fits, "limit": self.limit, "images_per_s": self.images_per_s}
        derived |= {"step_images_per_s": self.step_rate, "input_images_per_s": self.input_rate}
        derived |= {"hours": self.hours, "device_hours": self.hours and self.hours * self.ranks}
        return self.numbers | derived | {"cost": self.cost}

    def __str__(self) -> str:
        from eagleray.runs.forecast_text import report

        return "\n".join(report(self))

    def line(self) -> str:
        """Return a summary of the forecast in one line."""
        place = f"{self.ranks} x {self.device}" if self.ranks > 1 else self.device
        text = f"plan: {self.memory_needed / GIB:.1f} of {self.memory_of_device / GIB:.1f} GiB on {place}"
        text += f", {self.flops_per_image / 1e9:.4g} GFLOP per image{' of full size' if self.phases else ''}"
        if self.images_per_s and self.hours:
            text += f", {self.images_per_s:.0f} images/s, {duration(self.hours)}; the {self.limit} limits it"
        return text


def forecast(recipe: Recipe, devices: Devices, data: TrainingSet, trace: StepTrace | None = None) -> Forecast:
    """Forecast the memory and the speed of a run. `trace` is that of a training step; None: the step is traced here.

    With `optim.micro_batch=auto` the forecast is for the whole batch or, if that does not fit, for the first
    micro-batch tried that fits; if none does, for the whole batch. Raises UserError when the recipe cannot be built, or
    the device lacks its precision."""
    if recipe.optim.micro_batch == "auto":
        whole = forecast(replace(recipe, optim=replace(recipe.optim, micro_batch=None)), devices, data, trace)
        if whole.fits or devices.is_cpu:
            return whole
        return next((result for _, result in smaller_batches(recipe, devices, data) if result.fits), whole)
    form = precision_of(recipe, devices)
    if trace is None:
        last, gpu = replace(recipe, curriculum=()), not devices.is_cpu
        trace = trace_step(last, ranks=devices.ranks, dataset=data.images, dtype=DTYPES[form], gpu=gpu)
    if recipe.parallel == "fsdp":
        trace = divided(recipe, trace, devices.ranks)
    batch, peak = recipe.optim.batch, trace.peak
    needed = peak if devices.is_cpu else round(peak * SPLIT + CONTEXT)
    steps = recipe.optim.epochs * (data.images // batch)
    steps = min(steps, recipe.max_steps or steps)
    rates: dict[str, float] = {}
    seconds = mfu = None
    if speeds := devices.rates_in(form):
        rates |= step_rates(trace, speeds, devices, batch)
        seconds = batch / min(rates.values())
    loaders = data.loaders(recipe)
    if data.core_rate and loaders:
        rates[INPUT] = data.core_rate * devices.ranks * loaders
    if data.store_rate:
        rates[STORE] = data.store_rate / data.image_bytes
    top = devices.accelerator and 1e12 * (devices.accelerator.full if form == "fp32" else devices.accelerator.half)
    if top and seconds:
        mfu = trace.flops / (batch / min(rates.values()) * top)
    return Forecast(
        devices.name,
        devices.ranks,
        form,
        batch,
        trace.images,
        trace.memory,
        needed,
        round(devices.memory),
        trace.flops / trace.images,
        top,
        seconds,
        mfu,
        rates,
        steps,
        (steps * batch if recipe.max_steps else recipe.optim.epochs * data.images) * data.image_bytes,
        tuple(early_phases(recipe, devices, data, steps)),
        recipe=recipe,
        devices=devices,
        data=data,
    )


def step_rates(trace: StepTrace, speeds: Rates, devices: Devices, batch: int) -> dict[str, float]:
    """Return the images/s at which each part could take steps like `trace`: MODEL is the device alone, EXCHANGE the
    device with the communication between ranks that it waits for, and HOST the host."""
    ranks, seconds = devices.ranks, speeds.seconds(trace)
    rates = {MODEL: batch / seconds}
    if ranks > 1:
        waited = 0.0
        if known := devices.accelerator:
            waited = sum(times * reduce_seconds(known, ranks, size) for size, times in trace.exchanges.items())
            waited += max(reduce_seconds(known, ranks, trace.gradients) - HIDDEN * seconds, 0.0)
        rates[EXCHANGE] = batch / (seconds + waited)
    if speeds.dispatch:
        rates[HOST] = batch / (trace.operations * speeds.dispatch + agree_seconds(ranks))
    return rates


def early_phases(recipe: Recipe, devices: Devices, data: TrainingSet, steps: int) -> Iterator[EarlyPhase]:
    """Yield a forecast for each phase with smaller views or fewer patches, in a run of `steps` steps.
    Decoding is assumed to be as slow as for full views."""
    begin = 0
    for phase in recipe.phases[:-1]:
        result = forecast(in_phase(recipe, phase), devices, data)
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


def precision_of(recipe: Recipe, devices: Devices) -> str:
    """Return the number format of a recipe on some devices. Raises UserError when the devices do not support it."""
    half = "bf16" if devices.accelerator is None or devices.accelerator.bfloat16 else "fp16"
    form = recipe.precision
    if form == "auto":
        return "fp32" if devices.is_cpu else half
    if form == "bf16" and half != "bf16":
        raise UserError(f"precision=bf16: {devices.name} has no bfloat16; expected auto, fp16 or fp32")
    if form == "fp16" and devices.is_cpu:
        raise UserError("precision=fp16: a CPU trains in fp32 or bf16; expected one of these or auto")
    return form


def devices_of(name: str, device: Accelerator, ranks: int) -> Devices:
    """Return `ranks` accelerators of one kind as devices, with the speed that `stated_rates` expects of them."""
    return Devices(name, ranks, stated_rates(device), device.memory * GIB, device)


def remedies(found: Forecast) -> Iterator[tuple[dict[str, Any], Forecast]]:
    """Yield changes of a recipe's keys, each of which would make the run fit into memory, with the new forecast."""
    recipe, devices, data = found.recipe, found.devices, found.data

    def attempt(changed: Recipe) -> Forecast | None:
        with suppress(UserError):  # a model without blocks can neither recompute nor gather them
            if (result := forecast(changed, devices, data)).fits:
                return result
        return None

    o = recipe.optim
    if not o.checkpointing and (result := attempt(replace(recipe, optim=replace(o, checkpointing=True)))):
        yield {"optim.checkpointing": "true"}, result
    if devices.ranks > 1 and divisible(recipe) and (result := attempt(replace(recipe, parallel="fsdp"))):
        yield {"parallel": "fsdp"}, result
    for size, result in smaller_batches(recipe, devices, data) if o.micro_batch != "auto" else ():
        if result.fits:
            yield {"optim.micro_batch": size}, result
            break
    for ranks in () if devices.is_cpu else (2 * devices.ranks, 4 * devices.ranks):  # a CPU's ranks share its memory
        if ranks <= o.batch and (result := forecast(recipe, replace(devices, ranks=ranks), data)).fits:
            yield {"workers": ranks}, result
            break


def smaller_batches(recipe: Recipe, devices: Devices, data: TrainingSet) -> Iterator[tuple[int, Forecast]]:
    """Yield smaller micro-batches, each with its forecast.
    There are none for a backbone whose batch norm needs the whole batch."""
    o = recipe.optim
    with torch.device("meta"):
        if build_backbone(replace(recipe, optim=replace(o, micro_batch=None))).batch_norm:
            return
    size = min(o.micro_batch if isinstance(o.micro_batch, int) else o.batch, -(-o.batch // devices.ranks))
    for smaller in (size // 4, size // 16, size // 64):
        if smaller:
            yield smaller, forecast(replace(recipe, optim=replace(o, micro_batch=smaller)), devices, data)


def refusal(found: Forecast) -> UserError:
    """Return the error for a run that does not fit, with the keys that would make it fit."""
    need, have = found.memory_needed / GIB, found.memory_of_device / GIB
    cures = [" ".join(f"{k}={v}" for k, v in keys.items()) + f" ({f.memory_needed / GIB:.1f} GiB)"
             for keys, f in remedies(found)]  # fmt: skip
    cure = f"; {' or '.join(cures)} would fit" if cures else "; it needs a device with more memory, or a smaller model"
    return UserError(
        f"{found.recipe.backbone.name}: a step of {found.images_per_rank} images needs {need:.1f} GiB on each "
        f"{found.device}, which has {have:.1f} GiB{cure}"
    )


def duration(hours: float) -> str:
    """Return hours as text, in minutes or days where these read better."""
    return (
        f"{60 * hours:.0f} minutes" if hours < 1 else f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
    )
