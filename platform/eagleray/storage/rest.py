"""The base class of stores that are used by plain HTTP requests, without their cloud's own library."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from eagleray.storage.http_body import READ_TIMEOUT, with_floor
from eagleray.storage.remote import Refused, RemoteStore

CONNECTIONS = 32
CONNECT_TIMEOUT = 10  # seconds
LINE = 2**16  # most bytes that are read of an error's body
SENT = 2**19  # bytes of a body that are sent at once: urllib3 limits the time of each such call by CONNECT_TIMEOUT


class Pools:
    """Connection pools to servers, with a manager for each proxy."""

    def __init__(self) -> None:
        self._lock, self._pools = threading.Lock(), dict[str, Any]()

    def to(self, address: str) -> Any:
        """Return the connection pools for an address, which use the environment's proxy for it, if any."""
        from urllib3 import PoolManager, ProxyManager, make_headers

        parts = urlsplit(address)
        proxy = "" if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme, "")
        with self._lock:
            if proxy not in self._pools:
                login = urlsplit(proxy)
                headers = make_headers(
                    proxy_basic_auth=unquote(f"{login.username}:{login.password}") if login.password else None,
                    proxy_basic_auth_encoding="utf-8",
                )
                options: dict[str, Any] = {"maxsize": CONNECTIONS, "headers": {"User-Agent": "eagleray"}}
                manager = ProxyManager(proxy, proxy_headers=headers, **options) if proxy else PoolManager(**options)
                manager.pool_classes_by_scheme = with_floor(manager.pool_classes_by_scheme)
                self._pools[proxy] = manager
            return self._pools[proxy]


class RestStore(RemoteStore):
    """Sends the requests of a store by plain HTTP, without its cloud's own library."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = Pools()

    def _error(self, status: int, headers: Mapping[str, str], body: bytes) -> Refused:
        """Return the error that an answer describes."""
        raise NotImplementedError

    def _send(
        self,
        method: str,
        address: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        expected: Iterable[int] = (200, 201, 202, 204, 206),
    ) -> Any:
        """Send a request and return the response with an unread body. Raises Refused for an unexpected status."""
        from urllib3 import Timeout

        response = self.pools.to(address).request(
            method,
            address,
            body=body and (body[at : at + SENT] for at in range(0, len(body), SENT)),
            headers=dict(headers) if body is None else {**headers, "Content-Length": str(len(body))},
            timeout=Timeout(connect=CONNECT_TIMEOUT, read=READ_TIMEOUT),
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        if response.status not in expected:
            text = response.read(LINE)
            response.close()
            raise self._error(response.status, response.headers, text)
        return response
