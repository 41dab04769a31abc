"""Export backbones as models of transformers: ViTModel, Dinov2Model, SwinModel and ResNetModel."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import PatchEmbed
from timm.models.resnet import Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.exports.source import Program, Source, with_own_grid

PROGRAM = """\
import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained(folder)
model = AutoModel.from_pretrained(folder){arguments}.eval()


def preprocess(files):
    images = [ImageOps.exif_transpose(Image.open(file)).convert("RGB") for file in files]
    return processor(images, return_tensors="pt")["pixel_values"]


def embed(images):  # (B, 3, H, W)
    with torch.inference_mode():
        return model(images).{pooled}  # (B, D)
"""
CLASS_TOKEN, POOLED = "last_hidden_state[:, 0]", "pooler_output.flatten(1)"
# Patterns in timm's names of tensors, and what replaces them in transformers' names.
BLOCKS = [(r"\.norm1\.", ".layernorm_before."), (r"\.norm2\.", ".layernorm_after.")]
ATTENTION = [(r"\.attn\.proj\.", ".attention.o_proj.")]
PATCHES = [(r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection.")]
VIT = [*PATCHES, (r"^cls_token$", "embeddings.cls_token"), (r"^pos_embed$", "embeddings.position_embeddings")]
VIT += [(r"^reg_token$", "embeddings.register_tokens"), (r"^norm\.", "layernorm."), *ATTENTION]
SWIN = [*PATCHES, (r"^patch_embed\.norm\.", "embeddings.norm."), (r"^norm\.", "layernorm.")]
SWIN += [(r"^layers\.", "encoder.layers."), *BLOCKS, *ATTENTION]
TABLE = (r"\.attn\.relative_position_bias_table$", ".attention.relative_position_bias.relative_position_bias_table")
RESNET = [(r"^conv1\.", "embedder.embedder.convolution."), (r"^bn1\.", "embedder.embedder.normalization.")]
RESNET += [(r"\.downsample\.0\.", ".shortcut.convolution."), (r"\.downsample\.1\.", ".shortcut.normalization.")]


class Fit(NamedTuple):
    """A model of transformers, the backbone's tensors under its names, and Python code for its pooled output."""

    model: Any
    state: dict[str, Tensor]
    pooled: str


def write(source: Source, folder: Path) -> Program:
    """Write a model of transformers and its image processor, and return the program that loads them. Raises UserError
    for a network for which transformers has no class."""
    import transformers

    fits = {VisionTransformer: fit_vit, SwinTransformer: fit_swin, ResNet: fit_resnet}
    fit: Callable[[Any], Fit] | None = fits.get(type(source.backbone.model))
    if fit is None or not source.network.stem == source.network.norm == source.network.patch_norm == "timm":
        raise no_class(source, "it has ViT, Dinov2, Swin and ResNet, as timm builds them")
    try:
        model, state, pooled = fit(with_own_grid(source.backbone, source.network, source.preprocessing.size).model)
        model.load_state_dict(state)
    except (ValueError, RuntimeError, AttributeError) as e:
        raise no_class(source, " ".join(str(e).split())[:200]) from None
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    images = source.preprocessing
    transformers.BitImageProcessor(
        size={"shortest_edge": images.resize},
        crop_size={"height": images.size, "width": images.size},
        image_mean=list(images.mean),
        image_std=list(images.std),
        resample=3,  # bicubic
    ).save_pretrained(folder)
    return Program(PROGRAM.replace("(folder){arguments}", f"(folder{arguments(folder)})").replace("{pooled}", pooled))


def no_class(source: Source, why: str) -> UserError:
    return UserError(f"--to transformers: no class fits {source.network.name}: {why}")


