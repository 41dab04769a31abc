"""Defines constrained values of recipes: fractions, numbers of classes, sizes in bytes, number formats and names."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _bytes(value: Any) -> Any:
    """Turn a size such as `200GiB` or `1.5 TB` into bytes, and leave everything else to pydantic."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", value) if isinstance(value, str) else None
    return int(min(float(match[1]), 2.0**63) * UNITS[match[2]]) if match else value  # int fails on inf


Share = Annotated[float, Field(ge=0, le=1)]
Layers = Annotated[int, Field(gt=0)]  # layers of a projector; the papers use 2
Classes = Annotated[int, Field(ge=2)]
Bytes = Annotated[int, Field(gt=0, lt=2**63), BeforeValidator(_bytes)]
NO_FP16 = "precision=fp16: a CPU trains in fp32 or, more slowly, in bf16; expected auto, fp32 or bf16"
Format = Literal["auto", "bf16", "fp16", "fp32"]  # number format of the computation; auto: the best one for the device
ModelName = Annotated[str, Field(pattern=r"^[\w.-]+$")]  # names that MLflow's registry accepts
