"""What a sweep is: its trials as a function of seed and number, and one line for whatever is wrong with it."""

import csv
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.commands import status
from helpers.plugins import write_plugin, write_recipe
from helpers.recipes import SMALL

from eagleray import config
from eagleray.base import files
from eagleray.base.errors import Outage, UserError
from eagleray.config import bundled, plugins
from eagleray.runs import recipe as recipes
from eagleray.runs.recipe import Recipe
from eagleray.runs.tracking import Tracking, tracking_of, write_note
from eagleray.sweeps import checks, plots, run
from eagleray.sweeps.study import Study, begin, check_same, write_best, write_table
from eagleray.sweeps.sweep import Sweep, Values, corners, count_trials, load, recipe_of, suggest

SWEEP: dict[str, Any] = {
    "recipe": "small.yaml",
    "space": {"optim.lr.value": {"log": [1e-4, 1e-2]}, "method.momentum.value": {"uniform": [0.5, 0.99]}},
    "objective": {"key": "monitor/knn"},
}


SOON = ("monitor.every=4",)  # its objective is measured within its 20 steps


def write(folder: Path, **changes: Any) -> str:
    (folder / "small.yaml").write_text(SMALL)
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    return str(folder / "sweep.yaml")


def wrong(folder: Path, *overrides: str, **changes: Any) -> str:
    with pytest.raises(UserError) as e:
        checks.check_objective(load(write(folder, **changes), overrides))
    [line] = str(e.value).splitlines()
    return line


def test_a_trial_is_a_function_of_seed_and_number(tmp_path: Path):
    sweep = load(write(tmp_path))
    drawn = [suggest(sweep, n, []) for n in range(50)]
    assert drawn == [suggest(sweep, n, [{"anything": 1}]) for n in range(50)]
    assert len({str(d) for d in drawn}) == 50
    assert drawn != [suggest(load(write(tmp_path), ["sweep.seed=1"]), n, []) for n in range(50)]


def test_values_are_drawn_as_said(tmp_path: Path):
    space = {
        "optim.lr.value": {"log": [1e-4, 1e-2]},
        "optim.weight_decay.value": {"uniform": [0.1, 0.3]},
        "method.dim": {"integer": [8, 11]},
        "optim.name": {"choice": ["adamw", "lars"]},
    }
    sweep = load(write(tmp_path, space=space))
    drawn = [suggest(sweep, n, [])[1] for n in range(2000)]
    rates = [d["optim.lr.value"] for d in drawn]
    assert all(1e-4 <= x <= 1e-2 for x in rates)
    assert sum(x < 1e-3 for x in rates) / len(rates) == pytest.approx(0.5, abs=0.05)  # even in the logarithm
    decays = [d["optim.weight_decay.value"] for d in drawn]
    assert sum(decays) / len(decays) == pytest.approx(0.2, abs=0.01)
    assert set(Counter(d["method.dim"] for d in drawn)) == {8, 9, 10, 11}
    assert set(Counter(d["optim.name"] for d in drawn)) == {"adamw", "lars"}


def test_a_grid_is_every_point_once(tmp_path: Path):
    space = {"optim.lr.value": {"grid": [1e-3, 1e-2]}, "method.momentum.value": {"grid": [0.0, 0.9, 0.99]}}
    sweep = load(write(tmp_path, space=space, search="grid", scheduler="none"))
    assert count_trials(sweep) == 6
    points = {tuple(suggest(sweep, n, [])[1].values()) for n in range(6)}
    assert points == {(lr, m) for lr in (1e-3, 1e-2) for m in (0.0, 0.9, 0.99)}


def test_alternatives_have_their_own_recipes_and_spaces(tmp_path: Path):
    (tmp_path / "other.yaml").write_text(SMALL.replace("name: mocov3", "name: byol"))
    own = {
        "mocov3": {"space": {"method.temperature": {"choice": [0.1, 0.2]}}},
        "byol": {"recipe": "other.yaml", "fixed": {"optim.batch": 64}},
    }
    sweep = load(write(tmp_path, alternatives=own, fixed={"optim": {"epochs": 3}}))
    drawn = [suggest(sweep, n, []) for n in range(8)]
    assert Counter(name for name, _ in drawn) == {"mocov3": 4, "byol": 4}
    for name, values in drawn:
        r = recipe_of(sweep, name, values, name)
        assert r.method.name == name
        assert ("method.temperature" in values) == (name == "mocov3")
        assert r.optim.batch == (64 if name == "byol" else 32)
        assert r.optim.epochs == 3
        assert r.optim.lr.value == values["optim.lr.value"]


