"""Reports in a real browser, as wide as a desk or a phone: they render, ask for nothing, and their buttons work."""

import os
import shutil

import numpy as np
import pytest
import torch

import elementgrad as eg
from elementgrad._show.page import (
    Callout,
    Code,
    Facts,
    Heading,
    Image,
    NumbersTable,
    Page,
    PartGroup,
    Prose,
    Section,
    StepList,
    Table,
)

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
WIDTHS = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Reports of every sort, and a page of all parts with long words in them."""
    folder = tmp_path_factory.mktemp("reports")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Conv2d(2, 2, 3))
    image = torch.rand(1, 1, 8, 8)
    eg.report(folder / "gradient.html", net, image, of="output[0, 1, 2, 2]", wrt="input", title="What does it see?")
    eg.report(folder / "cut.html", lambda x: x.detach().sum(), torch.ones(3), wrt="x[1]")
    eg.report(folder / "trained.html", eg.trainable(torch.nn.Linear(4, 3), ["weight[0, :]", "bias[1]"]))
    long = "a_very_long_name_without_any_gap_" * 8
    parts = [
        Prose(long),
        Prose(f"`{long}` and `code`", ticks=True),
        Heading(long),
        PartGroup(long, [Code(f"{long} = {long}"), Facts([(long, long)])], "good"),
        Code(f"{long} = {long}"),
        Code("def f(x):\n    return x[0] + 1.5  # 'half'\n\nprint('f', None)"),
        Code(long, python=False),
        Facts([(long, long)]),
        Callout(long, [long], "bad"),
        StepList([(1, long, False, long), (2, long, True, long)]),
        Table([long, "b"], [[long, "1"]], "a note"),
        Image.of(np.arange(6.0).reshape(2, 3), title=long),
        NumbersTable.of(np.float32([[0.1, -2.5], [np.nan, np.inf]]), "a/b c"),
    ]
    Page(long, [Section(long, parts) for _ in range(6)], long).write(folder / "parts.html")
    return folder


@pytest.fixture
def opened(browser, folder):
    """Open a report; at the end check that it requested nothing and logged no error."""
    contexts, complaints = [], []

    def open_(name, width="desk", scheme="light", **options):
        context = browser.new_context(
            viewport={"width": WIDTHS[width], "height": 844}, color_scheme=scheme, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked(request.url))
        page.goto((folder / f"{name}.html").as_uri())
        return page

    def asked(url):
        if not url.startswith(("file:", "data:", "blob:")):
            complaints.append(url)

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gradient", "cut", "trained", "parts"])
def test_reports_render_at_every_width(opened, name, width, scheme):
    page = opened(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
    assert page.locator("h1").is_visible()
    for image in page.locator("figure img").all():
        assert image.get_attribute("alt")
        assert image.evaluate("image => image.complete && image.naturalWidth > 0")
    shown = page.locator(f"img.on-{scheme}").all()
    assert all(image.is_visible() for image in shown)
    assert page.locator("figure img:visible").count() == len(shown)
    texts = "[...document.querySelectorAll('h1, h2, p, dl, .finding, button')]"
    assert page.evaluate(f"{texts}.filter(one => one.getBoundingClientRect().right > innerWidth + 1).length") == 0


def test_words_stand_out_from_the_paper(opened):
    """At least 4.5 to 1, in every colour that text has."""
    contrast = """
    () => {
      const light = (text) => {
        const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(
          (part) => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const paper = (one) => {
        const colour = getComputedStyle(one).backgroundColor;
        return colour === "rgba(0, 0, 0, 0)" && one.parentElement ? paper(one.parentElement) : colour;
      };
      const texts = [...document.querySelectorAll("h1, h2, p, dt, dd, th, td, code, code span, a, button, strong")];
      return Math.min(...texts.map((one) => {
        const [a, b] = [light(getComputedStyle(one).color), light(paper(one))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      }));
    }
    """
    for scheme in ("light", "dark"):
        assert opened("parts", scheme=scheme).evaluate(contrast) >= 4.5


def test_the_theme_can_be_chosen(opened):
    page = opened("gradient", scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    button = page.locator("#theme")
    assert button.text_content() == "Theme: auto"
    button.click()
    assert button.text_content() == "Theme: light"
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    assert page.locator("img.on-light").first.is_visible()
    button.click()
    assert button.text_content() == "Theme: dark"
    assert page.evaluate(paper) == dark
    button.click()
    assert button.text_content() == "Theme: auto"


def test_numbers_are_downloaded_and_copied(opened, tmp_path):
    page = opened("parts", permissions=["clipboard-read", "clipboard-write"])
    expected = "axis0,axis1,gradient\n0,0,0.1\n0,1,-2.5\n1,0,nan\n1,1,inf\n"
    with page.expect_download() as started:
        page.get_by_role("button", name="Download .csv").first.click()
    assert started.value.suggested_filename == "a-b-c.csv"
    started.value.save_as(tmp_path / "n.csv")
    assert (tmp_path / "n.csv").read_text() == expected
    with page.expect_download() as started:
        page.get_by_role("link", name="Download .npy").first.click()
    started.value.save_as(tmp_path / "n.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "n.npy"), np.float32([[0.1, -2.5], [np.nan, np.inf]]))
    page.locator(".files .copy").first.click()
    page.get_by_text("Copied").first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == expected
    page = opened("trained", permissions=["clipboard-read", "clipboard-write"])
    with page.expect_download() as started:
        page.get_by_role("link", name="Download .csv").click()
    started.value.save_as(tmp_path / "t.csv")
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == "element,before,after,change"
    assert len(lines) == 6
    assert lines[1].startswith('"weight[0, 0]",')


def test_it_can_be_read_without_scripts(opened):
    page = opened("gradient", java_script_enabled=False)
    assert page.locator("button:visible").count() == 0
    assert page.get_by_role("link", name="Download .npy").is_visible()
