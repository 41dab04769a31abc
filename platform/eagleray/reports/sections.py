"""Make the report of one run, section by section. Empty sections are left out."""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from eagleray.config import yaml_text
from eagleray.evaluation.results import UNTRAINED as BARE
from eagleray.evaluation.results import Result, format_settings, without_twins
from eagleray.reports import plots
from eagleray.reports.page import (
    BUDGET,
    LEAST,
    Page,
    Picture,
    Pictures,
    Section,
    Table,
    Texts,
    Tile,
    footer_text,
    picture_uri,
)
from eagleray.reports.read import Run, names
from eagleray.runs import layout, metrics
from eagleray.runs.health import AT_END, KINDS
from eagleray.runs.summary import CHECKED, EARLY, EXPORTED, SENTENCES, UNCHECKED, VERDICT

REASONS = 20  # largest number of rows in a table of bad samples
FINDINGS = 50  # largest number of findings in their table
END = "At the end of the run"
LONGEST = 1e10  # longest duration that is shown, in seconds: three centuries
BEFORE = (metrics.AT_START, metrics.UNTRAINED)  # suffixes of the keys of scores measured before the training
BAD = ("failed", "broken off")  # states in which somebody must act
# Keys of the summary whose values other sections show.
SHOWN_ELSEWHERE = {
    "steps",
    "epochs",
    "images",
    EXPORTED,
    EARLY,
    *SENTENCES,
    metrics.WALL_SECONDS,
    metrics.RESTARTS,
    metrics.STEPS_REPEATED,
}
SHOWN_ELSEWHERE |= {metrics.SECONDS_LOST, metrics.GOODPUT, metrics.BAD_SAMPLES}


def page(run: Run, folder: Path) -> Page:
    """Return the report of a run, and write PNGs of its curves into a folder."""
    sections = [
        Section("Results", results(run), ["Top-1 and top-5 are in percent."], narrow=True),
        Section("Curves", figures(plots.curves(run, folder)), marks_note(run)),
        Section("Health", findings(run)),
        Section("Pictures", evaluation_pictures(run)),
        Section("Time", times(run)),
        Section("Plan", plan_and_fact(run), narrow=True),
        choice(run),
        Section("Bad samples", bad_samples(run)),
        Section("Log", [Texts([("the last lines of train.log", "\n".join(run.log))])] if shows_log(run) else []),
        Section("Recipe", recipe(run), ["Resolved, with its defaults."]),
        Section("Environment", environment(run)),
    ]
    return Page(
        title=": ".join(filter(None, (names([run.out])[0], model_text(run)))),
        state=run.state,
        bad=run.state in BAD,
        lead=[line for line in (*verdict(run), data_text(run), run.why) if line],
        tiles=list(tiles(run)),
        sections=[s for s in sections if s.blocks],
        footer=footer_text(run.out),
    )


def verdict(run: Run) -> list[str]:
    """Return sentences on what the final scores say about the backbone, and on problems that the last step shows."""
    said = [sentence[:1].upper() + sentence[1:] + "." for sentence in run.summary.get(VERDICT, ())]
    named = [f["kind"] for f in run.findings if f["kind"] in AT_END and f["step"] == run.last]
    return said + [f"Found at the end: {', '.join(named)}; Health has what may help."] * bool(named)


def model_text(run: Run) -> str:
    """Return the names of the method and the backbone, such as `dino on vit_small_patch16_224`, and the options with
    which the backbone was built."""
    parts = [run.recipe.get(part, {}).get("name", "?") for part in ("method", "backbone")]
    options = run.recipe.get("backbone", {}).get("options") or {}
    changed = ", ".join(f"{key} {value}" for key, value in options.items())
    return (" on ".join(parts) + (f" with {changed}" if changed else "")) if run.recipe else ""


def data_text(run: Run) -> str:
    """Return a sentence that names the training data and the batch size."""
    data, optim = run.recipe.get("data", {}), run.recipe.get("optim", {})
    return f"Images of {source_text(data.get('train'))} in batches of {optim.get('batch', '?')}." if run.recipe else ""


def source_text(train: Any) -> str:
    """Return the URL of the training data. Of several URLs, return the first and how many others there are."""
    first = train[0] if isinstance(train, list) and train else train
    url = first.get("url") if isinstance(first, Mapping) else first
    more = f" and {len(train) - 1} more" if isinstance(train, list) and len(train) > 1 else ""
    return f"{url}{more}"


