"""Define the command init, which writes a recipe for one's own images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eagleray.base.console import out, say
from eagleray.base.errors import UserError
from eagleray.base.files import check_local, writing
from eagleray.config import yaml_text

# The recipe that each method starts from, where it is not its first one on ImageNet.
BASES: Mapping[str, str] = {
    "dino": "dino_vits16_in1k_ep100",
    "ibot": "ibot_vits16_in1k_ep800",
    "dinov2": "dinov2_vits16_in1k_ep200",
    "mocov3": "mocov3_vits16_in1k_ep300",
    "byol": "byol_vits16_in1k_ep300",
    "simclr": "simclr_vits16_in1k_ep300",
    "swav": "swav_vits16_in1k_ep300",
    "moco": "moco_resnet50_in1k_ep200",
    "lejepa": "lejepa_vits16_in1k_ep100",
    "esvit": "esvit_swint_in1k_ep300",
    "moby": "moby_swint_in1k_ep300",
    "selfpatch": "selfpatch_vits16_in1k_ep200",
    "selfpatch_moby": "selfpatch_moby_vitxs16_coco_ep200",
}
LABELLED = ("supervised", "drloc")
MANY = 10**6  # images; from here on a folder is slow to list and to read


def register(app: typer.Typer) -> None:
    app.command()(init)


def init(
    data: Annotated[str, typer.Argument(help="Shards, or a folder of images. The images in it are counted.")] = "",
    images: Annotated[int, typer.Option(help="Number of images, if DATA is not given.", min=0)] = 0,
    size: Annotated[int, typer.Option(help="Short side of the images in pixels.", min=16)] = 224,
    gpus: Annotated[int, typer.Option(help="Number of GPUs; 0 for the CPU.", min=0)] = 1,
    method: Annotated[str, typer.Option(help="Method: a name shown by `eagleray list methods`.")] = "dino",
    file: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("my_recipe.yaml"),
) -> None:
    """Write a recipe for your own images, with batch, epochs, queue and momentum that fit their number."""
    check_local("--out", file)
    check_names(data, file)
    with writing(f"--out {file}"):
        exists = file.exists()
    if exists:
        raise UserError(f"--out {file}: already exists; give another --out")
    if not data and not images:
        raise UserError("expected shards or a folder of images, or their number as --images N")
    if data and images:
        raise UserError(f"--images {images}: the images in {data} are counted; give one of the two")
    images = images or count(data)
    recipe = text(base_of(method), images=images, size=size, gpus=gpus, data=data)
    with writing(f"--out {file}"):
        file.write_text(recipe)
    out.print(f"{file}: for {images} images; `eagleray show {file}` prints it with every default", markup=False)
    if images > MANY:
        out.print("For so many images, shards are faster than a folder: `eagleray shard FOLDER shards/`.")
    out.print(f"train     eagleray pretrain {file}{'' if data else ' data.train=DATA'}", markup=False)


def check_names(data: str, file: Path) -> None:
    """Raise UserError when the recipe could not be read at the name of its file, or could not name its data."""
    for what, name in (("DATA", data), ("--out", str(file))):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{what} {name!a}: the name is not UTF-8, as a recipe has to be; rename it") from None
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {file}: expected a file that ends in .yaml or .yml, as the name of a recipe does")


def base_of(method: str) -> str:
    """Return the name of the shipped recipe on which a method's new recipe is based. Raises UserError."""
    from eagleray.cli.recipes import facts
    from eagleray.config import bundled

    known = {f["method"]: f["name"] for f in reversed([facts(n) for n in bundled.names() if "_in1k_" in n])}
    known |= BASES
    fitting = {name: base for name, base in known.items() if name not in LABELLED}
    if method not in fitting:
        needs = ", which needs labels" if method in LABELLED else ""
        raise UserError(f"--method {method}{needs}: expected one of {', '.join(sorted(fitting))}")
    return fitting[method]


def count(data: str) -> int:
    """Return the number of images in a folder or in shards, which are indexed first. Raises UserError and Outage."""
    from eagleray.data.image_folder import holds_images, list_images
    from eagleray.data.index import open_index

    if holds_images(data):
        return len(list_images(data).sizes)
    return len(open_index(data, note=say))


def text(base: str, *, images: int, size: int = 224, gpus: int = 1, data: str = "") -> str:
    """Return the YAML of a recipe that changes a shipped one, `base`; a comment gives the reason for each value.
    Raises UserError."""
    from eagleray.config import bundled
    from eagleray.runs import fit, recipe

    said = bundled.recipe(base)
    values = fit.values_for(recipe.load(base), images, gpus=gpus, size=size)
    own = [fit.Value("data.train", data, "")] if data else []
    head = [
        f"# {images} images of {size} pixels on {f'{gpus} GPU(s)' if gpus else 'the CPU'}.",
        f"about: My images with the settings of {base}.",
        f"base: {base} # {said.about}",
    ]
    tree: dict[str, Any] = {}
    for value in own + values:
        *sections, key = value.key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[key] = value
    return "\n".join([*head, *_lines(tree)]) + "\n"


def _lines(tree: Mapping[str, Any], indent: str = "") -> Sequence[str]:
    lines: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        elif isinstance(value.value, list) and value.value and isinstance(value.value[0], Mapping):
            lines += [f"{indent}{key}: # {value.why}", *(f"{indent}  - {_flow(item)}" for item in value.value)]
        else:
            lines.append(f"{indent}{key}: {_flow(value.value)}" + (f" # {value.why}" if value.why else ""))
    return lines


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml_text.dump_line(value)
