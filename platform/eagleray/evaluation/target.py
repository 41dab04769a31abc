"""Load the backbone to evaluate: from a run, timm or a file of tensors, or with random weights."""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError, reworded
from eagleray.config import plugins
from eagleray.config.channels import Channels
from eagleray.engine import world
from eagleray.engine.export import read_export
from eagleray.engine.export_files import export_in
from eagleray.evaluation import results
from eagleray.evaluation.results import UNTRAINED
from eagleray.models import weights
from eagleray.models.backbone import Backbone
from eagleray.models.batch_norm import group_batch_norms
from eagleray.models.network import HF, TIMM, Network
from eagleray.models.pixels import OURS, Pixels, conversion, first_convolution
from eagleray.models.token_linear import on_device
from eagleray.protocols.digests import digest, weights_digest
from eagleray.protocols.settings import Bank, Evaluate
from eagleray.runs.build import build_method
from eagleray.runs.command import read_environment
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import pretrained, restore
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import absolute
from eagleray.storage import store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A backbone to evaluate, where it is from, and the evaluation settings of its recipe."""

    name: str  # name in the command, with absolute paths
    backbone: Backbone
    network: Network
    settings: Evaluate
    recipe: Recipe | None = None  # recipe of the run; None if the backbone is not from a run
    run: str | None = None  # folder or s3:// URL of the run
    pixels: Pixels = OURS  # mean and std with which its training normalised pixels
    channels: Channels = ()  # channels of its images; empty: red, green and blue

    @property
    def untrained(self) -> bool:
        """Tells whether the weights are random."""
        return self.name.startswith(UNTRAINED)

    @property
    def architecture(self) -> str:
        """The digest of the network's settings and of its plug-in, but not of its weights."""
        plugin = plugins.plugin_of(self.network.name, "backbone")
        return digest(self.network.arguments | ({"plugin": plugin.sha256} if plugin else {}))

    @cached_property
    def digest(self) -> str:
        """The digest of the architecture, the weights, the mean and std of training pixels, and the channels."""
        return weights_digest(self.backbone, self.architecture, tuple(self.pixels), *self.channels)

    @property
    def published(self) -> dict[str, float]:
        """The numbers that the paper reports for the recipe of the run; empty if there is no run or no such number."""
        if not self.run or not self.recipe:
            return {}
        command = read_environment(run_store(self.run).view).get("command")
        return results.published(command, config.to_plain(self.recipe)) if command else {}


@dataclass(frozen=True)
class Inputs:
    """The names of a command's backbone and data, which are sent to the processes that read them.

    Weights may be too large to send, so each process loads them itself."""

    backbone: str  # name for `load_target`
    digest: str  # digest of the backbone
    architecture: str | None = None  # timm's name of the network, if the backbone is a file of tensors
    model: str = ""  # timm's name of the backbone's network
    given: Mapping[str, str] = field(default_factory=dict)  # URLs and folders of data by option, as the user gave them
    urls: Mapping[str, str] = field(default_factory=dict)  # the same as `given`, with absolute paths
    gpus: bool = False  # whether each worker has a GPU, and computes in bfloat16
    channels: Channels = ()  # channels of decoded images; empty: red, green and blue
    bank: Bank = "fp32"  # number format in which features are stored
    spare: str = ""  # folder or URL for an index that cannot be written next to its shards

    def load(self) -> Backbone:
        """Return the backbone on this worker's device. Raises UserError when its weights changed during the command."""
        return load_in_worker(self.backbone, self.architecture, self.digest, self.gpus)


def check_crop(size: int, resize: int) -> None:
    """Raises UserError when a crop of `size` pixels is larger than the short side `resize` of the resized image."""
    if resize < size:
        raise UserError(f"--resize {resize}: smaller than the crop of --size {size}")


