"""One interface to every timm backbone: a pooled vector and a grid of patch vectors."""

import keyword
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import timm
import torch
from torch import Tensor, nn

from eagleray.base.errors import UserError, explained
from eagleray.models import variants
from eagleray.models.batch_norm import each_view
from eagleray.models.checkpointing import micro_batched
from eagleray.models.names import no_model, register_ours
from eagleray.models.stages import Parts, modules, stage_outputs, widths
from eagleray.models.tokens import (
    Hidden,
    class_token_pooled,
    class_tokens,
    joined,
    masked_features,
    packable,
    packed_features,
    visible_tokens,
)

if TYPE_CHECKING:
    from eagleray.models.lora import Adapters

Head = TypeVar("Head", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")

# Arguments with which the models of each timm module take images of any size.
ANY_SIZE = {"vision_transformer": {"dynamic_img_size": True}, "deit": {"dynamic_img_size": True}}
ANY_SIZE |= {"swin_transformer": {"strict_img_size": False}}
# Arguments of timm.create_model that name files or addresses, or change what is returned.
RESERVED = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path"}
RESERVED |= {"cache_dir", "num_classes", "features_only", "model_name"}


class Features(NamedTuple):
    """The output of a backbone. B images, D channels, N = h * w patches."""

    pooled: Tensor  # (B, D) the class token, or the mean patch where the model has none
    patches: Tensor  # (B, N, D) row-major
    grid: tuple[int, int]  # (h, w)


class Backbone(nn.Module):
    """A timm model without its classifier, with the changes of a recipe's `backbone` section.

    In shapes, B is the number of images and D the number of channels. Raises UserError for a name or an option unknown
    to timm, and for arguments that exclude each other."""

    model: Any  # the timm model
    micro_batch: int | None = None  # images in one forward pass while training; None: all
    compiled = False  # whether the model's layers run through torch.compile while training
    draw = 0  # seed of the step, by which rotary positions are shifted, stretched and scaled
    merged: "Adapters | None" = None  # adapters of `backbone.lora` that were added to the weights; None: none
    held = False  # whether `start.freeze` freezes this backbone while other parts of a method are trained

    def __init__(
        self,
        name: str = "vit_small_patch16_224",
        *,
        drop_path: float = 0.0,
        init: str = "timm",
        position: str = "timm",
        pool: str = "timm",
        norm: str = "timm",
        stem: str = "timm",
        freeze_patch: bool = False,
        patch_norm: str = "timm",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        keys = {"init": init, "position": position, "pool": pool, "norm": norm, "stem": stem, "patch_norm": patch_norm}
        self.model = create(name, keys, {"drop_path_rate": drop_path}, options or {})
        self.dim: int = self.model.num_features
        self.channels: int = (options or {}).get("in_chans", 3)  # channels of the images
        if stem == "wide":
            variants.widen_stem(self.model, name)
        if position in ("sincos", "dino"):
            variants.set_position(self.model, name, position)
        if init == "mae":
            variants.init_mae(self.model)
        if init != "timm" and stem == "timm":  # MoCo v3 initialises a stem of convolutions as PyTorch does
            variants.init_patch(self.model.patch_embed.proj)
        if freeze_patch:
            if not hasattr(self.model, "patch_embed"):
                raise UserError(f"backbone.freeze_patch=true: {name} has no patch projection")
            if stem == "conv":  # MoCo v3's code trains this stem in any case
                raise UserError("backbone.freeze_patch=true: there is no patch projection with backbone.stem=conv")
            self.model.patch_embed.requires_grad_(False)
        if patch_norm != "timm":
            if freeze_patch or stem == "conv":
                other = "freeze_patch=true" if freeze_patch else "stem=conv"
                raise UserError(f"backbone.patch_norm={patch_norm}: none is trained with backbone.{other}")
            if patch_norm == "weight":  # weight norm keeps the weights that were initialised above
                nn.utils.parametrizations.weight_norm(self.model.patch_embed.proj)

    def forward(self, images: Tensor, hidden: Hidden | None = None) -> Features:
        """Return the features of images (B, 3, H, W). `hidden` masks patches and needs a `maskable` model."""
        size = self.at_once
        if hidden is None:
            return Features(*micro_batched(self._features, images, size))
        where = (hidden.mask,) if hidden.source is None else (hidden.mask, hidden.source)
        return Features(*micro_batched(partial(self._features, token=hidden.token), images, size, *where))

    def pooled(self, images: Tensor) -> Tensor:
        """Return the pooled vectors (B, D) of images (B, 3, H, W), without keeping the patches' features in memory."""
        return micro_batched(self._pooled, images, self.at_once)

    def each(self, views: Sequence[Tensor]) -> list[Features]:
        """Return the features of each of V views (B, 3, S, S).

        If all views have the same size and the model has no batch norm, a single forward pass computes all of them."""
        if not self._joins(views):
            return [self(x) for x in views]
        out = self(torch.cat(list(views)))
        parts = zip(out.pooled.chunk(len(views)), out.patches.chunk(len(views)), strict=True)
        return [Features(pooled, patches, out.grid) for pooled, patches in parts]

    def pooled_each(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the pooled vectors (B, D) of each of V views, with the same forward passes as `each`."""
        if not self._joins(views):
            return [self.pooled(x) for x in views]
        return list(self.pooled(torch.cat(list(views))).chunk(len(views)))

    @property
    def at_once(self) -> int | None:
        """Return the number of images in one forward pass of a training step, also while `start.freeze` freezes the
        weights. None means all images of the batch. Outside of training, `at_once` is always None."""
        return self.micro_batch if self.training or self.held else None

    def _joins(self, views: Sequence[Tensor]) -> bool:
        return len(views) > 1 and not self.batch_norm and len({x.shape for x in views}) == 1

    def sizes(self, images: Sequence[Tensor], hidden: Hidden | None = None) -> list[Features]:
        """Return the features of each tensor of images (B, 3, S, S), whose sizes S may differ.

        If the model supports mixed sizes, one forward pass computes all features. `hidden` masks patches of the first
        tensor and needs a `maskable` model."""
        if not self._packs(images):
            return [self(images[0], hidden), *(self(x) for x in images[1:])]
        outs = self._run(images, hidden=hidden)
        return [self._split(out, x) for out, x in zip(outs, images, strict=True)]

    def pooled_sizes(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Return the pooled vectors (B, D) of each tensor of images, with the same forward passes as `sizes`."""
        if not self._packs(images):
            return [self.pooled(x) for x in images]
        return [self.model.forward_head(out, pre_logits=True) for out in self._run(images, pooled=True)]

    def visible(self, images: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pooled vectors (B, D) and all tokens (B, P + n, D) of images (B, 3, S, S). The blocks process only
        n patches of each image, whose positions are `kept` (B, n), counted row by row. P is the number of prefix
        tokens, such as the class token. Only backbones for which `tokens.drops_patches` is true support `visible`."""
        pooled, tokens = micro_batched(self._visible, images, self.at_once, kept)
        return pooled, tokens

    def _visible(self, images: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        run = compile_once(visible_tokens) if self.compiled and self.training else visible_tokens
        tokens = run(self.model, images, kept)
        return self.model.forward_head(tokens, pre_logits=True), tokens

    def _packs(self, images: Sequence[Tensor]) -> bool:
        return len(images) > 1 and not self.at_once and packable(self.model)

    @cached_property
    def batch_norm(self) -> bool:
        """Return whether the model has batch norm, so that an image's output depends on the other images."""
        return any(isinstance(m, nn.modules.batchnorm._NormBase) for m in self.modules())

    def _pooled(self, images: Tensor) -> Tensor:
        return self.model.forward_head(self._run([images], pooled=True)[0], pre_logits=True)

    def _features(
        self, images: Tensor, mask: Tensor | None = None, source: Tensor | None = None, token: Tensor | None = None
    ) -> Features:
        hidden = None if mask is None or token is None else Hidden(mask, token, source)
        return self._split(self._run([images], hidden=hidden)[0], images)

    def _run(self, images: Sequence[Tensor], *, pooled: bool = False, hidden: Hidden | None = None) -> list[Tensor]:
        """Return the outputs of the model's `forward_features` for images of one size or, if it is `packable`, several.

        With `pooled`, a model in training may return the class token alone."""
        run = outputs
        if self.compiled and self.training:
            run = compile_once(outputs)
            if fill := getattr(self.model, "fill_layouts", None):  # only EsViT's Swin has it
                fill(images)  # must precede tracing: the compiler would take new layouts for changes of the model
        class_token = pooled and self.training and class_token_pooled(self.model)
        return run(self.model, list(images), class_token, hidden, self._turns(images, hidden))

    def _turns(self, images: Sequence[Tensor], hidden: Hidden | None = None) -> list[Tensor] | None:
        """Return the rotations of rotary positions for each size of `images`. Return None for a model without rotary
        positions, and in evaluations without hidden patches, where timm computes the rotations itself.

        This is not compiled, because every training step draws the rotations anew."""
        if not (self.training or hidden) or not hasattr(self.model, "rope"):
            return None
        from eagleray.models.rotary import rotary, rotations  # imported here, as most models have no rotary positions

        if not rotary(self.model):
            return None
        return [rotations(self.model, self.patch_grid(x), self.draw) for x in images]

    def _split(self, out: Tensor, images: Tensor) -> Features:
        """Return the features of images (B, 3, H, W) from the output of the model's `forward_features`.

        Raises UserError for a model whose tokens do not lie on a grid."""
        pooled = self.model.forward_head(out, pre_logits=True)
        if not isinstance(out, Tensor):
            raise self._no_grid()
        if out.ndim == 4:
            if getattr(self.model, "output_fmt", "NCHW") != "NHWC":
                out = out.permute(0, 2, 3, 1)
            return Features(pooled, out.flatten(1, 2), (out.shape[1], out.shape[2]))
        (h, w), patches = self.patch_grid(images), out[:, getattr(self.model, "num_prefix_tokens", 0) :]
        if patches.shape[1] != h * w:
            raise self._no_grid()
        return Features(pooled, patches, (h, w))

    def patch_grid(self, images: Tensor) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches into which a ViT divides images (B, 3, H, W). Raises
        UserError for a model that does not embed patches."""
        embed: Any = getattr(self.model, "patch_embed", None)
        height, width = images.shape[2:]
        if hasattr(embed, "dynamic_feat_size"):  # a hybrid's patches are the cells of a CNN's map
            rows, columns = embed.dynamic_feat_size((height, width))
            return rows, columns
        size = getattr(embed, "patch_size", None)
        if not isinstance(size, tuple):
            raise self._no_grid()
        return height // size[0], width // size[1]

    def _no_grid(self) -> UserError:
        return UserError(
            f"backbone.name: {type(self.model).__name__} has no grid of patches; expected a vision transformer, a "
            "pyramid or a CNN whose features lie on one, such as vit_small_patch16_224"
        )

    def dims(self, parts: Parts) -> list[int]:
        """Return the number of channels of each of the token tensors that `grids` returns for `parts`."""
        return widths(self.model, parts)

    def grids(self, images: Tensor, parts: Parts = "last") -> tuple[Tensor, list[Tensor]]:
        """Return the pooled vectors (B, D) of images (B, 3, H, W), and their tokens (B, D, h, w) after every part.

        `parts` selects all stages, all blocks or the last one. A ViT's last tokens are those after its final norm; a
        pyramid's last tokens are those before its final norm. Raises UserError for a model without stages or blocks,
        and for a pyramid whose blocks return tokens without their grid."""
        pooled, *grids = micro_batched(lambda x: self._grids(x, parts), images, self.at_once)
        return pooled, grids

    def _grids(self, images: Tensor, parts: Parts) -> tuple[Tensor, ...]:
        with stage_outputs(modules(self.model, parts)) as seen:
            # This is not compiled, because the hooks are new in each call.
            [whole] = outputs(self.model, [images], False, None, self._turns([images]))
        flat, out = whole.ndim == 3, self._split(whole, images)
        if any((x.ndim == 3) is not flat for x in seen):
            name = type(self.model).__name__
            raise UserError(f"backbone.name: the {parts} of {name} return tokens without the grid on which they lie")
        h, w = out.grid
        if flat:  # tokens of a ViT, all on one grid
            tokens = [x[:, -h * w :] for x in seen[:-1]] + [out.patches]
            return out.pooled, *(x.mT.unflatten(2, out.grid) for x in tokens)
        last = getattr(self.model, "stage_fmt", getattr(self.model, "output_fmt", "NCHW")) == "NHWC"
        return out.pooled, *(x.permute(0, 3, 1, 2) if last else x for x in seen)

    def pooled_stages(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the mean token (B, D) of every stage for images (B, 3, H, W). For the last stage, this is the pooled
        vector. Raises UserError for the same models as `grids`."""
        return micro_batched(self._pooled_stages, images, self.at_once)

    def _pooled_stages(self, images: Tensor) -> tuple[Tensor, ...]:
        pooled, *grids = self._grids(images, "stages")
        return *(x.mean((2, 3)) for x in grids[:-1]), pooled

    def attention(self, images: Tensor) -> Tensor:
        """Return the attention (B, heads, 1 + N, 1 + N) of a ViT's last block. The row of each query sums to one."""
        seen: list[Tensor] = []
        attn = self.model.blocks[-1].attn
        with attn.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            self.model.forward_features(images)
        b, n, _ = seen[0].shape
        q, k, _ = attn.qkv(seen[0]).view(b, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        return (attn.q_norm(q) @ attn.k_norm(k).mT * attn.scale).softmax(-1)


def outputs(
    model: Any, images: list[Tensor], class_token: bool, hidden: Hidden | None, turns: list[Tensor] | None
) -> list[Tensor]:
    """Return the outputs of a model's layers for images (B, 3, S, S) of one size or, in one forward pass, of several.

    The outputs are all tokens or, with `class_token`, the class token alone. Patches of the first size's images may be
    `hidden`. `turns` are the rotations of rotary positions; None: the model has none, or timm computes them."""
    if turns is not None:
        from eagleray.models.rotary import rotary_features

        return [rotary_features(model, images[0], turns[0], hidden)]
    if class_token:
        return class_tokens(model, images)
    if len(images) > 1:
        return packed_features(model, images, hidden)
    return [model.forward_features(images[0]) if hidden is None else masked_features(model, images[0], hidden)]


@cache
def compile_once(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with torch.compile, the same object for all backbones. PyTorch compiles it anew for each model
    and list of image sizes.

    Only a backbone that is compiled calls this, as importing the compiler takes seconds."""
    return torch.compile(function, dynamic=False)


class Encoder(nn.Module, Generic[Head]):
    """A backbone with a head on its pooled vector, such as a student, a teacher or MoCo's query encoder f_q."""

    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the head's output (V * B, C) for V views (B, 3, S, S); the first view's rows come first.

        Consecutive views of one size share a forward pass of the backbone. The head runs once on all views together, so
        its batch norm computes its statistics over all views."""
        same: list[list[Tensor]] = []
        for x in views:
            if same and same[-1][0].shape == x.shape:
                same[-1].append(x)
            else:
                same.append([x])
        return self.head(joined(self.backbone.pooled_sizes([joined(xs) for xs in same])))

    def each(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the head's output (B, C) for each of V views (B, 3, S, S).

        Batch norm never mixes two views: the head's batch norm uses the statistics of each view alone, and a backbone
        with batch norm runs once for each view. Any other backbone runs only once if all views have one size."""
        return each_view(self.head, self.backbone.pooled_each(views))


def encoder_with(module: nn.Module, backbone: Backbone) -> Encoder[Any]:
    """Return the `Encoder` in a module that has this backbone."""
    return next(m for m in module.modules() if isinstance(m, Encoder) and m.backbone is backbone)


def check_option(name: str) -> None:
    """Raises UserError for a name that `backbone.options` cannot have: a name that cannot be a function's argument, or
    one of RESERVED, with which timm would read a file, make a request or return something else."""
    if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED:
        raise UserError(f"backbone.options: {name!r} is no option; expected an argument of the model, such as img_size")


def create(name: str, keys: dict[str, str], settings: dict[str, Any], options: dict[str, Any]) -> Any:
    """Create the timm model `name`.

    `keys` are the keys of the recipe's backbone section that change timm's ViT, with their values. `settings` and
    `options` are arguments for timm: eagleray chooses the settings, and the user's options take precedence.

    Raises UserError for a name that timm lacks, and for a key or an option that does not fit the model."""
    base = name.partition(".")[0]
    if not timm.is_model(base):
        register_ours()
    if not timm.is_model(base):
        raise no_model(name)
    family = timm.model_entrypoint(base).__module__.rpartition(".")[2]
    arguments: dict[str, Any] = {**ANY_SIZE.get(family, {}), **settings}
    for key, value in keys.items():
        extra = variants.ARGUMENTS.get((key, value), {})
        if extra and family != "vision_transformer":
            raise UserError(f"backbone.{key}={value}: {name} is not one of timm's plain vision transformers")
        if twice := sorted(extra.keys() & options.keys()):
            raise UserError(f"backbone.options.{twice[0]}: backbone.{key}={value} sets it already")
        arguments |= extra
    for option in options:
        check_option(option)
    unfit = TypeError, ValueError, AssertionError, RuntimeError
    with explained(f"backbone.name={name} backbone.options={options}", *unfit):
        return timm.create_model(base, num_classes=0, **{**arguments, **options})
