"""A hook of MkDocs: what stands in the repository's own files is shown on the site and written once.

The home page is the README, and two pages are the changelog and how to contribute; their links are turned to the pages.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a file of the repository where a page stands for one."""
    source = PAGES.get(page.file.src_uri)
    return LINK.sub(_on_the_site, (ROOT / source).read_text()) if source else markdown


def _on_the_site(link: re.Match[str]) -> str:
    """A link of the repository as one between pages."""
    target = link[1].removeprefix("docs/")
    pages = {source: page for page, source in PAGES.items()} | {"examples/README.md": "examples.md"}
    return f"]({pages.get(target, target)}{link[2] or ''})"


@event_priority(-100)  # behind the search, which makes the index
def on_post_build(*, config: Any, **_: Any) -> None:
    """The index of the search once more, as a script: pages opened from disk may not fetch it, and stop without it."""
    folder = Path(config.site_dir, "search")
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
