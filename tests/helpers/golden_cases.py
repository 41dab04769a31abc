"""Golden vectors: inputs, outputs and gradients of the authors' own code, kept in `golden/` or wherever GOLDEN says."""

import json
import os
import re
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eagleray.models.backbone import Backbone

torch.set_num_threads(1)  # as for DINO's vectors: sums in another order need not meet the tolerance

FOLDER = Path(os.environ.get("GOLDEN") or Path(__file__).parents[1] / "golden")
FAMILIES = (
    *("moco_v3_loss", "moco_v3_loss_gather", "moco_v3_step", "moco_v3_vit_forward", "moco_v3_pos_embed"),
    *("moco_v3_ema", "moco_v3_heads", "moco_v3_lars", "moco_v3_schedule"),
    *("dino_loss", "dino_head", "dino_clip_gradients", "dino_schedules", "dino_ema_update", "dino_lars"),
    *("dino_vit_posembed", "dino_knn", "knn_weighted"),
    *("moco_v2_infonce", "moco_v2_queue_step", "densecl_loss", "instloc_loss", "instdisc_nce", "instdisc_softmax"),
    "pirl_loss",
    *("instdisc_proximal_formula", "simclr_ntxent", "byol_loss", "swav_loss", "swav_queue"),
    *("esvit_ddino_loss", "esvit_dino_loss_mixup", "selfpatch_loss"),
    *("simsiam_heads", "simsiam_loss", "barlow_twins", "vicreg"),
    *("sigreg", "lejepa_loss", "mae_loss", "mae_pos_embed", "mae_step", "mpp_step"),
    *("esvit_swin", "esvit_vil", "esvit_cvt", "esvit_correspondence"),
    *("cvt_forward", "t2t_vit_forward"),
    *("drloc_l1", "drloc_ce", "drloc_reg", "drloc_exhaustive", "drloc_multigrid", "drloc_pool"),
    "drloc_lambda_schedule",
    *("moby_contrastive_loss", "moby_full_steps", "moby_loss", "moby_schedules"),
    *("selfpatch_aggregation", "selfpatch_cosine_schedule", "selfpatch_dinohead", "selfpatch_neighbour_index"),
    *("davis_label_propagation", "davis_j_f"),
    "pixpro_loss",
    *("detco_loss", "ibot_loss", "dinov2_sinkhorn", "dinov2_patch_loss", "dinov2_koleo", "block_masks"),
    *("dinov3_view_loss", "dinov3_patch_loss", "dinov3_koleo", "dinov3_gram", "dinov3_rope", "dinov3_vit"),
    "dinov3_masks",
)


class Case:
    """One vector: `case[name]` is an array, `case.hyper` its hyper-parameters."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.text: dict[str, Any] = json.loads(path.read_text())
        self.hyper: dict[str, Any] = self.text.get("hyper_parameters") or self.text.get("hyper") or {}
        self.tolerance = tolerance(self.text["suggested_tolerance"])
        self.path = path

    @cached_property
    def arrays(self) -> dict[str, Tensor]:
        with np.load(self.path.with_suffix(".npz")) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name].clone()  # tests change tensors in place

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The arrays whose names begin with the prefix, without it."""
        return {name.removeprefix(prefix): self[name] for name in self.arrays if name.startswith(prefix)}

    def count(self, pattern: str) -> int:
        """How many arrays of a numbered kind there are, such as `p{}_init`, from number 0."""
        number = 0
        while pattern.format(number) in self.arrays:
            number += 1
        return number

    def check(self, ours: Tensor | float | None, name: str) -> None:
        self.equal(ours, self[name], name)

    def equal(self, ours: Tensor | float | None, expected: Tensor, name: str) -> None:
        assert ours is not None, f"{self.name}: {name}: there is none"
        torch.testing.assert_close(
            torch.as_tensor(ours, dtype=torch.float64).detach(),
            expected.double(),
            **self.tolerance,
            msg=lambda text: f"{self.name}: {name}: {text}",
        )

    def near(self, ours: Tensor | None, name: str) -> None:
        """The tolerance applied to the array as a whole: to the norm of the difference, not to each number."""
        assert ours is not None, f"{self.name}: {name}: there is none"
        expected = self[name].double()
        self.equal((ours - expected).norm() + expected.norm(), expected.norm(), name)


def cases(family: str) -> Any:
    """Parametrises a test with the cases of a family; there may be none."""
    found = [path for path in sorted(FOLDER.glob("*.json")) if family_of(path.stem) == family]
    return pytest.mark.parametrize("case", [pytest.param(Case(path), id=f"golden-{path.stem}") for path in found])


def family_of(name: str) -> str | None:
    """The longest family that the name begins with: `moco_v3_loss_gather_a` is no `moco_v3_loss`."""
    return max((f for f in FAMILIES if name.startswith(f)), key=len, default=None)


def tolerance(said: dict[str, float] | str) -> dict[str, float]:
    """What a vector says, as numbers or as words (`rtol 1e-5, atol 1e-6 in float32`, `exact to 1e-9`, or `1e-5` for
    both); 0 where it is silent."""
    if isinstance(said, dict):
        return {"rtol": said.get("rtol", 0.0), "atol": said.get("atol", 0.0)}
    if re.fullmatch(r"[\d.]+(?:e[+-]?\d+)?", said):
        return {"rtol": float(said), "atol": float(said)}
    words = dict(re.findall(r"\b(rtol|atol|exact to)[ =]*([\d.]+(?:e[+-]?\d+)?)", said))
    return {"rtol": float(words.get("rtol", 0)), "atol": float(words.get("atol", words.get("exact to", 0)))}


def vit(img: int, patch: int, dim: int, depth: int, heads: int, **settings: Any) -> Backbone:
    """A small ViT; settings are those of a vector (`ln_eps`, `mlp_ratio`) and of the backbone."""
    options = {"img_size": img, "patch_size": patch, "embed_dim": dim, "depth": depth, "num_heads": heads}
    if "ln_eps" in settings:
        options["norm_layer"] = partial(nn.LayerNorm, eps=settings.pop("ln_eps"))
    if "mlp_ratio" in settings:
        options["mlp_ratio"] = settings.pop("mlp_ratio")
    return Backbone("vit_small_patch16_224", options=options, **settings)
