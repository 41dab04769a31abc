"""Pack a run for a cluster: the resolved recipe, its plug-ins, this package and a few environment variables, but no
secrets."""

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
from eagleray.runs.build import check_method
from eagleray.runs.recipe import Recipe
from eagleray.storage.store import is_remote, local_path, store

ADDRESSES = ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
SHARED = "expected an s3:// URL, or an absolute path that is the same on all nodes"


@dataclass(frozen=True)
class JobPackage:
    """A run that is ready to be sent to a cluster."""

    id: str  # of the run, the same whenever it is sent
    name: str  # of the recipe
    recipe: Recipe

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that the cluster stores with the job."""
        digest = recipes.digest(self.recipe)
        return {"eagleray": "pretrain", "recipe": self.name, "out": self.recipe.out, "digest": digest}

    def write(self, folder: Path) -> None:
        """Write everything that is sent into an empty folder."""
        skipped = shutil.ignore_patterns("__pycache__", "_bundled")  # the recipe has no base any more
        shutil.copytree(Path(eagleray.__file__).parent, folder / "eagleray", ignore=skipped)
        (folder / layout.RECIPE).write_text(config.dump(self.recipe))
        for sources in loading.pack(self.recipe.plugins).values():
            loading.write(folder / loading.FOLDER, sources)


def pack(name: str, overrides: Sequence[str], gpus: int | None, plugins: Sequence[str | Path] = ()) -> JobPackage:
    """Return the package of a recipe, after checking it. `name` and `overrides` are as for `pretrain`; `gpus` is the
    number of workers, each with one GPU. Raises UserError."""
    given = [o for o in overrides if o.startswith("workers=")]
    if gpus and given:
        raise UserError(
            f"--gpus {gpus} and {given[-1]}: expected only one of the two, as --gpus sets the number of workers"
        )
    recipe = recipes.load(
        name, [*overrides, *([f"workers={gpus}", "gpus=true"] if gpus else [])], [str(p) for p in plugins]
    )
    check_places(recipe)
    check_method(recipe)
    return JobPackage(identify(recipe.out), Path(name).stem, recipe)


def identify(out: str) -> str:
    """Return the job id of a run folder: its name, which people can read, and a hash of its whole path or URL."""
    place = out.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.rpartition("/")[2]).strip("-.")
    return f"{name[:60]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def check_places(recipe: Recipe) -> None:
    """Raises UserError when the recipe has a path that other nodes of the cluster could not find."""
    for key, sources in ("data.train", recipe.data.sources()), ("data.test", recipe.data.test or ()):
        for source in sources:
            _check(key, source.url)
    _check("out", recipe.out)
    if recipe.data.cache:
        _check("data.cache", recipe.data.cache)


def _check(key: str, place: str) -> None:
    """Raises UserError when the path of a key is relative."""
    store(place)
    if not is_remote(place) and not local_path(place).is_absolute():
        raise UserError(f"{key}={place}: a relative path; {SHARED}")


def environment(here: Mapping[str, str] = os.environ) -> tuple[dict[str, str], list[str]]:
    """Return the environment variables to send with the job, and a line about each that is not sent. Raises
    UserError when one contains a user or password."""
    sent = {k: v for k, v in sorted(here.items()) if v and (k in ADDRESSES or k.startswith("EAGLERAY_"))}
    for key, value in sent.items():
        if re.search(r"://[^/\s]*@", value):
            raise UserError(
                f"{key}: contains a user or password, which everyone who sees the cluster's jobs could read; set "
                f"the URL without it here, and set the password on the cluster's nodes, {_secret(key)}"
            )
    stays = []
    uri = sent.get("MLFLOW_TRACKING_URI", "")
    if uri and not uri.startswith(("http://", "https://")):
        del sent["MLFLOW_TRACKING_URI"]
        stays.append(
            f"MLFLOW_TRACKING_URI={uri} is not sent: expected an http:// or https:// URL, which the nodes could reach"
        )
    return sent, stays


def _secret(key: str) -> str:
    """Return where to put the password of a variable instead."""
    if key == "MLFLOW_TRACKING_URI":
        return "such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment of `ray start`"
    return "in the environment of `ray start`"
