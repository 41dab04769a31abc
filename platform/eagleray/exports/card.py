"""Write the card of an export: what the network is, how images are prepared, what was measured and how, and where the
data and the weights come from. The card is the export's README.md, which the Hugging Face Hub shows."""

import contextlib
import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

from eagleray import config
from eagleray.base.errors import Outage, UserError
from eagleray.evaluation import results
from eagleray.evaluation.target import Target
from eagleray.exports.compare import Difference
from eagleray.exports.source import Source
from eagleray.runs.command import read_environment
from eagleray.runs.metrics import CLASSIFIER_TOP1, KNN_TOP1, LINEAR_TOP1, METRICS, UNTRAINED
from eagleray.runs.provenance import Provenance, statements
from eagleray.runs.summary import EXPORTED, read_summary
from eagleray.views.preprocessing import Preprocessing

LIBRARIES = {"timm-hub": "timm", "torch.export": "pytorch"}  # the Hub's names of libraries that are not ours


def card(source: Source, to: str, program: str, difference: Difference, facts: Provenance) -> str:
    """Return the card of an export as Markdown. `program` loads the export; its variable `folder` is the path."""
    images, says, numbers = source.preprocessing, statements(facts), list(measured(source))
    licence = f"license: {facts.licence}\n" if facts.licence else ""
    sections = [
        f"---\n{licence}library_name: {LIBRARIES.get(to, to)}\npipeline_tag: image-feature-extraction\n"
        f"tags:\n- image-feature-extraction\n- self-supervised\n---\n\n{says['backbone']}",
        f"{says['parameters']} Eagleray pretrained it with {facts.method}.\n",
        f'## Use\n\n```python\nfolder = "."  # this one\n\n{program}```\n',
        "## Preprocessing\n\n"
        f"The short side becomes {images.resize} pixels ({images.interpolation}, antialiased), then the centre "
        f"{images.size} x {images.size} pixels are cut out. {colours(images)} the mean "
        f"{list(images.mean)} is taken off and they are divided by {list(images.std)}.\n",
        "## Numbers\n\n" + ("\n".join(table(numbers)) if numbers else "None were measured of these weights.") + "\n",
        says["licence"],
        f"## Origin\n\n{says['digests']}{says['forgotten']}" + "\n".join(f"* {line}" for line in origin(source)) + "\n",
        f"Loaded again in a new process and compared with the weights of the run, on ten photographs: {difference}.\n",
        says["recipe"],
    ]
    return "\n".join(sections)


def colours(images: Preprocessing) -> str:
    """Return the beginning of a sentence on how the values of image files become pixels from 0 to 1."""
    if not images.channels:
        return "Colours are scaled to 0 to 1, then"
    mean, std = ([getattr(channel, name) for channel in images.channels] for name in ("mean", "std"))
    return (
        f"Files have {len(mean)} channels, whose values are decoded first: the means {mean} become {list(images.mean)} "
        f"and the deviations {std} become {list(images.std)}, in 256 levels from 0 to 1, which cut off what is beyond. "
        "Of these levels"
    )


def origin(source: Source) -> Iterator[str]:
    """Yield lines about the run that trained the weights."""
    backbone = {k: v for k, v in config.to_plain(source.network).items() if k != "weights"}
    yield f"backbone: {json.dumps(backbone)}"
    yield f"encoder: {source.what or 'the one that the method exports'}"
    if source.steps is not None:
        done = final(source) if source.step is None else {}
        more = f", {done['images']} images, {done['epochs']} epochs" if done else ""
        yield f"training: {source.steps} steps{more}"
    packages, names = read_environment(source.folder).get("packages", {}), ("eagleray", "torch", "timm")
    yield f"trained with: {', '.join(f'{n} {packages[n]}' for n in names if n in packages) or 'unknown'}"
    yield f"exported with: {', '.join(f'{n} {importlib.metadata.version(n)}' for n in names)}"


def final(source: Source) -> dict[str, Any]:
    """Return the run's summary if its scores are those of the exported weights, else {}. They may not be: a run that is
    continued with a larger max_steps keeps the summary of its first end until it ends again."""
    summary = read_summary(source.folder) if source.evaluated else {}
    return summary if summary.get(EXPORTED, summary.get("steps", -1)) == source.steps else {}


def measured(source: Source) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each score of the exported weights: its name, value, value without training, and protocol."""
    e, summary = source.recipe.evaluate, final(source)
    crop = f"centre crop of {e.size} from {e.resize} pixels"
    limit = f", {e.limit} training images" if e.limit else ""
    for key, how in (
        (KNN_TOP1, f"{e.k} neighbours, temperature {e.temperature}, {crop}{limit}"),
        (LINEAR_TOP1, f"{e.probe_epochs} epochs, {crop}{limit}"),
        (CLASSIFIER_TOP1, f"the run's own classifier, {crop}"),
    ):
        if isinstance(summary.get(key), int | float):
            before = summary.get(key + UNTRAINED)
            untrained = results.format_number(before) if isinstance(before, int | float) else ""
            yield METRICS[key].label, results.format_number(summary[key]), untrained, f"at the end of the run: {how}"
    with contextlib.suppress(UserError, Outage):
        known = results.load(source.out)
        digest = Target("", source.backbone, source.network, e, channels=source.preprocessing.channels).digest
        own = [r for r in known if r.backbone_digest == digest]
        for row in results.rows(own, known, {}):
            yield f"{row.protocol} {row.number}", row.value, row.untrained, row.settings


def table(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of scores."""
    for line in (("Number", "Value", "Untrained", "Protocol"), ("---", "---:", "---:", "---"), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |"
