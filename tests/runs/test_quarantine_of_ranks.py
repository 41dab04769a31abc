"""All ranks count the same bad samples, also where only rank 0's machine has the list of a run that continues."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.ranks import on_ranks

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.data.quarantine import BadSample, Quarantine
from eagleray.data.tar_scan import NO_IMAGE
from eagleray.runs import layout
from eagleray.runs.train import open_quarantine


def bad(number: int) -> BadSample:
    return BadSample("s3://b/x.tar", f"k{number}", 512 * number, "no JPEG")


class Index(list[int]):
    bad = (bad(0),)


def run_of(folder: Path) -> Any:
    recipe = SimpleNamespace(data=SimpleNamespace(bad_limit=0.03))
    plan = SimpleNamespace(index=Index(range(99)), recipe=recipe)
    return SimpleNamespace(plan=plan, folder=SimpleNamespace(path=folder), world=SimpleNamespace(rank=dist.rank()))


def continued(folder: Path) -> list[tuple[int, str]]:
    return dist.gather_objects(found_on(folder))


def found_on(folder: Path) -> tuple[int, str]:
    quarantine = open_quarantine(run_of(folder / f"machine-{dist.rank()}"))
    quarantine.add([bad(2)], write=dist.rank() == 0)  # known already
    try:
        quarantine.add([bad(3)], write=dist.rank() == 0)
    except UserError as e:
        return len(quarantine), str(e).partition(" samples")[0]
    return len(quarantine), ""


def test_the_limit_is_passed_on_all_ranks_at_once(tmp_path: Path):
    for rank in range(2):
        (tmp_path / f"machine-{rank}").mkdir()
    Quarantine(tmp_path / "machine-0" / layout.QUARANTINE, samples=100, limit=1).add([bad(1), bad(2)])
    Quarantine(tmp_path / "machine-1" / layout.QUARANTINE, samples=100, limit=1).add([bad(0)])  # of an earlier start
    assert on_ranks(2, continued, tmp_path, tmp_path)[0] == [(4, "4 of 100"), (4, "4 of 100")]


def test_a_checkpoint_counts_every_line_of_the_list(tmp_path: Path):
    run = run_of(tmp_path)
    run.plan.index.bad = (bad(0), BadSample("s3://b/x.tar", "k9", -1, f"{NO_IMAGE}json"))
    open_quarantine(run).add([bad(1)])
    assert len(run.folder.bad) == len(read_lines(tmp_path / layout.QUARANTINE)) == 3
