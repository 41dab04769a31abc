"""docs/proof.md, its results and its sweeps agree; a verdict needs enough seeds."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.benchmarks import load_benchmark

from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.config import bundled
from eagleray.sweeps import checks
from eagleray.sweeps.sweep import Sweep, count_trials, load, suggest

ROOT = Path(__file__).parents[2]
SWEEPS = [name for name in bundled.names("sweep") if name.startswith("proof_")]


@pytest.fixture(scope="module")
def proof() -> dict[str, Any]:
    return load_benchmark("proof_page.py") | load_benchmark("proof.py")


def lines() -> list[dict[str, Any]]:
    return [json.loads(x) for x in (ROOT / "benchmarks" / "results" / "proof.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_starts_and_has_the_settings_that_its_claim_compares(name: str, proof: dict[str, Any]):
    sweep = load(name)
    checks.check_objective(sweep)
    trials = [suggest(sweep, n, []) for n in range(count_trials(sweep))]
    settings = {proof["setting"]({"alternative": a, "values": v}) for a, v in trials}
    [claim] = [c for c in proof["CLAIMS"] if c.sweep == name]
    assert {s for p in (*claim.pairs, *claim.beside) for s in (p.better, p.worse)} <= settings
    assert {r["setting"] for r in lines() if r["claim"] == name} <= settings
    seeds = {v["seed"] for a, v in trials}
    assert seeds == set(range(claim.seeds))
    assert len(trials) == len(settings) * claim.seeds, "each setting has them all"
    assert all(sound(proof, claim, pair, sweep) for pair in (*claim.pairs, *claim.beside))


def sound(proof: dict[str, Any], claim: Any, pair: Any, sweep: Sweep) -> bool:
    """Whether two settings differ in what their claim names and in nothing else."""
    found = proof["differing"](sweep, pair)
    return bool(found) and all(key.startswith(claim.differs) for key in found)


CONFOUNDED = """
alternatives:
  views: {recipe: dino_swin2_cifar10_ep2}
  regions: {recipe: esvit_swin2_cifar10_ep2, fixed: {method.free_scale: true}}
fixed: {data.train: x}
space: {seed: {grid: [0, 1]}}
search: grid
scheduler: none
"""


def test_settings_that_differ_in_more_than_their_claim_names_are_refused(proof: dict[str, Any], tmp_path: Path):
    """As proof_multistage was: DINO with prototypes of one length beside EsViT with those of any length."""
    (path := tmp_path / "proof_multistage.yaml").write_text(CONFOUNDED)
    sweep, pair = load(str(path)), proof["Pair"]("regions", "views", "knn/top1")
    claim = proof["Claim"]("proof_multistage", "", "", (pair,), ("method.name", "method.region", "method.matching"))
    assert "method.free_scale" in proof["differing"](sweep, pair)
    assert not sound(proof, claim, pair, sweep)
    [regions] = [c for c in proof["CLAIMS"] if c.sweep == "proof_regions"]
    assert not sound(proof, regions._replace(differs=("method.tokens",)), regions.pairs[0], load(regions.sweep))


def test_the_page_is_that_of_the_results(proof: dict[str, Any]):
    text = (ROOT / "docs" / "proof.md").read_text()
    assert text == proof["page"](lines()), "run `python benchmarks/proof.py --page`"
    assert sorted(c.sweep for c in proof["CLAIMS"]) == sorted(SWEEPS)
    shown = re.findall(r"\(images/proof/(\w+)\.png\)", text)
    assert set(shown) == {r["claim"] for r in lines()} | {"claims"}
    assert all((ROOT / "docs" / "images" / "proof" / f"{name}.png").exists() for name in shown)


def kept(sweep: str, metric: str, arms: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Results of settings, a number for each seed."""
    return [
        {"claim": sweep, "setting": arm, "seed": seed, "numbers": {metric: value}}
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    ]


