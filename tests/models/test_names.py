"""The names that are read in timm's source are those that timm has when it is imported."""

import json
import re
import subprocess
import sys

import pytest

from eagleray.base.errors import UserError
from eagleray.models import names
from eagleray.models.network import Network

# In a process of its own, as tests register models of theirs.
CODE = """
import json, sys
from eagleray.models import names
known = names._names()[0]
assert "timm" not in sys.modules
names.register_ours()
import timm
from timm.models._registry import _model_entrypoints
del sys.modules["timm"]
for name in timm.list_models(pretrained=True):
    names.check_weights(f"timm:{name}", "start.from=")
print(json.dumps([sorted(known), sorted(_model_entrypoints)]))
"""


def test_models_and_weights_are_those_that_timm_has():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    read, registered = json.loads(done.stdout)
    assert read == registered
    assert {"resnet18", "cvt_13", "vit_tiny_patch16_224_in21k"} <= set(read)  # timm's, ours, a former name


@pytest.mark.parametrize("name", ["resnt18", "resnt18.a1_in1k", "resnet18.a1_in2k", "vit_small_patch16_224.dinoo"])
def test_a_name_that_timm_lacks_is_refused(name: str):
    with pytest.raises(UserError, match=rf"^start.from=timm:{name}: timm has no weights of this name; did you mean"):
        names.check_weights(f"timm:{name}", "start.from=")
    names.check_weights(f"hf:{name}", "start.from=")


@pytest.mark.parametrize("expression", ["REGISTERED", "KEY"])
def test_timm_is_asked_where_its_source_cannot_be_read(expression: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(names, expression, re.compile("a version that writes it otherwise"))
    names._names.cache_clear()
    try:
        names.check_network(Network(name="resnet18", weights="timm:resnet18.a1_in1k"), "backbone")
        with pytest.raises(UserError, match=r"^backbone\.name=resnt18: timm has no such model"):
            names.check_network(Network(name="resnt18"), "backbone")
    finally:
        names._names.cache_clear()
