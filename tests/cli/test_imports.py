"""Light commands start at once: each imports what is named here, and none imports PyTorch, Ray, MLflow or timm."""

import contextlib
import functools
import http.server
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import fill, run_prepare

from eagleray import config
from eagleray.cli.catalogue import Kind
from eagleray.cli.early import check_run, may_have_gpu
from eagleray.runs import recipe

NEVER = {"torch", "torchvision", "timm", "ray", "mlflow"}
SELDOM = {"PIL", "boto3", "jinja2", "matplotlib", "numpy", "optuna", "pyarrow", "requests", "scipy", "sklearn"}
SELDOM |= {"duckdb", "pandas", "webdataset"}

# What each command may import of SELDOM; the words in capitals are filled in below.
RECIPE = "dino_vits16_in1k_ep100"
MAY: dict[str, set[str]] = {
    "--help": set(),
    "--version": set(),
    "pretrain --help": set(),
    f"show {RECIPE}": set(),
    f"show {RECIPE} method.prototypes=4096 optim.batch=256": set(),
    **{f"list {kind.value}": set() for kind in Kind},
    "list datasets": {"PIL", "numpy", "pyarrow"},
    "list recipes --json": set(),
    "jobs --address HEAD": {"requests"},
    "jobs --address HEAD --json": {"requests"},
    "logs first-00000000 --address HEAD": {"requests"},
    "logs first-00000000 --address HEAD --follow": {"requests"},
    "stop first-00000000 --address HEAD": {"requests"},
    "data stats SHARDS --out FOLDER": {"PIL", "matplotlib", "numpy", "pyarrow", "pandas"},
    "report RUN --out FOLDER/report.html": {"PIL", "jinja2", "matplotlib", "numpy"},
}
DEMO = "mocov3_vitxs8_shapes_demo"
HERE = "data.train=FOLDER/many"
LISTED = "`eagleray list recipes` lists all, and `eagleray init FOLDER` writes one for images of your own"
OPTION = "no such option; keys of the recipe are KEY=VALUE, without dashes:"
# Mistakes are found before PyTorch is imported; what their line begins with. `python tests/cli/test_imports.py` prints
# a table of them, with the CPU seconds of each as a process of its own.
MISTAKES = {
    f"pretrain {DEMO} data.train=FOLDER/none": "data.train: FOLDER/none: cannot be read",
    f"pretrain {DEMO} data.train=FOLDER/empty": "data.train: FOLDER/empty: no ",
    f"pretrain {DEMO} data.train=FOLDER/texts": "data.train: FOLDER/texts: no ",
    f"pretrain {DEMO} data.train=gcs://bucket": "data.train: gcs://bucket: unknown scheme 'gcs'",
    f"pretrain {DEMO} data.train=FOLDER/few": "data.train: 40 images do not fill one batch of optim.batch=128; 40 "
    "images are too few to pretrain on; expected at least 256, and some thousands to learn much: use public weights as "
    "they are, such as `eagleray embed timm:",
    f"pretrain {DEMO} {HERE} optim.batch=512": "data.train: 300 images do not fill one batch of optim.batch=512;"
    " optim.batch=16 data.lanes=16 optim.lr_images=512 would fit, or `eagleray init --images 300` writes a recipe",
    f"pretrain {DEMO} {HERE} data.test=FOLDER/none": "data.test: FOLDER/none: cannot be read",
    f"pretrain {DEMO} {HERE} data.trian=x": f"{DEMO}: data.trian: unknown key; did you mean 'data.train'?",
    f"pretrain {DEMO} {HERE} epochs=3": f"{DEMO}: epochs: unknown key; did you mean 'optim.epochs'?",
    f"pretrain {DEMO} {HERE} method.temprature=1": f"{DEMO}: method.temprature: unknown key; did you mean",
    f"pretrain {DEMO} {HERE} workers=many": f"{DEMO}: workers: expected a number of workers",
    f"pretrain {DEMO} {HERE} optim.batch=100 data.lanes=3": "optim.batch=100 data.lanes=3: a global batch of 100",
    f"pretrain {DEMO} {HERE} start.from=FOLDER/none.pth": "start.from=FOLDER/none.pth: no such run, checkpoint or file",
    f"pretrain {DEMO} {HERE} start.from=timm:vit_small_patch16_224.dinoo": "start.from=timm:vit_small_patch16_224."
    "dinoo: timm has no weights of this name; did you mean 'vit_small_patch16_224.dino'?",
    f"pretrain {DEMO} {HERE} start.from=resnet19": "start.from=FOLDER/resnet19: no such run, checkpoint or file; a",
    f"pretrain {DEMO} {HERE} backbone.name=vit_tinny_patch16_224": "backbone.name=vit_tinny_patch16_224: timm has no "
    "such model; did you mean vit_tiny_patch16_224?",
    f"pretrain {DEMO} {HERE} views=[{{'size':32}}]": "views: got 1, but mocov3 works with 2",
    f"pretrain {DEMO} {HERE} out=FOLDER/texts/1.txt": "out=FOLDER/texts/1.txt: cannot be written: ",
    f"pretrain {DEMO} FOLDER/many": "'FOLDER/many': expected key=value, such as data.train=FOLDER/many",
    f"pretrain {DEMO} data.train FOLDER/many": "'data.train': expected key=value, such as data.train=VALUE",
    f"pretrain {DEMO} {HERE} data.train=FOLDER/few": "data.train: given 2 times; expected one value, in quotes if it",
    f"tune first {HERE} data.train=FOLDER/few": "data.train: given 2 times; expected one value, in quotes if it",
    f"submit {DEMO} {HERE} data.train=FOLDER/few": "data.train: given 2 times; expected one value, in quotes if it",
    f"pretrain {DEMO} --data.train FOLDER/many": f"--data.train: {OPTION} data.train=FOLDER/many",
    f"pretrain {DEMO} --data=FOLDER/many": f"--data: {OPTION} data.train=FOLDER/many",
    f"pretrain {DEMO} {HERE} --epochs 3": f"--epochs: {OPTION} optim.epochs=3",
    f"pretrain {DEMO}": "data.train: missing; name a folder of images, or a folder, glob, brace pattern or s3://",
    f"pretrain {HERE}": f"{HERE}: no recipe and no run; expected RECIPE first, such as `{RECIPE} {HERE}`; {LISTED}",
    "pretrain FOLDER/many": f"FOLDER/many: no recipe and no run; expected RECIPE first, such as `{RECIPE} {HERE}`; "
    f"{LISTED}",
    "pretrain": f"RECIPE: missing; expected `eagleray pretrain RECIPE [KEY=VALUE]...`; {LISTED}",
    "pretrain mocov3_vits8": "mocov3_vits8: no recipe of this name; did you mean ",
    "pretrain FOLDER/none.yaml": "FOLDER/none.yaml: no such recipe file",
    f"pretrian {DEMO}": "no such command 'pretrian'",
    f"finetune FOLDER/none.pth {DEMO} {HERE}": "backbone.weights=FOLDER/none.pth: no such run, checkpoint or file",
    f"plan {RECIPE} --gpu h10": "--gpu h10: unknown; did you mean 'h100'?",
    f"plan {RECIPE} data.train=FOLDER/none": "data.train: FOLDER/none: cannot be read",
    "init FOLDER/none": "FOLDER/none: cannot be read",
    "init FOLDER/few --out FOLDER/x.yaml": "40 images are too few to pretrain on; expected at least 256",
    "init": "expected shards or a folder of images, or their number as --images N",
    "list recipe": "invalid value for 'kind': 'recipe' is not one of 'methods', ",
    "evaluate FOLDER/none --train SHARDS": "FOLDER/none: no such run",
    "evaluate nosuch --train SHARDS": "FOLDER/nosuch: no such run, checkpoint or file; a timm model is named timm:NAME",
    "evaluate timm:resnt50 --train SHARDS": "timm:resnt50: timm has no weights of this name; did you mean 'resnet50'?",
    "evaluate timm:resnet18 --train SHARDS --protocol knnn": "--protocol knnn: unknown; did you mean 'knn'?; see",
    "evaluate timm:resnet18 --train SHARDS --kk 10": "--kk: not a setting of knn, linear; did you mean 'k'?",
    f"plan {RECIPE} backbone.name=vit_none": "backbone.name=vit_none: timm has no such model",
    "evaluate FOLDER/none --gpus": "--gpus: ",
    "evaluate RUN": "RUN: its checkpoints/ holds no intact checkpoint",
    "evaluate timm:resnet18 --train FOLDER/none": "FOLDER/none: cannot be read",
    "evaluate untrained:timm:resnet18 --train FOLDER/x.tar": "FOLDER/x.tar: no shard",
    "export FOLDER/none": "FOLDER/none: no such run or checkpoint",
    "export RUN": "RUN: its checkpoints/ holds no intact checkpoint",
    "embed FOLDER/none SHARDS": "FOLDER/none: no such run",
    "embed timm:resnet18 FOLDER/none": "FOLDER/none: cannot be read",
    "data cluster FOLDER/none FOLDER/none": "FOLDER/none: cannot be read",
    "curate FOLDER/none timm:resnet18 out=FOLDER/out": "FOLDER/none: cannot be read",
    "curate SHARDS FOLDER/none out=FOLDER/out": "FOLDER/none: no such run",
    "data map FOLDER/none": "FOLDER/none: cannot be read",
    "data measure FOLDER/none": "FOLDER/none: cannot be read",
    "data stats FOLDER/none": "FOLDER/none: cannot be read",
    "data bench FOLDER/none": "FOLDER/none: cannot be read",
    "data which FOLDER/none --key x": "FOLDER/none: ",
    "index FOLDER/none": "FOLDER/none: cannot be read",
    "shard FOLDER/none FOLDER/out": "FOLDER/none: ",
    "prepare nonsense FOLDER/none FOLDER/out": "SOURCE nonsense: unknown",
    "prepare folder FOLDER/none FOLDER/out": "FOLDER/none: ",
    "report FOLDER/none": "FOLDER/none: ",
    "plan no_such_recipe": "no_such_recipe: ",
    f"plan {RECIPE} optim.lrr=1": "dino_vits16_in1k_ep100: optim.lrr: unknown key",
    "tune no_such_sweep": "no_such_sweep: ",
    "submit no_such_recipe --address HEAD": "no_such_recipe: ",
    f"submit {RECIPE} optim.lrr=1 --address HEAD": "dino_vits16_in1k_ep100: optim.lrr: unknown key",
}
if not may_have_gpu():
    MISTAKES[f"pretrain {DEMO} {HERE} gpus=true"] = (
        "gpus=true: this machine has no GPU; leave gpus out or give gpus=false"
    )