def tiles(run: Run) -> Iterator[Tile]:
    """Yield the large numbers at the top of the page."""
    s, last = run.summary, run.records[-1] if run.records else {}
    for key, label in ((metrics.KNN_TOP1, "kNN, top-1 %"), (metrics.LINEAR_TOP1, "linear, top-1 %")):
        if key in s:
            others = (metrics.UNTRAINED, "untrained"), (metrics.AT_START, "at the start")
            hint = ", ".join(f"{s[key + suffix]:.4g} {name}" for suffix, name in others if key + suffix in s)
            yield Tile(label, s[key], hint)
    if metrics.CLASSIFIER_TOP1 in s:
        yield Tile("classifier, top-1 %", s[metrics.CLASSIFIER_TOP1])
    if run.last or run.planned:
        yield Tile("steps", run.last, f"of {run.planned:,}" if run.planned else "")
    if metrics.LOSS in last:
        yield Tile("loss", last[metrics.LOSS], "at the end" if run.state == "finished" else "so far")
    if rates := values_of(run, metrics.IMAGES_PER_S):
        yield Tile("images/s", statistics.median(rates), "median")
    if waits := values_of(run, metrics.DATA_WAIT):
        yield Tile("waiting for data", f"{statistics.mean(waits):.1%}", "of the time")
    ends = last | s
    if metrics.GOODPUT in ends:
        hints = [f"{ends[key]:.0f} s lost" for key in (metrics.SECONDS_LOST,) if key in ends]
        yield Tile("goodput", f"{ends[metrics.GOODPUT]:.1%}", "; ".join(hints))
    if 0 <= s.get(metrics.WALL_SECONDS, -1) < LONGEST:
        yield Tile("duration", str(timedelta(seconds=round(s[metrics.WALL_SECONDS]))), "h:mm:ss")
    yield Tile("restarts", ends.get(metrics.RESTARTS, max(sum("step" in line for line in run.starts) - 1, 0)))
    yield Tile("bad samples", ends.get(metrics.BAD_SAMPLES, len(run.quarantine)))
    looks = len(values_of(run, "health/update"))
    yield Tile("findings", len(run.findings), f"in {looks} measurement{'s' * (looks != 1)} and {run.last:,} steps")


def values_of(run: Run, key: str) -> list[float]:
    """Return the values of the metric `key`, from the records that have it."""
    return [r[key] for r in run.records if key in r]


def results(run: Run) -> list[Table]:
    """Return a table for each evaluation, with this run's scores beside untrained and published scores. The evaluation
    at the end of the run comes first; later ones follow."""
    tables = []
    for m in all_scores(run):
        columns = ["Number", "This run", "At the start", "Untrained", "Published"]
        shown = [i for i in range(len(columns)) if i < 2 or any(row[i] is not None for row in m.rows)]
        tables.append(Table(m.heading, [columns[i] for i in shown], [[row[i] for i in shown] for row in m.rows]))
    return tables


class Scores(NamedTuple):
    """The scores of one evaluation, as rows of a table."""

    key: tuple[str, str]  # protocol with settings asked for, and data; scores with equal keys are comparable
    heading: str  # how the scores were measured
    rows: list[list[Any]]  # name, score, score at the start, score without training, published score


def all_scores(run: Run) -> Iterator[Scores]:
    """Yield the scores at the end of the run, then those of later evaluations."""
    s, paper = run.summary, run.published
    ends = [k for k in s if k not in SHOWN_ELSEWHERE and not k.endswith(BEFORE) and isinstance(s[k], int | float)]
    if ends:
        settings = final_settings(run, ends)
        data = run.recipe.get("data", {})  # without test images, some of the training images are held out
        same = json.dumps([run.recipe.get("evaluate"), data.get("test") or data.get("train")], default=str)
        rows = [[k, s[k], *(s.get(k + suffix) for suffix in BEFORE), paper.get(k)] for k in ends]
        yield Scores((settings, same), settings, rows)
    for result in latest_results(run):
        before, name = result.before(run.results), ", untrained" * result.untrained
        there = {} if result.untrained else paper
        rows = [[k + name, v, None, before.get(k), there.get(k)] for k, v in result.numbers.items()]
        of = backbone_suffix(run, result)
        key = protocol_text(result, asked=result.protocol != "throughput") + of  # speeds depend on the device, too
        yield Scores((key, result.data_digest), protocol_text(result) + of, rows)


def latest_results(run: Run) -> list[Result]:
    """Return the latest result for each combination of protocol, data, settings and backbone. Results of the untrained
    backbone are left out if the table of the trained one shows them in a column."""
    last = {
        (r.untrained, r.architecture, r.data_digest, protocol_text(r, asked=True) + backbone_suffix(run, r)): r
        for r in run.results
    }
    return sorted(without_twins(list(last.values())), key=lambda r: r.untrained)