def test_the_page_begins_with_the_verdicts_of_all_claims_and_shows_shares_in_percent(proof: dict[str, Any]):
    arms = {"regions": [0.40, 0.41, 0.42, 0.43, 0.44], "views": [0.20, 0.21, 0.22, 0.23, 0.24]}
    table, _, sections = proof["page"](kept("proof_regions", "correspondence/accuracy", arms)).partition(
        "\n## proof_st"
    )
    [row] = [r for r in table.splitlines() if "](#proof_regions)" in r]
    assert row.endswith("| 1 seen |")
    row = "| `regions` | 42.00 ± 1.58 (5) | `views` | 22.00 ± 1.58 (5) | `correspondence/accuracy` | +20.00 ± 2.31 |"
    assert f"{row} < 0.001 | seen |" in sections
    assert "| `regions` | - | `views` | - | `knn/top1` | - | - | - |" in sections, (
        "beside the claim there is no verdict"
    )
    [row] = [r for r in table.splitlines() if "](#proof_frozen)" in r]
    assert row.endswith("| not run yet |")


def test_a_comparison_is_welchs(proof: dict[str, Any]):
    compared = proof["compare"]([1, 2, 3], [3, 4, 5], lower=False)
    assert compared.gain == -2
    assert compared.p == pytest.approx(0.0705, abs=1e-4)  # t = 2.449 with 4 degrees of freedom
    assert compared.width(0.05) == pytest.approx(2.776 * compared.error, rel=1e-3)
    assert proof["compare"]([1, 2, 3], [3, 4, 5], lower=True).gain == 2
    assert proof["compare"]([1], [3, 4, 5], lower=False) is None


def test_as_many_visible_differences_are_seen_as_is_said(proof: dict[str, Any]):
    """Of pairs whose true difference is the one that is called visible, four of five have a p below the level."""
    rng, level = np.random.default_rng(0), 0.05 / 30
    a, b = rng.normal(size=(2, 4000, 5))
    visible = np.mean([proof["compare"](x, y, lower=False).visible(level) for x, y in zip(a[:500], b, strict=False)])
    seen = np.mean([proof["compare"](x + visible, y, lower=False).p < level for x, y in zip(a, b, strict=True)])
    assert 0.7 < seen < 0.9


@pytest.mark.parametrize("freedom", [2.2, 4, 8])
def test_few_seeds_see_the_visible_difference_as_often(freedom: float, proof: dict[str, Any]):
    """Two standard errors that are known exactly, and the t of a true gain by its definition."""
    rng, compared = np.random.default_rng(0), proof["Compared"](0.0, 2.0, freedom)
    true, edge = compared.visible(0.002) / 2, compared.width(0.002) / 2
    drawn = (rng.normal(size=100_000) + true) / np.sqrt(rng.chisquare(freedom, 100_000) / freedom)
    assert np.mean(drawn > edge) == pytest.approx(0.8, abs=0.01)


def test_verdicts_share_one_level_and_wait_for_all_seeds(proof: dict[str, Any]):
    (rate,) = [c for c in proof["CLAIMS"] if c.sweep == "proof_rate"]
    (frozen,) = [c for c in proof["CLAIMS"] if c.sweep == "proof_frozen"]
    near = [30.0, 31.0, 32.0, 33.0, 34.0]

    def verdict(claim: Any, gain: float, seeds: int = 5) -> str:
        pair = claim.pairs[0]
        arms = {pair.better: [x + gain for x in near][:seeds], pair.worse: near}
        found: dict[Any, str] = proof["verdicts"](kept(claim.sweep, pair.metric, arms))
        assert set(found.values()) <= {found[claim.sweep, pair], "unfinished"}
        return found[claim.sweep, pair]

    assert verdict(rate, 20) == "seen"
    assert verdict(rate, -20) == "reversed"
    assert verdict(frozen, 20) == "reversed", "a lower number is better"
    assert verdict(rate, 20, seeds=4) == "unfinished"
    assert verdict(rate, 3) == "not seen", "its p of 0.017 would be below the level of a page with one comparison"
    assert proof["compare"]([x + 3 for x in near], near, lower=False).p < 0.05


