"""Defines constrained values of recipes: fractions, numbers of classes, sizes in bytes, number formats and names."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from eagleray.config.schedule import Schedule

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _bytes(value: Any) -> Any:
    """Turn a size such as `200GiB` or `1.5 TB` into bytes, and leave everything else to pydantic."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", value) if isinstance(value, str) else None
    return int(min(float(match[1]), 2.0**63) * UNITS[match[2]]) if match else value  # int fails on inf


def _above_zero(schedule: Schedule) -> Schedule:
    first = schedule.warmup_from if schedule.warmup else schedule.value
    if min(first, schedule.value, schedule.value if schedule.end is None else schedule.end) <= 0:
        raise ValueError("expected a temperature above 0 in every step; a warm-up needs warmup_from, such as 0.04")
    return schedule


Share = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[Schedule, AfterValidator(_above_zero)]  # losses divide by a teacher's temperature
Layers = Annotated[int, Field(gt=0)]  # layers of a projector; the papers use 2
Classes = Annotated[int, Field(ge=2)]
Bytes = Annotated[int, Field(gt=0, lt=2**63), BeforeValidator(_bytes)]
NO_FP16 = "precision=fp16: a CPU trains in fp32 or, more slowly, in bf16; expected auto, fp32 or bf16"
Format = Literal["auto", "bf16", "fp16", "fp32"]  # number format of the computation; auto: the best one for the device
ModelName = Annotated[str, Field(pattern=r"^[\w.-]+$")]  # names that MLflow's registry accepts
