"""The explorer from the names to a walk of three steps, in Chromium, once by mouse and once by keys alone.

Whatever the page shows is held against the verbs, to the last digit.
"""

import re
from itertools import islice, product

import numpy as np
import pytest

import elementgrad as eg
from elementgrad._tour.data import WORDS
from elementgrad._tour.runner import Tour
from tests.slow.test_explore_browser import copy_code, new_answer, settle, to_numpy
from tests.slow.test_explore_browser import opened as opened
from tests.slow.test_report_browser import CHROMIUM
from tests.slow.test_report_browser import browser as browser
from tests.support.explored import NETS
from tests.support.torch_resnet import ResNet18

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
CENTRE, ANSWER = ".eg-centre", ".eg-answer"


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """The two models of the tour, trained."""
    tour = Tour("torch", tmp_path_factory.mktemp("tour"))
    names = {}
    for cell in ("setup", "net", "reader"):
        names |= tour.run_shared(cell).names
    return names


def resnet(_):
    import torch

    torch.manual_seed(0)
    return ResNet18().eval(), torch.rand(1, 3, 224, 224)


def read_sentence(tour):
    sentence = tour["tokens"][:1, :-1]
    return tour["reader"], sentence


MODELS = {
    "digits net of the tour": (lambda tour: (tour["net"], tour["image"]), "conv2"),
    "GRU of the tour": (read_sentence, "head"),
    "ResNet18": (resnet, "layer1.0.conv1"),
    "PyTorch": (lambda _: NETS["torch"](), "conv2"),
    "Keras": (lambda _: NETS["tensorflow"](), "conv2"),
    "JAX": (lambda _: NETS["jax"](), "conv2"),
}