def protocol_text(result: Result, *, asked: bool = False) -> str:
    """Return the protocol, the data and the settings of an evaluation as text. With `asked`, settings that it chose
    itself, such as a learning rate, are left out."""
    settings = format_settings({k: v for k, v in result.settings.items() if k in result.asked or not asked})
    at = " and ".join("/".join(place.rstrip("/").split("/")[-2:]) for place in result.data.values())
    return result.protocol + (f" on {at}" if at else "") + (f": {settings}" if settings else "")


def backbone_suffix(run: Run, result: Result) -> str:
    """Return `, of NAME` if the evaluated backbone is not the newest of the run, otherwise an empty text."""
    name = result.backbone.removeprefix(BARE).rstrip("/").rpartition("/")[2]
    return "" if name == run.out.rpartition("/")[2] else f", of {name}"


def final_settings(run: Run, keys: Sequence[str]) -> str:
    """Return the settings of the evaluation at the end of the run as text. `keys` are those of its scores."""
    e, of = run.recipe.get("evaluate", {}), {key.partition("/")[0] for key in keys}
    sentences = {
        "knn": f"kNN of k {e.get('k')}, T {e.get('temperature')}",
        "linear": f"probe of {e.get('probe_epochs')} epochs",
        "crops": "how often a second crop of an image finds its own",
    }
    parts = [words for protocol, words in sentences.items() if protocol in of] + [f"{e.get('size')} pixels"]
    return END + (f": {', '.join(parts)}" if e else "")


def figures(pictures: Sequence[Picture]) -> list[Pictures]:
    """Return the pictures as a list of one group; an empty list if there are no pictures."""
    return [Pictures(pictures)] if pictures else []


def marks_note(run: Run) -> list[str]:
    """Return the note that explains the red lines of the curves, if the run has findings."""
    return (
        ["A red line marks a step at which a problem was found; the table of findings below describes it."]
        if run.findings
        else []
    )


def findings(run: Run) -> list[Table]:
    """Return a table of the problems that the run found in itself, and a table of what it was checked for."""
    rows = [[f["step"], f["kind"], f["text"], KINDS.get(f["kind"], "")] for f in run.findings[:FINDINGS]]
    more = f"; the first {FINDINGS} of {len(run.findings)}" if len(run.findings) > FINDINGS else ""
    tables = [Table(f"Findings{more}", ["Step", "Finding", "What was seen", "What may help"], rows)] if rows else []
    both = (("checked", CHECKED), ("not checked", UNCHECKED))
    checks = [[words, "; ".join(run.summary[key])] for words, key in both if run.summary.get(key)]
    return tables + ([Table("What was checked", ["", "For what, and how often"], checks)] if checks else [])


