"""Record what a run learns from: its images and the weights that it takes over, each with digest and licence.

Rank 0 writes the record when the run starts, as images, weights and their entries on the Hugging Face Hub may change
later."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import timm

from eagleray import config
from eagleray.base.errors import Outage, UserError
from eagleray.base.files import write_atomic
from eagleray.datasets import card as dataset_card
from eagleray.datasets.sources.source import OWN
from eagleray.engine.checkpoint import blobs_of
from eagleray.engine.checkpoint_files import names_in, parse_manifest, sha256, step_of
from eagleray.engine.export_files import export_in
from eagleray.models import hub
from eagleray.models.network import HF, TIMM, Network
from eagleray.runs import layout, provenance
from eagleray.runs import recipe as recipes
from eagleray.runs.attempts import read_starts
from eagleray.runs.command import read_environment
from eagleray.runs.forgotten import read_forgotten, told
from eagleray.runs.licences import UNKNOWN, by_name, in_card
from eagleray.runs.plan import DIGESTS, Plan
from eagleray.runs.provenance import IMAGES, Material, Provenance, Record, parse_record, published
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.runs.summary import EXPORTED, parse_summary
from eagleray.storage import store


def record(plan: Plan, folder: Path, *, first: bool) -> None:
    """Write the materials of a run into its folder. Weights are recorded at its `first` start, and kept at later ones.
    Raises UserError when weights cannot be read, or have a record that eagleray has not written."""
    known = () if first else in_folder(folder)
    weights = [m for m in known if m.key != IMAGES]
    if first:
        weights = [weights_of(key, source) for key, source in plan.recipe.weight_sources.items()]
    whole = Record(materials=(images_of(plan), *weights))
    write_atomic(folder / layout.MATERIALS, json.dumps(config.to_plain(whole), indent=1))


def in_folder(folder: Path) -> tuple[Material, ...]:
    """Return the materials in a run's materials.json; none without this file. Raises UserError when it is damaged."""
    path = folder / layout.MATERIALS
    return parse_record(path.read_text(), str(path)) if path.exists() else ()


def images_of(plan: Plan) -> Material:
    """Return the training images as a material, with the licence in the data card beside them, else in the recipe."""
    licences: dict[str, None] = {}
    homes = (store.parent(blob.url) for blob in plan.index.shards)
    for home, source in dict.fromkeys(zip(homes, plan.index.sources, strict=True)):
        card = None
        with contextlib.suppress(UserError, Outage, OSError):  # a card that cannot be read states nothing
            card = dataset_card.find(home)
        stated = str(card["licence"]) if card else UNKNOWN
        licences[(source.licence or UNKNOWN) if stated in (OWN, UNKNOWN) else stated] = None
    urls = ", ".join(published(source.url) for source in plan.recipe.data.sources())
    return Material(key=IMAGES, source=urls, digest=plan.origin["data"], licences=tuple(licences))


def weights_of(key: str, source: str) -> Material:
    """Return the weights that a key of the recipe names, as a material. Weights of a run or an export of eagleray come
    with a record of what they were made from. Raises UserError when the weights cannot be read."""
    name, given = published(source), f"{key}={source}"
    if source.startswith(TIMM):
        settings = timm.get_pretrained_cfg(source.removeprefix(TIMM))
        file = hub.timm_overlay(settings, given).get("file")  # no file where timm does not read the weights from one
        licence = (settings and settings.license) or UNKNOWN
        return Material(key=key, source=name, digest=sha256(Path(file)) if file else "", licences=(licence,))
    if source.startswith(HF):
        repository = source.removeprefix(HF)
        stated = ""
        with contextlib.suppress(UserError):  # the repository may have no card, or the Hub may be out of reach
            stated = in_card(hub.fetch(repository, ["README.md"], given=given).read_text(errors="replace"))
        digest = sha256(hub.fetch(repository, given=given))
        return Material(key=key, source=name, digest=digest, licences=(stated or by_name(repository),))
    file = export_in(source)
    if file is None and store.may_be_folder(source):
        text = run_store(source).get(layout.MATERIALS)
        made_from = parse_record(text, f"{source}/{layout.MATERIALS}") if text else ()
        return Material(key=key, source=name, digest=newest_digest(source), made_from=made_from)
    return of_file(key, name, file or Path(source))


def of_file(key: str, name: str, path: Path) -> Material:
    """Return the weights in a file as a material: of an export, of a checkpoint of a run, or from elsewhere."""
    digest, about = sha256(path), path.with_name(provenance.NAME)
    if about.exists() and (facts := provenance.read(about)).files.get(path.name) == digest:
        licences = (facts.licence,) if facts.licence else ()
        return Material(key=key, source=name, digest=digest, licences=licences, made_from=facts.materials)
    made_from = in_folder(path.parent.parent) if path.parent.name == layout.CHECKPOINTS else ()
    return Material(
        key=key, source=name, digest=digest, licences=() if made_from else (by_name(path.name),), made_from=made_from
    )


def newest_digest(out: str) -> str:
    """Return the SHA-256 of a run's newest checkpoint, or of its best one if it ended with that; else an empty text."""
    url = f"{out.rstrip('/')}/{layout.CHECKPOINTS}"
    best = parse_summary(run_store(out).get(layout.SUMMARY), f"{out}/{layout.SUMMARY}").get(EXPORTED)
    names = sorted(names_in(blobs_of(url)), key=lambda name: step_of(name) != best)
    manifest = parse_manifest(store.find(f"{url}/{names[0]}.json") or b"") if names else None
    return str((manifest or {}).get("sha256", ""))


def facts_of(
    recipe: Recipe, out: str, folder: Path, network: Network, *, features: int, parameters: int, steps: int | None
) -> Provenance:
    """Return the facts about weights of the run at `out`, whose files on this machine are in `folder`. Raises UserError
    when its record of materials is damaged."""
    starts = read_starts(folder / layout.STARTS)
    noted = {name: tuple(dict.fromkeys(str(s[name]) for s in starts if name in s)) for name in DIGESTS[1:]}
    return Provenance(
        backbone=network.name,
        features=features,
        parameters=parameters,
        method=recipe.method.name,
        steps=steps,
        recipe=published(config.to_plain(recipe)),
        digests={DIGESTS[0]: (recipes.digest(recipe),)} | {name: found for name, found in noted.items() if found},
        commit=str(read_environment(folder).get("commit", "")),
        materials=in_folder(folder) or tuple(unrecorded(recipe)),
        forgotten=tuple(told(read_forgotten(out))),
    )


def unrecorded(recipe: Recipe) -> Iterator[Material]:
    """Yield the materials that a recipe names, without digests, for a run whose folder has no record of them."""
    urls = ", ".join(published(source.url) for source in recipe.data.train or ())
    yield Material(key=IMAGES, source=urls, digest="")
    for key, source in recipe.weight_sources.items():
        yield Material(key=key, source=published(source), digest="")
