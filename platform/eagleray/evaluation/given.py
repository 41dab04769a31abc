"""Check a command's backbone and data before PyTorch is imported to read them."""

from eagleray.base.errors import UserError
from eagleray.base.numbers_given import whole
from eagleray.data.index import list_data
from eagleray.evaluation.results import UNTRAINED
from eagleray.models import names
from eagleray.models.network import is_public
from eagleray.runs import sources
from eagleray.storage.store import folder_of


def check_backbone(name: str, architecture: str | None = None) -> None:
    """Raises UserError when `name` is a local path without a backbone. With `architecture`, `name` is a file of
    tensors, which only has to exist. The content of URLs is checked when they are read."""
    source = sources.absolute(name.removeprefix(UNTRAINED))
    if is_public(source):
        names.check_weights(source)
        return
    if architecture:
        sources.check_exists(source)
    else:
        sources.check_weights(source)


def check_data(url: str) -> None:
    """Raises UserError when a local folder, file or pattern has neither shards nor images. URLs are checked later."""
    if folder_of(url):
        list_data(url)


def check_gpus(gpus: bool, workers: int) -> None:
    """Raises UserError when `workers` is negative or no whole number, and when `gpus` is true and `workers` is 0, as
    only Ray tasks are given GPUs."""
    workers = workers and whole("workers", workers, 0)
    if gpus and not workers:
        raise UserError("--gpus: is for the Ray tasks of --workers N; without them this process uses its own GPU")