# CPU time that a command may take, over that of importing matplotlib, which takes 0.7 to 2.3 s on different machines.
# Measured: up to 1.0, but 2.2 for data stats and 1.8 for a report.
TIMES = {"data": 3.5, "report": 3.5}
USUAL = 1.5
SECONDS = 1.5  # CPU seconds of a mistake, or this times the yardstick on a slow machine; measured: up to 0.7
COLD = ("--version", f"show {RECIPE}", "list recipes --json", *(name for name in MAY if name.split()[0] in TIMES))
YARDSTICK = "import resource, matplotlib.pyplot; print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"

WAITS = """
import sys
import eagleray.api.pretrain, eagleray.cluster.process_group, eagleray.cluster.ray_train, eagleray.cluster.resize
import ray.train.v2._internal.execution.controller.controller
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
assert not {"torch", "timm", "torchvision"} & sys.modules.keys()
"""

RUN = """
import json, resource, sys
from eagleray.cli import main
try:
    main.main()
except SystemExit as stop:
    assert not stop.code, stop.code
seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime
packages = sorted({name.partition(".")[0] for name in sys.modules})
print("\\n" + json.dumps({"seconds": seconds, "packages": packages}))
"""

COPIES = """
import io, json, os, resource, sys
from eagleray.cli import main
for words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv[1:], sys.stderr, code = words, io.StringIO(), 0
        try:
            main.main()
        except SystemExit as stop:
            code = stop.code or 0
        packages = sorted({name.partition(".")[0] for name in sys.modules})
        seconds = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        found = {"code": code, "said": sys.stderr.getvalue(), "packages": packages, "seconds": seconds}
        print("\\nfound " + json.dumps(found), flush=True)
        os._exit(0)
    os.wait()
"""


