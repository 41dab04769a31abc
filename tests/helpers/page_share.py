"""Which test runs a command of the pages."""

import re

from helpers.pages import Command, commands

# Where the commands of a whole page run, in the order of the page.
RUN = {
    "docs/begin/photos.md": "docs/test_start_pages.py",
    "docs/cluster.md": "docs/test_cluster_page.py",
    "docs/plugins.md": "docs/test_plugins_page.py",
}
SYNTAX = re.compile(r"\s\[[A-Za-z-]|\.\.\.$|OWNER/")
FOUND = [c for c in commands() if c.whole and not SYNTAX.search(c.text)]
# What docs/test_page_commands.py runs: no store, no cluster, no GPU, no model of a paper.
HERE = re.compile(
    r"(\.venv/bin/)?eagleray (list |show |init |runs |shard photos/ shards/|data stats shards/|report runs/"
    r"|export runs/mine --to timm-hub)"
)
# What docs/test_head_commands.py runs on a cluster; docs/test_paper_commands.py runs all else of these pages.
ON_HEAD = re.compile(r"eagleray (submit|jobs|logs|stop)\b")
HEAD_PAGES = ("README.md", "docs/begin/cluster.md", "docs/jobs.md")
SMALL_PAGES = (
    "README.md",
    "docs/backbone/README.md",
    "docs/begin/better.md",
    "docs/begin/gpu.md",
    "docs/data.md",
    "docs/evaluate.md",
    "docs/export.md",
    "docs/finetune.md",
    "docs/images.md",
    "docs/methods.md",
    "docs/papers.md",
    "docs/plan.md",
    "docs/recipes.md",
    "docs/report.md",
    "docs/select.md",
    "docs/start.md",
    "docs/tune.md",
)


def on_small(command: Command) -> bool:
    """Return whether a command runs with small models under the names of papers' ones."""
    return command.page in SMALL_PAGES and not here(command) and not ON_HEAD.match(command.text)


def on_head(command: Command) -> bool:
    """Return whether a command of these pages runs on a real head of Ray, with small models too."""
    return command.page in HEAD_PAGES and bool(ON_HEAD.match(command.text))


def here(command: Command) -> bool:
    """Return whether a command of a page that is not run as a whole runs alone."""
    return command.page not in RUN and bool(HERE.match(command.text)) and "s3://" not in command.text


def runs(command: Command) -> bool:
    """Return whether a test runs a command."""
    return command.page in RUN or here(command) or on_small(command) or on_head(command)
