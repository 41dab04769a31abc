"""Tells the part of a URL that is a name from the part that is a pattern: names come first."""

from collections.abc import Callable

SPECIAL = frozenset("*?[]{}")  # the letters of wildcards and braces


def split_literal(url: str, exists: Callable[[str, bool], bool]) -> tuple[str, str]:
    """Return the longest part of a URL, up to a slash or its end, that exists under its very name, and the rest, which
    is a pattern. Parts without letters of patterns are taken for names.

    `exists` is asked for a name, and whether it is only a part of the URL, where it has such letters."""
    begin = url.find("://") + 3 if "://" in url else 0
    while begin < len(url):
        end = url.find("/", begin)
        end = len(url) if end < 0 else end
        part = url[end:].strip("/") != ""
        if SPECIAL & set(url[begin:end]) and not exists(url[:end], part):
            return url[:begin], url[begin:]
        begin = end + 1
    return url, ""
