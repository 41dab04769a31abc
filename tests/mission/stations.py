"""The stations of the mission: what a user types at each, and what must be there afterwards.

Each is a pair of functions. The first does it; the second looks, with other tools than Eagleray's where that is
possible, and returns what it found in a line. Between the two a planted break does its harm.
"""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from chaos.check import Line, steps, trace
from chaos.job import Run
from chaos.site import uninterrupted
from helpers.sweeps import stored
from mission import checks
from mission.checks import Wrong, expect
from mission.site import BUCKET, Site

HERE = Path(__file__).parent
RECIPE, SWEEP = HERE / "mission.yaml", HERE / "sweep.yaml"
PICTURES = {"train": 960, "test": 240}
STEPS, TRIALS = 240, 4
RUN, TRIED = f"s3://{BUCKET}/runs/first", f"s3://{BUCKET}/sweeps/first"
DATA = [f"data.train=s3://{BUCKET}/train", f"data.test=s3://{BUCKET}/test"]
# A cold process: it knows timm and what the command has printed, and nothing of Eagleray.
LOAD = """
import json, sys, timm, torch
model = eval(sys.argv[1]).eval()
assert "eagleray" not in sys.modules
with torch.inference_mode():
    print(json.dumps(model(torch.load(sys.argv[2], weights_only=True)).tolist()))
"""


def cluster(site: Site) -> None:
    for name in ("a", "b"):
        site.join(name)


def check_cluster(site: Site) -> str:
    expect("jobs of a new cluster", site.jobs(), [])
    return "a head that only directs and two nodes, S3, MLflow"


def shards(site: Site) -> None:
    from eagleray.cli.demo import pictures

    for seed, (split, count) in enumerate(PICTURES.items()):
        for picture in pictures(seed, count):
            number, _, kind = picture.key.partition("_")
            path = site.folder / "pictures" / split / kind / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture.data)
    site("prepare", "folder", "pictures/train", f"s3://{BUCKET}/train", "--size", 1, "--workers", 0)
    site("shard", "pictures/test", f"s3://{BUCKET}/test")
    site("index", f"s3://{BUCKET}/train")


def check_shards(site: Site) -> str:
    found = []
    for split, count in PICTURES.items():
        folders = sorted((site.folder / "pictures" / split).iterdir())
        drawn = Counter((zlib.crc32(p.read_bytes()), label) for label, f in enumerate(folders) for p in f.iterdir())
        expect(f"{split}: pictures that were drawn", drawn.total(), count)
        there = site.objects(split)
        tars = {name: data for name, data in there.items() if name.endswith(".tar")}
        if "index.parquet" not in there:
            raise Wrong(f"{split}: found no index.parquet, expected one beside {len(tars)} shards")
        checks.whole_index(drawn, {n: inside(d) for n, d in tars.items()}, indexed(there["index.parquet"], tars))
        found.append(f"{count} {split} pictures in {len(tars)} shard(s)")
    return ", ".join(found)


