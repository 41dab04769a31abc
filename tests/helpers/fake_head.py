"""A head of a Ray cluster as the commands about jobs see it: its jobs, their logs and what was sent to it."""

import http.server
import json
import threading
from collections.abc import Callable
from typing import Any


class FakeHead:
    """What the commands ask of a head, over HTTP; `broken`, if set, answers every request instead, and `then` is called
    once, after the first look at a log."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.packages: list[bytes] = []
        self.nodes: list[dict[str, Any]] = []
        self.knows_nodes = True
        self.asked = 0
        self.broken: Callable[[], tuple[int, str] | None] | None = None
        self.then: Callable[[], Any] | None = None
        head = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                head.asked += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = head.broken() if head.broken else head.reply(self.command, self.path, body)
                if reply is None:
                    self.close_connection = True
                    return
                text = reply[1].encode()
                self.send_response(reply[0])
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def reply(self, verb: str, path: str, body: bytes) -> tuple[int, str]:
        parts = path.strip("/").split("/")
        if path == "/api/version":
            return 200, json.dumps({"ray_version": "2.60.0"})
        if verb == "PUT":
            self.packages.append(body)
            return 200, "{}"
        if verb == "POST" and parts[-1] == "jobs":
            asked = json.loads(body)
            if asked["submission_id"] in self.jobs:
                return 500, f"ValueError: Job with submission_id {asked['submission_id']} already exists."
            self.add(asked["submission_id"], **asked)
            return 200, json.dumps({"job_id": "", "submission_id": asked["submission_id"]})
        if path.startswith("/api/v0/nodes"):
            counts = {"total": len(self.nodes) + 3, "num_after_truncation": len(self.nodes), "num_filtered": 0}
            found = counts | {"result": self.nodes, "partial_failure_warning": ""}
            return 200, json.dumps({"result": self.knows_nodes, "msg": "", "data": {"result": found}})
        if path == "/api/jobs/":
            return 200, json.dumps(list(self.jobs.values()))
        if parts[:2] == ["api", "jobs"] and parts[2] in self.jobs:
            job = self.jobs[parts[2]]
            if parts[3:] == ["logs"]:
                text, then, self.then = self.logs[parts[2]], self.then, None
                if then:
                    then()
                return 200, json.dumps({"logs": text})
            if parts[3:] == ["stop"]:
                self.set(parts[2], "STOPPED")
                return 200, json.dumps({"stopped": True})
            return 200, json.dumps(job)
        return 404, f"{path} is not here"

    def add(self, name: str, status: str = "RUNNING", **more: Any) -> None:
        told = {"type": "SUBMISSION", "submission_id": name, "status": status, "entrypoint": "x", "start_time": 10**12}
        given = {"metadata": {"eagleray": "pretrain", "recipe": "small", "out": "/o", "digest": "d"}}
        self.jobs[name] = told | given | more
        self.logs[name] = f"Ray's own\nRunning entrypoint for job {name}: x\n"

    def set(self, name: str, status: str, code: int | None = None, message: str = "") -> None:
        self.jobs[name] |= {"status": status, "end_time": 10**12 + 5000, "driver_exit_code": code, "message": message}
