#!/usr/bin/env python
"""Rewrites docs/reference/, two other pages and llms.txt from the parser, the classes of a recipe and docstrings."""

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer
import yaml
from pydantic import TypeAdapter
from pydantic.warnings import UnsupportedFieldAttributeWarning

import eagleray
from eagleray import config
from eagleray.cli import main
from eagleray.cluster import prometheus
from eagleray.config import signature
from eagleray.config.curriculum import Phase
from eagleray.config.schedule import Schedule
from eagleray.config.view import View
from eagleray.models.network import Lora, TrainedNetwork
from eagleray.runs import recipe

DOCS = Path(__file__).parent
WRITTEN = "<!-- written by docs/reference.py -->\n\n"
MARK = "<!-- from here on written by docs/reference.py -->\n"
# Sections of a recipe, in the order of the page.
SECTIONS = {
    "backbone": TrainedNetwork,
    "backbone.lora": Lora,
    "start": recipe.Start,
    "views": View,
    "curriculum": Phase,
    "data": recipe.Data,
    "optim": recipe.Optim,
    "evaluate": recipe.Evaluate,
    "monitor": recipe.Watch,
    "checkpoint": recipe.Checkpoint,
    "track": recipe.Track,
}
LISTS = ("views", "curriculum")  # of mappings with these keys
# Keys that mean the same in every method, where no comment of the method says more.
OF_METHODS = {
    "dim": "width of the vectors that the loss compares",
    "hidden": "width of the hidden layers of the heads",
    "temperature": "temperature of the similarities",
    "queue": "number of keys in each queue",
    "negatives": "number of other images' vectors from the bank that a crop is compared with",
    "momentum": "share of its weights that the momentum copy keeps in a step",
    "prototypes": "learned vectors that targets choose between: the size of the softmax",
    "patch_prototypes": "learned vectors that the targets of patches choose between",
    "bottleneck": "width of the unit vectors before the prototypes",
    "student_temp": "temperature of the student's softmax",
    "teacher_temp": "temperature of the teacher's softmax",
    "center_momentum": "share of its value that the centre keeps in a step",
    "koleo_weight": "weight of KoLeo, which spreads features apart, summed over both large crops; 0: none",
    "region_weight": "weight of the loss on regions",
    "region_loss": "mse: squared distance of the head's scores, scaled to unit length",
    "region_hidden": "width of the hidden layers of the regions' head",
    "matching": "sinkhorn: match tokens by optimal transport between the two views",
    "neighbours": "how many of the 8 patches around a patch, the most similar ones, form its target",
    "patch_weight": "weight of the loss on patches",
    "patch_hidden": "width of the hidden layers of the patches' head",
    "predictor": "false: no predictor",
    "decoder_dim": "width of the decoder",
    "decoder_depth": "blocks of the decoder",
    "decoder_heads": "attention heads of the decoder",
    "variance": "weight of the loss that keeps the deviation of each channel at 1 or above",
    "covariance": "weight of the loss on covariances between channels",
    "epsilon": "entropy of the assignments: a smaller one makes them sharper",
    "iterations": "iterations of Sinkhorn-Knopp",
    "classes": "number of classes of the labels",
    "smoothing": "label smoothing",
    "mixup": "alpha of mixup; 0: none",
    "cutmix": "alpha of CutMix; 0: none",
    "mode": "form of the loss on distances between tokens",
}


def pages() -> dict[str, str]:
    """Return the text of every page that this script writes, by its path below docs/."""
    return {
        "reference/commands.md": commands(),
        "reference/keys.md": keys(),
        "python.md": api(),
        "decisions/README.md": decisions(),
        "operate/monitoring.md": monitoring(),
        "../llms.txt": llms(),
    }


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|").replace("\n", " ") for cell in cells) + " |\n"


def head(*cells: str) -> str:
    return row(*cells) + row(*["---"] * len(cells))


def linked(text: str) -> str:
    """Return the text with links in place of the names of pages."""
    return re.sub(r"\bdocs/(\w+)\.md((?:#[\w-]+)?)", r"[\1](../\1.md\2)", text)


# Commands

VALUES = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


def commands() -> str:
    """Return the page of all commands, with their arguments and options."""
    out = f"# Commands\n\n{WRITTEN}Every command prints its part of this page with `--help`. "
    out += "The page on running explains the [exit status](../running.md#exit-status) of a command.\n"
    for name, command in walk(typer.main.get_command(main.app), "eagleray"):
        out += f"\n## {name}\n\n```\n{usage(name, command)}\n```\n\n{linked(inspect.cleandoc(command.help or ''))}\n"
        rows = [(parameter, described(parameter)) for parameter in command.params if not parameter.hidden]
        if rows:
            out += "\n" + head("Argument or option", "Default", "Meaning")
            out += "".join(row(f"`{label(p)}`", default_of(p), text) for p, text in rows)
    return out


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of the groups in it, by name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word in sorted(command.commands):
        if not command.commands[word].hidden:
            yield from walk(command.commands[word], f"{name} {word}")


