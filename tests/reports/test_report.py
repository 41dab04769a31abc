"""The page about a run: everything on it is inside of it, true, and nothing is an empty heading."""

import base64
import fcntl
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.bucket import CountingBucket
from helpers.run_folder import SUMMARY, describe_curves, lines, records, sweep_of, write_run
from helpers.s3.server import store_of
from PIL import Image
from typer.testing import CliRunner

from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.reports import page, plots, sections, write
from eagleray.reports.read import names, read
from eagleray.runs import layout
from eagleray.runs.bucket_files import GROWING
from eagleray.runs.run_store import run_store
from eagleray.storage import store

VOID = {"meta", "img", "br", "hr", "link", "input"}
ALWAYS = {"Curves", "Recipe", "Environment", "Time"}
EVIL = "<script>alert('x')</script>"


class Read(HTMLParser):
    """What a page says: its tags in balance, its headings with the numbers and texts below each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.below: dict[str, str] = {}
        self.numbers: list[float] = []
        self.rows: dict[str, list[float]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"{tag}: the same attribute twice"
        self.tags.append(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "poster")]
        self.ids += [str(given["id"])] if "id" in given else []
        if tag == "img":
            self.images.append(given)
            self.handle_data(str(given["alt"]))
        if tag == "data":
            self.numbers.append(float(str(given["value"])))
            if self.rows:
                self.rows[list(self.rows)[-1]].append(self.numbers[-1])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.below[data] = ""
            return
        if self.open and self.open[-1] == "th" and "tbody" in self.open:
            self.rows[data] = []
        if self.below:
            self.below[list(self.below)[-1]] += data


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The folder of a run that is done."""

    def of(name: str = "run", *overrides: str, summary: dict[str, Any] | None = SUMMARY) -> Path:
        return write_run(tmp_path / name, *overrides, summary=summary)

    return of


@pytest.fixture
def drawn() -> None:
    """For tests that look at curves: they are drawn."""


@pytest.fixture(autouse=True)
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are drawn only where somebody looks at them."""
    if "drawn" in request.fixturenames:
        monkeypatch.setattr(plots, "DPI", 40)
    else:
        describe_curves(monkeypatch)


def reported(*given: Path, out: Path | None = None) -> Read:
    text = Path(write.report([str(g) for g in given], out)[0]).read_text()
    assert len(text) < 5_000_000
    return Read(text)


def everything(folder: Path) -> None:
    """All that a run's folder can hold."""
    lines(folder / "health.jsonl", [{"step": 67, "kind": "spike", "text": "gradients 52 times their median"}])
    bad = [{"shard": "s3://b/a.tar", "key": f"k{i}", "offset": 0, "reason": "truncated"} for i in range(3)]
    lines(folder / "quarantine.jsonl", bad)
    lines(folder / "skipped.jsonl", [{"step": 30, "keys": ["a", "b"]}])
    given = {"protocol": "attention", "settings": {"mass": 0.6}, "backbone": "run", "backbone_digest": "0"}
    given |= {"architecture": "1", "data": {}, "data_digest": "2", "date": "2026-11-21", "seconds": 1.0}
    fresh = given | {"untrained": True, "numbers": {"attention/entropy": 2.75}}
    trained = given | {"untrained": False, "numbers": {"attention/entropy": 4.125}}
    older = trained | {"numbers": {"attention/entropy": 99.5}}
    trained |= {"pictures": ["pictures/attention_maps.png"]}
    (folder / "results.json").write_text(json.dumps([older, fresh, trained]))
    (folder / "pictures").mkdir()
    Image.new("RGB", (64, 48), "red").save(folder / "pictures" / "attention_maps.png")


def test_the_page_needs_nothing_beside_it(make: Make, drawn: None):
    everything(folder := make())
    found = reported(folder)
    assert found.links
    assert all(link.startswith(("data:image/", "#")) for link in found.links)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert "url(" not in (folder / "report.html").read_text()
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    for image in found.images:
        data = base64.b64decode(str(image["src"]).partition("base64,")[2])
        assert not re.search(rb'(href|src)="(?!#)', data), "a picture that fetches something"


def test_numbers_are_those_of_the_summary(make: Make):
    found = reported(make())
    assert set(SUMMARY.values()) <= set(found.numbers)


