"""Send HTTP requests to the dashboard of a Ray head node, with the token of the cluster."""

import os
import re
from pathlib import Path
from typing import Any

from eagleray.base.errors import UserError

ADDRESS = "RAY_API_SERVER_ADDRESS"  # the variable that names the dashboard, before RAY_ADDRESS


class TokenRefused(Exception):
    """The head requires a token, and none was sent (`missing`) or it does not accept the one that was sent."""

    def __init__(self, *, missing: bool) -> None:
        super().__init__("token missing" if missing else "token refused")
        self.missing = missing


def locate(address: str | None) -> str:
    """Return the dashboard's URL: `address`, or else RAY_API_SERVER_ADDRESS or RAY_ADDRESS. Raises UserError when there
    is none, or it is not the plain URL of a dashboard."""
    for name, given in [("--address", address)] + [(n, os.environ.get(n)) for n in (ADDRESS, "RAY_ADDRESS")]:
        if given and "@" in given:
            raise UserError(
                f"{name}: contains a user or password; expected the plain address, with "
                "the token in the variable RAY_AUTH_TOKEN"
            )
        if given and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", given):
            raise UserError(f"{name} {given}: expected the dashboard of a Ray head, such as http://head:8265")
        if given:
            return given.rstrip("/")
    raise UserError("--address: missing; expected the dashboard of a Ray head, such as http://head:8265")


def ask(address: str, path: str, *, verb: str = "GET", timeouts: tuple[float, float]) -> Any:
    """Send a request to a path of the dashboard, and return the JSON of the answer.

    `timeouts` are the seconds to wait for the connection and for the answer. Raises TokenRefused, RuntimeError for any
    status other than 200, and OSError when there is no answer or it is not JSON."""
    import requests

    answer = requests.request(verb, address + path, headers=_authorization(), timeout=timeouts)
    if answer.status_code in (401, 403):
        raise TokenRefused(missing=answer.status_code == 401)
    if answer.status_code != 200:
        raise RuntimeError(f"status code {answer.status_code}: {answer.text}")
    return answer.json()


def _authorization() -> dict[str, str]:
    """Return the HTTP header with the cluster's token, or {} without RAY_AUTH_MODE=token or a token. As for Ray, the
    token is in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names or in ~/.ray/auth_token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return {}
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        token = path.read_text() if path.is_file() else ""
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
