"""Renders the README for the page of the package, where links to files of the repository lead nowhere.

All else about the package is in pyproject.toml. `repository` in its `[tool.elementgrad]` is the public address of the
repository: links of the README lead there, or are left out while it is empty.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")
"""A link or picture of the repository: its mark, its text and the file."""


def render_readme(text: str, repository: str) -> str:
    """Return the README with links to a repository, or with their words alone and without pictures."""

    def render(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if repository:
            return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{target})"
        return "" if picture else words

    return RELATIVE_LINK.sub(render, text)


if __name__ == "__main__":
    address = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["elementgrad"]["repository"]
    setup(
        long_description=render_readme((ROOT / "README.md").read_text("utf-8"), address),
        long_description_content_type="text/markdown",
        project_urls={"Repository": address} if address else {},
    )
