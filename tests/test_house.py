"""Rules of the tree, kept as tests."""

import ast
import functools
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.blank import blank
from helpers.walks import check_all

from eagleray import config
from eagleray.api.job_commands import COMMANDS
from eagleray.config import bundled
from eagleray.runs import recipe
from eagleray.runs.build import build_method

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "platform" / "eagleray"
FILES = sorted(SOURCE.rglob("*.py"))

# Bottom first: a room imports only rooms before it.
ROOMS = ["base", "config", "storage", "views", "data", "models", "losses", "methods", "engine", "datasets", "protocols"]
ROOMS += ["dense", "runs", "cluster", "evaluation", "curation", "exports", "sweeps", "reports", "api", "cli"]
OWNERS = {
    "ray": {"cluster/", "sweeps/"},
    "mlflow": {"runs/mlflow_"},
    "boto3": {"storage/s3.py"},
    "botocore": {"storage/s3.py"},
    "urllib3": {"storage/"},
    "google": {"storage/gs.py"},
    "azure": {"storage/az_account.py"},
    "webdataset": {"datasets/"},
    "matplotlib": {
        "base/plotting.py",
        "datasets/contact_sheet.py",
        "dense/",
        "protocols/",
        "reports/data_plots.py",
        "reports/plots.py",
        "runs/plots.py",
        "sweeps/plots.py",
    },
    "jinja2": {"reports/page.py"},
    "h5py": {"datasets/sources/pcam.py"},
    "optuna": {"sweeps/sweep.py"},
    "duckdb": {"data/expressions.py"},
    "pillow_heif": {"data/pixels.py"},
    "faster_coco_eval": {"dense/detection/scores.py"},
    "sklearn": {"protocols/"},
    "scipy": {
        "datasets/sources/",
        "protocols/logistic_shards.py",
        "dense/video/measures.py",
        "sweeps/label_free.py",
    },
    "typer": {"cli/"},
    "rich": {"base/", "cli/", "sweeps/live_table.py"},
}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file names in an import, or in a text that may be handed to importlib."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: a relative import"
            whole = (SOURCE.parent / node.module.replace(".", "/")).is_dir()
            names |= {f"{node.module}.{a.name}" for a in node.names} if whole else {node.module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.match(r"eagleray\.(\w+)(\.|$)", node.value)
            if match and match[1] in ROOMS:
                names.add(node.value)
    return frozenset(names)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    return module.split(".")[1]


def allowed(room: str) -> set[str]:
    """The rooms that a room says, in its docstring, that it may import."""
    doc = ast.get_docstring(tree(SOURCE / room / "__init__.py")) or ""
    listed = " ".join(doc.partition("May import: ")[2].split()).rstrip(".")
    return set() if listed == "nothing of eagleray" else set(listed.split(", "))


def test_the_root_holds_only_rooms() -> None:
    assert [p.name for p in SOURCE.glob("*.py")] == ["__init__.py"]
    assert {p.parent.name for p in SOURCE.glob("*/__init__.py")} == set(ROOMS)


def test_a_room_says_what_it_is_and_names_only_rooms_before_it() -> None:
    def check(room: str) -> None:
        doc = ast.get_docstring(tree(SOURCE / room / "__init__.py")) or ""
        assert len(doc.split("\n\n")) == 3, "what it is, what goes in and out, what it may import"
        assert allowed(room) <= set(ROOMS[: ROOMS.index(room)])

    check_all(check, ROOMS)


def test_imports_stay_in_the_rooms_that_are_named() -> None:
    """Every import counts: at the top, inside functions, for type checkers only and by importlib."""

    def check(path: Path) -> None:
        mine = room_of(module_of(path))
        others = {name for name in imports(path) if name.startswith("eagleray.")}
        assert not {name for name in others if room_of(name) not in allowed(mine) | {mine}}

    check_all(check, [p for p in FILES if p.parent != SOURCE], module_of)


def test_every_room_that_is_named_is_imported() -> None:
    for room in ROOMS:
        names = {n for p in (SOURCE / room).rglob("*.py") for n in imports(p) if n.startswith("eagleray.")}
        assert allowed(room) <= {room_of(n) for n in names}, f"{room}: names a room that it does not import"


def test_methods_do_not_know_each_other():
    for path in (SOURCE / "methods").glob("*.py"):
        others = {n for n in imports(path) if n.startswith("eagleray.methods.")}
        assert others <= {"eagleray.methods.method"}


def test_heavy_packages_have_one_door():
    def check(package: str) -> None:
        users = {str(p.relative_to(SOURCE)) for p in FILES if any(n.split(".")[0] == package for n in imports(p))}
        assert {u for u in users if not u.startswith(tuple(OWNERS[package]))} == set()
        assert users

    check_all(check, OWNERS)


def test_platform_is_no_package():
    assert not (ROOT / "platform" / "__init__.py").exists(), "it would hide the standard library's platform"


def test_files_and_functions_are_short():
    def check(path: Path) -> None:
        assert len(path.read_text().splitlines()) <= 400
        functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]
        assert not {node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 70}

    check_all(check, FILES)