def load_target(name: str, architecture: str | None = None) -> Target:
    """Load the backbone with this name, in evaluation mode.

    The name is one of these:

    * a run's folder or s3:// URL, or a checkpoint file;
    * `timm:NAME`, a pretrained model of timm;
    * an exported backbone.safetensors, or its folder;
    * a file of tensors or `hf:NAME`, whose timm name is given as `architecture`;
    * `untrained:` followed by a run or `timm:NAME`, for random weights.

    Raises UserError when there is no such backbone or its weights cannot be loaded."""
    trained = name.removeprefix(UNTRAINED)
    with reworded(("backbone.name=", ""), ("backbone.weights=", "")):  # no recipe keys in errors, as users gave a name
        source = absolute(trained)
        target = _load(source, architecture, fresh=trained != name)
    target.backbone.eval()
    return replace(target, name=(UNTRAINED if trained != name else "") + source)


@functools.lru_cache(maxsize=1)
def load_in_worker(name: str, architecture: str | None, digest: str, gpus: bool) -> Backbone:
    """Return the backbone of `load_target` on this worker's device; it stays in memory for the next task.

    Raises UserError when it cannot be loaded, or when its digest is not that of the command's backbone."""
    target = load_target(name, architecture)
    if target.digest != digest:
        raise UserError(f"{name}: the weights changed during the evaluation; name a checkpoint file, or try again")
    return on_device(target.backbone, world.device_of(gpus))


def _load(source: str, architecture: str | None, *, fresh: bool) -> Target:
    if architecture and not fresh:
        return _fill(source, Network(name=architecture))
    if source.startswith(TIMM):
        network = Network(name=source.removeprefix(TIMM))
        return Target(source, _build(network), network, Evaluate()) if fresh else _fill(source, network)
    if source.startswith(HF):
        raise UserError(f"{source}: needs --architecture NAME, the timm model that its weights fit")
    if file := export_in(source):
        backbone, network, images = read_export(file)
        settings = Evaluate(size=images.size, resize=images.resize) if images else Evaluate()
        channels = images.channels if images else ()
        return Target(source, _build(network) if fresh else backbone, network, settings, channels=channels)
    try:
        recipe, method, folder = restore(source)
    except UserError as e:
        for kind, advice in (
            ("not a checkpoint written by eagleray", "a file of tensors needs --architecture NAME"),
            ("holds no intact checkpoint", "nor is there an exported backbone.safetensors"),
        ):
            if kind in str(e):
                raise UserError(f"{e}; {advice}") from None
        raise
    backbone = build_method(recipe).export() if fresh else method.export()
    group_batch_norms(backbone, None)  # protocols that train it have other batches, and may freeze or synchronise norms
    run = source if store.may_be_folder(source) else str(folder)
    run_store(run).fetch()
    return Target(source, backbone, recipe.backbone, recipe.evaluate, recipe, run, channels=recipe.data.channels)


def _build(network: Network) -> Backbone:
    torch.manual_seed(0)
    return Backbone(**network.arguments)


def _fill(source: str, network: Network) -> Target:
    """Return a backbone with the weights of a source. Raises UserError when a parameter would stay random, or when the
    source has layers within the backbone that the network lacks."""
    backbone = _build(network)
    given = pretrained(source)
    report = weights.fill(backbone, given.unconverted()._replace(key=""), whole=True)
    parameters = dict(backbone.model.named_parameters())
    if missing := [key for key in report.missing if key.partition(" ")[0] in parameters]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{source}: lacks {missing[0]}{more} of {len(parameters)} parameters of {network.name}, which would be "
            "random; expected all of them"
        )
    if report.warning:
        log.warning("%s", report.warning)
    theirs = given.pixels or OURS
    expect(backbone, theirs)
    return Target(source, backbone, network, Evaluate(), pixels=theirs)


def expect(backbone: Backbone, theirs: Pixels) -> None:
    """Make a backbone that was trained with the pixel mean and std `theirs` accept pixels normalised with ours.

    Eagleray normalises all images in the same way, so a hook converts the input of the first convolution. It does so
    before the convolution pads the input with zeros. Raises UserError when there is no convolution of 3 input
    channels."""
    if theirs == OURS:
        return
    first = first_convolution(backbone)
    if first is None:
        raise UserError(
            f"{type(backbone.model).__name__}: was trained with pixels of {theirs}, and has no convolution of 3 "
            f"input channels that could convert them; expected {OURS}"
        )
    exact = conversion(theirs).view(2, 3, 1, 1)

    def convert(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factor, summand = exact.to(args[0])
        return (args[0] * factor + summand, *args[1:])

    first[1].register_forward_pre_hook(convert)