def test_what_is_given_on_the_command_line_is_not_varied(tmp_path: Path):
    sweep = load(write(tmp_path), ["optim.lr.value=0.5", "sweep.trials=3", "out=here"])
    name, values = suggest(sweep, 0, [])
    assert list(values) == ["method.momentum.value"]
    assert recipe_of(sweep, name, values, "").optim.lr.value == 0.5
    assert (count_trials(sweep), sweep.out) == (3, "here")
    assert "expected keys to vary" in wrong(tmp_path, "optim.lr.value=0.5", "method.momentum.value=0.5")


def test_the_values_of_a_key_are_replaced_on_the_command_line(tmp_path: Path):
    """In every alternative or in one, also by values of another kind, and where a sweep's folder has its own file."""
    own = {"a": {"space": {"optim.lr.value": {"choice": [0.1]}}}, "b": {"space": {"method.dim": {"integer": [8, 9]}}}}
    rate, dim = "sweep.space.optim.lr.value={choice: [0.3, 0.4]}", "sweep.alternatives.b.space.method.dim.choice=[16]"
    spaces = {name: branch.space for name, branch in load(write(tmp_path, alternatives=own)).alternatives.items()}
    assert spaces["a"]["optim.lr.value"] == Values("choice", (0.1,))
    changed = {"optim.lr.value": Values("choice", (0.3, 0.4))}
    sweep = load(write(tmp_path, alternatives=own), [rate, dim])
    assert {n: b.space for n, b in sweep.alternatives.items()} == {
        "a": spaces["a"] | changed,
        "b": spaces["b"] | changed | {"method.dim": Values("choice", (16,))},
    }
    dotted = load(write(tmp_path, alternatives={"v1.5": own["a"]}), [rate]).alternatives
    assert dotted["v1.5"].space == spaces["a"] | changed
    [alone] = load(write(tmp_path), [rate, "sweep.space.method.dim={integer: [8, 9]}"]).alternatives.values()
    assert alone.space == spaces["b"] | changed
    (tmp_path / "out").mkdir()
    begin(study := Study(load(write(tmp_path)), tmp_path / "out"))
    [again] = load(str(study.folder / "sweep.yaml"), [rate]).alternatives.values()
    assert again.space["optim.lr.value"] == changed["optim.lr.value"]
    assert "space.optim.lr.value: expected one of choice, grid" in wrong(tmp_path, "sweep.space.optim.lr.value=0.5")
    assert "unknown key" in wrong(tmp_path, "sweep.space.optim.rate={choice: [0.5]}")
    line = wrong(tmp_path, "sweep.alternatives.c.space.seed.choice=[1]", alternatives=own)
    assert line == "sweep.alternatives.c: no such alternative; known are a, b"


def test_a_sweeps_own_file_goes_on_as_it_is_or_with_other_keys(tmp_path: Path):
    own = {n: {"space": {"method.temperature": {"choice": [0.1, 0.2]}}} for n in "ab"}
    (tmp_path / "out").mkdir()
    first = Study(load(write(tmp_path, alternatives=own), ["optim.epochs=3"]), tmp_path / "out")
    first.next()
    begin(first)
    file = str(tmp_path / "out" / "sweep.yaml")
    assert load(file).alternatives == first.sweep.alternatives
    for same in ([], ["optim.epochs=3"], ["sweep.trials=20"]):
        check_same(Study(load(file, same), first.folder))
    with pytest.raises(UserError, match=r"a\.recipe\.optim\.epochs is 3 there and 50 here"):
        check_same(Study(load(file, ["optim.epochs=50"]), first.folder))
    other = load(file, ["optim.epochs=50", "optim.lr.value=0.5", "out=elsewhere"])
    for name in "ab":
        assert set(other.alternatives[name].space) == {"method.momentum.value", "method.temperature"}
        r = recipe_of(other, name, {}, name)
        assert (r.optim.epochs, r.optim.lr.value) == (50, 0.5)
    with pytest.raises(UserError, match=r"epoks: unknown key; did you mean 'optim\.epochs'"):
        load(file, ["optim.epoks=50"])


