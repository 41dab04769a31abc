"""Change files and values at random, as damage and malice do: bytes, lines, digits, and the nodes of a tree."""

import copy
from random import Random
from typing import Any

# What parsers stumble over: ends, signs, numbers beyond all types, digits that are not ASCII, depth, paths.
TOKENS = [
    *(b"", b"\0", b"\n", b"\r", b"\x0b", b"\x1c", b" ", b"\t", b",", b";", b'"', b"'", b"\\", b"/", b".", b"..", b":"),
    *(b"0", b"-1", b"1.5", b"1e400", b"NaN", b"null", b"true", b"9" * 5, b"9" * 20, b"9" * 400, b"9" * 5000),
    *(b"\xff", b"\xc3\xa9", "\u00b2".encode(), "\u0663".encode(), b"\xef\xbb\xbf", b"\\ud800", b"\x1b]0;x\x07"),
    *(b"../../../etc/passwd", b"/etc/passwd", b"[", b"{", b"[" * 50_000, b"&a [*a]", b"!!python/name:os.system"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, 2**31, 2**60, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "/", ".", "..", "../../x", "/etc/passwd", "\0", "\ud800", "a" * 10_000),
    *("\x1b]0;x\x07", [], [1], [[]], {}, {"a": 1}, ["x", None], [0] * 1000),
]


def change_bytes(rng: Random, data: bytes) -> bytes:
    """Return a file with one to four changes: a byte, a token more or instead, an end, a line."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        near = rng.random() < 0.4  # the start, where headers are
        at = rng.randint(0, min(len(out), 200) if near else len(out))
        match rng.randrange(6):
            case 0 if out:
                out[min(at, len(out) - 1)] = rng.randrange(256)
            case 1:
                out[at:at] = rng.choice(TOKENS)
            case 2:
                out[at : at + rng.randint(1, 8)] = rng.choice(TOKENS)
            case 3:
                del out[at:]
            case 4:
                out[at : at + 4] = bytes(rng.choice([0, 1, 127, 128, 255]) for _ in range(len(out[at : at + 4])))
            case _:
                lines = bytes(out).split(b"\n")
                lines[rng.randrange(len(lines))] = rng.choice([*lines, b""])
                out = bytearray(b"\n".join(lines))
    return bytes(out)


def change_tree(rng: Random, tree: Any) -> Any:
    """Return a tree of lists and dictionaries with one to three changes: a value, a key less or more, an item twice."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        nodes = [n for n in _nodes(tree) if n]
        if not nodes or rng.random() < 0.02:
            return _value(rng)
        node = rng.choice(nodes)
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        match rng.randrange(8):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[rng.choice(["x", "", "id", "name", "../x", "\x1b[31m"])] = _value(rng)
            case 1:
                node.append(copy.deepcopy(node[key]))
            case 2 if isinstance(node[key], int | float) and not isinstance(node[key], bool):
                number = node[key]
                node[key] = rng.choice([-number, number + 1, number * 10**6, str(number), min(number, 2**99) / 3])
            case _:
                node[key] = _value(rng)
    return tree


def _value(rng: Random) -> Any:
    """Return a copy of one of VALUES: the next change may be made inside it."""
    return copy.deepcopy(rng.choice(VALUES))


def _nodes(tree: Any) -> list[Any]:
    """Return the lists and dictionaries of a tree."""
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    own = [tree] if isinstance(tree, dict | list) else []
    return own + [node for child in children for node in _nodes(child)]
