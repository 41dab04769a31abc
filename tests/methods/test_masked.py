"""What iBOT and DINOv2 refuse, with status 2 and one line that names the wrong key."""

from pathlib import Path

import pytest
from helpers.commands import refused
from helpers.recipes import small_recipe

BAD = {
    "method.mask_ratio=[0.5,0.1]": "method.mask_ratio=[0.5, 0.1]: expected the smaller number first",
    "method.mask_ratio=[0.0,0.1]": "method.mask_ratio=[0.0, 0.1]: hides none of the 4 patches of a large crop",
    "method.mask_ratio=[0.1,1.5]": "method.mask_ratio.1: input should be less than or equal to 1",
    "method.mask_ratio=0.3": "method.mask_ratio: input should be a valid tuple",
    "method.mask_probability=2": "method.mask_probability: input should be less than or equal to 1",
    "method.patch_prototypes=0": "method.patch_prototypes: input should be greater than 0",
    "views=[{size: 16}, {size: 32}]": "views: the first two, the large crops, are of [16, 32] pixels; expected one",
    "views=[{size: 16}]": "views: got 1, but {method} works with 2 to 100",
    "backbone={name: resnet50}": "backbone.name: expected a plain vision transformer of timm, whose patches can be",
}
BAD_OF_DINOV2 = {
    "method.centering=median": "method.centering: input should be 'sinkhorn' or 'mean'",
    "method.koleo_weight=-1": "method.koleo_weight: input should be greater than or equal to 0",
    "method.patch_bottleneck=0": "method.patch_bottleneck: input should be greater than 0",
}
CASES = [(m, key, line) for m in ("ibot", "dinov2") for key, line in BAD.items()]
CASES += [("dinov2", key, line) for key, line in BAD_OF_DINOV2.items()]


@pytest.mark.parametrize(("method", "key", "line"), CASES)
def test_a_wrong_key_gets_one_line(
    method: str, key: str, line: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = small_recipe(method)
    if key.startswith("backbone="):  # which replaces the section, and does not merge with it
        text = "\n".join(part for part in text.splitlines() if not part.startswith("backbone:"))
    (path := tmp_path / "recipe.yaml").write_text(text)
    given = [f"data.train={shards / 'train'}", f"out={tmp_path / 'out'}", key]
    assert line.format(method=method) in refused(capsys, "pretrain", str(path), *given)