def evaluation_pictures(run: Run) -> list[Pictures]:
    """Return the pictures that evaluations drew. All have the same share of BUDGET, to which larger ones are shrunk."""
    paths = sorted((run.folder / layout.PICTURES).rglob("*.png"))
    if (own := run.folder / layout.NEIGHBOURS).exists():
        paths.insert(0, own)
    share = max(BUDGET // max(len(paths), 1), LEAST)
    pictures = []
    for path in paths[: BUDGET // LEAST]:
        try:
            source = picture_uri(path, share)
        except OSError:
            continue
        text = caption(run, path)
        pictures.append(Picture(source, text, text))
    return [Pictures(pictures, large=True)] if pictures else []


def caption(run: Run, path: Path) -> str:
    """Return the caption of a picture: its name, and the evaluation that drew it with its settings."""
    if path.name == layout.NEIGHBOURS and path.parent == run.folder:
        return "At the end of the run: images of its evaluation, each with those nearest to it by their features"
    words = path.stem.replace("_", " ").replace("-", " ")
    of = next((r for r in reversed(run.results) if str(path.relative_to(run.folder)) in r.pictures), None)
    return f"{words}{', untrained' * of.untrained} ({protocol_text(of)}{backbone_suffix(run, of)})" if of else words


def times(run: Run) -> list[Table]:
    """Return a table of the starts and ends of the run, and a table of what its time was spent on."""
    rows: list[list[Any]] = []
    for s in run.starts:
        when = f"{datetime.fromtimestamp(s['time'], UTC):%Y-%m-%d %H:%M:%S}"
        if "step" in s:
            again = max(s.get("reached", 0) - s["step"], 0)
            rows.append([when, "continued" if len(rows) else "started", s["step"], s.get("ranks"), again])
        else:
            rows.append([when, "took its last step" if "trained" in s else "ended in order", None, None, None])
    columns = ["Time, UTC", "Event", "From step", "Workers", "Steps taken again"]
    tables = [Table("Starts and ends", columns, rows)] if rows else []
    ends = (run.records[-1] if run.records else {}) | run.summary
    labels = {
        metrics.GOODPUT: "share of the time in steps that count",
        metrics.SECONDS_LOST: "seconds lost",
        metrics.STEPS_REPEATED: "steps taken again after restarts",
        metrics.WALL_SECONDS: "seconds of all starts together, without lost ones",
        "images": "images seen",
        "epochs": "epochs",
    }
    spent = [[label, ends[key]] for key, label in labels.items() if key in ends]
    return tables + ([Table("Where the time went", ["What", "How much"], spent)] if spent else [])


def plan_and_fact(run: Run) -> list[Table]:
    """Return a table of what was expected in the plan of the run, beside what was measured."""
    plan = run.forecast
    if not plan or not run.records:
        return []

    def median(key: str) -> float | None:
        values = [r[key] for r in run.records if key in r and r["epoch"] > full]
        return statistics.median(values) if values else None

    full = max((phase["until"] for phase in plan.get("phases", ())), default=0)  # epoch when phases of small inputs end
    rows = [
        ["images/s", plan.get("images_per_s"), median(metrics.IMAGES_PER_S)],
        ["memory of tensors, GiB", sum(plan["memory"].values()) / 2**30, median(metrics.MEMORY_PEAK)],
        ["model FLOP utilisation", plan.get("mfu"), median(metrics.MFU)],
    ]
    return [Table(plan["line"], ["", "Expected", "Measured"], [row for row in rows if row[1:] != [None, None]])]


def choice(run: Run) -> Section:
    """Return the section on the samples that the run reads and leaves out, empty if its recipe makes no selection."""
    title = "Choice of samples"
    return run.choice.section(title) if run.choice else Section(title, [])


def bad_samples(run: Run) -> list[Table]:
    """Return a table of the reasons why samples could not be read, and a table of the steps whose gradients were not
    finite."""
    tables = []
    reasons = Counter(b["reason"] for b in run.quarantine)
    if reasons:
        rows = [[reason, count, examples(run, reason)] for reason, count in reasons.most_common(REASONS)]
        more = f"; {len(reasons) - REASONS} rarer reasons are in quarantine.jsonl" if len(reasons) > REASONS else ""
        tables.append(Table(f"Quarantine, by reason{more}", ["Reason", "Samples", "Such as"], rows))
    if run.skipped:
        listed = run.skipped[:REASONS]
        rows = [[s["step"], ", ".join(s["keys"][:3]) + (", ..." if s["keys"][3:] else "")] for s in listed]
        first = f"; the first {REASONS} of {len(run.skipped)}" if len(run.skipped) > REASONS else ""
        tables.append(Table(f"Steps without a finite gradient{first}", ["Step", "Images"], rows))
    return tables


def examples(run: Run, reason: str) -> str:
    """Return up to three bad samples with this reason, as shard/key, or as shard if the whole shard is bad."""
    samples = [b for b in run.quarantine if b["reason"] == reason][:3]
    return ", ".join("/".join(filter(None, (b["shard"].rpartition("/")[2], b["key"]))) for b in samples)


def shows_log(run: Run) -> bool:
    """Return whether to show the end of the log. It is not shown for a finished run, whose results are on the page."""
    return bool(run.log) and run.state != "finished"


def recipe(run: Run) -> list[Texts]:
    """Return the resolved recipe: a text for the keys outside of sections, then a text for each section."""
    inner = {k: v for k, v in run.recipe.items() if isinstance(v, dict | list)}
    alone = {k: v for k, v in run.recipe.items() if k not in inner}
    parts = [*([("run", alone)] if alone else []), *inner.items()]
    texts = [(k, yaml_text.dump(v, allow_unicode=True).rstrip()) for k, v in parts]
    return [Texts(texts)] if texts else []


def environment(run: Run) -> list[Table]:
    """Return a table of the packages, the machine and the command with which the run was made."""
    e = run.environment
    rows = [["python", e.get("python")], *(e.get("packages") or {}).items()] if e else []
    rows += [[k, e[k]] for k in ("user", "platform", "cpus") if k in e]
    if e.get("gpus"):
        rows.append(["gpus", ", ".join(f"{n} x {gpu}" for gpu, n in Counter(e["gpus"]).items())])
    if "command" in e:
        rows.append(["command", " ".join(e["command"])])
    return [Table("What the run was made with", ["What", "Which"], rows)] if rows else []