def test_a_recipe_written_into_a_sweep_has_its_fixed_keys_and_no_base(tmp_path: Path):
    [branch] = load(write(tmp_path, recipe=yaml.safe_load(SMALL), fixed={"optim.epochs": 7})).alternatives.values()
    assert isinstance(branch.recipe, dict)
    assert branch.recipe["optim"]["epochs"] == 7
    assert set(branch.space) == set(SWEEP["space"])
    line = wrong(tmp_path, recipe={"base": "small.yaml", "seed": 1})
    assert line.startswith("sweep.yaml: recipe.base: cannot be set here; expected `recipe: small.yaml`, and ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"optim.lrr": {"log": [1, 2]}}}, "unknown key; did you mean 'optim.lr'?"),
        ({"space": {"method.momentun.value": {"choice": [1]}}}, "did you mean 'method.momentum'?"),
        ({"space": {"optim.momentum": {"uniform": [0.5, 1.5]}}}, "less than or equal to 1"),
        ({"space": {"optim.momentum": {"uniform": [0.9, 0.5]}}}, "low 0.9 is above high 0.5"),
        ({"space": {"optim.momentum": {"log": [0, 0.5]}}}, "low 0 is not positive"),
        ({"space": {"optim.momentum": {"choice": []}}}, "a list with at least one value"),
        ({"space": {"optim.momentum": {"normal": [0, 1]}}}, "expected one of choice, grid, uniform, log, integer"),
        ({"space": {"optim.momentum": {"uniform": [0, "much"]}}}, "expected a list of two numbers"),
        ({"space": {"method.layers": {"integer": [1, math.inf]}}}, "two whole numbers, low and high; got [1, inf]"),
        ({"space": {"method.layers": {"integer": [1.5, 3]}}}, "method.layers: integer: expected a list of two whole"),
        ({"space": {"optim.momentum": {"grid": [0.9]}}}, "grid values cannot be searched by search=random"),
        ({"space": {"out": {"choice": ["a"]}}}, "cannot vary between trials"),
        ({"scheduler": "asah"}, "'asha' or 'none'"),
        ({"search": "grid"}, "expected scheduler=none, not asha"),
        ({"search": "grid", "scheduler": "none", "trials": 3}, "cannot be set with search=grid"),
        ({"recipe": "nowhere"}, "no recipe of this name"),
        ({"recipe": None}, "recipe: missing"),
        ({"objective": {"key": "monitor/knm"}}, "not a metric that runs report; did you mean 'monitor/knn'?"),
        ({"objective": {"key": "linear/top1"}}, "expected scheduler=none"),
        ({"objective": {"key": "knn/top1"}}, "evaluate.every=0 measures it only at the end of a trial"),
        ({"objective": {"key": "classifier/top1"}}, "mocov3 trains no classifier"),
        ({"objective": {"key": "labelfree"}}, "did you mean 'label_free'?"),
        ({"objective": {"mode": "most"}}, "'max' or 'min'"),
        ({"objective": {"key": "loss"}}, "objective.mode=max: lower loss is better; expected min"),
        ({"objective": {"key": "monitor/knn", "mode": "min"}}, "mode=min: higher monitor/knn is better; expected max"),
        ({"objective": {"key": "label_free", "mode": "min"}}, "higher label_free is better; expected max"),
        (
            {"objective": {"key": "knn/top1"}, "fixed": {"evaluate.every": 2}},
            "evaluate.every=2 measures it only at the end of a trial of optim.epochs=2, but scheduler=asha",
        ),
        ({"trails": 3}, "trails: unknown key; did you mean 'trials'?"),
    ],
)
def test_what_is_wrong_is_one_line(changes: dict[str, Any], said: str, tmp_path: Path):
    assert said in wrong(tmp_path, **changes)


def test_a_classifier_is_an_objective_where_there_is_one(tmp_path: Path):
    space = {"optim.lr.value": {"log": [1e-4, 1e-2]}}
    text = SMALL.replace("{name: mocov3, dim: 16, hidden: 32}", "{name: supervised, classes: 20}")
    for key, more, said in (
        ("knn/top1", "", "not measured for supervised, which trains a classifier"),
        ("classifier/top1", "", "needs data.test"),
        ("classifier/top1", ", test: shards", "evaluate.every=0"),
        ("accuracy", "", None),
    ):
        path = write(tmp_path, objective={"key": key}, space=space)
        (tmp_path / "small.yaml").write_text(text.replace("workers: 0}", f"workers: 0{more}}}"))
        if said is None:
            checks.check_objective(load(path))
        else:
            with pytest.raises(UserError, match=said):
                checks.check_objective(load(path))