def test_what_is_there_has_a_heading_and_what_is_not_has_none(make: Make):
    bare = reported(folder := make())
    assert set(bare.below) == ALWAYS | {"Results"}
    everything(folder)
    full = reported(folder)
    assert set(full.below) == ALWAYS | {"Results", "Health", "Pictures", "Bad samples"}
    for found in (bare, full):
        assert all(text.strip() for text in found.below.values())
    assert "gradients 52 times their median" in full.below["Health"]
    assert "a lower optim.lr.value" in full.below["Health"]
    assert "truncated" in full.below["Bad samples"]
    assert "a.tar/k0, a.tar/k1, a.tar/k2" in full.below["Bad samples"]
    assert "attention maps (attention: mass 0.6)" in full.below["Pictures"]
    assert full.rows["attention/entropy"][:2] == [4.125, 2.75]
    assert 99.5 not in full.numbers


def test_pictures_say_what_they_show(make: Make, drawn: None):
    found = reported(folder := make())
    assert len(found.images) == len(list((folder / "report").glob("*.png"))) == 7
    assert all(image["alt"] for image in found.images)
    assert "loss from 4.9 at step 10 to 3 at step 200" in found.below["Curves"]


def test_a_run_shows_the_nearest_of_its_own_images(make: Make, drawn: None):
    folder = make()
    Image.new("RGB", (64, 48), "red").save(folder / "neighbours.png")
    assert "images of its evaluation, each with those nearest to it" in reported(folder).below["Pictures"]


def test_what_others_wrote_is_text(make: Make):
    everything(folder := make(EVIL.replace("/", "|")))
    for name in ("health", "quarantine", "skipped", "recipe", "environment", "results"):
        [path] = folder.glob(f"{name}.*")
        text = path.read_text()
        for word in ("spike", "median", "truncated", "a.tar", "k0", "mocov3", "attention/entropy", "mass", "pretrain"):
            text = re.sub(rf"\b{re.escape(word)}\b", EVIL, text)
        path.write_text(text)
    found = reported(folder)
    assert "script" not in found.tags
    assert EVIL in found.below["Bad samples"]


def test_a_page_runs_no_script_and_asks_no_server(make: Make):
    text = Path(write.report([str(make())])[0]).read_text()
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_a_bomb_among_the_pictures_is_left_out(make: Make):
    folder = make()
    (folder / "pictures").mkdir(exist_ok=True)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for name, side in (("bomb", 60_000), ("large", 9_000)):  # the head says so; the data never come
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
        rows = zlib.compress(b"\0")
        (folder / "pictures" / f"{name}.png").write_bytes(
            b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
        )
    Image.new("RGB", (8, 8)).save(folder / "pictures" / "small.png")
    page_text = Path(write.report([str(folder)])[0]).read_text()
    assert 'alt="small' in page_text
    assert 'alt="bomb' not in page_text
    assert 'alt="large' not in page_text


def test_a_sample_whose_key_ends_a_line_is_counted_once(make: Make):
    bad = [{"shard": "a.tar", "key": "x\u2028y", "offset": 0, "reason": "odd"}]
    lines((folder := make()) / "quarantine.jsonl", bad)
    with (folder / "quarantine.jsonl").open("a") as f:
        f.write('{"shard": "half')
    assert len(read(str(folder)).quarantine) == 1


def test_starts_that_a_stranger_has_written_are_left_out(make: Make):
    good = {"step": 0, "ranks": 2, "time": 1.7e9}
    odd = [{"time": 1e300}, {"time": "now"}, {"step": [0]}, {"reached": "far"}, {"ranks": {}}]
    lines((folder := make()) / "starts.jsonl", [good, *(good | change for change in odd)])
    assert read(str(folder)).starts == [good]
    reported(folder)


@pytest.mark.parametrize(
    ("change", "state", "why"),
    [
        (lambda f: None, "broken off", "killed some time after step 200"),
        (
            lambda f: lines(f / "starts.jsonl", [{"step": 0, "time": 1.0}, {"ended": True, "time": 2.0}]),
            "stopped",
            "200",
        ),
        (
            lambda f: (f / "train.log").write_text(
                "2026-11-21 14:25:01,123 rank0 INFO begun\n2026-11-21 14:26:01,123 rank0 ERROR failed\n"
                "Traceback (most recent call last):\n  File\nRuntimeError: out of luck\n"
            ),
            "failed",
            "RuntimeError: out of luck",
        ),
        (
            lambda f: (f / ".failure").write_text('{"user": true, "why": "data.train: gone"}'),
            "failed",
            "data.train: gone",
        ),
        (lambda f: [(f / f"{n}.jsonl").unlink() for n in ("metrics", "starts")], "not begun", "not taken a step"),
    ],
)
def test_a_run_that_is_not_done_says_so(make: Make, change: Callable[[Path], object], state: str, why: str):
    folder = make(summary=None)
    change(folder)
    run = read(str(folder))
    assert run.state == state
    assert why in run.why
    found = reported(folder)
    assert "Results" not in found.below
    assert state in (folder / "report.html").read_text()


