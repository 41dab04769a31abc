"""Stores file names, which are bytes, in columns of Unicode text, and makes them readable.

Python decodes each byte of a name that is not UTF-8 as a lone surrogate (PEP 383), which neither Parquet nor JSON can
hold. A stored name has a character from U+EF80 to U+EFFF instead, as in MirBSD's OPTU-8. If a name really has such a
character, its three bytes are stored in the same way, so that two names never become one."""

import re

_RESERVED = re.compile("[\uef80-\uefff]")
_SURROGATES = {0xDC00 + byte: 0xEF00 + byte for byte in range(0x80, 0x100)}
_BYTES = {stored: surrogate for surrogate, stored in _SURROGATES.items()}
# Control characters, which terminals obey, and characters that reverse the order of the text after them.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\uef80-\uefff]")


def to_text(name: str) -> str:
    """Return the text that is stored for a file name. A UTF-8 name without reserved characters is stored as it is."""
    if name.isascii():
        return name
    name = _RESERVED.sub(lambda m: m[0].encode().decode("ascii", "surrogateescape"), name)
    return name.translate(_SURROGATES)


def from_text(text: str) -> str:
    """Return the file name, with lone surrogates, for which `to_text` returned this text."""
    if text.isascii() or not _RESERVED.search(text):
        return text
    return text.translate(_BYTES).encode(errors="surrogateescape").decode(errors="surrogateescape")


def readable(name: str) -> str:
    """Return a file name, stored or not, for a message. `\\xe9` stands for a byte that is not UTF-8 or not
    printable."""
    return name if name.isprintable() and name.isascii() else _UNPRINTABLE.sub(_escape, name)


def _escape(character: re.Match[str]) -> str:
    code = ord(character[0])
    raw = 0xDC80 <= code <= 0xDCFF or 0xEF80 <= code <= 0xEFFF
    return f"\\x{code & 0xFF:02x}" if raw or code < 0x100 else f"\\u{code:04x}"
