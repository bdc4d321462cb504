"""What a click in the explorer takes, on the digits net of the tour and on a ResNet18 with pictures of 224 x 224.

`python -m benchmarks exploring` compares the session's answer with the reads of which it consists. `python -m
benchmarks.exploring` measures from click to picture in Chromium, with the explorer in a process of its own.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

import elementgrad as eg
from benchmarks.harness import Row
from elementgrad._explore.session import Session

CLICKS = 50
CASES = {
    "digits net": ("elementgrad._tour.explorer:torch_net", "elementgrad._tour.explorer:torch_image", "conv1", 150),
    "ResNet18, early layer": ("benchmarks.exploring:resnet", "benchmarks.exploring:picture", "layer1.0.conv1", 400),
}
"""The model, its input, a layer, and the most milliseconds from a click in that layer to the picture."""
PICTURE_SHOWN = """new Promise((resolve) => {
  const root = document.querySelector(".elementgrad-explore"), before = root.dataset.shown;
  let clicked = null;
  window.addEventListener("pointerup", (event) => { clicked = event.timeStamp; }, { once: true, capture: true });
  const look = () => {
    if (clicked === null || root.dataset.shown === before) requestAnimationFrame(look);
    else requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - clicked)));
  };
  look();
})"""
"""Resolves with the milliseconds from a click until the frame with its picture is drawn."""
IDLE = "() => !document.querySelector('[aria-busy], [data-busy]')"


def __getattr__(name: str) -> Any:
    """Make the ResNet18 and its picture, for a command line that names them."""
    import torch

    from tests.support.torch_resnet import ResNet18

    torch.manual_seed(0)
    if name == "resnet":
        return ResNet18().eval()
    if name == "picture":
        return torch.rand(1, 3, 224, 224)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def rows() -> Iterator[Row]:
    """Yield the session's answer to one click after another against the reads that it is made of."""
    import elementgrad._tour.explorer as digits

    models = {"digits net": (digits.torch_net, digits.torch_image)}
    models["ResNet18, early layer"] = (__getattr__("resnet"), __getattr__("picture"))
    for label, (net, image) in models.items():
        session, layer = Session(net, [image]), CASES[label][2]
        names, source = [row.name for row in session.names], session.start()["source"]
        indices = list(product(*map(range, session.names[names.index(layer)].shape)))
        random.Random(0).shuffle(indices)
        elements = cycle(indices)

        def answer(
            session: Session = session,
            elements: Any = elements,
            names: Any = names,
            layer: str = layer,
            source: int = source,
        ) -> None:
            of = {"tensor": names.index(layer), "index": next(elements)}
            session.close()  # what was read before is forgotten
            json.dumps(session.answer({"ask": "view", "tensor": source, "of": of}))

        def reads(
            net: Any = net,
            image: Any = image,
            elements: Any = elements,
            layer: str = layer,
            source: str = names[source],
        ) -> None:
            eg.value(net, image, of=layer)
            eg.grad(net, image, of=eg.at(layer)[next(elements)], wrt=source)

        yield Row(f"torch click on the {label}, answered", answer, reads, "eg.value and eg.grad", most=2.0)


def measure_clicks() -> bool:
    """Print the median from click to picture, and the server's processor time; return True if all are in bounds."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    within = True
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for label, (model, image, layer, most) in CASES.items():
            command = [sys.executable, "-m", "elementgrad", "explore", model, "--input", image, "--no-browser"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as server:
                try:
                    assert server.stdout is not None
                    page = browser.new_page(viewport={"width": 1440, "height": 900})
                    page.set_default_timeout(180_000)
                    page.goto(server.stdout.readline().strip())
                    waits, seconds = _click_around(page, layer, lambda: _processor_seconds(server.pid))
                    page.close()
                finally:
                    server.terminate()
            found = median(waits)
            within = within and found <= most
            print(
                f"{label}: click to picture {found:.0f} ms (at most {most}; median of {len(waits)}, fastest "
                f"{min(waits):.0f}, slowest {max(waits):.0f}); processor time of the server per click, with drivers, "
                f"field and code, {1e3 * median(seconds):.0f} ms; load {os.getloadavg()[0]:.1f}"
            )
        browser.close()
    return within


def _click_around(page: Any, layer: str, processor_seconds: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Click on elements of a layer here and there; return the milliseconds to the pictures, and the server's time."""
    page.locator(".eg-drivers table").wait_for()
    search = page.get_by_role("searchbox")
    search.fill(layer)
    search.press("Enter")
    page.wait_for_function("name => document.querySelector('.eg-hand-title').textContent === name", arg=layer)
    page.wait_for_function(IDLE)
    box = page.locator(".eg-centre canvas.eg-canvas").bounding_box()
    chance = random.Random(0)
    waits: list[float] = []
    seconds: list[float] = []
    while len(waits) < CLICKS:
        # In the upper part, since the last row of tiles may be half empty.
        x, y = box["x"] + chance.uniform(0, box["width"]), box["y"] + chance.uniform(0, 0.45 * box["height"])
        before = processor_seconds()
        page.evaluate(f"() => {{ window.pictureShown = {PICTURE_SHOWN}; }}")
        page.mouse.click(x, y)
        waits.append(page.evaluate("window.pictureShown"))
        page.wait_for_function(IDLE)
        seconds.append(processor_seconds() - before)
    return waits, seconds


def _processor_seconds(process: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


SUITES = {"exploring": rows}


if __name__ == "__main__":
    sys.exit(not measure_clicks())
