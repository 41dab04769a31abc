"""Rules of the tree, kept as tests."""

import ast
import itertools
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from eagleray import config
from eagleray.config import bundled
from eagleray.runs import pretrain, recipe

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "platform" / "eagleray"
FILES = sorted(SOURCE.rglob("*.py"))

# Who may import whom: a file imports from its own level or below. What is not named here is at the bottom.
LEVELS = [
    {"cli", "demo", "jobs_cli", "tune_cli", "finetune_cli", "report_cli", "evaluate_cli"},
    {"sweep_run", "evaluation"},
    {"launch", "extraction"},
    {"ticks", "sweep_table"},
    {"console"},
    {"cluster.ray_tune"},
    {"cluster.trial"},
    {"cluster.ray_train", "cluster.ray_map", "cluster.jobs", "cluster.parcel"},
    {"run"},
    {"meter"},
    {"folder", "monitor", "report"},
    {"export", "evals", "health", "picture", "sweep_plots", "weights"},
    {"cluster", "cluster.world", "cluster.gauges", "sweep_book", "goodput"},
    {"sweep", "place"},
    {"recipe"},
    {"train", "track", "checkpoint", "optim"},
    {"methods"},
    {"losses"},
    {"models", "data"},
    {"views"},
    {"dist", "config", "files", "schedule", "measures", "spikes"},
    {"errors"},
]
OWNERS = {
    "ray": {f"cluster/{n}.py" for n in ("ray_train", "session", "ray_map", "ray_tune", "trial", "jobs", "gauges")},
    "mlflow": {"track.py", "database.py"},
    "boto3": {"data/s3.py"},
    "botocore": {"data/s3.py"},
}
OWNERS |= {
    "webdataset": {"data/shards.py", "data/pack.py"},
    "matplotlib": {"data/sheet.py", "picture.py", "sweep_plots.py", "report/plots.py"},
    "jinja2": {"report/page.py"},
    "optuna": {"sweep.py"},
    "faster_coco_eval": {"evals/detection_scores.py"},
    "sklearn": {"evals/logistic.py", "evals/metrics.py"},
    "scipy": {"data/sources/imagenet.py", "data/sources/matlab.py"},
}
OWNERS["matplotlib"] |= {"evals/segmentation_picture.py"}
OWNERS["matplotlib"] |= {"evals/draw.py"}
OWNERS["scipy"] |= {"evals/davis_measures.py"}
OWNERS |= {
    "typer": {"cli.py", "options.py", *(f"{n}_cli.py" for n in ("evaluate", "finetune", "jobs", "report", "tune"))},
    "rich": {"console.py", "ticks.py", "sweep_table.py"},
}


def level(module: str) -> int:
    name = module.removeprefix("eagleray").removeprefix(".")
    for candidate in (name, name.partition(".")[0]):
        for i, names in enumerate(LEVELS):
            if candidate in names:
                return i
    return len(LEVELS)


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it runs; what only type checkers see does not count."""
    tree = ast.parse(path.read_text())
    skipped = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    hidden = {id(inner) for n in skipped for part in n.body for inner in ast.walk(part)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = (SOURCE.parent / node.module.replace(".", "/")).is_dir()
            found |= {f"{node.module}.{a.name}" for a in node.names} if whole else {node.module}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_downwards(path: Path):
    mine = level(module_of(path))
    for name in imports(path):
        if name.startswith("eagleray."):
            assert level(name) >= mine, f"{module_of(path)} imports {name} from above"


def test_methods_do_not_know_each_other():
    for path in (SOURCE / "methods").glob("*.py"):
        others = {n for n in imports(path) if n.startswith("eagleray.methods.")}
        assert others <= {"eagleray.methods.method"}


def test_evaluations_see_no_method():
    for path in (SOURCE / "evals").glob("*.py"):
        assert not any(n.startswith("eagleray.methods") for n in imports(path))


@pytest.mark.parametrize("package", OWNERS)
def test_heavy_packages_have_one_door(package: str):
    users = {str(p.relative_to(SOURCE)) for p in FILES if any(n.split(".")[0] == package for n in imports(p))}
    assert users <= OWNERS[package] | ({"launch.py", "demo.py"} if package == "rich" else set())
    assert users


def test_platform_is_no_package():
    assert not (ROOT / "platform" / "__init__.py").exists(), "it would hide the standard library's platform"


def test_files_and_functions_are_short():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path}: {node.name}"


@pytest.mark.parametrize("name", bundled.names())
def test_every_recipe_loads_says_what_it_is_and_builds(name: str, tmp_path: Path):
    import torch

    text = bundled.find(name).read_text()
    assert text.startswith("# ")
    header = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    for label in ("Published:", "Cost:", "Ours:"):
        assert label in header, f"a header states {label}"
    r = recipe.load(name)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(r))
    assert config.load(recipe.Recipe, again) == r
    assert r.optim.batch % r.data.lanes == 0
    least, most = r.method.target.views
    assert least <= sum(v.count for v in r.views) <= most
    with torch.device("meta"):
        assert pretrain.build(r).export().dim > 0


def test_no_setting_is_without_use():
    """A key that no recipe, test or document names is one that nobody needs."""
    folders = [ROOT / name for name in ("pipelines", "tests", "docs", "benchmarks")]
    files = [p for folder in folders for p in folder.rglob("*.*") if p.suffix in (".yaml", ".py", ".md", ".sh")]
    texts = [p.read_text() for p in files]
    everything = "\n".join(texts)
    keys = {k.rpartition(".")[2] for k in recipe.identity(recipe.load(bundled.names()[0]))}
    assert not [k for k in keys if k not in everything]


ALONE = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "mlflow", "boto3", "botocore", "webdataset", "typer", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
from pathlib import Path
from eagleray import recipe, run
from eagleray.cluster import world
from eagleray.track import Tracking
r = run.resolve(recipe.load(sys.argv[1], sys.argv[2:]))
Path(r.out).mkdir(parents=True)
run.plan(r)
summary = run.pretrain(r, world.local(), tracking=Tracking("none"))
assert summary["steps"] == 3, summary
"""


def test_core_trains_without_ray_mlflow_boto3_and_webdataset(small: Path, shards: Path, tmp_path: Path):
    args = [str(small), f"data.train={shards / 'train'}", f"out={tmp_path / 'out'}", "max_steps=3"]
    done = subprocess.run([sys.executable, "-c", ALONE, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mlflow is not installed" in (tmp_path / "out" / "train.log").read_text()


@pytest.mark.slow
def test_the_wheel_carries_the_recipes(tmp_path: Path):
    """Built from the tree, unpacked elsewhere, and asked for its recipes."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom eagleray import recipe as r; print(r.__file__, *r.names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split()[0].startswith(str(tmp_path))
    assert done.stdout.split()[1:] == bundled.names()


def test_yaml_is_plain():
    for name in bundled.names():
        assert isinstance(yaml.safe_load(bundled.find(name).read_text()), dict)


def test_documented_commands_name_what_there_is():
    """Recipes and sweeps in the commands of README and docs; what is to be replaced is written in capitals."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    for commands, kind, many in (("pretrain|submit|show", "recipe", 3), ("tune", "sweep", 3)):
        named = set(re.findall(rf"eagleray(?:\.sbatch)? (?:{commands}) ([a-z]\w+)(?=[ `\n])", text))
        assert named <= set(bundled.names(kind)), named - set(bundled.names(kind))
        assert len(named) >= many, named
