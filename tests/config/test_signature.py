"""What the source of a method says of its parameters is what Python says once the method is imported."""

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, create_model

from eagleray import config
from eagleray.config import STRICT, signature

METHODS = config.parts("eagleray.methods")

PLUGIN = '''
"""A method of a developer: He et al. 2021, arXiv:2104.00000. The rest is not a headline."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from eagleray.config.schedule import Schedule
from eagleray.config.types import Share
from {package}.kinds import LAYERS, Kind

Height = Literal["low", "high"]
HEIGHT: str = "low"


class _Helper:
    pass


def count() -> int:
    return 3


class Mine:
    def __init__(
        self,
        backbone: object,
        *,
        classes: PositiveInt,
        share: Share | None = None,
        height: Height = HEIGHT,
        kind: Kind = "a",
        ends: tuple[float, float] = (-1.0, 1.0),
        weight: Schedule = Schedule(value=0.5, drops=(1, 2)),
        layers: Annotated[int, Field(ge=1)] = {default},
    ) -> None:
        self.backbone, self.layers = backbone, layers
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a package outside eagleray whose method `mine` has this default for `layers`, and return its name."""
    package = re.sub(r"\W", "_", tmp_path.name)  # another one for each test, as Python keeps what it imported

    def write(default: str = "LAYERS") -> str:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "kinds.py").write_text('from typing import Literal\n\nKind = Literal["a", "b"]\nLAYERS = 3\n')
        (folder / "mine.py").write_text(PLUGIN.format(default=default, package=package).lstrip())
        return package

    monkeypatch.syspath_prepend(tmp_path)
    return write


def schema(fields: signature.Fields) -> Any:
    return TypeAdapter(create_model("M", __config__=STRICT, **fields)).json_schema()  # type: ignore[call-overload]


@pytest.mark.parametrize("name", METHODS)
def test_source_and_class_agree(name: str):
    module = f"eagleray.methods.{name}"
    read = signature.from_source(module)  # and not `fields`, which would fall back to the class
    target = signature.public_class(module)
    inspected = [p for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert list(read) == [p.name for p in inspected]
    assert [default for _, default in read.values()] == [... if p.default is p.empty else p.default for p in inspected]
    asked = signature.from_import(target)
    assert {n: str(a) for n, (a, _) in read.items()} == {n: str(a) for n, (a, _) in asked.items()}
    assert schema(read) == schema(asked)


def test_no_method_is_imported_for_its_parameters():
    code = (
        "import sys\nfrom eagleray.config import parts, signature\n"
        "for n in parts('eagleray.methods'): signature.fields(f'eagleray.methods.{n}')\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy') or m.startswith('eagleray.meth')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['eagleray.methods']")


def test_a_module_outside_eagleray_is_read_too(plugin: Any):
    module = f"{plugin('max(LAYERS, 2)')}.mine"
    read = signature.fields(module)
    assert module not in sys.modules
    assert read["layers"][1] == 3
    assert read["ends"][1] == (-1.0, 1.0)
    assert schema(read) == schema(signature.from_import(signature.public_class(module)))
    assert signature.headline(module) == "A method of a developer: He et al. 2021, arXiv:2104.00000."


def test_what_the_source_does_not_tell_the_class_does(plugin: Any):
    module = f"{plugin('count()')}.mine"
    with pytest.raises(signature.Unreadable):
        signature.from_source(module)
    assert signature.fields(module)["layers"][1] == 3
    assert module in sys.modules


def test_a_part_imports_its_class_when_it_is_built(plugin: Any):
    package = plugin()
    adapter: Any = TypeAdapter(config.part_of(package))
    part = adapter.validate_python({"name": "mine", "classes": 5})
    assert part == adapter.validate_python({"name": "mine", "classes": 5}) == pickle.loads(pickle.dumps(part))
    assert part != adapter.validate_python({"name": "mine", "classes": 6})
    assert f"{package}.mine" not in sys.modules
    assert part.build("backbone").backbone == "backbone"
    assert type(part.build("backbone")) is part.target


@pytest.mark.parametrize("name", METHODS)
def test_a_headline_is_a_whole_sentence(name: str):
    line = signature.headline(f"eagleray.methods.{name}")
    assert line[-1] == "."
    assert "\n" not in line