def usage(name: str, command: Any) -> str:
    words = [name, *(label(p) for p in command.params if p.param_type_name == "argument")]
    return " ".join(words) + (" [OPTION]..." if any(p.param_type_name == "option" for p in command.params) else "")


def label(parameter: Any) -> str:
    """Return an argument as it stands in a usage line, or an option with the kind of its value."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        if name.startswith("["):
            return str(name)
        name += "..." if parameter.nargs == -1 else ""
        return str(name) if parameter.required else f"[{name}]"
    if parameter.is_flag:
        return "`, `".join((*parameter.opts, *parameter.secondary_opts))
    kind = parameter.type_descriptor.annotation
    return f"{parameter.opts[0]} {parameter.metavar or VALUES.get(kind, parameter.name.upper())}"


def described(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    choices = [str(choice.value) for choice in kind] if hasattr(kind, "__members__") else []
    return linked(parameter.help or "") + (f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else "")


def default_of(parameter: Any) -> str:
    value = parameter.default
    if parameter.required or value in (None, "", ()) or callable(value) or parameter.is_eager:
        return "required" if parameter.required else ""
    if getattr(parameter, "is_flag", False):
        return "yes" if value else "no"
    return f"`{getattr(value, 'value', value)}`"


# Keys of a recipe

COLUMNS = ("Key", "Value", "Default", "Meaning")
# What holds for a whole section.
NOTES = {
    "views": "The photometric operations run in the order of `apply`. Their parameters are drawn from the "
    "distributions of torchvision's transforms. Every view is normalised with ImageNet's mean and standard deviation. "
    "Consecutive views of one size share a forward pass.\n\n",
    "curriculum": "A phase sets `sizes`, `keep` or both, and begins where the previous phase ends. After the last "
    "phase, views have their own `size` and all of their patches. See "
    "[smaller views first](../running.md#smaller-views-first) and "
    "[fewer patches first](../running.md#fewer-patches-first).\n\n",
}
SCHEDULE = "[schedule](../recipes.md#schedules)"
SHARDS = "a URL, or a [list](../data.md#where-shards-may-be)"
# What is said better than by the annotation, which holds the value after it was read.
SAID = {
    "workers": "whole number, or such as `4..16`",
    "profile": "such as `10..12`, or null",
    "plugins": "list of files and modules",
    "data.train": SHARDS,
    "data.test": SHARDS,
    "data.cache_size": "bytes, or such as `200GiB`",
}


def keys() -> str:
    """Return the page of all keys: kinds of values, defaults, and whether a continued run may change them."""
    out = f"# Recipe keys\n\n{WRITTEN}This page lists every key of a [recipe](../recipes.md). "
    out += "Counts are whole numbers; shares and probabilities lie between 0 and 1; a range has two numbers, the lower "
    out += "first. A key with a mark (✓) may have another value when a run is "
    out += "[continued](../recipes.md#what-identifies-a-run).\n"
    tops = [f for f in fields(recipe.Recipe) if f.name not in SECTIONS and f.name != "method"]
    out += "\n## At the top\n\n" + table(recipe.Recipe, "", {f.name for f in tops})
    for name, kind in SECTIONS.items():
        out += f"\n## {name}\n\n" + NOTES.get(name, "") + table(kind, f"{name}[]." if name in LISTS else f"{name}.")
    out += "\n## method\n\nEach of the [methods](../methods.md) has its own keys, the arguments of its class.\n"
    for name in config.parts("eagleray.methods"):
        arguments = signature.fields(f"eagleray.methods.{name}")
        free = config.part_constant("eagleray.methods", name, "may_change")
        out += f"\n### {name}\n\n{signature.headline(f'eagleray.methods.{name}')}\n"
        if arguments:
            out += "\n" + head(*COLUMNS)
        said = meanings(inspect.getsource(signature.public_class(f"eagleray.methods.{name}")))
        for key, (kind, default) in arguments.items():
            mark = " ✓" if key in free else ""
            out += row(f"`method.{key}`{mark}", words(kind), value(default), said.get(key) or OF_METHODS.get(key, ""))
    return out


def table(kind: type, prefix: str, only: set[str] | None = None) -> str:
    """Return the table of the keys of a section."""
    out, hints = head(*COLUMNS), get_type_hints(kind, include_extras=True)
    said: dict[str, str] = {}
    for each in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        said |= meanings(inspect.getsource(each))
    for field in fields(kind):
        if only is None or field.name in only:
            name = prefix + (kind.__pydantic_fields__[field.name].alias or field.name)
            free = any(f"{name}.".startswith(f"{key}.") for key in recipe.OPERATION)
            default = field.default if field.default is not MISSING else ...
            default = field.default_factory() if field.default_factory is not MISSING else default
            default = "`runs/<recipe>`" if name == "out" else value(default)
            mark = " ✓" if free else ""
            out += row(f"`{name}`{mark}", SAID.get(name) or words(hints[field.name]), default, said.get(field.name, ""))
    return out


def meanings(source: str) -> dict[str, str]:
    """Return what the comments of a class say about its fields and the arguments of its `__init__`: the comment on the
    lines of each one or, where there is none, the lines of comment above it."""
    source = textwrap.dedent(source)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {
        t.start[0]: (t.string.lstrip("# "), not t.line[: t.start[1]].strip())
        for t in tokens
        if t.type == tokenize.COMMENT
    }
    [node] = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    places = {n.target.id: n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            places |= {argument.arg: argument for argument in function.args.kwonlyargs}  # type: ignore[dict-item]
    out = {}
    for name, place in places.items():
        lines = [comments[n][0] for n in range(place.lineno, (place.end_lineno or 0) + 1) if n in comments]
        above = place.lineno - 1
        while not lines and above in comments and comments[above][1]:
            above -= 1
        lines = lines or [comments[n][0] for n in range(above + 1, place.lineno)]
        out[name] = linked(" ".join(lines).replace("None:", "null:"))
    return out


def words(kind: Any) -> str:
    """Return the values that an annotation allows, in words."""
    warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)  # of an alias, which is read above
    if isinstance(kind, type) and is_dataclass(kind):
        return SCHEDULE if kind is Schedule else "mapping"
    if getattr(kind, "__origin__", None) is Schedule:
        return SCHEDULE
    try:
        return in_words(TypeAdapter(kind).json_schema())
    except Exception:  # of an annotation that JSON cannot say
        return "mapping"


def in_words(schema: dict[str, Any]) -> str:
    match schema:
        case {"anyOf": kinds}:
            return ", or ".join(dict.fromkeys(in_words(each) for each in kinds))
        case {"enum": values}:
            return ", ".join(f"`{each}`" for each in values)
        case {"const": single}:
            return f"`{single}`"
        case {"$ref": name}:
            return SCHEDULE if name.endswith("/Schedule") else "mapping"
        case {"type": "array", "prefixItems": items}:
            return f"list of {len(items)} numbers"
        case {"type": "array", "items": item}:
            return f"list of: {in_words(item)}"
        case {"type": "integer" | "number" as kind}:
            return {"integer": "whole number", "number": "number"}[kind] + limits(schema)
        case {"type": kind}:
            return {"string": "text", "boolean": "true or false", "object": "mapping"}.get(kind, kind)
    return "mapping"


def limits(schema: dict[str, Any]) -> str:
    """Return the range of a number; bounds that only machines have are left out."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None:
        return " above 0" if not above else f" above {above}"
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f", at least {low}" if low is not None else ""