class Head(http.server.BaseHTTPRequestHandler):
    """The dashboard of a Ray head that knows one job, which has ended."""

    def do_GET(self) -> None:
        labels = {"eagleray": "pretrain", "recipe": "small", "out": "/o", "digest": "d"}
        times = {"start_time": 10**12, "end_time": 10**12 + 5000, "driver_exit_code": 0, "message": ""}
        job = {"submission_id": "first-00000000", "status": "SUCCEEDED", "metadata": labels, **times}
        answers: dict[str, Any] = {
            "/api/version": {"ray_version": "2.60.0"},
            "/api/jobs/": [job],
            "/api/jobs/first-00000000": job,
            "/api/jobs/first-00000000/logs": {"logs": "Running entrypoint for job first-00000000: x\nstep 1\n"},
        }
        text = json.dumps(answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    yield from made(tmp_path_factory.mktemp("light"))


def made(folder: Path) -> Iterator[dict[str, str]]:
    """What the words in capitals stand for: shards with a card, a run that has ended, a head, an empty folder."""
    fill(folder / "images", [f"{c}/{i}.jpg" for c in "ab" for i in range(5)])
    run_prepare("folder", folder / "images", folder / "shards")
    for name, images in (("few", 40), ("many", 300), ("empty", 0)):
        fill(folder / name, [f"{i}.jpg" for i in range(images)]) if images else (folder / name).mkdir()
    (folder / "texts").mkdir()
    (folder / "texts" / "1.txt").touch()
    run = folder / "run"
    run.mkdir()
    resolved = recipe.load("mocov3_vitxs8_cifar10_ep2", ["data.train=s3://bucket/train"])
    (run / "recipe.yaml").write_text(config.dump(resolved))
    (run / "environment.json").write_text(json.dumps({"packages": {}, "python": "3.11", "command": ["eagleray"]}))
    curves = [
        {"step": s, "epoch": s / 100, "time": 1.7e9 + s, "loss": 5 * math.exp(-s / 60), "lr": 1e-3, "grad_norm": 1.0}
        | {"images_per_s": 900.0, "data_wait": 0.1, "bad_samples": 0, "goodput": 1.0, "knn/top1": 30 + s / 20}
        for s in range(0, 200, 10)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curves))
    (run / "starts.jsonl").write_text(json.dumps({"step": 0, "ranks": 2, "time": 1.7e9}) + "\n")
    summary = {"steps": 200, "epochs": 2.0, "images": 6400, "wall_seconds": 71.2, "restarts": 0, "bad_samples": 0}
    (run / "summary.json").write_text(json.dumps({"knn/top1": 40.0, "goodput": 1.0, "seconds_lost": 0.0, **summary}))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Head)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    head = f"http://127.0.0.1:{server.server_port}"
    yield {"SHARDS": str(folder / "shards"), "RUN": str(run), "HEAD": head, "FOLDER": str(folder)}
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def outcomes(places: dict[str, str]) -> dict[str, Any]:
    """What came of each command, in copies of a process that has imported the command line alone."""
    commands, words = [*MAY, *MISTAKES], list(places.items())
    real = [functools.reduce(lambda c, pair: c.replace(*pair), words, command).split() for command in commands]
    command = [sys.executable, "-c", COPIES, json.dumps(real)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=places["FOLDER"])
    found = [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines() if line.startswith("found {")]
    for one in found:
        one["said"] = functools.reduce(lambda said, pair: said.replace(pair[1], pair[0]), words, one["said"])
    return dict(zip(commands, found, strict=True))


