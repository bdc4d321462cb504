"""The documentation as a site: every page is linked, every public name described, the picture up to date."""

import re
from importlib import util
from pathlib import Path
from xml.etree import ElementTree

import elementgrad

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    listed = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    described = re.findall(r"^::: elementgrad\.(\w+)$", pages, re.MULTILINE) + ["at"] * ("heading: at" in pages)
    assert sorted(described) == sorted(elementgrad.__all__)


def test_the_picture_is_what_its_script_draws():
    spec = util.spec_from_file_location("picture", ROOT / "tools" / "picture.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.picture()
    words = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert {"36 of 36 move", "1 of 36 move", "zero:", "dead-relu"} <= set(words)
    assert drawn == module.FILE.read_text()


def test_the_site_asks_for_nothing_from_elsewhere():
    """No fonts, scripts or styles of others: what the pages need is in the repository or in the theme."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert not re.search(r"https?://", config + (DOCS / "assets" / "site.css").read_text())