def value(default: Any) -> str:
    """Return a default as YAML would have it."""
    if default is ...:
        return "required"
    if hasattr(default, "__dataclass_fields__"):
        given = {f.name: getattr(default, f.name) for f in fields(default) if getattr(default, f.name) != f.default}
        return f"`{{{', '.join(f'{k}: {json.dumps(v)}' for k, v in given.items())}}}`"
    return f"`{json.dumps(default, default=str)}`" if not isinstance(default, str) else f"`{default}`"


# The Python API


def api() -> str:
    """Return what people wrote of the page on Python, then everything in `eagleray`, from its docstrings."""
    out = (DOCS / "python.md").read_text().partition(MARK)[0] + MARK
    things = {name: getattr(eagleray, name) for name in eagleray.__all__ if name != "__version__"}
    for title, chosen in (
        ("Functions", {n: t for n, t in things.items() if not inspect.isclass(t)}),
        ("Classes", {n: t for n, t in things.items() if inspect.isclass(t) and not issubclass(t, Exception)}),
        ("Errors", {n: t for n, t in things.items() if inspect.isclass(t) and issubclass(t, Exception)}),
    ):
        out += f"\n## {title}\n"
        for name, thing in chosen.items():
            out += f"\n### {name}\n\n{definition(f'eagleray.{name}', thing)}{docstring(thing)}"
            if inspect.isclass(thing):
                out += "".join(members(name, thing))
    return out


