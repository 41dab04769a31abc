"""Write and read provenance.json, which says what exported weights were made from and how to recognise them.

The file has a digest of every other file of the export and of each of its own fields, so that verification can name
what was changed. This module does not import PyTorch, which a reader of an export may not have."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from eagleray import config
from eagleray.base.errors import explained, hide_secrets
from eagleray.base.files import NO_JSON, write_atomic
from eagleray.config import STRICT, yaml_text
from eagleray.engine.checkpoint_files import sha256
from eagleray.runs.licences import UNKNOWN, is_free, with_terms

NAME = "provenance.json"
TENSORS = ".safetensors"
LENGTH = 16  # hexadecimal digits of the digests of tensors and fields
IMAGES = "data.train"
# Maps keys of a recipe to the words for their materials in an export. Other keys name weights to start from.
WORDS = {IMAGES: "images", "method.teacher.weights": "teacher"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Material:
    """Images or weights that a run has learned from."""

    key: str  # the recipe's key for these images or weights, such as data.train
    source: str  # a public name or URL, or the end of a path
    digest: str  # digest of the index of images, or SHA-256 of the file of weights; empty if unknown
    licences: tuple[str, ...] = ()  # as they are stated; none for weights that have no licence of their own
    made_from: tuple["Material", ...] = ()  # the materials of weights that a run of eagleray has trained


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Record:
    """The content of materials.json in a run's folder."""

    materials: tuple[Material, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Provenance:
    """The facts about the weights of an export."""

    format: Literal[1] = 1
    backbone: str  # name of the backbone's model
    features: int
    parameters: int
    method: str
    encoder: str = ""  # name of the method's encoder that `--what` has chosen
    steps: int | None = None  # training steps of the weights; None: the checkpoint does not say
    recipe: dict[str, Any]  # the recipe, with paths cut to their last two parts
    digests: dict[str, tuple[str, ...]]  # digests of recipe, data, order and code that the starts of the run recorded
    commit: str = ""  # git commit of the code; empty if it was no checkout
    licence: str = ""  # licence under which the weights are published; empty if nobody has said
    materials: tuple[Material, ...]
    forgotten: tuple[str, ...] = ()  # how many images the run has forgotten, and since which step
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of the export's other files
    # Digests of the tensors of each safetensors file, by their names.
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)  # digests of the fields above


def published(value: Any) -> Any:
    """Return the values of a recipe without secrets, and with paths of this machine cut to their last two parts."""
    if isinstance(value, Mapping):
        return {key: published(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [published(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return "/".join(value.rstrip("/").split("/")[-2:]) if value.startswith("/") else hide_secrets(value)


def parse_record(text: str, name: str) -> tuple[Material, ...]:
    """Return the materials in `text`, the content of a run's file `name`. Raises UserError when it is damaged."""
    with explained(f"{name}: not written by eagleray", *NO_JSON):
        return config.check(Record, json.loads(text), name).materials


def read(path: Path) -> Provenance:
    """Read the provenance of an export. Raises UserError when it is missing or not written by `eagleray export`."""
    with explained(f"{path}: not written by `eagleray export`", OSError, *NO_JSON):
        return config.check(Provenance, json.loads(path.read_bytes()), str(path))


def render(facts: Provenance) -> bytes:
    """Return the content of provenance.json. Equal facts give equal bytes, so a changed byte is a change or damage."""
    return json.dumps(config.to_plain(facts), indent=1).encode()


def seal(folder: Path, names: Sequence[str], facts: Provenance) -> None:
    """Write the provenance of an export whose other files have these `names`."""
    files = {name: sha256(folder / name) for name in sorted(names)}
    tensors = {name: tensor_digests(folder / name) for name in files if name.endswith(TENSORS)}
    whole = replace(facts, files=files, tensors=tensors)
    write_atomic(folder / NAME, render(replace(whole, fields=field_digests(whole))))


def remove_stale(folder: Path, names: Sequence[str]) -> None:
    """Delete the files of an earlier export that the next one, with files of these `names`, does not replace.
    Files that were changed since the earlier export stay."""
    if (folder / NAME).exists():
        for name, digest in read(folder / NAME).files.items():
            path = folder / name
            if name == path.name and name not in names and path.is_file() and sha256(path) == digest:
                path.unlink()


def field_digests(facts: Provenance) -> dict[str, str]:
    """Return the digest of each field except `fields`, by name."""
    plain = config.to_plain(facts)
    return {name: _short(json.dumps(value).encode()) for name, value in plain.items() if name != "fields"}


def tensor_digests(path: Path) -> dict[str, str]:
    """Return the digests of type, shape and bytes of a file's tensors, by name. Raises UserError if it is damaged."""
    out = {}
    with explained(f"{path}: no tensors can be read", OSError, OverflowError, *NO_JSON), path.open("rb") as file:
        size = path.stat().st_size  # a damaged file may state any length
        start = 8 + int.from_bytes(file.read(8), "little")
        for name, about in json.loads(file.read(min(start - 8, size))).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                file.seek(start + first)
                data = file.read(min(max(last - first, 0), size))
                out[name] = _short(f"{about['dtype']} {about['shape']} ".encode() + data)
    return out


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:LENGTH]


def licences(materials: Sequence[Material], of: str = "") -> Iterator[tuple[str, str]]:
    """Yield each material, in words, with each of its licences, and likewise those that it was made from. `of` is put
    behind the word of a material, such as ` of the teacher`."""
    for material in materials:
        word = WORDS.get(material.key, "start weights")
        known = f" ({material.source})" if material.source.startswith(("timm:", "hf:")) else ""
        for licence in material.licences or (() if material.made_from else (UNKNOWN,)):
            yield f"{word}{of}{known}", licence
        yield from licences(material.made_from, f" of the {word}{of}")


def conditions(facts: Provenance) -> str:
    """Return in one line the licences that forbid a use, have conditions or are unknown. It is empty if none does."""
    found = [f"{what}: {with_terms(licence)}" for what, licence in licences(facts.materials) if not is_free(licence)]
    return "; ".join(dict.fromkeys(found))


def statements(facts: Provenance) -> dict[str, str]:
    """Return the paragraphs of an export's model card, by the name of the fact that each of them states."""
    open_ = "The licence of these weights is for those to state who publish them: `eagleray export --licence NAME`."
    own = f"These weights are published under {facts.licence}." if facts.licence else open_
    of = dict.fromkeys(f"* {what}: {with_terms(licence)}\n" for what, licence in licences(facts.materials))
    return {
        "backbone": f"# {facts.backbone}, {facts.method}\n",
        "parameters": f"A backbone of {facts.parameters / 1e6:.1f} million parameters that turns "
        f"an image into a vector of {facts.features} numbers.",
        "licence": f"## Licence\n\n{own} They were made from:\n\n{''.join(of)}",
        "digests": "".join(f"* {name}: digest {', then '.join(found)}\n" for name, found in facts.digests.items()),
        "forgotten": "".join(f"* forgotten: {line}\n" for line in facts.forgotten),
        "steps": "" if facts.steps is None else f"* training: {facts.steps} steps",
        "recipe": f"## Recipe\n\n```yaml\n{yaml_text.dump(facts.recipe)}```\n",
    }