def test_every_value_is_tried_before_anything_starts(tmp_path: Path):
    sweep = load(write(tmp_path))
    seen = [c["optim.lr.value"] for c in corners(sweep.alternatives[""].space)]
    assert set(seen) == {1e-4, 1e-2}
    middle = {"optim.name": {"choice": ["adamw", "adam", "lars"]}}  # neither the first nor the last
    assert "optim.name" in wrong(tmp_path, space=middle)
    for kind in ("uniform", "log"):  # both ends are whole, but hardly any value between them
        assert "with monitor.every=2.5: monitor.every: " in wrong(tmp_path, space={"monitor.every": {kind: [2, 8]}})


@pytest.fixture
def study(tmp_path: Path) -> Study:
    sweep = load(write(tmp_path, trials=6))
    (tmp_path / "out").mkdir()
    return Study(sweep, tmp_path / "out")


def fill(study: Study) -> None:
    """Six trials, of which the second failed and the third was stopped."""
    for n in range(6):
        row = study.next()
        assert row is not None
        study.set(row["id"], state="running")
        for percent in (30, 100):
            if (n, percent) not in ((1, 100), (2, 100)):
                study.report(row["id"], percent, 100, percent, 10 + n * percent / 100)
        study.set(row["id"], state={1: "failed", 2: "stopped"}.get(n, "finished"), why="it had to be" * (n == 1))


def test_a_book_outlives_its_process(study: Study):
    for _ in range(3):
        row = study.next()
        assert row is not None
        study.set(row["id"], state="running")
    study.report("001", 5, 10, 50.0, 3.5)
    study.set("001", state="finished")
    values = [r["values"] for r in study.rows.values()]
    again = Study(study.sweep, study.folder)
    again.wait_again()
    assert [r["state"] for r in again.rows.values()] == ["waiting", "finished", "waiting"]
    assert [r["values"] for r in again.rows.values()] == values
    assert again.open_trials() == 5
    handed = []
    while row := again.next():
        again.set(row["id"], state="running")
        handed.append(row["id"])
    assert handed == ["000", "002", "003", "004", "005"]


def test_the_best_is_one_that_took_all_its_steps(study: Study):
    fill(study)
    best = study.best()
    assert best is not None
    assert best["id"] == "005"
    study.rows["002"]["metric"] = 1000.0  # stopped
    assert study.best() == best
    path = write_best(study, recipe_of(study.sweep, "", best["values"], ""), best, workers=0)
    again = recipes.load(str(path))
    assert again.optim.lr.value == best["values"]["optim.lr.value"]
    assert again.out == str(study.folder / "best")


