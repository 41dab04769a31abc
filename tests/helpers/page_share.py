"""Which commands of the pages a test runs, and how many of all."""

import re

from helpers.pages import Command, commands

# Where the commands of a whole page run, in the order of the page.
RUN = {
    "docs/begin/photos.md": "docs/test_start_pages.py",
    "docs/begin/bucket.md": "docs/test_start_pages.py",
    "docs/cluster.md": "docs/test_cluster_page.py",
    "docs/plugins.md": "docs/test_plugins_page.py",
}
FOUND = [c for c in commands() if c.whole and not re.search(r"\s\[|\.\.\.$", c.text)]  # no lines of syntax
# What docs/test_page_commands.py runs: no store, no cluster, no GPU, no model of a paper.
HERE = re.compile(
    r"(\.venv/bin/)?eagleray (list |show |init |runs |shard photos/ shards/|data stats shards/|report runs/"
    r"|export runs/mine --to timm-hub)"
)
# Pages whose commands docs/test_paper_commands.py runs on small models, but for those of NOT.
ON_SMALL = (
    "README.md",
    "docs/begin/gpu.md",
    "docs/data.md",
    "docs/evaluate.md",
    "docs/export.md",
    "docs/finetune.md",
    "docs/methods.md",
    "docs/operate/sizes.md",
    "docs/papers.md",
    "docs/plan.md",
    "docs/prepare.md",
    "docs/recipes.md",
    "docs/report.md",
    "docs/select.md",
    "docs/start.md",
    "docs/tune.md",
)
NOT = re.compile(
    r"eagleray (submit|jobs)"  # needs a cluster
    r"|timm:(?!swin_small)|https://host|dino_deitsmall16_pretrain|openimages train-images"  # need what others serve
    r"|tune (imagenet_methods|mocov3_figure5)|report SWEEP"  # are or need many trials
    r"|--coco DIR"  # needs annotations
)


def on_small(command: Command) -> bool:
    """Return whether a command runs with small models under the names of papers' ones."""
    return command.page in ON_SMALL and not here(command) and not NOT.search(command.text)


def here(command: Command) -> bool:
    """Return whether a command of a page that is not run as a whole runs alone."""
    return command.page not in RUN and bool(HERE.match(command.text))


def share() -> tuple[int, int]:
    """Return the number of commands that a test runs, and of all that a reader can type."""
    return sum(c.page in RUN or here(c) or on_small(c) for c in FOUND), len(FOUND)
