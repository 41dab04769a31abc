"""YAML becomes typed, complete values, or one line that names the wrong key.

Files, names and `a.b=value` overrides go in; checked dataclasses come out.

May import: base.
"""

from eagleray.config.tree import (
    STRICT,
    Part,
    RecipeError,
    check,
    differences,
    dump,
    explain,
    flat,
    known,
    load,
    merge,
    nearest,
    override,
    part,
    part_constant,
    part_of,
    parts,
    plain,
    read,
)

__all__ = [
    "STRICT",
    "Part",
    "RecipeError",
    "check",
    "differences",
    "dump",
    "explain",
    "flat",
    "known",
    "load",
    "merge",
    "nearest",
    "override",
    "part",
    "part_constant",
    "part_of",
    "parts",
    "plain",
    "read",
]