@pytest.mark.filterwarnings("ignore:Overwriting vit_of_a_plugin")
def test_the_copy_of_a_sweep_in_a_store_has_its_plugins(tmp_path: Path, request: pytest.FixtureRequest):
    request.addfinalizer(plugins.unload)
    write_plugin(tmp_path / "recipes")
    tree = {"recipe": str(write_recipe(tmp_path / "recipes")), "space": {"method.dim": {"choice": [8, 12]}}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    (copy := tmp_path / "copy").mkdir()
    begin(Study(load(str(tmp_path / "sweep.yaml")), tmp_path / "out", folder=copy))
    for place in copy, tmp_path / "out":
        assert (place / "plugins" / "my_method.py").exists()


def test_fewer_trials_than_are_done_leave_none(study: Study, tmp_path: Path):
    fill(study)
    assert Study(load(write(tmp_path, trials=4)), study.folder).open_trials() == 0


def test_what_mlflow_did_not_hear_at_the_end_is_sent_by_the_same_command(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(study)
    begin(study)
    tracking, sent, away = replace(tracking_of(study.folder), parent="p"), [], [True]

    def update(tracking: Tracking, note: Path, numbers: dict[str, float], files: list[Path], status: str) -> None:
        if away:
            away.pop()
            raise Outage("no answer")
        sent.append((tracking.parent, status, numbers["best"]))
        write_note(note, tracking.uri, {"ended": status})

    def again() -> None:
        run.tune(load(str(tmp_path / "sweep.yaml"), ["sweep.trials=6", f"out={study.folder}"]), most=None, resume=True)

    write(tmp_path, trials=6)
    monkeypatch.setattr(run, "parent", lambda study: tracking)
    monkeypatch.setattr(run.mlflow_run, "update", update)
    for _ in range(3):
        again()
    assert sent == [("p", "FINISHED", 15.0)]  # once


def test_the_best_trial_is_registered_wherever_it_is_tracked(study: Study, monkeypatch: pytest.MonkeyPatch):
    """While MLflow is away, a sweep has no run there under which its trials could be found."""
    asked = list[tuple[Path, str]]()

    def register_run(tracking: Tracking, note: Path, name: str) -> str:
        asked.append((note, name))
        return "1"

    monkeypatch.setattr(run.mlflow_run, "register_run", register_run)
    run.register_best(study, "005", "shapes")
    assert asked == [(study.folder / "trials" / "005" / "mlflow.json", "shapes")]


def test_the_table_has_every_trial_once(study: Study):
    fill(study)
    with write_table(study).open() as f:
        rows = list(csv.DictReader(f))
    assert [r["id"] for r in rows] == [f"{n:03d}" for n in range(6)]
    assert rows[1]["state"] == "failed"
    assert rows[1]["why"] == "it had to be"
    assert float(rows[5]["metric"]) == study.rows["005"]["metric"]


def test_another_sweep_in_the_folder_is_refused(study: Study, tmp_path: Path):
    def given(*overrides: str, **changes: Any) -> Study:
        return Study(load(write(tmp_path, **changes), overrides), study.folder)

    begin(study)
    check_same(given(seed=4))  # no trial has begun
    study.next()
    check_same(given(trials=9))  # more trials continue it
    with pytest.raises(UserError, match=r"seed is 0 there and 4 here; give another out="):
        check_same(given(seed=4))
    with pytest.raises(UserError, match=r"optim.epochs is 2 there and 7 here"):
        check_same(given("optim.epochs=7"))


def test_an_objective_that_trials_are_too_short_for_is_refused(shards: Path, tmp_path: Path):
    data = f"data.train={shards / 'train'}"
    checks.check_data(load(write(tmp_path), [data, *SOON]), tmp_path)
    with pytest.raises(
        UserError, match=r"monitor/knn: first measured at step 16, and a trial takes 10 steps; give more"
    ):
        checks.check_data(load(write(tmp_path), [data, *SOON, "optim.epochs=1"]), tmp_path)


@pytest.mark.slow
def test_a_sweep_whose_data_is_missing_leaves_its_folder_to_the_corrected_one(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run, "conduct", lambda study, most: {"rows": study.rows})
    sweep, out = write(tmp_path), tmp_path / "out"
    with pytest.raises(UserError, match=r"^data\.train: /nowhere: cannot be read"):
        run.tune(load(sweep, [f"out={out}", "data.train=/nowhere"]), most=None, resume=False)
    assert [p.name for p in out.iterdir()] == [".command"]
    for resume in (True, False):  # there is nothing to continue, and nothing that forbids it
        told = run.tune(load(sweep, [f"out={out}", f"data.train={shards / 'train'}", *SOON]), most=None, resume=resume)
        assert told == {"rows": {}}


DRIVER = """
import sys
import ray.tune, ray.tune.execution.tune_controller
from eagleray.cli import main
from eagleray.sweeps import ray_tune, run

def launch(*given, **more):
    if found := {"torch", "timm", "torchvision"} & sys.modules.keys():
        raise RuntimeError(f"{found} imported")

ray_tune.launch = launch
run.parent = run.end = lambda *given, **more: {"finished": True, "best": {}}
main.main()
"""


@pytest.mark.slow
def test_the_driver_of_a_sweep_imports_no_pytorch(shards: Path, tmp_path: Path):
    """A head has one for every sweep; the process that checks the sweep ends before the first trial."""
    words = ["tune", write(tmp_path), f"out={tmp_path / 'out'}", *SOON]
    for data, code, said in ("/nowhere", 2, "error: data.train: /nowhere: cannot be read"), (shards / "train", 0, ""):
        command = [sys.executable, "-c", DRIVER, *words, f"data.train={data}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr.strip()[: len(said) or None]) == (code, said), done.stdout
    machine = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert machine["command"][-1] == f"data.train={shards / 'train'}"
    assert machine["packages"]["torch"][0].isdigit()


def test_a_sweep_without_a_best_trial_has_an_exit_status_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """As when all trials have failed, after which a script has nothing to go on with."""
    for best, code in ({"id": "000"}, None), (None, 1):
        monkeypatch.setattr("eagleray.tune", lambda *_, b=best, **__: {"best": b, "finished": True})
        assert status("tune", "mine.yaml", "--json") == code


def test_an_evaluation_before_the_end_of_some_trials_is_an_objective(tmp_path: Path):
    changes: dict[str, Any] = {"objective": {"key": "knn/top1"}, "fixed": {"evaluate.every": 2}}
    checks.check_objective(load(write(tmp_path, **changes), ["optim.epochs=3"]))
    checks.check_objective(load(write(tmp_path, space={"optim.epochs": {"choice": [2, 4]}}, **changes)))


def test_a_sweep_goes_on_with_the_objective_that_it_began_with(study: Study, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "conduct", lambda study, most: {"rows": len(study.rows)})
    checked = lambda study, objective: {"checked": objective and checks.check_objective(study.sweep)}  # noqa: E731
    monkeypatch.setattr(run, "checked", checked)
    given = ["sweep.objective.key=label_free", "sweep.objective.mode=min", f"out={study.folder}"]
    file = write(study.folder.parent)
    with pytest.raises(UserError, match="expected max"):
        run.tune(load(file, given), most=None, resume=False)
    study = Study(load(file, given), study.folder)
    study.next()
    begin(study)
    assert run.tune(load(file, given), most=None, resume=True) == {"rows": 1}


def test_a_sweep_is_not_written_into_the_folder_of_a_run(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "conduct", lambda study, most: {"rows": len(study.rows)})
    monkeypatch.setattr(run, "checked", lambda study, objective: {})
    for name in ("recipe.yaml", "environment.json"):
        (study.folder / name).write_text("{}")
    with pytest.raises(UserError, match=rf"^out={study.folder}: holds a run; give another out=$"):
        run.tune(load(write(tmp_path), [f"out={study.folder}"]), most=None, resume=True)
    assert {p.name: p.read_text() for p in study.folder.iterdir()} == {"recipe.yaml": "{}", "environment.json": "{}"}
    study = Study(load(write(tmp_path)), study.folder)  # one that was written into it before that was refused
    study.next()
    begin(study)
    assert run.tune(load(write(tmp_path), [f"out={study.folder}"]), most=None, resume=True) == {"rows": 1}


def test_pictures_are_drawn_of_any_sweep(study: Study):
    assert plots.draw(study) == []
    fill(study)
    assert [p.name for p in plots.draw(study)] == ["keys.png", "parallel.png", "curves.png"]
    assert all((study.folder / n).stat().st_size > 10_000 for n in ("keys.png", "parallel.png", "curves.png"))


def test_pictures_leave_out_what_has_no_result_and_show_mappings_and_lists(tmp_path: Path):
    space = {"views.0": {"choice": [{"size": 16, "blur": 0.5}, {"size": 16}]}, "optim.betas": {"choice": [[0.9, 0.95]]}}
    sweep = load(write(tmp_path, trials=4))
    [branch] = sweep.alternatives.values()
    options = {key: Values("choice", tuple(spec["choice"])) for key, spec in space.items()}
    late = replace(branch, space={"optim.weight_decay.value": Values("log", (1e-3, 1e-1))})
    sweep = replace(sweep, alternatives={"first": replace(branch, space=options), "late": late})
    (tmp_path / "out").mkdir()
    study = Study(sweep, tmp_path / "out")
    for value in (1.0, None, 2.0):
        row = study.next()
        assert row is not None
        if value:
            study.report(row["id"], 10, 10, 100.0, value)
            study.set(row["id"], state="finished")
    assert {r["alternative"] for r in study.rows.values() if r["metric"]} == {"first"}
    assert plots.drawn_keys(study, [study.rows["000"]]) == list(space)
    assert [p.name for p in plots.draw(study)] == ["keys.png", "parallel.png", "curves.png", "alternatives.png"]


@pytest.mark.parametrize(
    ("values", "kind", "shares"),
    [
        ([{"a": 1}, {"b": 2}, {"a": 1}], "choice", [0.0, 1.0, 0.0]),
        ([True, 1, "x"], "choice", [0.5, 0.0, 1.0]),
        ([1, 1.0, 2], "choice", [0.0, 0.0, 1.0]),
        ([1e-4, 1e-2, 1e-3], "log", [0.0, 1.0, 0.5]),
    ],
)
def test_values_have_their_places_on_an_axis(values: list[Any], kind: str, shares: list[float]):
    scale = plots.Scale(values, kind)
    assert [scale.share(v) for v in values] == pytest.approx(shares)
    assert [at for at, _ in scale.ticks()] == pytest.approx(sorted({*shares} - {0.5} if kind == "log" else {*shares}))


def test_a_search_that_learns_looks_at_what_others_found(tmp_path: Path):
    pytest.importorskip("optuna")
    sweep = load(write(tmp_path, search="optuna"))

    def told(better: float) -> list[dict[str, Any]]:
        """Fifty trials, the better the closer their rates were to one."""
        rows = []
        for n in range(50):
            name, values = suggest(sweep, n, [])
            metric = -abs(math.log(values["optim.lr.value"] / better))
            rows.append({"alternative": name, "values": values, "metric": metric, "state": "finished", "step": 1})
        return rows

    low = [suggest(sweep, n, told(2e-4))[1]["optim.lr.value"] for n in range(60, 70)]
    high = [suggest(sweep, n, told(5e-3))[1]["optim.lr.value"] for n in range(60, 70)]
    assert sorted(low)[5] < 1e-3 < sorted(high)[5]
    assert suggest(sweep, 60, told(2e-4)) == suggest(sweep, 60, told(2e-4))


@pytest.mark.parametrize("name", bundled.names("sweep"))
def test_every_sweep_says_what_it_is_and_its_trials_can_be_made(name: str, tmp_path: Path):
    path = bundled.folder("tune") / f"{name}.yaml"
    assert path.read_text().startswith("# ")
    sweep = load(name)
    checks.check_objective(sweep)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(sweep))
    assert config.load(Sweep, again) == sweep
    for n in range(min(count_trials(sweep), 12)):
        branch, values = suggest(sweep, n, [])
        assert isinstance(recipe_of(sweep, branch, values, name), Recipe)
    assert json.dumps(config.to_plain(sweep))


@pytest.mark.parametrize(
    ("name", "each"), [("imagenet_methods", 24), ("imagenet_resnet50_lars", 24), ("cifar10_methods", 8)]
)
def test_a_comparison_of_methods_searches_for_each(name: str, each: int):
    """Trials of a method that learns slowly at first are not stopped by those of another one."""
    sweep = load(name)
    assert sweep.apart
    assert count_trials(sweep) == each * len(sweep.alternatives)
    assert f"{each} trials" in (bundled.folder("tune") / f"{name}.yaml").read_text().splitlines()[0]


def test_an_empty_mapping_on_the_command_line_replaces_that_of_the_recipe(tmp_path: Path):
    [branch] = load(write(tmp_path), ["backbone.options={}"]).alternatives.values()
    assert isinstance(branch.recipe, dict)
    assert not branch.recipe["backbone"].get("options")
    assert "'sweep.trials': expected key=value" in wrong(tmp_path, "sweep.trials")


def test_a_key_whose_parts_vary_cannot_be_a_number(tmp_path: Path):
    line = wrong(tmp_path, "optim.lr=0.001")
    assert "optim.lr=0.001: expected a mapping, as space.optim.lr.value varies" in line


def test_paths_that_vary_mean_the_same_to_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from eagleray.sweeps import ray_tune
    from eagleray.sweeps.trial import Trial

    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    study = Study(load(write(tmp_path, space={"data.train": {"choice": ["a", "b"]}})), tmp_path / "out")
    row = study.next()
    assert row
    settings = ray_tune.trial_settings(study, row, "c")
    monkeypatch.chdir("/")
    [source] = Trial(row["id"], settings, Tracking("none")).recipe.data.sources()
    assert source.url == str(tmp_path / row["values"]["data.train"])


def test_a_result_whose_row_was_not_stored_is_not_taken_for_known(study: Study, monkeypatch: pytest.MonkeyPatch):
    row = study.next()
    assert row

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        study.report(row["id"], 10, 10, 100.0, 3.5)
    again = Study(study.sweep, study.folder)
    assert (again.reports, again.rows[row["id"]]["metric"]) == ({}, None)


def test_an_alternative_that_is_a_name_is_one_line(tmp_path: Path):
    rate = "sweep.space.optim.lr.value.log=[1.0e-4, 1.0e-3]"
    assert "alternatives.a" in wrong(tmp_path, rate, alternatives={"a": "small.yaml"})
