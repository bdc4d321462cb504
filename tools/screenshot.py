"""Takes docs/assets/explorer.png, the explorer on the digits net of the tour: `python tools/screenshot.py`.

Needs playwright and Chromium, whose path may be given as CHROMIUM.
"""

import io
import os
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import elementgrad as eg
from elementgrad._tour import explorer

FILE = Path(__file__).parent.parent / "docs" / "assets" / "explorer.png"
SIZE = {"width": 1280, "height": 800}


def take(net: object, image: object) -> bytes:
    """Return the page with an element of a feature map as its target."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as driver, eg.explore(net, image, labels=[str(digit) for digit in range(10)]) as served:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(served.url)
        page.locator(".eg-drivers table").wait_for()
        page.get_by_role("searchbox").fill("conv2[0, 5, 1, 2]")
        page.get_by_role("searchbox").press("Enter")
        page.get_by_text("receptive field, 5").wait_for()
        page.wait_for_timeout(2000)
        page.mouse.move(5, 795)
        page.evaluate("() => document.activeElement.blur()")
        picture = page.screenshot()
        browser.close()
    return picture


if __name__ == "__main__":
    image = Image.open(io.BytesIO(take(explorer.torch_net, explorer.torch_image)))
    image.convert("RGB").quantize(240, dither=Image.Dither.NONE).save(FILE, optimize=True)
    print(FILE, FILE.stat().st_size)
