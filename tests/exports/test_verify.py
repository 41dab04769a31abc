"""An export is verified as long as each of its bytes is the one that was written."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.exports import source
from helpers.networks import VIT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.engine.export_files import CARD
from eagleray.exports import write
from eagleray.exports.compare import Difference
from eagleray.exports.verify import verify
from eagleray.runs import provenance
from eagleray.runs.provenance import NAME

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[write.Written]:
    folder = tmp_path_factory.mktemp("exports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "compare", lambda *_, **__: Difference(0, 0, 0))
        found = replace(source(folder / "run", "vit_tiny_patch16_224", options=VIT), steps=7)
        yield write.write(found, "timm-hub", folder / "out", licence="cc-by-4.0")


@pytest.fixture
def export(written: write.Written, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written.folder, tmp_path / "export"))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as e:
        verify(folder)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_an_export_as_it_was_written_is_verified(written: write.Written, export: Path):
    found = verify(export)
    assert found.facts.steps == 7
    assert found.facts.backbone == "vit_tiny_patch16_224"
    assert found.conditions == written.conditions == "images: unknown, as nobody has stated it"
    assert list(found.facts.files) == [CARD, "config.json", WEIGHTS]
    card = (export / CARD).read_text()
    assert "license: cc-by-4.0\n" in card
    assert "These weights are published under cc-by-4.0." in card
    assert "* images: unknown" in card
    assert str(written.folder.parent) not in card + (export / NAME).read_text(), "paths of this machine stay here"
    (export / ".gitattributes").write_text("")  # what the Hub adds
    shutil.copytree(written.folder, export / "onnx")  # another export
    verify(export)


def test_it_needs_no_pytorch(export: Path):
    code = f"import eagleray, sys; eagleray.verify({str(export)!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def change(name: str, old: str, new: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return apply


def change_last_byte(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (change_last_byte, f"{WEIGHTS}: was changed; {WEIGHTS}: tensor "),
        (change(CARD, "timm", "tomm"), f"{CARD}: was changed"),
        (
            change(CARD, "name: mocov3", "name: simclr"),
            f"{CARD}: was changed; {CARD}: its recipe is not that of {NAME}",
        ),
        (change(CARD, "images: unknown", "images: mit"), f"{CARD}: was changed; {CARD}: its licence is not that of"),
        (change(CARD, "training: 7", "training: 8"), f"{CARD}: was changed; {CARD}: its steps is not that of {NAME}"),
        (
            change("config.json", '"vit_tiny', '"vit_base'),
            "config.json: was changed; config.json: backbone is vit_base",
        ),
        (change(NAME, '"steps": 7', '"steps": 8'), f"{NAME}: steps was changed; {CARD}: its steps is not that"),
        (
            change(NAME, '"licence": "cc-by-4.0"', '"licence": "mit"'),
            f"{NAME}: licence was changed; {CARD}: its licence",
        ),
        (change(NAME, '"name": "mocov3"', '"name": "simclr"'), f"{NAME}: recipe was changed"),
        (change(NAME, '"format": 1', '"format":  1'), f"{NAME}: was changed"),
        (change(NAME, "{", "["), f"{NAME}: not written by `eagleray export`"),
        (lambda folder: (folder / CARD).unlink(), f"{CARD}: is missing"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS}: is missing"),
        (lambda folder: (folder / NAME).unlink(), f"has no {NAME}; expected the folder of an export"),
        (lambda folder: (folder / "hubconf.py").touch(), "hubconf.py: was added"),
    ],
)
def test_what_was_changed_is_named(tamper: Callable[[Path], object], said: str, export: Path):
    tamper(export)
    assert said in refused(export)


def test_facts_with_new_digests_still_differ_from_the_card(export: Path):
    """Somebody has rewritten provenance.json as a whole, and no other file."""
    facts = replace(provenance.read(export / NAME), licence="mit", steps=8)
    facts = replace(facts, fields=provenance.field_digests(facts))
    (export / NAME).write_bytes(provenance.render(facts))
    line = refused(export)
    assert f"{CARD}: its licence is not that of {NAME}; {CARD}: its steps is not that of {NAME}" in line


def test_weights_with_a_new_digest_still_differ_by_their_tensors(export: Path):
    change_last_byte(export)
    facts = provenance.read(export / NAME)
    facts = replace(facts, files=facts.files | {WEIGHTS: provenance.sha256(export / WEIGHTS)})
    (export / NAME).write_bytes(provenance.render(replace(facts, fields=provenance.field_digests(facts))))
    assert f"not verified: {WEIGHTS}: tensor " in refused(export)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bit_can_be_flipped(export: Path, data: st.DataObject):
    path = data.draw(st.sampled_from(sorted(export.iterdir())))
    good = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
    try:
        assert path.name in refused(export)
    finally:
        path.write_bytes(good)


def test_what_an_earlier_export_has_left_is_removed(export: Path):
    (export / "config.json").write_text("{}")  # by somebody else
    provenance.remove_stale(export, [WEIGHTS])
    assert {p.name for p in export.iterdir()} == {WEIGHTS, "config.json", NAME}


def test_facts_are_json_that_others_read(export: Path):
    facts = json.loads((export / NAME).read_text())
    assert facts["recipe"]["method"]["name"] == "mocov3"
    assert facts["materials"][0]["key"] == "data.train"