@pytest.mark.parametrize("command", MAY)
def test_a_light_command_imports_only_what_is_named_here(command: str, outcomes: dict[str, Any]):
    found = outcomes[command]
    assert found["code"] == 0
    packages = set(found["packages"])
    assert not packages & NEVER
    assert packages & SELDOM <= MAY[command]


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_found_before_pytorch_is_imported(command: str, outcomes: dict[str, Any]):
    found = outcomes[command]
    assert found["code"] == 2
    assert found["said"].startswith(f"error: {MISTAKES[command]}"), found["said"]
    assert len(found["said"].splitlines()) == 1
    assert not set(found["packages"]) & NEVER
    assert found["seconds"] < SECONDS * max(yardstick(0), 1.0)  # beside importing the command line itself


@pytest.mark.parametrize("command", COLD)
def test_a_light_command_takes_little_of_the_processor(command: str, places: dict[str, str]):
    """The best of five runs counts, as CPU time grows on a machine that others use."""
    bound = TIMES.get(command.split()[0], USUAL)
    words = [places.get(word, word) for word in command.replace("FOLDER/", f"{places['FOLDER']}/").split()]
    assert any(seconds(*words) < bound * yardstick(attempt) for attempt in range(5)), bound


def seconds(*words: str) -> float:
    """Return the user CPU seconds of a command in a process of its own."""
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