def test_chance_alone_makes_a_verdict_on_one_page_of_twenty(proof: dict[str, Any]):
    rng = np.random.default_rng(1)
    pages = 0
    for _ in range(200):
        found = [
            line
            for claim in proof["CLAIMS"]
            for metric in {p.metric for p in claim.pairs}
            for line in kept(
                claim.sweep,
                metric,
                {s: rng.normal(50, 1, claim.seeds) for p in claim.pairs for s in (p.better, p.worse)},
            )
        ]
        pages += not set(proof["verdicts"](found).values()) <= {"not seen"}
    assert pages <= 20, "10 are expected"


def test_a_time_is_compared_with_that_of_the_same_seed(proof: dict[str, Any]):
    """The machine takes twice as long on the day of seed 1 and of seed 3, which one setting lacks."""
    times = {"full": {0: 400, 1: 820, 2: 400, 3: 800}, "curriculum": {0: 200, 1: 410, 2: 204}, "keep": {}}
    found = [
        {"claim": "proof_curriculum", "setting": arm, "seed": seed, "numbers": {"wall_seconds": seconds}}
        for arm, by_seed in times.items()
        for seed, seconds in by_seed.items()
    ]
    section = proof["page"](found).partition("\n## proof_curriculum")[2]
    row = "| `curriculum` | 50.33 ± 0.58 (3) | `full` | 100.00 ± 0.00 (3) | `wall_seconds` | +49.67 ± 1.43 | < 0.001 |"
    assert f"{row} unfinished |" in section
    assert "| `keep` | - | `full` | - | `wall_seconds` | - | - | unfinished |" in section


def test_the_plot_of_all_claims_has_what_is_finished_and_keeps_within_its_edge(proof: dict[str, Any]):
    arms = {"lr=0.004": (30, 31, 32, 33, 34), "lr=0.016": (20, 20.01, 20.02, 20.01, 20)}
    claims = [c for c in proof["CLAIMS"] if c.sweep in ("proof_frozen", "proof_rate")]
    [(found, ahead, row)] = proof["leads"](claims, kept("proof_rate", "knn/top1", arms))
    assert (found, ahead) == ("seen", 4)
    assert row == 1, "in the second claim's row"