def inside(tar: bytes) -> Counter[int]:
    """Return the checksums of the pictures in a tar."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as file:
        members = [m for m in file if m.name.endswith(".png")]
        return Counter(zlib.crc32(file.extractfile(m).read()) for m in members)  # type: ignore[union-attr]


def indexed(index: bytes, tars: dict[str, bytes]) -> dict[str, checks.Pictures]:
    """Return the pictures of each shard that lie where an index says."""
    file = pq.ParquetFile(io.BytesIO(index))
    found = {}
    for group, shard in enumerate(json.loads(file.metadata.metadata[b"shards"])):
        rows, tar = file.read_row_group(group).to_pylist(), tars.get(shard["name"], b"")
        crcs = [zlib.crc32(tar[row["offset"] : row["offset"] + row["size"]]) for row in rows]
        expect(f"{shard['name']}: checksums of the index", [row["crc"] for row in rows] == crcs, True)
        found[shard["name"]] = Counter((crc, row["label"]) for crc, row in zip(crcs, rows, strict=True))
    return found


def pretrain(site: Site) -> None:
    """Two ranks on two nodes; a rank is killed and later a node, and the run ends as if nothing had been."""
    job = site.start("submit", RECIPE, *DATA, f"out={RUN}", "--follow")

    def come(step: int, ranks: int, past: set[str]) -> set[str]:
        """Wait for a step of so many ranks that began after `past`, and return all attempts so far."""

        def there() -> bool:
            if job.process.poll() is not None:
                job.end()
                raise Wrong(f"found the end of the run, expected step {step} of {ranks} rank(s) before")
            lines = [line for line in trace(site.folder / "trace") if line.attempt not in past]
            return any(len(line.rows) == ranks and line.step >= step for line in lines)

        site.wait(f"step {step} of {ranks} rank(s)", there)
        return {line.attempt for line in trace(site.folder / "trace")}

    past = come(30, 2, set())
    site.ranks()[0].kill()
    come(55, 2, past)
    site.lose("b")
    job.end()
    for path in (site.folder / "trace").glob("rank-*.jsonl"):  # later ranks are those of the sweep
        path.rename(site.read / path.name)


def check_pretrain(site: Site) -> str:
    for name in ("metrics.jsonl", "steps.jsonl"):
        lines = stored(f"{RUN}/{name}")
        checks.each_step_once(name, (line["step"] for line in lines if "loss" in line), STEPS)
        for line in lines:
            checks.finite(f"{name}, step {line['step']}", {"loss": line["loss"]} if "loss" in line else {})
    [job] = [j for j in site.jobs() if j["command"] == "pretrain"]
    expect(f"state of {job['id']}", (job["state"], job["status"]), ("succeeded", 0))
    expect(f"the last step in the log of {job['id']}", f"step {STEPS}/{STEPS}" in site("logs", job["id"]), True)
    summary = json.loads(site.objects("runs/first")["summary.json"])
    expect("steps of summary.json", summary["steps"], STEPS)
    starts = [line for line in stored(f"{RUN}/starts.jsonl") if "step" in line]
    checks.survived(starts)
    lines: list[Line] = trace(site.read)
    with tempfile.TemporaryDirectory(dir=site.folder) as folder:
        run = Run(RECIPE, f"s3://{BUCKET}/train", Path(folder) / "run")
        checks.as_planned(lines, uninterrupted(run, STEPS, []), STEPS)
    again = sum(s.get("reached", 0) - s["step"] for s in starts)
    return f"{STEPS} steps once each, {len(steps(lines)) * 32:,} samples as planned; {again} steps were taken again"


def tune(site: Site) -> None:
    if "b" not in site.nodes:
        site.join("c")
    site("submit", "tune", SWEEP, *DATA, f"out={TRIED}", "--follow")


def check_tune(site: Site) -> str:
    trials = stored(f"{TRIED}/trials.jsonl")
    expect("trials", [t["id"] for t in trials], [f"{n:03d}" for n in range(TRIALS)])
    expect("trials that are not done", [t["id"] for t in trials if t["state"] not in ("finished", "stopped")], [])
    [note] = json.loads(site.objects("runs/first")["mlflow.json"]).values()
    checks.one_tree([run for run in runs_of_mlflow() if run["id"] != note["run_id"]], trials)
    best = max(trial["metric"] for trial in trials if trial["metric"] is not None)
    return f"{TRIALS} trials of two methods in one tree, the best with a kNN accuracy of {best:.1f} %"


def runs_of_mlflow() -> list[dict[str, Any]]:
    """Return all runs of the experiment."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("eagleray")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    return [
        {
            "id": r.info.run_id,
            "parent": r.data.tags.get("mlflow.parentRunId"),
            "status": r.info.status,
            "params": r.data.params,
            "metrics": r.data.metrics,
        }
        for r in found
    ]


def evaluate(site: Site) -> None:
    data = ["--train", f"s3://{BUCKET}/train", "--test", f"s3://{BUCKET}/test"]
    site("evaluate", RUN, "--protocol", "knn,linear", *data, "--untrained")


def check_evaluate(site: Site) -> str:
    there = site.objects("runs/first")
    results, summary = json.loads(there.get("results.json", b"[]")), json.loads(there["summary.json"])
    checks.evaluated(results, summary)
    top1 = {(r["protocol"], r["untrained"]): r["numbers"][f"{r['protocol']}/top1"] for r in results}
    return ", ".join(f"{p} {top1[p, False]:.1f} %, untrained {top1[p, True]:.1f} %" for p in ("knn", "linear"))


def export(site: Site) -> None:
    (site.folder / "line.txt").write_text(site("export", RUN, "--destination", site.folder / "export"))


def check_export(site: Site) -> str:
    """The line that the command has printed, in a cold process, against the backbone of the newest checkpoint."""
    import torch

    from eagleray.evaluation.target import load_target

    printed = (site.folder / "line.txt").read_text()
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = load_target(RUN).backbone(pixels).pooled.tolist()
    checks.same_features(cold_features(printed, pixels, site.folder / "probe.pt"), expected)
    return f"timm's model has the {len(expected[0])} features of the last checkpoint"


def cold_features(printed: str, pixels: Any, probe: Path) -> list[list[float]]:
    """Return what the model of a printed line makes of pixels (B, 3, H, W) in a cold process. Raises Wrong."""
    import torch

    torch.save(pixels, probe)
    line = printed[printed.index("timm.create_model(") :].splitlines()[0]
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, line, str(probe)], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise Wrong(f"timm in a cold process: found {done.stderr.strip().splitlines()[-1]}, expected a model")
    found: list[list[float]] = json.loads(done.stdout)
    return found


Station = tuple[Callable[[Site], None], Callable[[Site], str]]
STATIONS: dict[str, Station] = {
    "cluster": (cluster, check_cluster),
    "shards": (shards, check_shards),
    "pretrain": (pretrain, check_pretrain),
    "tune": (tune, check_tune),
    "evaluate": (evaluate, check_evaluate),
    "export": (export, check_export),
}
