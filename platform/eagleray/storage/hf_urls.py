"""Reads the URLs of data sets of the Hugging Face Hub: hf://datasets/OWNER/NAME[@REVISION][/PATH or SPLIT]."""

import re
from typing import Any

from eagleray.base.errors import UserError

URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/+(.*))?")
FORM = "expected hf://datasets/OWNER/NAME[@REVISION][/PATH or SPLIT]"


def split_url(url: str) -> tuple[str, str, str]:
    """Return a URL's repository, revision and path; the last two may be empty. Raises UserError for another FORM."""
    found = URL.fullmatch(url)
    if not found:
        raise UserError(f"{url}: {FORM}")
    return found[1], (found[2] or "").replace("%2F", "/"), (found[3] or "").rstrip("/")


def unpinned(given: Any) -> Any:
    """Return a URL, or a list or dict that contains URLs, without the revisions in hf:// URLs."""
    if isinstance(given, list | tuple):
        return [unpinned(each) for each in given]
    if isinstance(given, dict):
        return {key: unpinned(value) for key, value in given.items()}
    found = URL.fullmatch(given) if isinstance(given, str) else None
    return f"hf://datasets/{found[1]}{f'/{found[3]}' if found[3] else ''}" if found else given
