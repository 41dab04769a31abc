"""The names of tensors in checkpoints of Hugging Face's transformers library, for ViT and DINOv2, become timm's."""

import re

import torch
from torch import Tensor

NAMES = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.", ""),
    (r"^encoder\.layer\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.(?:layernorm_before|norm1)\.", ".norm1."),
    (r"\.(?:layernorm_after|norm2)\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)
FIRST = re.compile(r"(.*)encoder\.layer\.\d+\.attention\.attention\.query\.")  # `vit.` or another prefix
QUERY = re.compile(r"\.attention\.attention\.query\.(weight|bias)$")


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with timm's names, and queries, keys and values as one. Those of other libraries are returned
    as they are."""
    prefix = next((match[1] for key in state if (match := FIRST.match(key))), None)
    if prefix is None:
        return state
    out: dict[str, Tensor] = {}
    state = {key.removeprefix(prefix): value for key, value in state.items()}
    for key, value in state.items():
        if ".attention.attention." not in key:
            out[_renamed(key)] = value
        elif match := QUERY.search(key):
            parts = [state[key.replace(".query.", f".{part}.")] for part in ("query", "key", "value")]
            out[f"{_renamed(key[: match.start() + 1])}attn.qkv.{match[1]}"] = torch.cat(parts)
    return out


def _renamed(key: str) -> str:
    for pattern, name in NAMES:
        key = re.sub(pattern, name, key)
    return key