@functools.cache
def yardstick(attempt: int) -> float:
    """Return the user CPU seconds of importing matplotlib."""
    done = subprocess.run([sys.executable, "-c", YARDSTICK], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_a_bare_name_of_timm_is_no_mistake(places: dict[str, str], tmp_path: Path):
    """The run takes it over from timm, as from timm:NAME."""
    images = f"data.train={places['FOLDER']}/many"
    for key in "start.from", "backbone.weights":
        check_run(DEMO, [images, f"out={tmp_path / 'out'}", "workers=0", f"{key}=resnet18"])


def test_the_check_notices_pytorch():
    code = RUN.replace("import main\n", "import main\nimport torch\n")
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])["packages"]) & NEVER


def test_training_imports_the_compiler_only_to_compile():
    """It takes seconds in each process: every rank, trial and evaluation."""
    code = 'import sys, eagleray.runs.pretrain; sys.exit("torch._inductor.compile_fx" in sys.modules)'
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_that_of_the_package():
    from typer.testing import CliRunner

    import eagleray
    from eagleray.cli import main

    assert CliRunner().invoke(main.app, ["--version"]).stdout == f"eagleray {eagleray.__version__}\n"


def test_the_shell_completes_recipes_and_sweeps():
    from eagleray.cli.options import complete_recipe, complete_sweep

    assert RECIPE in complete_recipe("dino_vits16_in1k")
    assert all(name.startswith("dino_vits16_in1k") for name in complete_recipe("dino_vits16_in1k"))
    assert "imagenet_methods" in complete_sweep("imagenet")


def test_what_waits_for_a_run_on_a_cluster_imports_no_pytorch():
    """The driver and Ray Train's controller, of which a head has one for every run."""
    subprocess.run([sys.executable, "-c", WAITS], check=True, timeout=120)


EVALUATES = """
import contextlib, sys
from eagleray.cli.main import main
from eagleray.cluster import ray_map

@contextlib.contextmanager
def reserve(ray, number, each, say):
    sys.exit(f"{number} of {each}; {sorted({'torch', 'timm', 'torchvision'} & sys.modules.keys())}")
    yield

ray_map.session, ray_map.reserve_workers = contextlib.nullcontext, reserve
main()
"""


def test_the_driver_of_an_evaluation_waits_for_room_without_pytorch(places: dict[str, str], tmp_path: Path):
    """It needs PyTorch for what its workers extract, and imports it when there are some."""
    words = ["evaluate", "timm:resnet18", "--train", places["SHARDS"], "--workers", "2", "--out", str(tmp_path)]
    env = os.environ | {"RAY_ADDRESS": "127.0.0.1:6379"}
    done = subprocess.run([sys.executable, "-c", EVALUATES, *words], capture_output=True, text=True, env=env)
    assert done.stderr.strip() == "1 of {'CPU': 1.0}; []"


def print_table(places: dict[str, str]) -> None:
    """Print what each mistake says, with the user and system seconds of its process and its exit status."""
    print("| Command | Status | CPU seconds | Line |\n| --- | ---: | ---: | --- |")
    for command in MISTAKES:
        words = functools.reduce(lambda c, pair: c.replace(*pair), places.items(), command).split()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = [sys.executable, "-m", "eagleray.cli", *words]
        done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=places["FOLDER"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        said = functools.reduce(lambda text, pair: text.replace(*pair[::-1]), places.items(), done.stderr).strip()
        print(f"| `{command}` | {done.returncode} | {used:.2f} | {said} |", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, contextlib.contextmanager(made)(Path(scratch)) as found:
        print_table(found)
