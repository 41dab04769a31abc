"""Facts that the pages repeat are those of the code and of benchmarks/results/."""

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import fields

import pytest
import yaml
from helpers.pages import PAGES, ROOT

from eagleray import config
from eagleray.base import user
from eagleray.cluster import job_package
from eagleray.models.network import Lora, TrainedNetwork
from eagleray.runs import layout, recipe

RECIPES = (ROOT / "docs" / "recipes.md").read_text()
OF_A_TRIAL = {layout.FAILED, layout.PLACEMENT}


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_goodput_of_the_pages_is_the_measured_one() -> None:
    line = (ROOT / "benchmarks/results/survive_cpu.jsonl").read_text().splitlines()[-1]
    for key in ("goodput", "goodput_unharmed"):
        share = json.loads(line)[key]
        for page in ("docs/results.md", "docs/concepts/goodput.md"):
            assert f"{share:.3f}" in (ROOT / page).read_text(), page
        assert f"{100 * share:.1f} %" in (ROOT / "README.md").read_text()


def test_the_loop_of_its_page_is_the_one_of_the_code() -> None:
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "docs/concepts/loop.md").read_text(), re.M | re.S)
    assert block
    assert textwrap.indent(block[1], " " * 8) in (ROOT / "platform/eagleray/runs/train.py").read_text()


def test_the_run_folder_lists_every_file_of_a_run() -> None:
    listing = re.search(r"^```\nout/\n(.*?)^```", (ROOT / "docs/running.md").read_text(), re.M | re.S)
    assert listing
    listed = set(re.findall(r"[.\w]+", listing[1]))
    ours = {k: v for k, v in vars(layout).items() if k.isupper() and not k.startswith(("EVALUATION_STARTS", "SWEEP"))}
    names = {v.partition("/")[0] for v in ours.values()}
    assert not names - OF_A_TRIAL - listed


def test_the_keys_that_may_change_are_those_of_the_code() -> None:
    listed = re.findall(r"`([\w.*]+)`", section(RECIPES, "What identifies a run").split("\n\n")[1])
    methods = config.parts("eagleray.methods")
    own = {f"method.{k}" for m in methods for k in config.part_constant("eagleray.methods", m, "may_change")}
    assert {key.removesuffix(".*") for key in listed} == {*recipe.OPERATION, *own}
    assert len(listed) == len(set(listed))


def test_every_key_has_a_meaning() -> None:
    """All but those of methods, which their page explains."""
    keys = (ROOT / "docs/reference/keys.md").read_text().partition("\n## method\n")[0]
    rows = re.findall(r"^\| `([\w.\[\]]+)`(?: ✓)? \| .* \| .* \| (.*) \|$", keys, re.M)
    assert [name for name, meaning in rows if not meaning.strip()] == []
    kinds = {"": recipe.Recipe, "data.": recipe.Data, "optim.": recipe.Optim, "start.": recipe.Start}
    kinds |= {"backbone.": TrainedNetwork, "backbone.lora.": Lora, "views[].": recipe.View}
    kinds |= {"evaluate.": recipe.Evaluate}
    kinds |= {"monitor.": recipe.Watch, "checkpoint.": recipe.Checkpoint, "track.": recipe.Track}
    names = {
        prefix + (kind.__pydantic_fields__[f.name].alias or f.name)
        for prefix, kind in kinds.items()
        for f in fields(kind)
    }
    sections = {name.rpartition(".")[0].removesuffix("[]") for name in names} | {"method", "curriculum"}
    assert names - sections <= {name for name, _ in rows}


def test_the_resolved_recipe_of_the_page_is_what_show_prints() -> None:
    excerpt = section(RECIPES, "The resolved recipe").partition("```yaml\n")[2].partition("```")[0]
    shown = config.dump(recipe.load("dino_vits16_in1k_ep100")).splitlines()
    at = 0
    for line in excerpt.splitlines():
        if line.strip() != "...":
            at = shown.index(line, at) + 1
    assert yaml.safe_load("\n".join(shown))["method"]["name"] == "dino"


def test_the_variables_that_are_sent_with_a_job_are_listed() -> None:
    sent = section((ROOT / "docs/jobs.md").read_text(), "What is sent")
    listed = {name for row in re.findall(r"^\| (`.*?) \|", sent, re.M) for name in re.findall(r"`(\w+)\*?`", row)}
    assert listed == {*job_package.SENT, *job_package.BEGINNINGS, user.NAME}


def test_files_that_pages_name_exist() -> None:
    """By name, as pages leave out rooms. Not what a reader writes, Ray's own, and what a decision has replaced."""
    tree = [ROOT / "platform", ROOT / "tests", ROOT / "benchmarks", ROOT / "docs"]
    names = {path.name for folder in tree for path in folder.rglob("*.py")}
    free = re.compile(r"my_\w+|NAME|centroid|default_worker|load|protocols")
    for page in PAGES:
        text = page.read_text()
        named = {name for name in re.findall(r"`(?:\w+/)*(\w+)\.py`", text) if not free.fullmatch(name)}
        assert {f"{name}.py" for name in named} <= names, page
        for shown, target in re.findall(r"\[`([\w./]+\.py)`\]\(([^)#]+)", text):
            assert target.endswith(shown), page


@pytest.mark.slow
def test_the_table_of_plans_is_what_the_benchmark_prints() -> None:
    command = [sys.executable, "benchmarks/plan.py", "--table"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip()
    assert printed in (ROOT / "docs/plan.md").read_text()
