"""Pack a command for a cluster: its arguments, resolved recipe or sweep, plug-ins, this package and a few environment
variables, but no secrets."""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import eagleray
from eagleray import config
from eagleray.base.errors import UserError, has_secrets, hide_secrets
from eagleray.base.user import user
from eagleray.config import bundled
from eagleray.config import plugins as loading
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.named_run import check_goes_on
from eagleray.runs.recipe import Recipe
from eagleray.runs.sources import resolve_paths, weight_files
from eagleray.storage.store import check_writable, folder_of, store

# The names, and below the beginnings of names, of the environment variables that are sent with a job: addresses, and
# settings of NCCL, gloo, libfabric, PyTorch and Ray Train. None of these variables is meant to hold a secret.
SENT = ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AZURE_STORAGE_ACCOUNT", "OMP_NUM_THREADS")
BEGINNINGS = ("NCCL_", "GLOO_", "TORCH_", "RAY_TRAIN_", "FI_")
# Variables that begin with TORCH_ but name a path of this machine, so they are not sent.
OF_THIS_MACHINE = ("TORCH_HOME",)
SECRET = re.compile(r"(?i)(token|secret|passw|credential|(?<![a-z])key(?![a-z]))")  # names that suggest a secret
SHARED = "expected an s3:// URL, or an absolute path that is the same on all nodes"


@dataclass(frozen=True)
class JobPackage:
    """A command that is ready to be sent to a cluster."""

    id: str  # the job id: the same each time the same command is sent
    command: str  # e.g. pretrain
    name: str  # name of the recipe, sweep, backbone or data
    out: str  # folder or URL of the results
    digest: str  # digest of everything that determines the results
    words: tuple[str, ...]  # arguments of `eagleray` on the head
    asks: str  # the resources that the command needs, in words
    files: Mapping[str, str] = field(default_factory=dict)  # texts of the files sent with the command, by file name
    plugins: Mapping[str, loading.Sources] = field(default_factory=dict)  # plug-ins by folder in the package
    recipe: Recipe | None = None  # None unless the job is a run

    def __post_init__(self) -> None:
        """Raises UserError, which repeats no secret, when an argument or file has a user, password or key."""
        words = [(word.partition("=")[0] if "=" in word else "an argument", word) for word in self.words]
        for where, text in [("out", self.out), *words, *self.files.items()]:
            if has_secrets(text):
                raise UserError(
                    f"{hide_secrets(where)}: contains a user, password or key, which everyone who sees the cluster's "
                    "jobs could read; set it on the cluster's nodes, in the environment of `ray start`"
                )

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that the cluster stores with the job."""
        kept = {"eagleray": self.command, "recipe": self.name, "out": self.out, "digest": self.digest}
        return kept | {"user": user()}

    @property
    def busy(self) -> str:
        """Return a clause that says that the command is running, for a message."""
        return "this run is being trained" if self.command in ("pretrain", "finetune") else f"{self.command} is running"

    def write(self, folder: Path) -> None:
        """Write the package into an empty folder."""
        skipped = shutil.ignore_patterns("__pycache__", "_bundled")  # a resolved recipe needs no shipped one
        shutil.copytree(Path(eagleray.__file__).parent, folder / "eagleray", ignore=skipped)
        detectors = f"pipelines/{bundled.SCHEDULES}"  # the protocol `detection` reads one of these by its name
        shutil.copytree(bundled.folder(detectors), folder / "eagleray" / "_bundled" / detectors)
        for name, text in self.files.items():
            (folder / name).write_text(text)
        for place, sources in self.plugins.items():
            loading.write(folder / place, sources)


def pack(
    name: str,
    overrides: Sequence[str],
    gpus: int | None,
    plugins: Sequence[str | Path] = (),
    *,
    command: str = "pretrain",
) -> JobPackage:
    """Check a run's recipe, and return the run's package. `name` and `overrides` are as for `pretrain`. `gpus` is the
    number of workers, with a GPU each; None: as in the recipe. Raises UserError when the cluster cannot train it."""
    given = [o for o in overrides if o.startswith("workers=")]
    if gpus and given:
        raise UserError(
            f"--gpus {gpus} and {given[-1]}: expected only one of the two, as --gpus sets the number of workers"
        )
    check_goes_on(name, overrides)
    recipe = recipes.load(
        name, [*overrides, *([f"workers={gpus}", "gpus=true"] if gpus else [])], [str(p) for p in plugins]
    )
    check_data_places(recipe)
    check_place("out", recipe.out)
    recipes.check_lanes(recipe)
    from eagleray.runs.checks import check_method

    check_method(recipe)
    return JobPackage(
        identify(recipe.out),
        command,
        Path(name).stem,
        recipe.out,
        recipes.digest(recipe),
        ("pretrain", layout.RECIPE),
        f"{recipe.workers} worker(s)" + (" with a GPU each" if recipe.gpus else ""),
        {layout.RECIPE: config.dump(recipe)},
        {loading.FOLDER: _joined(loading.pack(recipe.plugins))},
        recipe,
    )


def pack_words(
    command: str,
    name: str,
    out: str,
    words: Sequence[str],
    plugins: Sequence[str | Path] = (),
    files: Mapping[str, str] | None = None,
    *,
    asks: str,
    used: Sequence[loading.Plugin] = (),
) -> JobPackage:
    """Return the package of a command other than `pretrain`. `words` are the arguments after its name, `files` the
    texts of files to send along, by name. Plug-ins, with those `used` by the files, are put into the working folder of
    the command, where it looks for them. Raises UserError for plug-ins that cannot be used, and for secrets."""
    loaded = [config.check(loading.Plugin, tree, "plugins") for tree in loading.resolve([str(p) for p in plugins])]
    line = (command, *words, *(word for p in loaded for word in ("--plugin", p.name)))
    everything = [*line, *(files or {}).values(), *(p.sha256 for p in loaded)]
    digest = hashlib.sha256("\0".join(everything).encode()).hexdigest()
    sources = {".": _joined(loading.pack([*loaded, *used]))}
    return JobPackage(identify(out, command), command, name, out, digest, line, asks, files or {}, sources)


def _joined(packed: Mapping[str, loading.Sources]) -> loading.Sources:
    """Return the files of all plug-ins in one mapping."""
    return {path: data for sources in packed.values() for path, data in sources.items()}


def identify(out: str, command: str = "pretrain") -> str:
    """Return the job id of a command: the last part of `out`, which people can read, and a hash of the whole `out`. The
    id begins with the command unless that is `pretrain`, as several commands may work on one folder."""
    place = out.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.rpartition("/")[2]).strip("-.") or "run"  # an id is no option
    own = "" if command == "pretrain" else f"{command}-"
    return f"{own}{name[:60]}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"


def check_data_places(recipe: Recipe) -> None:
    """Raises UserError when `check_place` refuses the place of a recipe's data, weights or cache."""
    for key, sources in ("data.train", recipe.data.sources()), ("data.test", recipe.data.test or ()):
        for source in sources:
            for place in filter(None, (source.url, source.exclude, *source.columns)):
                check_place(key, place)
    for key in weight_files(resolve_paths(recipe)):  # names of weights such as timm's are no files
        check_place(key, recipe.weight_sources[key])
    if recipe.data.cache:
        check_place("data.cache", recipe.data.cache)


