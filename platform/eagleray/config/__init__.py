"""Turns YAML files into typed values with every default, or into an error that names the wrong key.

Files, names and `a.b=value` overrides go in; checked dataclasses come out.

May import: base."""

# `as` marks the names that other modules import from here, for ruff and for type checkers.
from eagleray.config.tree import STRICT as STRICT
from eagleray.config.tree import Part as Part
from eagleray.config.tree import RecipeError as RecipeError
from eagleray.config.tree import allowed_keys as allowed_keys
from eagleray.config.tree import check as check
from eagleray.config.tree import chosen as chosen
from eagleray.config.tree import differences as differences
from eagleray.config.tree import dump as dump
from eagleray.config.tree import explain as explain
from eagleray.config.tree import flatten as flatten
from eagleray.config.tree import keys_named as keys_named
from eagleray.config.tree import load as load
from eagleray.config.tree import merge as merge
from eagleray.config.tree import nearest as nearest
from eagleray.config.tree import override as override
from eagleray.config.tree import part as part
from eagleray.config.tree import part_constant as part_constant
from eagleray.config.tree import part_of as part_of
from eagleray.config.tree import parts as parts
from eagleray.config.tree import read as read
from eagleray.config.tree import to_plain as to_plain