def code_lines(path: Path) -> int:
    """The lines of a file that are neither blank, nor a comment, nor of a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [n.body[0] for n in ast.walk(tree(path)) if isinstance(n, documented) and ast.get_docstring(n)]
    texts = {line for doc in docs for line in range(doc.lineno, (doc.end_lineno or 0) + 1)}
    lines = enumerate(map(str.strip, path.read_text().splitlines()), 1)
    return sum(line != "" and not line.startswith("#") and number not in texts for number, line in lines)


def test_failures_are_caught_at_boundaries():
    """At most 7 `try` for 1,000 lines of code. `explained`, `named`, `on_error` and `side_work` hold what many need."""
    tries = [node for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.Try)]
    assert len(tries) <= 7 * sum(map(code_lines, FILES)) / 1000


@pytest.mark.slow
def test_every_recipe_loads_and_builds(tmp_path: Path):
    built = set[str]()

    def check(name: str) -> None:
        r = recipe.load(name)
        again = tmp_path / "again.yaml"
        again.write_text(config.dump(r))
        assert config.load(recipe.Recipe, again) == r
        assert r.optim.batch % r.data.lanes == 0
        least, most = r.method.target.views
        assert least <= sum(v.count for v in r.views) <= most
        what = repr((r.method, r.backbone, r.optim.micro_batch, r.optim.checkpointing, r.curriculum))
        if what not in built:  # many recipes differ in the rest alone
            with blank():
                assert build_method(r).export().dim > 0
            built.add(what)

    check_all(check, bundled.names())


ALONE = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "mlflow", "boto3", "botocore", "webdataset", "typer", "rich", "triton"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
from pathlib import Path
from eagleray.runs import pretrain
drawn = [name for name in sys.modules if name.partition(".")[0] == "eagleray"]
assert len(drawn) <= 150, "stores, formats and whatever else a recipe may not name are imported when they are used"
from eagleray.engine import world
from eagleray.runs import recipe
from eagleray.runs.sources import resolve_paths
from eagleray.runs.checks import make_plan
from eagleray.runs.tracking import Tracking
r = resolve_paths(recipe.load(sys.argv[1], sys.argv[2:]))
Path(r.out).mkdir(parents=True)
make_plan(r)
summary = pretrain.pretrain(r, world.local(), tracking=Tracking("none"))
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
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        [about] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    targets = re.findall(r"\]\(([^)\s]+)\)", about)
    assert targets
    assert all(re.match("https?:|#", target) for target in targets), "links of the README lead nowhere in a wheel"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from eagleray.config import bundled; print(bundled.__file__, *bundled.names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split()[0].startswith(str(tmp_path))
    assert done.stdout.split()[1:] == bundled.names()


def test_no_message_names_a_page_that_a_wheel_lacks():
    """Neither in texts that are printed nor in docstrings that `--help` and `help()` show."""

    def check(path: Path) -> None:
        tree = ast.parse(path.read_text())
        shown = path.parent.name in ("cli", "api")
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and isinstance(node.body[0], ast.Expr)
            and (isinstance(node, ast.Module) or not shown)
        }
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        assert not [n.value for n in texts if id(n) not in docs and re.search(r"\bdocs/\w+(/\w+)*\.md", n.value)]

    check_all(check, FILES, lambda path: path.relative_to(SOURCE).as_posix())


def test_documented_commands_name_what_there_is():
    """Recipes and sweeps in the commands of README and docs; what is to be replaced is written in capitals."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    for commands, kind, many in (("pretrain|submit|show", "recipe", 3), ("tune|submit tune", "sweep", 3)):
        named = set(re.findall(rf"eagleray(?:\.sbatch)? (?:{commands}) ([a-z]\w+)(?=[ `\n])", text)) - {*COMMANDS}
        assert named <= set(bundled.names(kind)), named - set(bundled.names(kind))
        assert len(named) >= many, named


TESTS = ROOT / "tests"
NO_ROOM = {"benchmarks", "chaos", "deploy", "devices", "docs", "golden", "helpers", "mission", "pipelines"}


def test_tests_mirror_the_tree():
    """Every folder of tests is named after a room of the package, or stands in NO_ROOM."""
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    assert not folders - rooms - NO_ROOM


def test_no_test_imports_another_test_or_a_conftest():
    """What several test modules need is in tests/helpers/."""

    def check(path: Path) -> None:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                parts = {part for alias in node.names for part in f"{module}.{alias.name}".split(".")}
                tests = {part for part in parts if part == "conftest" or part.startswith("test_")}
                assert not tests, f"line {node.lineno}: {ast.unparse(node)}"

    check_all(check, sorted(TESTS.rglob("*.py")))
