"""Define the command init, which writes a recipe for the user's own images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import eagleray
from eagleray.base.console import say, say_loading
from eagleray.base.errors import UserError, explained
from eagleray.base.files import check_local, writing
from eagleray.config.yaml_text import dump_line

if TYPE_CHECKING:
    from eagleray.datasets.survey import Survey
    from eagleray.runs.recipe import Recipe

# The shipped recipe on which a method's new recipe is based; for other methods, their first recipe on ImageNet.
BASES: Mapping[str, str] = {
    "dino": "dino_vits16_in1k_ep100",
    "ibot": "ibot_vits16_in1k_ep800",
    "dinov2": "dinov2_vits16_in1k_ep200",
    "mocov3": "mocov3_vits16_in1k_ep300",
    "byol": "byol_vits16_in1k_ep300",
    "simclr": "simclr_vits16_in1k_ep300",
    "swav": "swav_vits16_in1k_ep300",
    "lejepa": "lejepa_vits16_in1k_ep100",
    "esvit": "esvit_swint_in1k_ep300",
    "moby": "moby_swint_in1k_ep300",
    "selfpatch_moby": "selfpatch_moby_vitxs16_coco_ep200",
}
LABELLED = ("supervised", "drloc")
USUAL = 224  # side in pixels of the crops of nearly all recipes
LEAST_SIDE = 16  # smallest side in pixels of images that a backbone can divide into patches
LARGE = 2.5  # least ratio of the images' side to the crops' side at which JPEGs are decoded at reduced size
FEW = 20_000  # number of images below which public weights are recommended
RENTED = ("l4", "h100")  # kinds of GPU for which hours are forecast if this machine has no GPU
MANY = 10**6  # number of images above which a folder is slow to list and to read


def init(
    data: Annotated[
        str, typer.Argument(help="Shards or a folder of images. `init` examines some hundred of the images.")
    ] = "",
    images: Annotated[int, typer.Option(help="Number of images, if DATA is not given.", min=0)] = 0,
    size: Annotated[
        int | None,
        typer.Option(
            help="Short side of the images in pixels. By default that of the images in DATA, or 224 without DATA.",
            min=16,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Number of GPUs; 0 trains on the CPU. By default all GPUs of this machine.", min=0),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="Kind of GPU for which to forecast the hours, such as l4 or h100. May be repeated."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of one GPU per hour, in any currency.", min=0)] = None,
    method: Annotated[str, typer.Option(help="Method: a name shown by `eagleray list methods`.")] = "dino",
    file: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("my_recipe.yaml"),
) -> None:
    """Examine your images and write a recipe for them. The sizes of the images determine crops and patches; their
    number determines batch size and epochs. `init` also prints its reasons and the hours that training takes."""
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
    from eagleray.cli.early import may_have_gpu
    from eagleray.datasets.survey import survey
    from eagleray.runs import accelerators

    base = base_of(method)
    for kind in gpu or ():
        accelerators.find(kind)
    seen = survey(data) if data else None
    number = seen.images if seen else images
    count, machine = (gpus, "") if gpus is not None else (1, "") if gpu else here(may_have_gpu())
    recipe = text(base, images=number, size=size, gpus=count, data=data, seen=seen, machine=machine)
    with writing(f"--out {file}"):
        file.write_text(recipe)
    for line in recipe.splitlines():
        say(f"  {line}")
    say(f"{file}: `eagleray show {file}` prints it with every default")
    if number > MANY:
        say("For so many images, shards are faster than a folder: `eagleray shard FOLDER shards/`.")
    for line in forecasts(file, number, seen, gpu, count, price):
        say(line)
    say(f"train     eagleray pretrain {file}{'' if data else ' data.train=DATA'}")


def here(may_have_gpu: bool) -> tuple[int, str]:
    """Return the number of GPUs of this machine, and their names and memory as text."""
    if not may_have_gpu:
        return 0, "this machine has no GPU"
    say_loading()
    from eagleray.base import devices

    memory = devices.memory_size(devices.current()) or 0
    names = devices.names()
    return len(names), f"{', '.join(names)}, {memory / 2**30:.0f} GiB each" if names else "PyTorch finds no GPU here"


def forecasts(
    file: Path, images: int, seen: "Survey | None", kinds: Sequence[str] | None, gpus: int, price: float | None
) -> Iterator[str]:
    """Yield a line about memory, hours and cost of a recipe for each kind of GPU in `kinds`, by default for the GPU of
    this machine or, without one, for the kinds in RENTED."""
    say_loading()
    from eagleray.runs import recipe
    from eagleray.runs.local_forecast import loader_rate

    rate = loader_rate(recipe.load(str(file)), seen.files if seen else ())
    rented = not kinds and not gpus
    if rented:
        yield f"here      `eagleray plan {file}` measures how long this CPU takes"
    named: Sequence[str | None] = RENTED if rented else kinds or (None,)
    for kind in named:
        asked: dict[str, Any] = {
            "gpu": kind,
            "gpus": max(gpus, 1),
            "images": images,
            "input_rate": rate,
            "price": price,
        }
        name = f"{max(gpus, 1)} x {kind or 'GPU of this machine'}"
        what = "if rented" if rented else "plan"
        for how in ("", " with optim.micro_batch=auto", " with optim.checkpointing=true"):
            try:
                result = eagleray.plan(str(file), ["data.train=null", *how.split()[1:]], **asked)
                break
            except UserError as e:
                if "GiB on each" not in str(e):  # only `refusal`, for a run that does not fit, says this
                    raise
                why = str(e)
        else:
            yield f"{what:<9} {name}: {why}"
            continue
        hours = result.hours or 0.0
        money = f", {result.cost:,.2f} at {price:g} an hour" if result.cost else ""
        yield (
            f"{what:<9} {name}{how}: {result.memory_needed / 2**30:.1f} of "
            f"{result.memory_of_device / 2**30:.1f} GiB, {result.images_per_s:,.0f} images/s, {hours:,.1f} h, "
            f"{hours * result.ranks:,.1f} GPU-hours{money}; the {result.limit} limits it"
        )


def check_names(data: str, file: Path) -> None:
    """Raises UserError when a name is not UTF-8, as a recipe has to be, or `file` does not end in .yaml or .yml."""
    for what, name in (("DATA", data), ("--out", str(file))):
        other = f"{what} {name!a}: the name is not UTF-8, as a recipe has to be; rename it"
        with explained(other, UnicodeEncodeError, why=False):
            name.encode()
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {file}: expected a file that ends in .yaml or .yml, as the name of a recipe does")


def base_of(method: str) -> str:
    """Return the name of the shipped recipe on which a method's new recipe is based. Raises UserError for an unknown
    method and for one that needs labels."""
    from eagleray.cli.recipes import facts
    from eagleray.config import bundled

    known = {f["method"]: f["name"] for f in reversed([facts(n) for n in bundled.names() if "_in1k_" in n])}
    known |= BASES
    fitting = {name: base for name, base in known.items() if name not in LABELLED}
    if method not in fitting:
        needs = ", which needs labels" if method in LABELLED else ""
        raise UserError(f"--method {method}{needs}: expected one of {', '.join(sorted(fitting))}")
    return fitting[method]


def text(
    base: str,
    *,
    images: int,
    size: int | None = None,
    gpus: int = 1,
    data: str = "",
    seen: "Survey | None" = None,
    machine: str = "",
) -> str:
    """Return the YAML of a recipe that changes a shipped one, `base`; a comment gives the reason for each value. The
    short side of the images is `size` pixels. Without `size` it is taken from `seen`, a survey of the images, and
    without that it is 224. Raises UserError for too few images."""
    from eagleray.config import bundled
    from eagleray.runs import fit, recipe

    side = size or (seen.sides[1] if seen else USUAL)
    said, loaded = bundled.recipe(base), recipe.load(base)
    values = fit.values_for(loaded, images, gpus=gpus, size=max(side, LEAST_SIDE))
    own = [fit.Value("data.train", data, "")] if data else []
    if seen and not size and seen.formats["JPEG"] > seen.looked / 2 and side >= LARGE * USUAL:
        why = f"JPEGs of {seen.width} x {seen.height} pixels are decoded at an eighth to a half of their size"
        own.append(fit.Value("data.decode", "scaled", why))
    about = seen.lines() if seen else [f"{images:,} images, of {side} pixels by --size or the usual ones of recipes"]
    where = f"{gpus} GPU(s)" if gpus else "the CPU"
    head = [
        *(f"# {line}" for line in about),
        f"# For {where}{': ' + machine if machine else ''}; crops are {crops(side)}.",
        *(f"# {line}" for line in advice(loaded, images, side, seen)),
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


def crops(side: int) -> str:
    """Return a text on how large crops are for images whose shorter side has `side` pixels."""
    if side < USUAL:
        return f"as large as the images, whose shorter side is {side} pixels, where the backbone can take that"
    if side < LARGE * USUAL:
        return f"of the recipe's usual size, as the shorter side is {side} pixels"
    return (
        f"of the recipe's usual size, though images are {side / USUAL:.0f} times as large: details below "
        f"{side / USUAL:.0f} pixels are lost; where they matter, cut the images up before"
    )


def advice(loaded: "Recipe", images: int, side: int, seen: "Survey | None") -> Iterator[str]:
    """Yield lines of advice that the recipe's values do not follow: on weights to start from, and on further keys."""
    from eagleray.runs.fit import PUBLIC, SMALL

    network = PUBLIC.removeprefix("timm:").partition(".")[0]
    if images < FEW:
        yield "Few images teach a backbone little from random weights: public weights may serve you better as they are."
    if images < FEW and loaded.backbone.name == network and side >= SMALL and not loaded.backbone.options:
        yield "To continue from some, where the Hub can be reached, take the recipe continue_dinov3_vits16 or, with"
        yield "weights under Apache-2.0, continue_dinov2_vits14."
    if seen and seen.channels not in (1, 3):
        yield "Images of such channels need data.channels, which `eagleray data stats --channels` prints."


def _lines(tree: Mapping[str, Any], indent: str = "") -> Sequence[str]:
    lines: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        elif isinstance(value.value, list) and value.value and isinstance(value.value[0], Mapping):
            lines += [f"{indent}{key}: # {value.why}", *(f"{indent}  - {dump_line(item)}" for item in value.value)]
        else:
            lines.append(f"{indent}{key}: {dump_line(value.value)}" + (f" # {value.why}" if value.why else ""))
    return lines
