"""Write what a method has beside its backbones, such as heads, centres and queues, so that another run can go on with
it."""

from pathlib import Path

from safetensors.torch import save_file

from eagleray.base.errors import UserError
from eagleray.engine.export_files import FILE, HEADS
from eagleray.engine.serialise import sha256
from eagleray.exports.source import Source


def write(source: Source, folder: Path) -> None:
    """Write these tensors by the names that all methods have in common. Raises UserError when there are none."""
    if not source.parts:
        raise UserError(f"--heads: {source.recipe.method.name} has nothing beside its backbone")
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in source.parts.items()}
    about = {"method": source.recipe.method.name, "backbone": source.role, "sha256": sha256(folder / FILE)}
    save_file(state, folder / HEADS, about)