def test_a_run_that_is_at_work_is_not_disturbed(make: Make):
    folder = make(summary=None)
    with (folder / layout.OWNER).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(str(folder)).state == "running"
    assert read(str(folder)).state == "broken off"


def test_a_run_that_went_on_after_its_summary_is_not_finished(make: Make):
    folder = make(summary=SUMMARY | {"steps": 100})
    assert read(str(folder)).state == "broken off"
    found = reported(folder)
    assert "Results" not in found.below
    assert SUMMARY["knn/top1"] not in found.numbers, "it was measured at step 100 of 200"


def test_steps_to_take_are_those_of_the_epochs_or_the_most(make: Make):
    assert read(str(make())).planned == 200
    assert read(str(make("short", "max_steps=150"))).planned == 150


def test_a_long_run_with_many_pictures_stays_small(make: Make, drawn: None):
    folder = make()
    rng = np.random.default_rng(0)
    layers = {f"grad/blocks.{i:02}" for i in range(24)}
    rows = [r | {k: float(rng.lognormal()) for k in (*layers, "loss")} for r in records(5000)]
    lines(folder / "metrics.jsonl", rows)
    (folder / "pictures").mkdir()
    for i in range(8):
        noise = rng.integers(0, 255, (600, 900, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "pictures" / f"{i}.png", compress_level=0)
    (folder / "pictures" / "torn.png").write_bytes(b"\x89PNG no")
    (folder / "pictures" / "half.png").write_bytes((folder / "pictures" / "0.png").read_bytes()[:33])  # its first part
    found = reported(folder)
    assert sum(str(i["src"]).startswith("data:image/webp") for i in found.images) == 8


def test_runs_are_compared(make: Make, drawn: None, tmp_path: Path):
    one = make("one")
    views = "views=[{size: 32, blur: 0.25}, {size: 32}]"
    two = make("two", "optim.lr.value=0.5", views, summary=SUMMARY | {"knn/top1": 44.5})
    out = tmp_path / "both.html"
    found = reported(one, two, out=out)
    assert set(found.below) == {"Runs", "Results", "Cost", "Curves", "Recipes"}
    recipes = found.below["Recipes"]
    assert "optim.lr.value" in recipes
    assert "views.0.blur" in recipes
    assert "optim.batch" not in recipes
    assert {32.82, 44.5, 0.5, 0.25} <= set(found.numbers)
    assert "one from 4.9 at step 10" in found.below["Curves"]
    assert "two from 4.9 at step 10" in found.below["Curves"]
    assert (tmp_path / "both" / "loss.png").exists()
    assert not (one / "report.html").exists()


def test_what_was_found_on_the_way_makes_no_other_number(make: Make, tmp_path: Path):
    """The probe's lambda is found for each run, and again when its evaluation is repeated."""
    outs = []
    for name, found in {"one": [(1.5, 40.25), (2.5, 41.25)], "two": [(3.5, 42.25)]}.items():
        given = {"protocol": "logistic", "backbone": name, "untrained": False, "backbone_digest": name}
        given |= {"architecture": "1", "data": {"train": "/a/b"}, "data_digest": "2", "date": "", "seconds": 1.0}
        given |= {"asked": {"seed": 0}}
        each = [given | {"settings": {"seed": 0, "lambda": x}, "numbers": {"logistic/top1": y}} for x, y in found]
        outs.append(make(name))
        (outs[-1] / "results.json").write_text(json.dumps(each))
    both = reported(*outs, out=tmp_path / "both.html")
    assert both.rows["logistic/top1"] == [41.25, 42.25]
    assert "logistic on a/b: seed 0" in both.below["Results"]
    assert "logistic on a/b: seed 0, lambda 2.5" in reported(outs[0]).below["Results"]


def test_an_early_checkpoint_is_not_the_run(make: Make):
    given = {"protocol": "knn", "settings": {"k": 5}, "asked": {"k": 5}, "untrained": False, "backbone_digest": "0"}
    given |= {"architecture": "1", "data": {}, "data_digest": "2", "date": "2026-11-21", "seconds": 1.0}
    folder = make(summary=None)
    of = {str(folder): 41.5, f"{folder}/checkpoints/step-000000001.pt": 12.5}
    (folder / "results.json").write_text(
        json.dumps([given | {"backbone": b, "numbers": {"knn/top1": v}} for b, v in of.items()])
    )
    found = reported(folder)
    assert {41.5, 12.5} <= set(found.numbers)
    assert "knn: k 5, of step-000000001.pt" in found.below["Results"]


def test_numbers_of_other_ends_are_not_compared(make: Make, tmp_path: Path):
    """The keys of the evaluation at the end of a run are not the same."""
    found = reported(make("one"), make("two", "evaluate.k=200"), out=tmp_path / "both.html")
    assert "kNN of k 20" in found.below["Results"]
    assert "kNN of k 200" in found.below["Results"]


@pytest.mark.parametrize(("name", "text"), [("summary.json", "[]"), ("environment.json", "3"), ("recipe.yaml", "- a")])
def test_a_file_of_another_kind_is_named(make: Make, name: str, text: str):
    folder = make()
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=name):
        reported(folder)


