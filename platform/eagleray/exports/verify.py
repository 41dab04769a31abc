"""Verify an export without PyTorch: recompute its digests, and check that its files agree on each fact."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.base.files import NO_JSON
from eagleray.engine.checkpoint_files import sha256
from eagleray.engine.export_files import CARD, CONFIG, DESCRIPTION
from eagleray.runs import provenance
from eagleray.runs.provenance import NAME, Provenance, tensor_digests

MOST = 3  # largest number of changes that an error names


@dataclass(frozen=True)
class Verified:
    """An export whose digests and facts were found to be right."""

    folder: Path  # folder on this machine
    sha256: str  # SHA-256 of provenance.json, which identifies the export
    checks: tuple[str, ...]  # a line of text about each check
    conditions: str  # licences that forbid a use, have conditions or are unknown, as text
    facts: Provenance


def verify(folder: Path) -> Verified:
    """Verify the export in a local folder. Raises UserError, which names what was changed."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder}: has no {NAME}; expected the folder of an export, such as RUN/export")
    facts = provenance.read(path)
    found = [*fields(path, facts), *files(folder, facts), *tensors(folder, facts), *words(folder, facts)]
    if found:
        more = f"; and {len(found) - MOST} more" if found[MOST:] else ""
        raise UserError(f"{folder}: not verified: {'; '.join(found[:MOST])}{more}")
    digest, count = hashlib.sha256(path.read_bytes()).hexdigest(), sum(map(len, facts.tensors.values()))
    checks = (
        f"facts     {len(facts.fields)} fields of {NAME}, SHA-256 {digest}",
        f"files     {len(facts.files)}: {', '.join(facts.files)}",
        f"tensors   {count}" if count else "tensors   not listed: the format is not that of safetensors",
        f"says      {facts.backbone} by {facts.method}, {facts.parameters:,} parameters, {facts.steps} steps, recipe "
        f"{', '.join(facts.digests.get('recipe', ()))}, commit {facts.commit or 'unknown'}",
    )
    return Verified(folder, digest, checks, provenance.conditions(facts), facts)


def fields(path: Path, facts: Provenance) -> Iterator[str]:
    """Yield a line for each fact in provenance.json that was changed after the export was written."""
    wanted, known = provenance.field_digests(facts), facts.fields
    wrong = [name for name in {**wanted, **known} if wanted.get(name) != known.get(name)]
    yield from (f"{NAME}: {name} was changed" for name in wrong)
    if not wrong and provenance.render(facts) != path.read_bytes():
        yield f"{NAME}: was changed"


def files(folder: Path, facts: Provenance) -> Iterator[str]:
    """Yield a line for each missing, changed or added file, except hidden files and folders of other exports."""
    there = {p.name: p for p in sorted(folder.iterdir()) if not p.name.startswith(".") and not (p / NAME).exists()}
    yield from (f"{name}: is missing" for name in facts.files if name not in there)
    for name, path in there.items():
        if name not in {*facts.files, NAME}:
            yield f"{name}: was added"
        elif name != NAME and not (path.is_file() and sha256(path) == facts.files[name]):
            yield f"{name}: was changed"


def tensors(folder: Path, facts: Provenance) -> Iterator[str]:
    """Yield a line for each tensor that was changed, added or removed after the export was written."""
    for file, wanted in facts.tensors.items():
        found = {}
        if file in facts.files and (folder / file).is_file():
            with contextlib.suppress(UserError):  # a damaged file counts as a file without tensors
                found = tensor_digests(folder / file)
            wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
            yield from (f"{file}: tensor {name} was changed" for name in wrong)


def words(folder: Path, facts: Provenance) -> Iterator[str]:
    """Yield a line for each fact on which another file of the export disagrees with provenance.json."""
    if (card := folder / CARD).is_file():
        text = card.read_text(errors="replace")
        wrong = [fact for fact, said in provenance.statements(facts).items() if said not in text]
        yield from (f"{CARD}: its {fact} is not that of {NAME}" for fact in wrong)
    wanted = {"backbone": facts.backbone.partition(".")[0], "features": facts.features}
    for name in sorted({DESCRIPTION, CONFIG} & facts.files.keys()):
        with contextlib.suppress(OSError, *NO_JSON):  # `files` reports damaged files
            known = json.loads((folder / name).read_text())
            model = known.get("architecture") or known.get("network", {}).get("name", facts.backbone)
            said = {"backbone": model.partition(".")[0], "features": known.get("num_features", known.get("features"))}
            wrong = [fact for fact in said if said[fact] not in (None, wanted[fact])]
            yield from (f"{name}: {fact} is {said[fact]}, and {wanted[fact]} in {NAME}" for fact in wrong)
