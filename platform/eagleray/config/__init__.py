"""Turns YAML files into typed values with every default, or into an error that names the wrong key.

Files, names and `a.b=value` overrides go in; checked dataclasses come out.

May import: base."""

from eagleray.config.tree import (
    STRICT,
    Part,
    RecipeError,
    allowed_keys,
    check,
    chosen,
    differences,
    dump,
    explain,
    flatten,
    keys_named,
    load,
    merge,
    nearest,
    override,
    part,
    part_constant,
    part_of,
    parts,
    read,
    to_plain,
)

__all__ = [
    "STRICT",
    "Part",
    "RecipeError",
    "allowed_keys",
    "check",
    "chosen",
    "differences",
    "dump",
    "explain",
    "flatten",
    "keys_named",
    "load",
    "merge",
    "nearest",
    "override",
    "part",
    "part_constant",
    "part_of",
    "parts",
    "read",
    "to_plain",
]
