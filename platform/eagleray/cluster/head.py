"""Ask the dashboard of a Ray head over HTTP, as Ray's own client does, without the second that importing Ray takes."""

import os
from pathlib import Path
from typing import Any


class TokenRefused(Exception):
    """The head wants a token, or another one: `missing` tells which."""

    def __init__(self, *, missing: bool) -> None:
        super().__init__("token missing" if missing else "token refused")
        self.missing = missing


def ask(address: str, path: str, *, verb: str = "GET", timeouts: tuple[float, float]) -> Any:
    """The JSON that the head answers. `timeouts` are seconds to connect and to wait for the answer.

    Raises TokenRefused, RuntimeError for another status than 200, and OSError where nobody answers or not in JSON."""
    import requests

    answer = requests.request(verb, address + path, headers=_authorization(), timeout=timeouts)
    if answer.status_code in (401, 403):
        raise TokenRefused(missing=answer.status_code == 401)
    if answer.status_code != 200:
        raise RuntimeError(f"status code {answer.status_code}: {answer.text}")
    return answer.json()


def _authorization() -> dict[str, str]:
    """Ray's rule: with RAY_AUTH_MODE=token, that of RAY_AUTH_TOKEN, else of the file RAY_AUTH_TOKEN_PATH, else of
    ~/.ray/auth_token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return {}
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        token = path.read_text() if path.is_file() else ""
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