class Mouse:
    """A user who points and clicks, and types nothing but a search."""

    def __init__(self, page):
        self.page = page

    def take(self, name):
        search = self.page.get_by_role("searchbox")
        search.fill(name)
        self.page.get_by_role("treeitem", name=re.compile(f"^{re.escape(name)}, (activation|output)")).click()
        search.fill("")

    def move_over(self, side):
        """Point at one element after another, from the upper left."""
        canvas = self.page.locator(f"{side} canvas.eg-canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        for down, right in product((0.3, 0.5, 0.7, 0.9, 0.1), repeat=2):
            self.at = box["width"] * right, box["height"] * down
            canvas.hover(position={"x": self.at[0], "y": self.at[1]})
            yield

    def choose(self, side):
        self.page.locator(f"{side} canvas.eg-canvas").click(position={"x": self.at[0], "y": self.at[1]})

    def choose_first_driver(self):
        self.page.locator(".eg-drivers tbody button").first.click()

    def press(self, name, _):
        self.page.locator(ANSWER).get_by_role("button", name=name, exact=True).click()


class Keys:
    """A user who has no mouse."""

    def __init__(self, page):
        self.page = page

    def take(self, name):
        self.page.keyboard.press("/")
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(name)
        self.page.keyboard.press("ArrowDown")
        while not self.page.evaluate(f"document.activeElement.ariaLabel.startsWith('{name}, ')"):
            self.page.keyboard.press("ArrowDown")
        self.page.keyboard.press("Enter")

    def go_to(self, selector):
        while not self.page.evaluate(f"document.activeElement.matches('{selector}')"):
            self.page.keyboard.press("Tab")

    def move_over(self, side):
        self.go_to(f"{side} canvas.eg-canvas")
        for key in ["ArrowRight", *["ArrowDown", "ArrowRight"] * 20]:
            self.page.keyboard.press(key)
            yield

    def choose(self, _):
        self.page.keyboard.press("Enter")

    def choose_first_driver(self):
        self.go_to(".eg-drivers tbody tr:first-child button")
        self.page.keyboard.press("Enter")

    def press(self, _, key):
        self.page.keyboard.press(key)


def read_out(page, side):
    """Return the element under the pointer or cursor, and what else is said of it."""
    element, *rest = page.locator(f"{side} .eg-readout").text_content().split(" · ")
    name, value = element.split(" = ")
    return name, value, rest


def slope_of(rest):
    return next(np.float32(text.removeprefix("gradient ")) for text in rest if text.startswith("gradient "))


def index_of(place):
    return tuple(eg.Place.parse(place).index)


def target_of(page):
    return page.locator(".eg-question code").text_content()


@pytest.mark.parametrize("hand", [Mouse, Keys])
@pytest.mark.parametrize("case", MODELS)
def test_what_is_shown_is_what_the_verbs_say(opened, tour, case, hand):
    make, layer = MODELS[case]
    net, x = make(tour)
    page = opened(net, x, tokens=[WORDS[token] for token in x[0]] if case.startswith("GRU") else None)
    hand = hand(page)

    # The names.
    page.evaluate("""() => {
      for (let item; (item = document.querySelector('.eg-tree [aria-expanded=false] .eg-twist'));) item.click();
    }""")
    rows = page.locator(".eg-tree [data-tensor]")
    listed = set(rows.evaluate_all("items => items.map((item) => item.ariaLabel.split(', ')[0])"))
    assert listed == {row.name for row in eg.names(net, x)}
    settle(page)

    # An element of a layer, and its gradient over the source.
    hand.take(layer)
    page.wait_for_function("name => document.querySelector('.eg-hand-title').textContent === name", arg=layer)
    settle(page)
    list(islice(hand.move_over(CENTRE), 3))
    of, value, _ = read_out(page, CENTRE)
    assert np.float32(value) == to_numpy(eg.value(net, x, of=layer))[index_of(of)]
    with new_answer(page):
        hand.choose(CENTRE)
    assert page.locator(".eg-question").text_content() == f"What drives {of} = {value}"
    source = page.locator(".eg-source-choice option:checked").text_content().split()[0]
    gradient = to_numpy(eg.grad(net, x, of=of, wrt=source))
    rows = [row.locator("td").all_text_contents() for row in page.locator(".eg-drivers tbody tr").all()]
    assert len(rows) == min(20, np.count_nonzero(gradient))
    assert abs(np.float32(rows[0][1])) == np.abs(gradient).max()
    assert all(gradient[index_of(element)] == np.float32(slope) for element, slope, *_ in rows)

    # Its overlay, as far as an element that has no influence, and the verdict on that one.
    for _ in hand.move_over(ANSWER):
        dead, _, rest = read_out(page, ANSWER)
        assert slope_of(rest) == gradient[index_of(dead)]
        if slope_of(rest) == 0:
            break
    assert gradient[index_of(dead)] == 0
    hand.choose(ANSWER)
    page.locator(".eg-verdict .eg-sentence").wait_for()
    diagnosis = eg.explain(net, x, of=of, wrt=dead)
    assert page.locator(".eg-verdict .eg-sentence").text_content() == diagnosis.sentence
    if diagnosis.fix is not None:
        assert page.locator(".eg-verdict").text_content().endswith(f"fix: {diagnosis.fix}")
    settle(page)

    # The strongest driver: its number, the shares, and the code that gives it.
    hand.choose_first_driver()
    page.locator(".eg-shares table").wait_for()
    settle(page)
    slope = np.float32(page.locator(".eg-derivative strong").text_content())
    assert slope == gradient[index_of(rows[0][0])]
    shares = eg.contributions(net, x, of=of, wrt=rows[0][0])
    table = [row.locator("th, td").all_text_contents() for row in page.locator(".eg-shares tbody tr").all()]
    assert [row[0] for row in table] == [*[share.operation for share in shares], "total"]
    numbers = [*[share.value for share in shares], shares.total]
    assert [np.float32(row[-1]) for row in table] == [to_numpy(number) for number in numbers]
    code = copy_code(page, lambda: hand.press("Copy as code", "c"))
    assert to_numpy(eval(code)) == slope

    # Three steps back from the output, and one forward.
    hand.take("output")
    page.wait_for_function("() => document.querySelector('.eg-hand-title').textContent === 'output'")
    settle(page)
    next(hand.move_over(CENTRE))
    with new_answer(page):
        hand.choose(CENTRE)
    walked = [target_of(page)]
    for _ in range(3):
        with new_answer(page):
            hand.press("Walk back", "w")
        step = target_of(page)
        slopes = to_numpy(eg.grad(net, x, of=walked[-1], wrt=eg.Place.parse(step).name))
        assert np.abs(slopes).max() == abs(slopes[index_of(step)]) > 0
        walked.append(step)
    assert len({eg.Place.parse(step).name for step in walked}) == 4
    with new_answer(page):
        hand.press("Back", "[")
    assert target_of(page) == walked[-2]
