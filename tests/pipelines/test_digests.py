"""Every shipped recipe resolves to the same tree as on the day its digest was written, byte for byte."""

import hashlib
import json
from pathlib import Path

from eagleray import config
from eagleray.config import bundled
from eagleray.runs import recipe

DIGESTS = Path(__file__).with_name("digests.json")


def test_every_recipe_resolves_to_the_same_bytes_and_keeps_its_identity():
    """Runs that were begun with a shipped recipe can only be continued while its identity stays the same.

    digests.json holds, for every name, the SHA-256 of what `eagleray show NAME` prints and `recipe.digest`.
    """
    expected = json.loads(DIGESTS.read_text())
    loaded = {name: recipe.load(name) for name in bundled.names()}
    texts = {name: hashlib.sha256(config.dump(r).encode()).hexdigest() for name, r in loaded.items()}
    resolved = {name: [texts[name], recipe.digest(r)] for name, r in loaded.items()}
    assert resolved.keys() == expected.keys()
    assert not [name for name in expected if resolved[name] != expected[name]]