def check_place(key: str, place: str) -> None:
    """Raises UserError when a key's path is relative, contains secrets or, as an output, is not writable."""
    if has_secrets(place):
        there = "set them in the environment of `ray start` on the nodes"
        raise UserError(f"{key}: contains a user, password or key; expected {hide_secrets(place)}; {there}")
    store(place)
    if key in ("out", "DST"):
        check_writable(place, key)
    if (path := folder_of(place)) and not path.is_absolute():
        raise UserError(f"{key}={place}: a relative path; {SHARED}")


def environment(here: Mapping[str, str] = os.environ) -> tuple[dict[str, str], list[str]]:
    """Return the environment variables to send with the job, and a line about each variable that is not sent because
    it may be secret or nodes cannot reach its address. Raises UserError for a value to send with a user or password."""
    sent = {k: v for k, v in sorted(here.items()) if v and (k in SENT or k.startswith(BEGINNINGS))}
    for key in OF_THIS_MACHINE:
        sent.pop(key, None)
    stays = [f"{key} is not sent: it may hold a secret" for key in sent if SECRET.search(key)]
    sent = {key: value for key, value in sent.items() if not SECRET.search(key)}
    for key, value in sent.items():
        if has_secrets(value):
            raise UserError(
                f"{key}: contains a user or password, which everyone who sees the cluster's jobs could read; set "
                f"the URL without it here, and set the password on the cluster's nodes, {_secret(key)}"
            )
    uri = sent.get("MLFLOW_TRACKING_URI", "")
    if uri and not uri.startswith(("http://", "https://")):
        del sent["MLFLOW_TRACKING_URI"]
        stays.append(
            f"MLFLOW_TRACKING_URI={uri} is not sent: expected an http:// or https:// URL, which the nodes could reach"
        )
    return sent, stays


def _secret(key: str) -> str:
    """Return a text on where to set a password instead of in the value of the variable `key`."""
    if key == "MLFLOW_TRACKING_URI":
        return "such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment of `ray start`"
    return "in the environment of `ray start`"
