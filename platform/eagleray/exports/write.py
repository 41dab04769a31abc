"""Write an export into a folder: its files, which are checked in a new process, and its card. If a file cannot be
written or a check fails, the folder does not change."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file

from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.files import sync_file, sync_folder, writing
from eagleray.engine.checkpoint_files import sha256
from eagleray.engine.export import snippet
from eagleray.engine.export_files import CARD, CONFIG, FILE, HEADS
from eagleray.exports import hugging_face, timm_files, traced
from eagleray.exports.card import LIBRARIES, card
from eagleray.exports.compare import Difference, compare
from eagleray.exports.source import Program, Source
from eagleray.runs import provenance
from eagleray.runs.materials import facts_of


@dataclass(frozen=True)
class Target:
    """A library that loads exports, and how they are written for it."""

    write: Callable[[Source, Path], Program]  # writes the files, and returns the program that loads them
    line: Callable[[Path], str]  # returns the line of Python that loads them


TARGETS = {
    "timm": Target(timm_files.write, snippet),
    "timm-hub": Target(timm_files.write_hub, timm_files.hub_line),
    "transformers": Target(hugging_face.write, hugging_face.line),
    "onnx": Target(traced.write_onnx, traced.onnx_line),
    "torch.export": Target(traced.write_torch, traced.torch_line),
}


class Written(NamedTuple):
    """An export that has been written and compared with its backbone."""

    folder: Path
    files: list[Path]
    line: str  # line of Python that loads the export
    difference: Difference
    step: int | None  # step in pixels between the image sides that a traced network accepts
    conditions: str  # licences that forbid a use, have conditions or are unknown


def write(source: Source, to: str, folder: Path, *, with_heads: bool = False, licence: str = "") -> Written:
    """Write an export into a folder, and replace an earlier export for the same library, but only after a new process
    has loaded it. Raises UserError, and leaves the folder unchanged, when the export fails or the folder has other
    files of the same names."""
    target = TARGETS[to]
    if source.preprocessing.channels and to != "timm":
        raise UserError(
            f"--to {to}: is for images in red, green and blue; expected --to timm for a run with data.channels"
        )
    with staged(folder) as stage:
        program = target.write(source, stage)
        written = {CARD, provenance.NAME, *(p.name for p in stage.iterdir()), *([HEADS] if with_heads else [])}
        check_place(folder, to, written)
        say(f"a new process loads the {to} files and compares features of ten photographs, which takes about a minute")
        ours = to == "timm" and timm_files.needs_ours(source)
        difference = compare(source, stage, program.text, sizes=program.probes, ours=ours)
        if with_heads:
            write_heads(source, stage)
        facts = facts_of_export(source, licence)
        (stage / CARD).write_text(card(source, to, program.text, difference, facts))
        provenance.seal(stage, [p.name for p in stage.iterdir()], facts)
        names = sorted(p.name for p in stage.iterdir())
        provenance.remove_stale(folder, names)
    lines = target.line(folder), difference, program.step, provenance.conditions(facts)
    return Written(folder, [folder / n for n in names], *lines)


def facts_of_export(source: Source, licence: str = "") -> provenance.Provenance:
    """Return the facts about the backbone of a source. `licence` is the licence of the published weights."""
    features, parameters = source.backbone.dim, sum(p.numel() for p in source.backbone.parameters())
    how = source.recipe, source.out, source.folder, source.network
    facts = facts_of(*how, features=features, parameters=parameters, steps=source.steps)
    return replace(facts, licence=licence, encoder=source.what or "")


def write_heads(source: Source, folder: Path) -> None:
    """Write the tensors of a method outside its backbones, such as heads, centres and queues. They get the names that
    all methods share, so that another run can start from them. Raises UserError when there are no such tensors."""
    if not source.parts:
        raise UserError(f"--heads: {source.recipe.method.name} has nothing beside its backbone")
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in source.parts.items()}
    about = {"method": source.recipe.method.name, "backbone": source.role, "sha256": sha256(folder / FILE)}
    save_file(state, folder / HEADS, about)


def check_place(folder: Path, to: str, names: Collection[str]) -> None:
    """Raises UserError when `folder` has files called `names` that are not from an export for the library `to`, or
    weights that timm would load instead of the export's."""
    there = sorted(name for name in names if os.path.lexists(folder / name))
    if there and (known := library_of(folder)) != to:
        whose = f"from an export --to {known}" if known else f"not from an export --to {to}"
        raise UserError(f"{folder}: has {', '.join(there)} already, {whose}; give another --destination")
    if to == "timm" and CONFIG in names:  # timm loads a file with one of its usual names, or else the first by name
        usual = re.compile(r"(open_clip_)?(pytorch_)?model\.(safetensors|bin|pth)")
        before = [n for n in os.listdir(folder) if usual.fullmatch(n) or (n.endswith(".safetensors") and n < FILE)]
        if before:
            raise UserError(f"{folder}: has {min(before)}, which timm would load instead; give another --destination")


def library_of(folder: Path) -> str:
    """Return the library for which a folder has an export, or "" if it has none."""
    if not os.path.lexists(folder / CARD):  # a run writes an export without a card at its end
        try:
            known = json.loads((folder / FILE).with_suffix(".json").read_text())
            return "timm" if {"timm", "backbone"} & set(known) else ""
        except (OSError, ValueError, TypeError):
            return ""
    if not (folder / CARD).is_file():
        return ""
    use = (folder / CARD).read_text(errors="replace").partition("## Preprocessing")[0]
    name = re.search(r"^library_name: (\S+)$", use, re.MULTILINE)
    found = [t for t in TARGETS if name and "Eagleray pretrained it" in use and LIBRARIES.get(t, t) == name[1]]
    if "timm" in found:  # the card calls both `timm` and `timm-hub` timm
        return "timm" if os.path.lexists(folder / FILE) else "timm-hub"
    return found[0] if found else ""


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A context with a new folder, whose files move into `folder` at its end, with the modes that the umask gives.

    After an error `folder` is unchanged. Raises UserError when `folder` cannot be written."""
    with writing(f"--destination {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
            stage = Path(scratch)
            yield stage
            (probe := folder / ".mode").touch()
            mode = probe.stat().st_mode
            probe.unlink()
            files = sorted(stage.iterdir(), key=lambda f: f.name != CARD)  # first the card: it names the library
            for file in files:  # a full disk may be noticed only here, while `folder` is unchanged
                file.chmod(mode)  # safetensors lets only the owner read its files
                sync_file(file)
            for file in files:
                file.replace(folder / file.name)
            sync_folder(folder)
