"""Find what is wrong with the command of a run before PyTorch is imported, which takes seconds."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from eagleray.base.console import say, say_loading
from eagleray.base.errors import UserError
from eagleray.config.source import Source
from eagleray.data import index_file
from eagleray.data.image_folder import check_outside, images_below
from eagleray.data.index import Listing, list_data, open_shown
from eagleray.models import names
from eagleray.runs import accelerators, fit, sources
from eagleray.runs import recipe as recipes
from eagleray.runs.named_run import check_goes_on
from eagleray.runs.recipe import Recipe
from eagleray.storage import store

# Patterns of the files in /dev that Linux has for accelerators of NVIDIA (`dxg` in WSL), AMD, Intel and others.
DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "dri/renderD*", "accel*")


def check_run(name: str, overrides: Sequence[str], plugins: Sequence[str] = ()) -> None:
    """Raises UserError when the recipe, a key, a path on this machine or the device of a run is wrong. The run itself
    checks stores, and what needs PyTorch. At the end, says that PyTorch is being loaded."""
    check_goes_on(name, overrides)
    recipe = recipes.load(name, overrides, plugins)
    store.check_writable(recipe.out, "out")
    check_out(recipe.out)
    check_device(recipe)
    check_names(recipe)
    folder = store.folder_of(store.absolute(recipe.out))
    if folder and not sources.has_begun(folder):  # new; a run in a store may have begun, and needs no weights then
        for key, place in sources.weight_files(sources.resolve_paths(recipe)).items():  # refuses NAME without timm: too
            sources.check_exists(place, key)
    recipes.check_lanes(recipe)
    check_data(recipe)
    say_loading()


def check_plan(
    name: str, overrides: Sequence[str], plugins: Sequence[str], *, gpu: str | None, images: int | None
) -> None:
    """Raises UserError when the recipe of a plan, its GPU or its data on this machine are wrong. If `images` is given,
    the data are not checked."""
    recipe = recipes.load(name, overrides, plugins)
    if gpu:
        accelerators.find(gpu)
    check_names(recipe)
    if recipe.data.train and not images:
        check_data(recipe)
    say_loading()


def check_names(recipe: Recipe) -> None:
    """Raises UserError when the recipe names a model or weights that timm does not have."""
    names.check_network(recipe.backbone, "backbone")
    if recipe.teacher:
        names.check_network(recipe.teacher, "method.teacher")
    if recipe.start:
        names.check_weights(recipe.start.source, "start.from=")


def check_out(out: str) -> None:
    """Raises UserError when the folder of a run on this machine can neither be written nor made."""
    folder = store.folder_of(store.absolute(out))
    there = next((path for path in (folder, *folder.parents) if path.exists()), None) if folder else None
    if there and not (there.is_dir() and os.access(there, os.W_OK)):
        why = "is no folder" if not there.is_dir() else "may not be written"
        raise UserError(f"out={folder}: cannot be written: {there} {why}")


def check_device(recipe: Recipe) -> None:
    """Raises UserError when the run asks for GPUs of this machine, which has none, see `may_have_gpu`."""
    if recipe.gpus and not recipe.is_elsewhere and not may_have_gpu():
        raise UserError(
            "gpus=true: this machine has no GPU; leave gpus out or give gpus=false to train on its CPU, or name a "
            "cluster in RAY_ADDRESS, with workers=N"
        )


def may_have_gpu() -> bool:
    """Return whether /dev shows an accelerator, true if this is not Linux; PyTorch may be unable to use it."""
    return sys.platform != "linux" or any(next(Path("/dev").glob(pattern), None) for pattern in DEVICES)


def check_data(recipe: Recipe) -> None:
    """Index data on this machine that have no index yet. Raises UserError when data are missing, or when the images of
    a folder do not fill a batch."""
    train = listings(recipe.data.sources(), "data.train: {}")
    test = listings(recipe.data.test or (), "data.test: {}; name another, or none: data.test=null")
    out, batch = store.absolute(recipe.out.rstrip("/")), recipe.optim.batch
    given = {store.absolute(source.url): source for source in (*(recipe.data.test or ()), *recipe.data.sources())}
    if all(listing and not (listing.blobs or given[url].weight) for url, listing in train.items()):
        images = sum(given[url].repeat * len(list(islice(images_below(store.local_path(url)), batch))) for url in train)
        if images < batch:
            raise fit.too_small(recipe, images)
    check_outside(out, given, "out=")
    for url, listing in (train | test).items():
        if listing and lacks_index(listing, out):
            open_shown([replace(given[url], url=url)], out, note=say, channels=recipe.data.channels)


def listings(sources: Sequence[Source], said: str) -> dict[str, Listing | None]:
    """Return what is at the absolute paths and URLs of data; None for data in a store, which the run checks. Raises
    UserError for an unknown store or a path without shards and images: `said`, with the reason in its braces."""
    found: dict[str, Listing | None] = {}
    try:
        for url in (store.absolute(source.url) for source in sources):
            store.store(url)
            found[url] = list_data(url) if store.folder_of(url) else None
    except UserError as e:
        raise UserError(said.format(e)) from None
    return found


def lacks_index(listing: Listing, spare: str) -> bool:
    """Return whether any folder of a listing has an index neither beside its files nor in the folder `spare`."""
    folders = {*listing.folders, *(store.parent(blob.url) for blob in listing.blobs)}
    places = [(f"{folder}/{index_file.NAME}", index_file.aside(folder, spare) or "") for folder in folders]
    return not all(any(map(os.path.exists, pair)) for pair in places)
