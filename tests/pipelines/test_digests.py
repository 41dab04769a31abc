"""Every shipped recipe resolves to the same tree as on the day its digest was written, byte for byte.

Run as a program it writes the SHA-256 of every recipe and the identities of new ones, and forgets names that are gone.
It names the recipes whose identity would change. To accept that, delete their lines first.
"""

import hashlib
import json
from pathlib import Path

from eagleray import config
from eagleray.config import bundled
from eagleray.runs import recipe

DIGESTS = Path(__file__).with_name("digests.json")


def digests(name: str) -> list[str]:
    """Return the SHA-256 of what `eagleray show NAME` prints, and the recipe's identity."""
    resolved = recipe.load(name)
    return [hashlib.sha256(config.dump(resolved).encode()).hexdigest(), recipe.digest(resolved)]


def test_every_recipe_resolves_to_the_same_bytes_and_keeps_its_identity():
    """Runs that were begun with a shipped recipe can only be continued while its identity stays the same."""
    expected = json.loads(DIGESTS.read_text())
    assert bundled.names() == sorted(expected)
    assert not [name for name in expected if digests(name) != expected[name]]


if __name__ == "__main__":
    written, now = json.loads(DIGESTS.read_text()), {name: digests(name) for name in bundled.names()}
    lines = [f'  "{n}": {json.dumps([d[0], written.get(n, d)[1]])}' for n, d in now.items()]
    DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print("identity would change:", *[n for n, d in now.items() if written.get(n, d)[1] != d[1]] or ["of none"])
