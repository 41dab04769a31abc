"""Plug-ins are found, imported, identified by their source, and refused in one line where something is wrong."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagleray.base.errors import PluginError
from eagleray.config import plugins, register

OPERATION = """
from eagleray.config import register

@register.view("{name}")
def operation(crop, seed):
    return crop
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a working folder of its own, and leaves no plug-in behind."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    plugins.unload()


def write(folder: Path, name: str, text: str = OPERATION) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(name=path.stem) if text is OPERATION else text)
    return path


def refused(name: str, *folders: Path) -> str:
    before = set(sys.modules), register.entries("view")
    with pytest.raises(PluginError) as e:
        plugins.load(name, *folders)
    assert "\n" not in str(e.value)
    assert set(sys.modules) - before[0] <= {"mypackage"}, "what fails leaves no module"
    assert register.entries("view") == before[1]
    return str(e.value)


def test_a_file_is_found_in_the_working_folder_and_beside_the_recipe(tmp_path: Path):
    write(Path(), "first.py")
    write(tmp_path / "recipes", "second.py")
    listed = plugins.resolve(["first.py", "second.py"], folder=tmp_path / "recipes")
    assert [p["name"] for p in listed] == ["first.py", "second.py"]
    assert {"first", "second"} <= register.entries("view").keys()
    used = plugins.plugin_of("second", "view")
    assert used
    assert listed[1] == {"name": used.name, "sha256": used.sha256}
    assert plugins.plugin_of("third", "view") is None


def test_a_resolved_recipe_finds_the_copy_with_its_digest(tmp_path: Path):
    """The copy beside a run's recipe.yaml is taken where the file in the working folder has changed since."""
    write(tmp_path / "run" / "plugins", "mine.py")
    [entry] = plugins.resolve(["mine.py"], folder=tmp_path / "run" / "plugins")
    plugins.unload()
    write(Path(), "mine.py", "CHANGED = True\n")
    assert plugins.resolve([entry], folder=tmp_path / "run") == [entry]
    assert not hasattr(sys.modules["mine"], "CHANGED")
    plugins.unload()
    with pytest.raises(PluginError, match=r"mine\.py is not the file that the recipe was resolved with"):
        plugins.resolve([entry], folder=tmp_path)


def test_an_equal_file_elsewhere_is_the_same_plugin(tmp_path: Path):
    one = plugins.load("mine.py", write(tmp_path / "a", "mine.py").parent)
    assert plugins.load("mine.py", write(tmp_path / "b", "mine.py").parent) == one
    with pytest.raises(PluginError, match=r"two different files are called mine\.py"):
        plugins.resolve([str(tmp_path / "a" / "mine.py"), str(write(tmp_path / "c", "mine.py", "X = 1\n"))])


def test_a_changed_file_is_imported_again(tmp_path: Path):
    write(Path(), "mine.py", OPERATION.format(name="before"))
    before = plugins.load("mine.py")
    write(Path(), "mine.py", OPERATION.format(name="after"))
    assert plugins.load("mine.py") != before
    assert "after" in register.entries("view")
    assert "before" not in register.entries("view")


def test_a_file_that_the_users_code_has_imported_is_the_plugin(monkeypatch: pytest.MonkeyPatch):
    write(Path(), "mine.py")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    import mine

    plugins.load("mine.py")
    assert sys.modules["mine"] is mine
    assert "mine" in register.entries("view")


@pytest.mark.parametrize("initialised", [True, False], ids=["package", "namespace"])
def test_a_module_of_a_package(tmp_path: Path, initialised: bool):
    package = tmp_path / "lib"
    write(package, "mypackage/views.py", "from mypackage.shared import NAME\n" + OPERATION.format(name="stripes"))
    write(package, "mypackage/shared.py", "NAME = 1\n")
    if initialised:
        write(package, "mypackage/__init__.py", "")
    before = plugins.load("mypackage.views", package)
    used = plugins.plugin_of("stripes", "view")
    assert used == before
    packed = plugins.pack([before])
    assert {"mypackage/views.py", "mypackage/shared.py"} <= packed["mypackage.views"].keys()
    plugins.unload()
    write(package, "mypackage/shared.py", "NAME = 2\n")
    assert plugins.load("mypackage.views", package) != before, "a change in another file of the package counts"


