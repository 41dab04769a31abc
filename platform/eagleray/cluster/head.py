"""Send requests to the dashboard of a Ray head over HTTP. Ray's own client does the same, but importing Ray takes a
second."""

import os
from pathlib import Path
from typing import Any


class TokenRefused(Exception):
    """The head requires a token (`missing`), or does not accept the one that was sent."""

    def __init__(self, *, missing: bool) -> None:
        super().__init__("token missing" if missing else "token refused")
        self.missing = missing


def ask(address: str, path: str, *, verb: str = "GET", timeouts: tuple[float, float]) -> Any:
    """Send a request to a path of the dashboard, and return the JSON that it answers. `timeouts` are the seconds to
    wait for the connection and for the answer.

    Raises TokenRefused, RuntimeError for any other status than 200, and OSError when there is no answer or it is not
    JSON.
    """
    import requests

    answer = requests.request(verb, address + path, headers=_authorization(), timeout=timeouts)
    if answer.status_code in (401, 403):
        raise TokenRefused(missing=answer.status_code == 401)
    if answer.status_code != 200:
        raise RuntimeError(f"status code {answer.status_code}: {answer.text}")
    return answer.json()


def _authorization() -> dict[str, str]:
    """Return the HTTP header with the cluster's token, found as Ray finds it: only with RAY_AUTH_MODE=token, from
    RAY_AUTH_TOKEN, else from the file that RAY_AUTH_TOKEN_PATH names, else from ~/.ray/auth_token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return {}
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        token = path.read_text() if path.is_file() else ""
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