def test_a_recipe_with_an_empty_part_has_a_page(make: Make):
    folder = make()
    (folder / "recipe.yaml").write_text("method:\ndata:\n")
    assert "Results" in reported(folder).below


def test_runs_of_other_batches_are_compared_by_epoch(make: Make, tmp_path: Path):
    found = reported(make("one"), make("two", "optim.batch=64"), out=tmp_path / "both.html")
    assert "at epoch 0.1 to 3 at epoch 2" in found.below["Curves"]


def test_equal_runs_have_no_table_of_differences(make: Make, drawn: None, tmp_path: Path):
    found = reported(make("one"), make("$\\frac"), out=tmp_path / "both.html")
    assert "Recipes" not in found.below


def test_names_are_as_long_as_it_takes():
    assert names(["/a/dino/run", "/a/moco/run"]) == ["dino/run", "moco/run"]
    assert names(["/a/one"]) == ["one"]
    assert names(["s3://b/x/one", "/c/two"]) == ["one", "two"]
    with pytest.raises(UserError, match="given twice"):
        names(["/a/run", "/a/run"])


def test_every_panel_is_explained():
    panels = [*plots.TOP, plots.gradients({}), *plots.BOTTOM, plots.SPEED, plots.GOODPUT]
    assert {p.title for p in panels} == set(plots.EXPLAINED)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "true"),
        (12345, "12,345"),
        (0.123456, "0.1235"),
        (123456.7, "123,457"),
        (float("nan"), "nan"),
    ],
)
def test_cells(value: Any, text: str):
    assert page.shown(value) == text


def test_a_sweep_has_its_trials_and_pictures(tmp_path: Path, make: Make):
    sweep_of(folder := tmp_path / "sweep")
    found = reported(folder)
    assert set(found.below) == {"Trials", "Pictures", "Sweep"}
    assert [found.rows[f"00{i}"][3] for i in range(3)] == [30.25, 41.5, 20.75]
    assert len(found.images) == 4
    assert 41.5 in found.numbers
    (folder / "trials.jsonl").unlink()
    assert set(reported(folder).below) == {"Sweep"}
    with pytest.raises(UserError, match="a sweep cannot be compared"):
        write.report([str(folder), str(make())])


def test_a_sweep_has_its_page_when_its_pictures_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(study: Any) -> list[Path]:
        raise TypeError("unhashable type: 'dict'")

    monkeypatch.setattr("eagleray.sweeps.plots.draw", fails)
    sweep_of(folder := tmp_path / "sweep")
    assert set(reported(folder).below) == {"Trials", "Sweep"}
    assert "The pictures could not be drawn: unhashable type" in (folder / "report.html").read_text()