def test_what_a_packages_parts_register_belongs_to_the_package(tmp_path: Path):
    write(tmp_path, "mypackage/__init__.py", "from mypackage import views\n")
    write(tmp_path, "mypackage/views.py")
    whole = plugins.load("mypackage", tmp_path)
    assert plugins.plugin_of("views", "view") == whole


def test_installed_packages_announce_their_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site-packages"
    write(site, "announced/views.py", OPERATION.format(name="announced"))
    write(site, "announced/__init__.py", "")
    info = site / "announced-1.0.dist-info"
    write(info, "METADATA", "Metadata-Version: 2.1\nName: announced\nVersion: 1.0\n")
    write(info, "entry_points.txt", "[eagleray.plugins]\nviews = announced.views\n")
    monkeypatch.syspath_prepend(str(site))
    plugins.load_installed()
    plugin = plugins.plugin_of("announced", "view")
    assert plugin
    assert plugins.pack([plugin]) == {"announced.views": {}}, "an installed package is not sent"


def test_plugins_are_sent_to_another_process(tmp_path: Path):
    write(Path(), "mine.py")
    write(Path(), "mypackage/__init__.py", "")
    write(Path(), "mypackage/views.py")
    sent = [plugins.load(name) for name in ("mine.py", "mypackage.views")]
    packed = plugins.pack()
    plugins.unload()
    assert "views" not in register.entries("view")
    (Path("mypackage") / "views.py").write_text("CHANGED = True\n")
    plugins.install(packed)
    assert {"mine", "views"} <= register.entries("view").keys()
    assert [plugins.plugin_of("mine", "view"), plugins.plugin_of("views", "view")] == sent
    plugins.install(packed)  # again, which changes nothing


def test_processes_that_are_sent_the_same_plugins_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(Path(), "mine.py")
    plugins.load("mine.py")
    packed = plugins.pack()
    Path("mine.py").unlink()
    for damage in (None, "half a fi"):  # as of a process that was killed, or a cache that somebody has changed
        plugins.unload()
        if damage:
            next((tmp_path / "cache").rglob("mine.py")).write_text(damage)
        plugins.install(packed)
        assert "mine" in register.entries("view")
    [folder] = (tmp_path / "cache" / "eagleray" / "plugins").iterdir()
    assert (folder / "mine.py").read_bytes() == packed["mine.py"]["mine.py"]
    plugins.unload()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "mine.py"))
    with pytest.raises(PluginError, match=r"plugins: .*: cannot be written: Not a directory"):
        plugins.install(packed)


def test_what_cannot_be_imported(tmp_path: Path):
    assert "missing.py: no such file in" in refused("missing.py")
    assert refused("mypackage.missing") == ("plugins: mypackage.missing: no such file and no module of this name")
    write(Path(), "broken.py", "def f(:\n")
    assert refused("broken.py") == (
        "plugins: broken.py: cannot be imported: SyntaxError: invalid syntax (broken.py, line 1)"
    )
    write(Path(), "imports.py", "import os\nimport nothing_of_this_name\n")
    assert refused("imports.py").endswith(
        "ModuleNotFoundError: No module named 'nothing_of_this_name' (imports.py, line 2)"
    )
    write(Path(), "leaves.py", "import sys\n\nsys.exit('no')\n")
    assert "SystemExit: no (leaves.py, line 3)" in refused("leaves.py")
    write(Path(), "mypackage/__init__.py", "")
    write(Path(), "mypackage/views.py", OPERATION.format(name="views") + "\n1 / 0\n")
    assert refused("mypackage.views").endswith("ZeroDivisionError: division by zero (mypackage/views.py, line 8)")
    assert "No module named 'mypackage.other'" in refused("mypackage.other")


@pytest.mark.parametrize("name", ["json.py", "numpy.py", "pytest.py", "eagleray.py"])
def test_the_name_of_another_module(name: str):
    write(Path(), name)
    assert refused(name) == f"plugins: {name}: another module is called {Path(name).stem} too; rename the file"


def test_one_name_is_registered_once(tmp_path: Path):
    write(Path(), "a.py", OPERATION.format(name="mine"))
    write(Path(), "b.py", OPERATION.format(name="mine"))
    plugins.load("a.py")
    assert "view 'mine' is registered twice: by a and by b" in refused("b.py")


def test_a_list_is_expected():
    with pytest.raises(PluginError, match="plugins: expected a list of files and modules, got"):
        plugins.resolve("mine.py")
