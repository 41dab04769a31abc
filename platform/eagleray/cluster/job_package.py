"""Pack a run for a cluster: the resolved recipe, its plug-ins, this package and a few addresses, but no secrets."""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import eagleray
from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import plugins as loading
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.build import check_sizes
from eagleray.runs.plan import training_sources
from eagleray.runs.recipe import Recipe
from eagleray.storage.store import is_remote, local_path, store

ADDRESSES = ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
SHARED = "expected an s3:// URL, or an absolute path that is the same on all nodes"


@dataclass(frozen=True)
class JobPackage:
    id: str  # of the run, the same whenever it is sent
    name: str  # of the recipe
    recipe: Recipe

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which the cluster describes the job."""
        digest = recipes.digest(self.recipe)
        return {"eagleray": "pretrain", "recipe": self.name, "out": self.recipe.out or "", "digest": digest}

    def write(self, folder: Path) -> None:
        """Write everything that is sent into an empty folder."""
        skipped = shutil.ignore_patterns("__pycache__", "_bundled")  # the recipe has no base any more
        shutil.copytree(Path(eagleray.__file__).parent, folder / "eagleray", ignore=skipped)
        (folder / layout.RECIPE).write_text(config.dump(self.recipe))
        for sources in loading.pack(self.recipe.plugins).values():
            loading.write(folder / loading.FOLDER, sources)


def pack(name: str, overrides: Sequence[str], gpus: int | None, plugins: Sequence[str | Path] = ()) -> JobPackage:
    """Return the checked package of a recipe, named as for `pretrain`, with `gpus` workers. Raises UserError."""
    given = [o for o in overrides if o.startswith("workers=")]
    if gpus and given:
        raise UserError(f"--gpus {gpus} and {given[-1]}: expected one of them; a worker has one GPU")
    recipe = recipes.load(
        name, [*overrides, *([f"workers={gpus}", "gpus=true"] if gpus else [])], [str(p) for p in plugins]
    )
    check_places(recipe)
    check_sizes(recipe)
    return JobPackage(identify(recipe.out or ""), Path(name).stem, recipe)


def identify(out: str) -> str:
    """Return the job id of a run folder: its name, for people, and a digest of its whole URL."""
    place = out.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.rpartition("/")[2]).strip("-.")
    return f"{name[:60]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def check_places(recipe: Recipe) -> None:
    """Raise UserError when the recipe has a path that other nodes could not find."""
    for key, sources in ("data.train", training_sources(recipe)), ("data.test", recipe.data.test or ()):
        for source in sources:
            _check(key, source.url)
    _check("out", recipe.out or "")
    if recipe.data.cache:
        _check("data.cache", recipe.data.cache)


def _check(key: str, place: str) -> None:
    store(place)
    if not is_remote(place) and not local_path(place).is_absolute():
        raise UserError(f"{key}={place}: is relative to a folder of this machine; {SHARED}")


def environment(here: Mapping[str, str] = os.environ) -> tuple[dict[str, str], list[str]]:
    """Return the variables that are sent, and a line about each that is not. Raises UserError for a password."""
    sent = {k: v for k, v in sorted(here.items()) if v and (k in ADDRESSES or k.startswith("EAGLERAY_"))}
    for key, value in sent.items():
        if re.search(r"://[^/\s]*@", value):
            raise UserError(
                f"{key}: has a user or password in it, which everyone who may see the cluster's jobs could read; give "
                f"the address alone here, and the secret to the cluster's nodes, {_secret(key)}"
            )
    stays = []
    uri = sent.get("MLFLOW_TRACKING_URI", "")
    if uri and not uri.startswith(("http://", "https://")):
        del sent["MLFLOW_TRACKING_URI"]
        stays.append(f"MLFLOW_TRACKING_URI={uri} stays here: no server of MLflow that the nodes could reach")
    return sent, stays


def _secret(key: str) -> str:
    if key == "MLFLOW_TRACKING_URI":
        return "such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment of `ray start`"
    return "in the environment of `ray start`"
