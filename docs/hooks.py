"""What mkdocs needs to know about this repository: pages and files outside docs/, and that no page needs a network.

Pages link to each other by their places in the repository, so that the links are right on a Git host too. Here a link
to a file outside docs/ becomes one to a copy of it in the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "deploy/README.md")
UNSOUGHT = re.compile(r"decisions/|recipes/|log\.md|CHANGELOG\.md")
FENCE = re.compile(r"^(```.*?^```)", re.M | re.S)
LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and a copy of every other file that a page links to."""
    for page in PAGES:
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    for file in list(files.documentation_pages()):
        for _, target in LINK.findall(FENCE.sub("", Path(file.abs_src_path).read_text())):
            path = repository_path(file.src_uri, target)
            name = site_path(path) if path else None
            if path and name and name.startswith("files/") and not files.get_file_from_path(name):
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links by places in the repository into links by places in the site. Pages that are looked up by name and not
    by their words stay out of the search, where they would hide the guides."""
    page.meta["search"] = {"exclude": UNSOUGHT.match(page.file.src_uri) is not None}
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda m: link(page.file.src_uri, m[1], m[2]), part) for part in parts[::2]]
    return "".join(parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would load something from another place. Raises PluginError."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output


def link(page: str, text: str, target: str) -> str:
    """Return a link of a page as it is in the site; a folder without a page is no link there."""
    path = repository_path(page, target)
    if path is None:
        return f"{text}({target})"
    name, anchor = site_path(path), target.partition("#")[2]
    if name is None:
        return text[1:-1]
    return f"{text}({posixpath.relpath(name, posixpath.dirname(page) or '.')}{'#' + anchor if anchor else ''})"


def repository_path(page: str, target: str) -> str | None:
    """Return the place in the repository that a link names; None for addresses and for anchors of the same page."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    source = page if page in PAGES else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def site_path(path: str) -> str | None:
    """Return the place in the site of a file of the repository; a page's source in place of the page."""
    if (ROOT / path).is_dir():
        path += "/README.md"
        if not (ROOT / path).exists():
            return None
    if path == "README.md" or path in PAGES:
        return path
    if path.startswith("docs/") and not path.endswith(".py"):  # scripts are no pages: exclude_docs
        return path.removeprefix("docs/")
    # Browsers show text, and offer to keep most other kinds of files.
    return f"files/{path}" if path.endswith(".png") else f"files/{path}.txt"