def members(name: str, kind: type) -> Iterator[str]:
    """Yield the public methods and properties of a class that have a docstring of their own."""
    for member, thing in vars(kind).items():
        function = getattr(thing, "fget", None) or getattr(thing, "__func__", thing)
        if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
            shown = "" if isinstance(thing, property) else definition(f"{name}.{member}", function)
            yield f"\n#### {name}.{member}\n\n{shown}{docstring(function)}"


def definition(name: str, thing: Any) -> str:
    """Return the signature of a function or class as its source has it."""
    if not inspect.isfunction(thing) and not (inspect.isclass(thing) and "__init__" in vars(thing)):
        return ""
    function = thing.__init__ if inspect.isclass(thing) else thing
    try:
        [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError):  # of a dataclass, whose __init__ has no source
        return ""
    assert isinstance(node, ast.FunctionDef)
    parts = arguments(node.args)
    returned = f" -> {annotation(node.returns)}" if node.returns and not inspect.isclass(thing) else ""
    line = f"{name}({', '.join(parts)}){returned}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"
    return f"```python\n{line}\n```\n\n"


def arguments(node: ast.arguments) -> list[str]:
    """Return the arguments of a function as they are written, without `self`."""
    defaults = [None] * (len(node.args) - len(node.defaults)) + node.defaults
    plain = [written(a, d) for a, d in zip(node.args, defaults, strict=True) if a.arg not in ("self", "cls")]
    star = [f"*{written(node.vararg, None)}"] if node.vararg else ["*"] if node.kwonlyargs else []
    named = [written(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    return plain + star + named + ([f"**{written(node.kwarg, None)}"] if node.kwarg else [])


def annotation(node: ast.expr) -> str:
    """Return an annotation as source; one that is quoted, as its name is not imported when the program runs, as it
    is read."""
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def written(argument: ast.arg, default: ast.expr | None) -> str:
    """Return one argument with its annotation and its default."""
    kind = f": {annotation(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default else "")


def docstring(thing: Any) -> str:
    """Return a docstring as Markdown; its example becomes a block of code."""
    text, _, example = (inspect.getdoc(thing) or "").partition("Example:\n")
    out = linked(text.rstrip()).replace("](../", "](") + "\n"  # this page is not below reference/
    return out + (f"\n```python\n{textwrap.dedent(example).strip()}\n```\n" if example.strip() else "")


# Decisions


def decisions() -> str:
    """Return the list of the pages in docs/decisions/."""
    out = f"# Decisions\n\n{WRITTEN}"
    out += "One page for every choice that was hard to make, with the figures that decided it.\n\n"
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        title = page.read_text().partition("\n")[0].lstrip("# ")
        out += f"* [{title}]({page.name})\n"
    return out


# llms.txt


def llms() -> str:
    """Return the list of all pages for assistants, in the order of the site, as https://llmstxt.org describes it."""
    out = "# Eagleray\n\n> Pretrain vision transformers without labels, on Ray, straight from WebDataset shards in a "
    out += "folder or an object store.\n\nCommands, keys and functions are listed in full under Reference; "
    out += "`AGENTS.md` says how to build, test and change the code.\n"
    nav = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for title, page, section in re.findall(r"^ *- (.*): (\S+\.md)$|^  - (\w+):$", nav, re.M):
        if section:
            out += f"\n## {section}\n\n"
        elif page == "compare.md":
            out += f"\n## {title}\n\n* [{title}](docs/{page})\n"
        elif title != "Home":
            place = f"docs/{page}" if (DOCS / page).exists() else page
            out += f"* [{title}]({place})\n"
    return out


# Monitoring


def monitoring() -> str:
    """Return what people wrote of the page on monitoring, then the alert rules and the metrics of Prometheus."""
    out = (DOCS / "operate/monitoring.md").read_text().partition(MARK)[0] + MARK + "\n## Alert rules\n\n"
    rules = yaml.safe_load((DOCS.parent / "deploy/prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
    out += head("Alert", "What to look at", "For", "Condition")
    for rule in rules:
        out += row(f"`{rule['alert']}`", rule["annotations"]["action"], rule.get("for", ""), f"`{rule['expr']}`")
    out += "\n## Metrics\n\nEach metric has the labels `run` (the run's full address), `method` and `user` (the "
    out += "person who started the run). Findings also have the label `kind`.\n\n"
    out += head("Metric", "Meaning")
    about = {name: metric.meaning for name, metric in prometheus.GAUGES.items()}
    about |= dict([prometheus.PROGRESS, prometheus.PLANNED, prometheus.WANTED]) | {
        f"{prometheus.FINDINGS[0]}_total": prometheus.FINDINGS[1]
    }
    return out + "".join(row(f"`ray_{prometheus.PREFIX}{name}`", meaning) for name, meaning in about.items())


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