def test_the_trials_of_a_sweep_are_named_as_a_shell_expands_them(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path / "bucket"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sweep_of(folder := tmp_path / "sweep")
    url = "s3://runs/kept"
    for path in folder.iterdir():
        store.put_bytes(f"{url}/{path.name}", path.read_bytes())
    there = "s3://runs/kept/trials/{000..002}"
    assert f"eagleray report {there}" in Path(write.report([url])[0]).read_text()
    with pytest.raises(UserError, match=re.escape(there)):
        write.report([url, str(make())])
    with pytest.raises(UserError, match=re.escape(f"{folder}/trials/*")):
        write.report([str(folder), str(make("other"))])


def test_a_sweep_lays_the_curves_of_its_trials_over_each_other(tmp_path: Path):
    """Two of three trials have a folder, of which one logs no layers."""
    sweep_of(folder := tmp_path / "sweep")
    (folder / "trials").mkdir()
    for name in ("000", "002"):
        write_run(folder / "trials" / name)
    rows = [{k: v for k, v in r.items() if not k.startswith("grad/")} | {"grad_norm": 2.5} for r in records()]
    lines(folder / "trials" / "002" / "metrics.jsonl", rows)
    found = reported(folder)
    assert "Stability" in found.below
    texts = [str(image["alt"]) for image in found.images]
    shown = {alt.partition(":")[0]: alt for alt in texts if " at step " in alt}
    layers = "gradient norm, first and last layer"
    assert set(shown) == {"loss", "kNN monitor, top-1 %", "kNN evaluation, top-1 %", "gradient norm", layers}
    assert "000: byol, 0.001, 0.9 from 4.9 at step 10 to 3 at step 200; 002: byol, 0.003, 0.9 from 4.9" in shown["loss"]
    assert shown[layers] == f"{layers}: 000: byol, 0.001, 0.9 from 0.2 at step 10 to 0.2 at step 200"


@pytest.mark.slow
def test_many_trials_are_shown_from_the_worst_to_the_best(tmp_path: Path):
    sweep_of(folder := tmp_path / "sweep")
    (folder / "trials").mkdir()
    row = json.loads((folder / "trials.jsonl").read_text().splitlines()[0])
    rows = [row | {"id": f"{i:03d}", "metric": float(i * 7 % 40)} for i in range(40)]
    lines(folder / "trials.jsonl", rows)
    (folder / "reports.jsonl").write_text("")
    for r in rows:
        write_run(folder / "trials" / r["id"])
    found = reported(folder)
    texts = [str(image["alt"]) for image in found.images]
    [loss] = [alt for alt in texts if alt.startswith("loss: ")]
    assert loss.count(" from ") == plots.MOST
    worst, best = (next(r["id"] for r in rows if r["metric"] == m) for m in (0.0, 39.0))
    assert f"{worst}: " in loss
    assert f"{best}: " in loss
    assert not any(alt.startswith("gradient norm, first") for alt in texts), "more trials than colours"


def test_wrong_places_are_one_line(tmp_path: Path, make: Make):
    with pytest.raises(UserError, match="no such folder"):
        write.report([str(tmp_path / "none")])
    with pytest.raises(UserError, match="not the folder of a run"):
        write.report([str(tmp_path)])
    folder = make()
    with pytest.raises(UserError, match=r"both: expected a name that ends with \.html"):
        write.report([str(folder)], tmp_path / "both")
    with pytest.raises(UserError, match="given twice"):
        write.report([str(folder), str(folder)], tmp_path / "both.html")
    assert not (tmp_path / "both").exists()
    with pytest.raises(UserError, match="cannot be written"):
        write.report([str(folder)], Path("/proc/nowhere/report.html"))
    (folder / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json: not valid JSON"):
        write.report([str(folder)])


def test_the_command_says_where_the_page_is(make: Make):
    folder = make()
    done = CliRunner().invoke(main.app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(folder / "report.html")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with store_of(tmp_path / "s3", "runs"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield "s3://runs/kept"


def test_a_run_in_a_store_has_its_page_there(make: Make, drawn: None, url: str):
    everything(folder := make())
    for path in (p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if name in GROWING:
            run_store(url).append(name, path.read_text())
        else:
            run_store(url).put(name, path.read_bytes())
    here, there = write.report([url])
    assert there == f"{url}/report.html"
    text = store.store(there).get(there).decode()
    assert text == Path(here).read_text()
    assert set(Read(text).below) == ALWAYS | {"Results", "Health", "Pictures", "Bad samples"}
    assert store.store(url).get(f"{url}/report/loss.png").startswith(b"\x89PNG")
    with pytest.raises(UserError, match="not the folder of a run"):
        write.report([f"{url}-not"])


def test_the_title_names_what_changes_the_backbone(make: Make):
    run = read(str(make()))
    run.recipe["backbone"] = {"name": "vit_tiny_patch16_224", "options": {"depth": 4, "embed_dim": 128}}
    assert sections.model_text(run).endswith(" on vit_tiny_patch16_224 with depth 4, embed_dim 128")


def test_goodput_is_the_summarys_with_what_was_lost(make: Make):
    run = read(str(make()))
    [tile] = [t for t in sections.tiles(run) if t.label == "goodput"]
    assert (tile.value, tile.hint) == ("91.0%", "4 s lost")


def test_numbers_on_images_held_out_of_other_data_are_not_compared(make: Make, tmp_path: Path):
    runs = make("one", "data.test=null"), make("two", "data.test=null", "data.train=s3://bucket/other")
    assert reported(*runs, out=tmp_path / "both.html").below["Results"].count("kNN of k 20") == 2
