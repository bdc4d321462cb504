"""The package as others get it: the wheel, the source distribution and the page that is rendered from the README."""

import email
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import elementgrad as eg

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:|#)[^)]+\)")
"""A link to a file, which leads nowhere outside of the repository."""


def run(*command, cwd=None):
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=True).stdout


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the wheel and the source distribution of this repository."""
    source = tmp_path_factory.mktemp("dist") / "source"
    others = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "site", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=others)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (wheel,) = dist.glob("*.whl")
    return wheel


def test_the_distributions_can_be_published(dist):
    assert run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()).count("PASSED") == 2


def test_the_page_of_the_package_has_no_dead_link_and_says_what_is_supported(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        page = email.message_from_bytes(archive.read(name))
    assert page["Version"] == eg.__version__
    assert page["Author"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= {*page.get_all("Classifier")}
    assert "Gradients, one element at a time" in page.get_payload()
    assert not LINK.search(page.get_payload())
    assert "docs/assets" not in page.get_payload()


def test_links_of_the_page_lead_to_the_repository_once_it_has_an_address():
    render = runpy.run_path(str(ROOT / "setup.py"))["render_readme"]
    page = render((ROOT / "README.md").read_text("utf-8"), "https://host.invalid/elementgrad")
    assert "[Places](https://host.invalid/elementgrad/blob/main/docs/places.md)" in page
    assert "](https://host.invalid/elementgrad/raw/main/docs/assets/verbs.svg)" in page
    assert not LINK.search(page)


def test_the_source_distribution_holds_the_whole_suite_and_what_it_reads(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        held = {name.partition("/")[2] for name in source.getnames()}
    for folder in ("tests", "docs", "examples", "locks", "tools", "benchmarks", "src/elementgrad"):
        assert {f"{folder}/{name}" for name in files(ROOT / folder) if name != "results.json"} <= held
    assert {"README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "Makefile", "mkdocs.yml"} <= held


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(python, "-m", "pip", "install", "--disable-pip-version-check", wheel, cwd=tmp_path)
    assert run(python, "-m", "elementgrad", "--version", cwd=tmp_path).strip() == f"elementgrad {eg.__version__}"
    code = "import elementgrad as eg; print(eg.__file__, eg.at('w[1, 0]').select(shape=(2, 3)).flat())"
    where, *numbers = run(python, "-c", code, cwd=tmp_path).split()
    assert tmp_path in Path(where).parents
    assert numbers == ["[3]"]
    installed = files(Path(where).parent)
    assert installed >= {"py.typed", "_show/page.html", "_tour/digits.npz", "_tour/cells/tour_torch.py"}
