"""Check the backbone and the data that a command is given, before PyTorch is imported to read them."""

from eagleray.base.errors import UserError
from eagleray.data.index import list_data
from eagleray.evaluation.results import UNTRAINED
from eagleray.models import names
from eagleray.models.network import is_public
from eagleray.runs import sources
from eagleray.storage.store import folder_of


def check_backbone(name: str, architecture: str | None = None) -> None:
    """Raises UserError when a command names a backbone as a path, with timm's name of the architecture of a file of
    tensors, and there is none. A store is asked later."""
    source = sources.absolute(name.removeprefix(UNTRAINED))
    if is_public(source):
        names.check_weights(source)
        return
    if architecture:
        sources.check_exists(source)
    else:
        sources.check_weights(source)


def check_data(url: str) -> None:
    """Raises UserError when a folder, a file or a pattern holds no shards and no images. A store is asked later."""
    if folder_of(url):
        list_data(url)


def check_gpus(gpus: bool, workers: int) -> None:
    """Raises UserError when GPUs are asked for without the Ray tasks that they are for."""
    if gpus and not workers:
        raise UserError("--gpus: is for the Ray tasks of --workers N; without them this process uses its own GPU")