def fit_vit(model: Any) -> Fit:
    """Return the ViTModel for a ViT. If the ViT has layer scale or registers, return a Dinov2Model."""
    import transformers

    if model.cls_token is None or model.global_pool != "token":
        raise ValueError("its classes pool by the class token")
    if type(model.patch_embed) is not PatchEmbed:
        raise ValueError("its classes project patches by one convolution")
    first = model.blocks[0]
    h, w = model.patch_embed.img_size
    settings: dict[str, Any] = {
        "hidden_size": model.embed_dim,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": first.attn.num_heads,
        "image_size": h if h == w else [h, w],
        "patch_size": model.patch_embed.patch_size[0],
        "qkv_bias": first.attn.qkv.bias is not None,
        "layer_norm_eps": model.norm.eps,
    }
    registers = 0 if model.reg_token is None else model.reg_token.shape[1]
    state = renamed(model, VIT)
    table = state.get("embeddings.position_embeddings")
    if table is None:
        raise ValueError("its classes have a table of positions")
    if model.no_embed_class:
        table = torch.cat([torch.zeros_like(table[:, :1]), table], 1)
    elif registers:
        state["embeddings.register_tokens"] = state["embeddings.register_tokens"] + table[:, 1 : 1 + registers]
        table = torch.cat([table[:, :1], table[:, 1 + registers :]], 1)
    state["embeddings.position_embeddings"] = table
    width = first.mlp.fc1.out_features
    if not registers and not hasattr(first.ls1, "gamma"):
        config = transformers.ViTConfig(**settings, intermediate_size=width)
        vit = transformers.ViTModel(config, add_pooling_layer=False)
        return Fit(vit, rename(state, [(r"^blocks\.", "layers."), *BLOCKS]), CLASS_TOKEN)
    settings["mlp_ratio"] = width // model.embed_dim
    if registers:
        settings["num_register_tokens"] = registers
        dinov2: Any = transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**settings))
    else:
        dinov2 = transformers.Dinov2Model(transformers.Dinov2Config(**settings))
    ones = {k: torch.ones_like(v) for k, v in dinov2.state_dict().items() if k.endswith(".lambda1")}
    ones["embeddings.mask_token"] = torch.zeros(1, model.embed_dim)
    state = rename(state, [(r"^blocks\.", "encoder.layer."), (r"\.ls([12])\.gamma$", r".layer_scale\1.lambda1")])
    return Fit(dinov2, ones | state, CLASS_TOKEN)


def fit_swin(model: Any) -> Fit:
    """Return the SwinModel for a Swin transformer."""
    import transformers

    first = model.layers[0].blocks[0]
    config = transformers.SwinConfig(
        image_size=list(model.patch_embed.img_size),
        patch_size=model.patch_embed.patch_size[0],
        embed_dim=model.embed_dim,
        depths=[len(stage.blocks) for stage in model.layers],
        num_heads=[stage.blocks[0].attn.num_heads for stage in model.layers],
        window_size=first.window_size[0],
        mlp_ratio=first.mlp.fc1.out_features / model.embed_dim,
        layer_norm_eps=model.norm.eps,
    )
    state = renamed(model, [TABLE, *SWIN])

    def moved(match: re.Match[str]) -> str:  # in transformers, downsampling ends the previous stage
        return f"encoder.layers.{int(match[1]) - 1}.downsample"

    state = {re.sub(r"^encoder\.layers\.(\d+)\.downsample", moved, k): v for k, v in state.items()}
    return Fit(transformers.SwinModel(config), state, POOLED)


def fit_resnet(model: Any) -> Fit:
    """Return the ResNetModel for a ResNet."""
    import transformers

    stages = [model.layer1, model.layer2, model.layer3, model.layer4]
    config = transformers.ResNetConfig(
        embedding_size=model.conv1.out_channels,
        hidden_sizes=[stage[0].conv1.in_channels for stage in stages[1:]] + [model.num_features],
        depths=[len(stage) for stage in stages],
        layer_type="bottleneck" if isinstance(stages[0][0], Bottleneck) else "basic",
    )

    def layer(match: re.Match[str]) -> str:
        stage, block, kind, number = match.groups()
        part = "convolution" if kind == "conv" else "normalization"
        return f"encoder.stages.{int(stage) - 1}.layers.{block}.layer.{int(number) - 1}.{part}."

    def shortcut(match: re.Match[str]) -> str:
        return f"encoder.stages.{int(match[1]) - 1}.layers.{match[2]}.shortcut."

    state = {re.sub(r"^layer(\d)\.(\d+)\.(conv|bn)(\d)\.", layer, k): v for k, v in renamed(model, RESNET).items()}
    state = {re.sub(r"^layer(\d)\.(\d+)\.shortcut\.", shortcut, k): v for k, v in state.items()}
    return Fit(transformers.ResNetModel(config), state, POOLED)


def renamed(model: Any, names: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the tensors of a model under other names, see `rename`, with separate queries, keys and values."""
    return rename(dict(_apart(model.state_dict())), names)


def rename(state: dict[str, Tensor], names: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Return tensors under other names. Each pattern in `names` is replaced by its text, one after the other."""
    out = {}
    for key, value in state.items():
        for pattern, name in names:
            key = re.sub(pattern, name, key)
        out[key] = value
    return out


def _apart(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name. A fused tensor of queries, keys and values is split into three."""
    for key, value in state.items():
        before, found, after = key.partition(".attn.qkv.")
        if found:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                yield f"{before}.attention.{part}_proj.{after}", rows.contiguous()
        else:
            yield key, value


def line(folder: Path) -> str:
    """Return the line of Python that loads the export in a folder."""
    return f"transformers.AutoModel.from_pretrained({str(folder)!r}{arguments(folder)})"


def arguments(folder: Path) -> str:
    """Return the further arguments of the call that loads the model in `folder`. For a ViTModel they leave out the
    pooling layer, which would have random weights."""
    named = json.loads((folder / "config.json").read_text())["architectures"]
    return ", add_pooling_layer=False" if named == ["ViTModel"] else ""
