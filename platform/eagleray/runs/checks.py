"""Check that a run can begin or continue: its recipe must fit its method, its data, the machine and its checkpoint.

The command checks everything before it writes anything. Each rank checks again what may differ on its machine."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eagleray import config
from eagleray.base.errors import UserError, explained, named
from eagleray.config import yaml_text
from eagleray.config.view import View
from eagleray.data import image_folder, labels
from eagleray.data.file_names import readable
from eagleray.data.index import Index, ScanAll, open_index, scan_here
from eagleray.data.order import rows
from eagleray.engine import optim
from eagleray.engine.compiling import compiles
from eagleray.engine.loop import patch_parameters
from eagleray.engine.precision import compute_dtype
from eagleray.engine.sharded import check_shardable
from eagleray.methods.method import Method
from eagleray.models.batch_norm import check_groups
from eagleray.protocols.probes import check_class_names
from eagleray.runs import fit
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method
from eagleray.runs.plan import Plan, open_plan
from eagleray.runs.recipe import Recipe

log = logging.getLogger(__name__)
CHANGED = {
    "data": "the shards of data.train are not those",
    "order": "a table of data.train (columns, exclude, or one beside the shards) or the order is not the one",
}


def make_plan(
    recipe: Recipe,
    *,
    note: Callable[[str], None] = log.info,
    scan_all: ScanAll = scan_here,
    opening: Callable[..., Index] = open_index,
) -> Plan:
    """Check that the recipe, its method and its data fit each other, and open the data. `scan_all` reads tars that have
    no index. Raises what `open_plan` raises, and UserError when something does not fit."""
    method = check_method(recipe)
    check_shares(recipe, method.norm_group)
    image_folder.check_outside(recipe.out, [s.url for s in (*recipe.data.sources(), *(recipe.data.test or ()))], "out=")
    plan = open_plan(recipe, note=note, scan_all=scan_all, opening=opening)
    index, test = plan.index, plan.test
    if queue := fit.long_queue(recipe, plan.stream.samples_per_epoch):
        note(queue)
    chosen = plan.stream.selection
    if chosen and chosen.kept < len(chosen.weight) and type(method).allocate is not Method.allocate:
        raise UserError(
            f"data.train: leaves out {len(chosen.weight) - chosen.kept:,} of {len(chosen.weight):,} samples, but "
            f"{recipe.method.name} has a vector for each and would compare with those that are never read; expected "
            "shards of the chosen ones: eagleray prepare webdataset --where"
        )
    if method.classes is not None:
        labels.check_labels("data.train", index, method.classes, every=True)
        if test:
            labels.check_labels("data.test", test, method.classes, every=False)
    for key, data in ("data.test", test), ("data.train", index):
        unread = labels.unread_labels(data) if test and data else ""
        if test and data and not data.labelled and (test.labelled or index.labelled):
            why = f": {unread}" * bool(unread)
            both = "evaluation needs labels in both data.train and data.test, or none"
            raise UserError(f"{key}: has no labels{why}; {both}")
        if unread:
            note(f"{key}: {unread}; evaluation leaves them out")
    if test:
        try:
            check_class_names(index, test, ("data.train", "data.test"))
        except UserError as e:
            if method.classes is not None:
                raise
            note(f"{e}; the scores of this run compare the numbers")
    return plan


def check_method(recipe: Recipe) -> Method:
    """Build the method on the meta device, without memory for weights, check that the recipe fits it, and return it.

    Raises UserError when it cannot be built, when its backbone cannot take images of a size that the recipe asks for,
    and when keys exclude each other."""
    check_lora(recipe)
    with torch.device("meta"):
        method = build_method(recipe)
        check_dropped_patches(recipe, method)
        o = recipe.optim
        optim.param_groups(
            method,
            decay=o.decay,
            constant=o.constant_lr,
            layer_decay=o.layer_decay,
            undecayed_lr_scale=o.undecayed_lr_scale,
        )
        if o.clip_patch and not patch_parameters(method):
            raise UserError(f"optim.clip_patch={o.clip_patch}: no patch projection is trained")
        backbone = method.export()
        stated = {v.size for v in recipe.views} | {recipe.evaluate.size}
        for size in sorted(stated | {size for phase in recipe.curriculum for size in phase.sizes}):
            given = "" if size in stated else "curriculum: "
            with explained(f"{given}backbone.name={recipe.backbone.name}: cannot take {size} pixel images", Exception):
                found = backbone(torch.empty(2, recipe.planes, size, size)).pooled.shape[1]
            if found != backbone.dim:
                raise UserError(
                    f"backbone.name={recipe.backbone.name}: its features have {found} "
                    f"channels, but the model states {backbone.dim}"
                )
        *early, full = recipe.phases
        method.check_views(_empty(full.views, recipe.planes))
        method.check_crops([view for view in full.views for _ in range(view.count)])
        for i, phase in enumerate(early):
            with named(f"curriculum.{i}.sizes={[v.size for v in phase.views]}"):
                method.check_views(_empty(phase.views, recipe.planes))
    check_parallel(recipe, method)
    check_start(recipe, method)
    return method


def check_dropped_patches(recipe: Recipe, method: Method) -> None:
    """Raises UserError when patches of views are to be dropped, but the method or `start.anchor` reads all of them."""
    rate = recipe.backbone.options.get("patch_drop_rate", 0)
    keys = [f"curriculum.{i}.keep={phase.keep:g}" for i, phase in enumerate(recipe.curriculum) if phase.keep < 1]
    if not rate and not keys:
        return
    key = keys[0] if keys else f"backbone.options.patch_drop_rate={rate}"
    if not method.pooled_only:
        raise UserError(f"{key}: {recipe.method.name} reads every patch of a view; expected all of them, 1")
    if recipe.start and recipe.start.anchor:
        raise UserError(f"{key}: start.anchor={recipe.start.anchor:g} compares every patch of a view; leave one out")


def _empty(views: Sequence[View], planes: int) -> list[torch.Tensor]:
    return [torch.empty(2, planes, v.size, v.size) for v in views for _ in range(v.count)]


def check_shares(recipe: Recipe, norm_group: int | None) -> None:
    """Raises UserError when the batch cannot be divided among every number of ranks that the run may have, or when
    batch norm's groups of `norm_group` images do not fit the ranks' shares."""
    least, most = recipe.ranks
    for ranks in range(least, most + 1):
        shares = rows(recipe.data.lanes, recipe.optim.batch, ranks=ranks)
        if norm_group:
            check_groups(norm_group, shares)


def check_parallel(recipe: Recipe, method: Method) -> None:
    """Raises UserError when the recipe asks for FSDP, but the method is not tested with it, or another key needs
    unsharded weights on every rank."""
    if recipe.parallel == "ddp":
        return
    check_shardable(method, recipe.method.name)
    for key in keys_of_whole_weights(recipe):
        raise UserError(f"parallel=fsdp: does not work with {key}; leave it out, or use parallel=ddp")


def keys_of_whole_weights(recipe: Recipe) -> list[str]:
    """Return the keys of a recipe that need unsharded weights on every rank, so that they do not work with FSDP."""
    optim = recipe.optim
    keys = {"optim.micro_batch=auto": optim.micro_batch == "auto", "optim.reduce=bf16": optim.reduce == "bf16"}
    keys |= {"compile=true": recipe.compile is True, "backbone.lora": recipe.backbone.lora is not None}
    return [key for key, given in keys.items() if given]


def check_lora(recipe: Recipe) -> None:
    """Raises UserError when LoRA adapters would be trained on random frozen weights, or with `start.what=all`."""
    if recipe.backbone.lora and not (recipe.start or recipe.backbone.weights):
        raise UserError("backbone.lora: random weights would stay as they are; expected backbone.weights or start.from")
    if recipe.backbone.lora and recipe.start and recipe.start.what == "all":
        raise UserError("start.what=all: does not work with backbone.lora, whose adapters are new; use method")


def check_start(recipe: Recipe, method: Method) -> None:
    """Raises UserError when other keys of the recipe contradict its `start`."""
    if recipe.start is None:
        return
    given = f"start.from={recipe.start.source}"
    if recipe.backbone.weights:
        raise UserError(f"{given}: backbone.weights names other weights; give one of the two")
    if method.supervised:
        raise UserError(f"{given}: {recipe.method.name} learns from labels; backbone.weights is for fine-tuning")
    if recipe.start.freeze and recipe.start.what == "all":
        raise UserError("start.freeze: does not work with start.what=all, whose heads need not be warmed; use method")
    if recipe.start.freeze >= recipe.optim.epochs:
        raise UserError(
            f"start.freeze={recipe.start.freeze:g}: the backbone would never be trained, with "
            f"optim.epochs={recipe.optim.epochs}"
        )
    if recipe.start.anchor and recipe.parallel == "fsdp":
        raise UserError("start.anchor: does not work with parallel=fsdp, which divides the weights; use parallel=ddp")
    if recipe.start.what == "all" and recipe.parallel == "fsdp":
        raise UserError("start.what=all: does not work with parallel=fsdp, which divides the moments; use method")


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Raises UserError when a device lacks the number format or the compiler that the recipe asks for."""
    compute_dtype(recipe.precision, device)
    compiles(recipe.compile, device)