def test_a_trial_that_took_all_its_steps_is_one_line_with_its_numbers(
    proof: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "proof_frozen"
    for name, value in {"RUNS": tmp_path, "RESULTS": tmp_path / "proof.jsonl"}.items():
        monkeypatch.setitem(proof["store"].__globals__, name, value)
    for name, value in {"IMAGES": tmp_path, "PAGE": tmp_path / "proof.md"}.items():
        monkeypatch.setitem(proof["write"].__globals__, name, value)
    rows = []
    for number, state in enumerate(("finished", "finished", "running")):
        values = {"seed": number, "backbone.freeze_patch": True}
        rows.append({"id": f"{number:03d}", "alternative": "", "values": values, "state": state})
        (trial := folder / "trials" / f"{number:03d}").mkdir(parents=True)
        (trial / "summary.json").write_text(json.dumps({"knn/top1": 30.0 + number, "loss": 1.0}))
        norms = [2.0] * 40 + [14.0, 2.0]
        (trial / "steps.jsonl").write_text("".join(json.dumps({"grad_norm": n}) + "\n" for n in norms))
    results = [{"untrained": u, "numbers": {"knn/top1": 20.0 if u else 30.0}} for u in (False, True)]
    (folder / "trials" / "000" / "results.json").write_text(json.dumps(results))
    (folder / "trials.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    [frozen] = [c for c in proof["CLAIMS"] if c.sweep == "proof_frozen"]
    proof["store"](frozen)
    proof["store"](frozen)  # a second time changes nothing
    stored = [json.loads(x) for x in (tmp_path / "proof.jsonl").read_text().splitlines()]
    assert [(r["setting"], r["seed"]) for r in stored] == [("freeze_patch=True", 0), ("freeze_patch=True", 1)]
    assert stored[0]["numbers"] == {"jump": 7.0, "knn/top1": 30.0}
    [patches] = [c for c in proof["CLAIMS"] if c.sweep == "proof_patches"]
    folder.rename(tmp_path / "proof_patches")
    for number in ("000", "001"):
        (tmp_path / "proof_patches" / "trials" / number / "summary.json").write_text(json.dumps({"loss": 1.0}))
    proof["store"](patches)  # no protocol of its claim has been applied to them but to the first
    assert [json.loads(x) for x in (tmp_path / "proof.jsonl").read_text().splitlines()][2:] == [
        {"claim": "proof_patches", "setting": "freeze_patch=True", "seed": 0, "numbers": {"knn/top1": 30.0}}
    ]
    proof["write"](stored)
    assert (tmp_path / "proof_frozen.png").exists()
    assert (tmp_path / "claims.png").exists()
    assert "30.50 ± 0.71 (2)" in (tmp_path / "proof.md").read_text()


def test_what_stops_a_trial_before_its_program_starts_is_named(
    proof: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    programs = proof["Programs"]
    monkeypatch.setitem(programs.run.__globals__, "RUNS", tmp_path)

    def refuse(*args: object) -> None:
        raise UserError("a recipe is gone")

    monkeypatch.setitem(programs.run.__globals__, "recipe_of", refuse)
    [claim] = [c for c in proof["CLAIMS"] if c.sweep == "proof_backbones"]
    assert programs([claim], proof["Clock"](600), []).run(2) == ["proof_backbones: a recipe is gone"] * 10
    monkeypatch.setitem(programs.run.__globals__, "recipe_of", None)
    with pytest.raises(TypeError):
        programs([claim], proof["Clock"](600), []).run(2)


def test_trials_whose_numbers_are_stored_are_not_run_again(
    proof: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    programs = proof["Programs"]
    scope, ran = programs.run.__globals__, []
    monkeypatch.setitem(scope, "RUNS", tmp_path)
    monkeypatch.setitem(scope, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setitem(scope, "eagleray", lambda *words, until: ran.append(words[1]) or 1)
    settings = [f"lr={rate}" for rate in (0.001, 0.004, 0.016)]
    stored = [{"claim": "proof_rate", "setting": s, "seed": n, "numbers": {}} for s in settings for n in range(5)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stored[:-1]))
    [claim] = [c for c in proof["CLAIMS"] if c.sweep == "proof_rate"]
    failed = programs([claim], proof["Clock"](600), []).run(2)
    states = {r["id"]: r["state"] for r in read_lines(tmp_path / "proof_rate" / "trials.jsonl")}
    assert states.pop("014") == "waiting"
    assert set(states.values()) == {"stopped"}
    assert set(ran) == {str(tmp_path / "proof_rate" / "014.yaml")}
    assert set(failed) == {"proof_rate 014 with status 1"}


@pytest.mark.slow
def test_programs_take_the_trials_of_claims_side_by_side(
    proof: dict[str, Any], shards: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A claim begins when the one has ended that it starts from; a trial that fails is named, and is not done."""
    space = {
        "early": "seed: {grid: [0, 1]}",
        "late": "seed: {grid: [0, 1]}",
        "bad": f"data.test: {{grid: [{shards / 'test'}, nowhere]}}",
        "never": "seed: {grid: [0]}",
    }
    after = {"late": "early", "never": "bad"}
    for name, values in space.items():
        text = f"recipe: {small}\nspace: {{{values}}}\nobjective: {{key: loss, mode: min}}\nsearch: grid\n"
        (tmp_path / f"{name}.yaml").write_text(f"{text}scheduler: none\n")
    programs = proof["Programs"]
    monkeypatch.setitem(programs.run.__globals__, "RUNS", tmp_path)
    monkeypatch.setitem(programs.run.__globals__, "load", lambda name, keys: load(f"{tmp_path / name}.yaml", keys))
    claims = [proof["Claim"](name, "", "", (), after=after.get(name, "")) for name in space]
    keys = [f"data.train={shards / 'train'}", "workers=0", "max_steps=4", "evaluate.probe_epochs=0"]
    failed = programs(claims, proof["Clock"](600), keys).run(2)
    assert failed == ["bad 001 with status 2"]
    rows = {name: [r["state"] for r in read_lines(tmp_path / name / "trials.jsonl")] for name in space}
    assert rows.pop("never") == [], "it starts from trials of which one has failed"
    assert rows == {"early": ["finished"] * 2, "late": ["finished"] * 2, "bad": ["finished", "waiting"]}
    [row, _] = read_lines(tmp_path / "early" / "trials.jsonl")
    assert (row["step"], row["steps"]) == (4, 4)
    assert row["metric"] == read_lines(tmp_path / "early" / "trials" / "000" / "metrics.jsonl")[-1]["loss"]
    assert row["seconds"] > 0
    ends = [(tmp_path / "early" / "trials" / n / "summary.json").stat().st_mtime for n in ("000", "001")]
    starts = [read_lines(tmp_path / "late" / "trials" / n / "starts.jsonl")[0]["time"] for n in ("000", "001")]
    assert max(ends) <= min(starts)
    assert [trial.name for trial, _ in proof["finished"](claims[2])] == ["000"]
    evaluated = []

    def evaluate(claim: Any, trial: Path, clock: Any) -> list[str]:
        evaluated.append((claim.sweep, trial.name))
        return []

    monkeypatch.setitem(programs.run.__globals__, "evaluate", evaluate)
    assert programs(claims[:2], proof["Clock"](600), keys).run(2) == [], "all are done"
    assert sorted(evaluated) == [(name, number) for name in ("early", "late") for number in ("000", "001")]
    assert programs(claims[2:3], proof["Clock"](0), keys).run(2) == [], "no time is left"
    assert len(evaluated) == 4


@pytest.mark.slow
def test_a_signal_ends_a_trial_with_a_checkpoint_and_no_other_begins(
    proof: dict[str, Any], shards: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = f"recipe: {small}\nspace: {{seed: {{grid: [0, 1]}}}}\nobjective: {{key: loss, mode: min}}\nsearch: grid\n"
    (tmp_path / "long.yaml").write_text(f"{text}scheduler: none\n")
    programs, clock = proof["Programs"], proof["Clock"](600)
    monkeypatch.setitem(programs.run.__globals__, "RUNS", tmp_path)
    monkeypatch.setitem(programs.run.__globals__, "load", lambda name, keys: load(f"{tmp_path / name}.yaml", keys))
    trials = tmp_path / "long" / "trials"

    def stop() -> None:
        while not read_lines(trials / "000" / "steps.jsonl"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    keys = [f"data.train={shards / 'train'}", "workers=0", "optim.epochs=300", "evaluate.probe_epochs=0"]
    with clock.ended_by_signals():
        failed = programs([proof["Claim"]("long", "", "", ())], clock, keys).run(1)
    assert clock.stopped
    assert failed == [], "what was stopped has not failed"
    assert 0 < len(read_lines(trials / "000" / "steps.jsonl")) < 3000
    assert list((trials / "000" / "checkpoints").iterdir())
    assert [folder.name for folder in trials.glob("0*")] == ["000"]
    assert {r["state"] for r in read_lines(tmp_path / "long" / "trials.jsonl")} == {"waiting"}


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("proof.py", ["--only", "proof_nothing", "--page"], "--only proof_nothing: expected one of proof_starts"),
        ("proof_set.py", ["nowhere"], "nowhere: expected a folder cifar10 in it"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_one_line(script: str, arguments: list[str], words: str):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert words in line
