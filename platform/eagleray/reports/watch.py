"""Serve a page about a run or a sweep on this machine. The page is made anew when a browser requests it."""

import os
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eagleray.base.errors import Outage, UserError
from eagleray.base.numbers_given import whole
from eagleray.reports import sections, sweep
from eagleray.reports.page import Page, render
from eagleray.reports.read import Source, read
from eagleray.storage import store
from eagleray.sweeps.sweep_dir import sweep_folder

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")  # accepted Host headers; an attack by DNS rebinding would send another
SECONDS = 10.0  # age of a page in seconds from which a request gets a new one


class Watch:
    """A web server on this machine, for a page about a run or a sweep. Open its address `url` in a browser.

    `run` is a `Run`, a folder or an s3:// URL; `port=0` picks any free port. When a browser requests the page, the
    server generates a new page if the last page is older than `seconds`. The server runs in threads until `close` is
    called or its `with` block ends. Raises UserError and Outage.

    Example:

        with eagleray.watch("runs/a") as page:
            print("open", page.url)
    """

    def __init__(self, run: Source, port: int = 0, *, seconds: float = SECONDS) -> None:
        url, port = os.fspath(run), whole("port", port, 0, 65535)
        self.of, self.seconds = url, seconds
        self._page, self._drawn, self._lock = page_about(url), time.monotonic(), threading.Lock()
        try:
            self._server = Server((LOOPBACK, port), handler_of(self))
        except OSError as e:
            raise UserError(f"port {port}: {e.strerror or e}; name another, or 0 for any that is free") from None
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def wait(self) -> None:
        """Wait until the server is closed."""
        self._thread.join()

    def page(self) -> Page:
        """Return the current page. If Eagleray cannot generate it, return the last page with a line that says why."""
        with self._lock:  # of several requests at once, only one draws the page
            if time.monotonic() - self._drawn >= self.seconds:  # finished runs are redrawn, too: they may be extended
                try:
                    self._page = page_about(self.of)
                except (UserError, Outage, OSError) as e:
                    line = f"Not newer than {datetime.now(UTC):%H:%M:%S} UTC, since then: {e}"
                    return replace(self._page, lead=[*self._page.lead, line])
                self._drawn = time.monotonic()
            return self._page


watch = Watch  # lower case, as it is called like a function


class Server(ThreadingHTTPServer):
    """An HTTP server that does not report errors of connections, such as when browsers go away."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error."""


def handler_of(watch: Watch) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers HTTP requests for the page of `watch`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
                return self.send_error(HTTPStatus.FORBIDDEN)
            if self.path != "/":
                return self.send_error(HTTPStatus.NOT_FOUND)
            page = watch.page()
            body = render(page).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if goes_on(page):
                self.send_header("Refresh", f"{watch.seconds:g}")  # the browser reloads and keeps its position
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def page_about(url: str) -> Page:
    """Return the report of a run or a sweep. Raises UserError if it fails, and Outage if the store does not answer."""
    place = url.rstrip("/")
    with TemporaryDirectory(prefix="eagleray-watch-") as pictures:
        if folder := sweep_folder(place):
            return sweep.page(folder, store.absolute(place), Path(pictures))
        return sections.page(read(url), Path(pictures))


def goes_on(page: Page) -> bool:
    """Return whether the run of a page is not finished: if it was stopped or killed, it may still be continued."""
    return page.state != "finished"
