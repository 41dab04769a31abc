"""The page that `eagleray watch` serves: it follows a run, only to browsers of this machine."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from helpers import forked
from helpers.browser import browsing
from helpers.commands import refused
from helpers.processes import wait_for
from helpers.run_folder import SUMMARY, describe_curves, lines, records, sweep_of, write_run

import eagleray
from eagleray.reports import watch
from eagleray.reports.watch import Watch


def get(watch: Watch, path: str = "", **headers: str) -> tuple[int, str, str | None]:
    """The status, the text and the seconds after which a browser asks again."""
    request = urllib.request.Request(watch.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode(), answer.headers["Refresh"]
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(), e.headers["Refresh"]


def steps(page: str) -> str:
    [found] = re.findall(r'<dt>steps</dt><dd><span class="number"><data value="(\d+)"', page)
    return str(found)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    describe_curves(monkeypatch)  # the page of the command, in a process of its own, has its pictures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that was killed after 50 steps."""
    folder = write_run(tmp_path / "run", summary=None)
    lines(folder / "metrics.jsonl", records(5))
    return folder


def test_the_page_follows_the_run_to_its_end(folder: Path):
    with Watch(str(folder), 0, seconds=0) as served:
        status, page, again = get(served)
        assert (status, steps(page), again) == (200, "50", "0")
        lines(folder / "metrics.jsonl", records(9))
        assert steps(get(served)[1]) == "90"
        lines(folder / "metrics.jsonl", records(20))
        (folder / "summary.json").write_text(str(SUMMARY).replace("'", '"'))
        status, page, again = get(served)
        assert (status, steps(page), again) == (200, "200", None), "a run that is finished is asked for no more"
        lines(folder / "metrics.jsonl", records(25))
        (folder / "summary.json").unlink()
        _, page, again = get(served)
        assert (steps(page), again) == ("250", "0"), "whoever asks sees that it was extended"
        assert not list(folder.glob("report*")), "the run's own folder is left as it is"


@pytest.mark.slow
def test_a_browser_shows_each_page_until_the_run_is_finished(folder: Path, monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    honest = watch.render

    def render(page: Any) -> str:
        shown.append(steps(text := honest(page)))
        return text

    monkeypatch.setattr(watch, "render", render)
    with Watch(str(folder), 0, seconds=0.5) as served, browsing(served.url, "--remote-debugging-port=0"):
        wait_for(lambda: shown.count("50") > 1)  # it has asked again
        lines(folder / "metrics.jsonl", records(9))
        wait_for(lambda: "90" in shown)
        lines(folder / "metrics.jsonl", records(20))
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        wait_for(lambda: "200" in shown)
        time.sleep(3)
        assert shown.count("200") == 1, "a run that is finished is asked for no more"
        with browsing(served.url, "--dump-dom") as reader:
            text = reader.communicate(timeout=60)[0]
        assert steps(text) == "200"
        assert "<html" in text


def test_the_page_of_a_sweep(tmp_path: Path):
    sweep_of(folder := tmp_path / "sweep")
    with Watch(str(folder), 0) as served:
        status, page, _ = get(served)
    assert status == 200
    assert "Every trial that was started" in page


def test_what_cannot_be_read_leaves_the_last_page_and_says_why(folder: Path):
    with Watch(str(folder), 0, seconds=0) as served:
        whole = (folder / "recipe.yaml").read_text()
        (folder / "recipe.yaml").write_text("a: [")
        _, page, again = get(served)
        assert steps(page) == "50"
        assert "recipe.yaml: not valid YAML" in page
        assert again
        (folder / "recipe.yaml").write_text(whole)
        assert "not valid" not in get(served)[1]


def test_browsers_that_ask_together_have_it_drawn_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[str] = []

    def counted(url: str, about: Any = watch.page_about) -> Any:
        drawn.append(url)
        return about(url)

    monkeypatch.setattr(watch, "page_about", counted)
    with Watch(str(folder), 0, seconds=60) as served:
        served._drawn -= 60
        asking = [threading.Thread(target=get, args=(served,)) for _ in range(4)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert get(served)[0] == 200
    assert len(drawn) == 2, "at its start, and for the five"


def test_only_pages_of_this_machine_are_answered(folder: Path):
    with Watch(str(folder), 0) as served:
        port = int(served.url.rstrip("/").rpartition(":")[2])
        for host, status in {
            "localhost:1": 200,
            f"127.0.0.1:{port}": 200,
            "evil.example": 403,
            "": 403,
            "[": 403,
        }.items():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.putrequest("GET", "/", skip_host=True)
            connection.putheader("Host", host)
            connection.endheaders()
            assert connection.getresponse().status == status, host
            connection.close()
        assert get(served, "../recipe.yaml")[0] == 404
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_wrong_input_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "no such folder" in refused(capsys, "watch", str(tmp_path / "nowhere"))
    assert "not the folder of a run" in refused(capsys, "watch", str(tmp_path))
    with eagleray.watch(folder) as served:
        port = served.url.rstrip("/").rpartition(":")[2]
        assert f"port {port}: Address already in use" in refused(capsys, "watch", str(folder), "--port", port)


def test_the_command_ends_at_ctrl_c(folder: Path):
    command = [sys.executable, "-m", "eagleray.cli", "watch", str(folder), "--port", "0"]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        [url] = re.findall(r"^(http://127\.0\.0\.1:\d+/) shows", line)
        with urllib.request.urlopen(url, timeout=120) as answer:
            assert steps(answer.read().decode()) == "50"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert not process.stderr or process.stderr.read() == ""
