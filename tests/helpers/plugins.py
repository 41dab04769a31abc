"""A plug-in in a folder, and a recipe that uses it."""

from pathlib import Path

from helpers.recipes import SMALL

SOURCE = Path(__file__).parent / "plugin_method.py"


def write_plugin(folder: Path, name: str = "my_method.py", more: str = "") -> Path:
    """Write the plug-in of the tests, which registers the method `cosine_pairs`, the view operation `stripes`, the
    source `drawers`, the protocol `norms`, a backbone and a callback."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(SOURCE.read_text() + more)
    return path


def write_recipe(folder: Path, plugins: str = "[my_method.py]", backbone: str = "") -> Path:
    """Write a recipe that trains the plug-in's method for seconds on the plug-in's crops."""
    text = SMALL.replace("name: mocov3, dim: 16, hidden: 32", "name: cosine_pairs, dim: 12")
    text = text.replace("size: 16, scale: [0.3, 1.0], blur: 0.5", "size: 16, operations: [stripes]")
    if backbone:
        lines = [f"backbone: {{name: {backbone}}}" if x.startswith("backbone:") else x for x in text.splitlines()]
        text = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mine.yaml"
    path.write_text(text + (f"plugins: {plugins}\n" if plugins else ""))
    return path