def differences(recipe: Recipe, stored: Recipe) -> str:
    """Return a text on the first keys that make two recipes different experiments, or an empty text if none does."""
    return config.differences(recipes.identity(stored), recipes.identity(recipe))


def check_continues(plan: Plan, state: Mapping[str, Any]) -> None:
    """Raises UserError when a checkpoint's `state` was made with another recipe, other data or another order than the
    plan's. The error names the keys, or the shard, that differ."""
    recipe, out = plan.recipe, plan.recipe.out
    if state["digest"] != recipes.digest(recipe):
        differ = differences(recipe, config.check(Recipe, yaml_text.parse(state["recipe"]), f"{out}/checkpoints"))
        raise UserError(f"{out}: its checkpoints were made with another recipe: {differ}")
    for name, what in CHANGED.items():
        if state["origin"][name] != plan.origin[name]:
            found = changed_shards(state["shards_read"], plan.shards_text) if name == "data" else ""
            named = f" ({found})" if found else ""
            raise UserError(
                f"{out}: {what} that the run has read by up to step {state['step']}, so it cannot continue "
                f"exactly{named}; put back what was there, or begin another run with start.from={out}"
            )


def changed_shards(before: str, now: str) -> str:
    """Return which shards differ between two texts of `Plan.shards_text`, or an empty string if none does."""
    old, new = (dict(line.rpartition("\t")[::2] for line in text.split("\n")[:-1]) for text in (before, now))
    names = {name: "an image of the folder" if image_folder.is_part(name) else readable(name) for name in old | new}
    said = [f"{names[name]} is gone" for name in old if name not in new]
    said += [f"{names[name]} has changed{_revision(was)}" for name, was in old.items() if new.get(name, was) != was]
    said += [f"{names[name]} is new" for name in new if name not in old]
    return ", ".join(said[:1] + [f"and {len(said) - 1} more"] * (len(said) > 1))


def _revision(shard: str) -> str:
    """Return a clause with the Hugging Face revision that a line of `Plan.shards_text` states, or an empty string."""
    _, _, revision = shard.partition(" hf:")
    return f", which was of revision {revision}" if revision else ""
