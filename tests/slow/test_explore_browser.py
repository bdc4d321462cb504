"""The explorer in Chromium, by mouse and by keys alone: it shows what the verbs say, and asks for nothing elsewhere."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

import elementgrad as eg
from tests.slow.test_report_browser import CHROMIUM
from tests.slow.test_report_browser import browser as browser
from tests.support.explored import NETS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
WIDTHS = {"wide": 1440, "middle": 900, "narrow": 390}
SLOW = 180_000
"""Milliseconds within which anything must have happened, however busy the machine is."""


@pytest.fixture
def opened(browser):
    """Opens explorers, and in the end sees that nothing left this machine and nothing was complained of."""
    contexts, explorers, complaints = [], [], []

    def open_(net, x, width="wide", scheme="light", **options):
        explorer = eg.explore(net, x, **options)
        explorers.append(explorer)
        context = browser.new_context(
            viewport={"width": WIDTHS[width], "height": 900},
            color_scheme=scheme,
            permissions=["clipboard-read", "clipboard-write"],
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SLOW)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: check(explorer, request.url))
        page.goto(explorer.url)
        page.locator(".eg-drivers table").wait_for()
        settle(page)
        return page

    def check(explorer, url):
        if not url.startswith((explorer.url.partition("?")[0], "data:", "blob:")):
            complaints.append(url)

    yield open_
    for context in contexts:  # a page that is there longer than its explorer complains of it
        context.close()
    for explorer in explorers:
        explorer.close()
    assert complaints == []


def to_numpy(tensor):
    from elementgrad._backends import registry

    return registry.require_backend(tensor).to_numpy(tensor)


def settle(page):
    """Wait until the page asks nothing: whatever follows an answer is asked before the page is idle again."""
    page.wait_for_function("() => !document.querySelector('[aria-busy], [data-busy]')")


@contextmanager
def new_answer(page):
    """Do something that asks for another gradient, and wait until it is shown with all that belongs to it."""
    shown = page.evaluate("document.querySelector('.elementgrad-explore').dataset.shown")
    yield
    page.wait_for_function("shown => document.querySelector('.elementgrad-explore').dataset.shown !== shown", arg=shown)
    settle(page)


def go_to(page, place):
    """Type a place into the search: its element becomes the target."""
    with new_answer(page):
        page.keyboard.press("/")
        search = page.get_by_role("searchbox")
        search.fill(place)
        search.press("Enter")


def walk(page):
    """Walk one layer back by the key; return the target."""
    with new_answer(page):
        page.keyboard.press("w")
    return page.locator(".eg-question code").text_content()


def copy_code(page, copy=None):
    """Copy the line of code, by the key if no other way is given; return it."""
    page.evaluate("navigator.clipboard.writeText('')")
    (copy or (lambda: page.keyboard.press("c")))()
    script = """async (limit) => {
      const end = performance.now() + limit, pause = () => new Promise((resolve) => setTimeout(resolve, 20));
      let text = await navigator.clipboard.readText();
      for (; !text && performance.now() < end; text = await navigator.clipboard.readText()) await pause();
      return text;
    }"""
    return page.evaluate(script, SLOW)


def test_a_click_on_the_canvas_picks_the_element_under_the_pointer(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    page.get_by_role("treeitem", name=re.compile("^conv1, activation")).click()
    page.wait_for_function("() => document.querySelector('.eg-hand-title').textContent === 'conv1'")
    settle(page)
    canvas = page.locator(".eg-centre canvas.eg-canvas")
    canvas.hover(position={"x": 20, "y": 20})
    readout = page.locator(".eg-centre .eg-readout").text_content()
    with new_answer(page):
        canvas.click(position={"x": 20, "y": 20})
    place, value = readout.split(" = ")
    assert page.locator(".eg-question").text_content() == f"What drives {place} = {value}"
    assert np.float32(value) == to_numpy(eg.value(net, x, of=place))
    picture = page.locator(".eg-answer canvas.eg-canvas")
    picture.hover(position={"x": 30, "y": 30})
    element, slope = page.locator(".eg-answer .eg-readout").text_content().split(" · ")
    expected = to_numpy(eg.grad(net, x, of=place, wrt=element.split(" = ")[0]))
    assert np.float32(slope.removeprefix("gradient ")) == expected
    page.get_by_text(re.compile("receptive field, 3 . 3")).wait_for()


def choose_source(page, name):
    """Choose a source in the list, and wait for its gradient."""
    options = page.locator(".eg-source-choice option").all_text_contents()
    page.get_by_label("Source", exact=True).select_option(next(one for one in options if one.split()[0] == name))
    script = "name => document.querySelector('.eg-answer canvas.eg-canvas').ariaLabel.includes(`respect to ${name}:`)"
    page.wait_for_function(script, arg=name)
    settle(page)


@pytest.mark.parametrize("framework", NETS)
def test_the_verdict_on_a_dead_element_is_that_of_explain(opened, framework):
    net, x = NETS[framework]()
    values = to_numpy(eg.value(net, x, of="conv1"))
    last = framework == "tensorflow"
    row, column = map(int, np.argwhere((values[0, ..., 0] if last else values[0, 0]) < 0)[0])
    dead = f"conv1[0, {row}, {column}, 0]" if last else f"conv1[0, 0, {row}, {column}]"
    page = opened(net, x)
    go_to(page, "output[0, 1]")
    choose_source(page, "conv1")
    page.locator(".eg-answer canvas.eg-canvas").focus()
    for key in ["ArrowRight", *["ArrowDown"] * row, *["ArrowRight"] * column]:  # the first goes to the first cell
        page.keyboard.press(key)
    assert page.locator(".eg-answer .eg-readout").text_content().startswith(f"{dead} = ")
    page.keyboard.press("Enter")
    page.locator(".eg-verdict .eg-sentence").wait_for()
    diagnosis = eg.explain(net, x, of="output[0, 1]", wrt=dead)
    assert diagnosis.cause == "dead-relu"
    assert page.locator(".eg-verdict .eg-sentence").text_content() == diagnosis.sentence
    assert page.locator(".eg-verdict").text_content().endswith(f"fix: {diagnosis.fix}")
    assert float(page.locator(".eg-derivative strong").text_content()) == 0


def test_all_of_it_works_by_keys_alone(opened, tmp_path):
    net, x = NETS["torch"]()
    page = opened(net, x, labels=list("abcde"))
    press = page.keyboard.press
    press("/")
    page.keyboard.type("conv2")
    press("ArrowDown")
    press("Enter")
    page.wait_for_function("() => document.querySelector('.eg-hand-title').textContent === 'conv2'")
    settle(page)
    while page.evaluate("!document.activeElement.closest('.eg-centre canvas')"):
        press("Tab")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        press(key)
    assert page.locator(".eg-centre .eg-readout").text_content().startswith("conv2[0, 0, 1, 1] = ")
    with new_answer(page):
        press("Enter")
    assert walk(page).startswith("relu")
    assert page.locator(".eg-crumbs li").count() == 3
    press("[")
    page.wait_for_function("() => document.querySelector('.eg-question code').textContent.startsWith('conv2')")
    press("]")
    page.wait_for_function("() => document.querySelector('.eg-question code').textContent.startsWith('relu')")
    press(".")
    page.wait_for_function("() => document.querySelector('.eg-question code').textContent.startsWith('relu[1, ')")
    settle(page)
    assert to_numpy(eval(copy_code(page))).shape == (2, 1, 8, 8)
    with page.expect_download() as started:
        press("r")
    started.value.save_as(tmp_path / "report.html")
    assert "relu[1, " in (tmp_path / "report.html").read_text()
    press("?")
    page.get_by_role("dialog").wait_for()
    press("Escape")


def test_a_slider_moves_an_input_element_and_the_numbers_follow(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "conv2[0, 0, 1, 1]")
    page.locator(".eg-drivers tbody button").first.click()
    element = page.locator(".eg-drivers tbody button").first.text_content()
    slider = page.locator(".eg-slider input[type=range]")
    slider.focus()
    for _ in range(3):
        with new_answer(page):
            page.keyboard.press("ArrowRight")
    number = page.locator(".eg-slider input[type=number]")
    value = number.input_value()
    number.fill("")
    number.press("Enter")
    assert float(number.input_value()) == float(value)
    edited = eg.at(x)[eg.Place.parse(element).index].set(float(value))
    target = page.locator(".eg-question .eg-value").text_content().removeprefix(" = ")
    assert np.float32(target) == to_numpy(eg.value(net, edited, of="conv2[0, 0, 1, 1]"))
    slope = page.locator(".eg-derivative strong").text_content()
    assert np.float32(slope) == to_numpy(eg.grad(net, edited, of="conv2[0, 0, 1, 1]", wrt=element))
    assert "1 element is edited" in page.locator(".eg-edits").text_content()
    page.get_by_role("button", name="Reset").click()
    page.wait_for_function("() => document.querySelector('.eg-edits').textContent === ''")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_every_width_in_light_and_dark(opened, width, scheme):
    net, x = NETS["torch"]()
    page = opened(net, x, width, scheme, labels=["<script>alert(1)</script>", "b", "c", "d", "e" * 200])
    page.locator(".eg-drivers tbody button").first.click()
    page.locator(".eg-shares table").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width]
    paper = page.evaluate("getComputedStyle(document.querySelector('.elementgrad-explore')).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
    texts = "[...document.querySelectorAll('h1, h2, p, button, select, canvas')]"
    outside = f"{texts}.filter((one) => one.getBoundingClientRect().right > innerWidth + 1).length"
    assert page.evaluate(outside) == 0
    cut = "[...document.querySelectorAll('.eg-stage')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.evaluate(cut) == 0
    for canvas in page.locator("canvas.eg-canvas").all():
        assert canvas.get_attribute("aria-label")


def test_a_slow_read_can_be_cancelled(opened):
    import threading

    import torch

    gate, calls = threading.Event(), []

    def slow(x):
        calls.append(1)
        if len(calls) > 3:
            gate.wait(60)
        return x * 2

    gate.set()
    page = opened(slow, torch.rand(4))
    calls.extend([1] * 3)
    gate.clear()
    before = page.locator(".eg-question code").text_content()
    page.locator(".eg-centre canvas.eg-canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel").click()
    page.locator(".eg-progress").wait_for(state="hidden")
    gate.set()
    page.wait_for_timeout(500)
    assert page.locator(".eg-question code").text_content() == before


def hold(page, *questions):
    """Hold back questions of the page until the function that is returned is called."""
    held, released = [], []

    def handle(route):
        asked = (route.request.post_data_json or {}).get("ask")
        if asked in questions and not released:
            held.append(route)
        else:
            route.continue_()

    def release():
        released.append(True)
        for route in held:
            route.continue_()

    page.route("**", handle)
    return release


def press_first_driver(page):
    """Move to the first driver and press the mouse on it; return its text."""
    driver = page.locator(".eg-drivers tbody button").first
    driver.scroll_into_view_if_needed()
    box = driver.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
    page.mouse.down()
    return driver.text_content()


def test_a_click_on_a_driver_counts_though_the_list_is_drawn_anew(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "conv2[0, 1, 2, 2]")
    release = hold(page, "drivers")
    page.keyboard.press("/")
    page.get_by_role("searchbox").fill("conv2[0, 1, 3, 3]")
    page.get_by_role("searchbox").press("Enter")
    page.wait_for_function("() => document.querySelector('.eg-question').textContent.includes('3, 3]')")
    pressed = press_first_driver(page)
    release()
    page.wait_for_timeout(500)
    page.mouse.up()
    page.locator(".eg-shares table").wait_for()
    assert pressed in page.locator(".eg-derivative code").text_content()
    total = eg.contributions(net, x, of="conv2[0, 1, 3, 3]", wrt=pressed).total
    assert np.float32(page.locator(".eg-shares td").last.text_content()) == to_numpy(total)
    settle(page)
    gradient = to_numpy(eg.grad(net, x, of="conv2[0, 1, 3, 3]", wrt="input"))
    first = page.locator(".eg-drivers tbody tr").first.locator("td").nth(1).text_content()
    assert abs(np.float32(first)) == np.abs(gradient).max()


def test_a_click_on_a_driver_is_not_undone_by_what_was_asked_before(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "conv2[0, 1, 2, 2]")
    release = hold(page, "find")
    page.keyboard.press("/")
    page.get_by_role("searchbox").fill("conv2[0, 1, 3, 3]")
    page.get_by_role("searchbox").press("Enter")
    press_first_driver(page)
    page.mouse.up()
    page.locator(".eg-shares table").wait_for()
    release()
    page.wait_for_timeout(500)
    assert page.locator(".eg-shares table").is_visible()
    assert page.locator(".eg-question code").text_content() == "conv2[0, 1, 2, 2]"


def test_the_drivers_stay_under_the_pointer_when_the_shares_come(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "conv2[0, 1, 2, 2]")
    press_first_driver(page)
    before = page.locator(".eg-drivers tbody button").first.bounding_box()["y"]
    page.mouse.up()
    page.locator(".eg-shares table").wait_for()
    assert abs(page.locator(".eg-drivers tbody button").first.bounding_box()["y"] - before) < 2


def test_the_gap_between_tiles_belongs_to_the_nearest(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "conv1[0, 0, 0, 0]")
    canvas = page.locator(".eg-centre canvas.eg-canvas")
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] / 2 - 1, "y": 20})  # between the first tile and the second
    assert page.locator(".eg-centre .eg-readout").text_content().startswith("conv1[0, 0, 0, 5] = ")
    canvas.hover(position={"x": box["width"] / 2 + 1, "y": 20})
    assert page.locator(".eg-centre .eg-readout").text_content().startswith("conv1[0, 1, 0, 0] = ")


def test_the_breadcrumb_has_the_layers_that_a_walk_steps_over(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "output[0, 1]")
    walk(page)
    assert page.locator(".eg-passed").all_text_contents() == ["via head"]
    assert page.get_by_text("output[0, 1] is the same number as head[0, 1]; the walk went on").is_visible()
    assert page.locator(".eg-question code").text_content().startswith("flat[0, ")
    page.locator(".eg-passed button").click()
    page.wait_for_function("() => document.querySelector('.eg-hand-title').textContent === 'head'")
    settle(page)
    assert page.locator(".eg-centre .eg-readout").text_content().startswith("head[0, 1] = ")
    assert page.locator(".eg-question code").text_content().startswith("flat[0, ")


def test_a_narrow_window_has_the_bars_and_numbers_of_the_drivers(opened):
    net, x = NETS["torch"]()
    page = opened(net, x, "narrow")
    go_to(page, "conv2[0, 1, 2, 2]")
    rows = "[...document.querySelectorAll('.eg-drivers tbody tr')]"
    sizes = page.evaluate(f"{rows}.map((row) => parseFloat(getComputedStyle(row).backgroundSize))")
    assert sizes[0] == 100
    assert sizes == sorted(sizes, reverse=True)
    ends = page.evaluate(f"{rows}.map((row) => row.children[3].getBoundingClientRect().right)")
    assert max(ends) < WIDTHS["narrow"] - 5


def test_going_to_an_element_turns_to_the_page_with_its_channel(opened):
    import torch

    torch.manual_seed(0)
    net, x = torch.nn.Conv2d(3, 130, 2), torch.rand(1, 3, 6, 6)
    page = opened(net, x)
    for place, channels in (("output[0, 100, 2, 1]", "64 to 127"), ("output[0, 129, 0, 3]", "128 to 129")):
        go_to(page, place)
        assert f"Channels {channels} of 130" in page.locator(".eg-centre .eg-notes").text_content()
        value = page.locator(".eg-centre .eg-readout").text_content().removeprefix(f"{place} = ")
        assert np.float32(value) == to_numpy(eg.value(net, x, of=place))
    with new_answer(page):
        page.keyboard.press("[")
    assert "Channels 64 to 127 of 130" in page.locator(".eg-centre .eg-notes").text_content()
    page.locator(".eg-drivers tbody button").first.click()
    page.locator(".eg-shares table").wait_for()
    assert page.locator(".eg-shares thead th").all_text_contents() == ["operation", "share"]
    cut = "[...document.querySelectorAll('.eg-shape')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.evaluate(cut) == 0


def test_a_long_strip_can_be_hit_and_has_the_exact_number_of_each_element(opened):
    import torch

    weights, x = torch.linspace(2, 1, 20_000), torch.rand(1, 8, 20_000)

    def net(input):
        return input + (input * weights).sum(-1, keepdim=True)

    page = opened(net, x)
    go_to(page, "output[0, 3, 2000]")
    canvas = page.locator(".eg-centre canvas.eg-canvas")
    box = canvas.bounding_box()
    assert box["height"] > 90
    assert page.locator(".eg-centre .eg-readout").text_content().startswith("output[0, 3, 2000] is one of several")
    canvas.hover(position={"x": box["width"] / 2, "y": box["height"] * 5.5 / 8})
    readout = page.locator(".eg-centre .eg-readout").text_content()
    assert readout.startswith("output[0, 5, ")
    # A driver that has a larger one in its cell.
    gradient = to_numpy(eg.grad(net, x, of="output[0, 3, 2000]", wrt="input"))
    drivers = page.locator(".eg-drivers tbody button")
    assert drivers.all_text_contents()[:3] == ["input[0, 3, 2000]", "input[0, 3, 0]", "input[0, 3, 1]"]
    drivers.nth(2).click()
    page.locator(".eg-shares table").wait_for()
    assert "input[0, 3, 1]" in page.locator(".eg-derivative").text_content()
    assert np.float32(page.locator(".eg-derivative strong").text_content()) == gradient[0, 3, 1]


def test_a_place_in_another_example_is_shown(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "conv1[1, 2, 3, 4]")
    value = page.locator(".eg-centre .eg-readout").text_content().removeprefix("conv1[1, 2, 3, 4] = ")
    assert np.float32(value) == to_numpy(eg.value(net, x, of="conv1[1, 2, 3, 4]"))
    assert page.get_by_label("Example", exact=True).input_value() == "1"


def test_the_gradient_zooms_to_the_field_of_one_target_after_the_other(opened):
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 5), torch.nn.ReLU(), torch.nn.Conv2d(2, 2, 5))
    page = opened(net, torch.rand(1, 3, 64, 64))
    go_to(page, "0[0, 1, 20, 30]")
    page.keyboard.press("f")
    page.get_by_text("Rows 18 to 26 of 64. Columns 28 to 36 of 64.").wait_for()
    go_to(page, "2[0, 1, 40, 2]")
    page.get_by_text("Rows 37 to 51 of 64. Columns 0 to 13 of 64.").wait_for()
    page.keyboard.press("[")
    page.get_by_text(re.compile("^At each pixel the largest gradient")).wait_for()


def test_the_end_of_a_long_name_can_be_read(opened):
    import torch

    net = torch.nn.Sequential()
    for what in ("queries", "keys", "values"):
        net.add_module(f"a_module_with_a_long_name_projection_of_{what}_to_the_heads", torch.nn.Tanh())
    page = opened(net, torch.rand(1, 3))
    page.get_by_role("searchbox").fill("projection")
    cut = "[...document.querySelectorAll('.eg-name')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.locator(".eg-node").count() == 3
    assert page.evaluate(cut) == 0


def test_a_cancelled_read_leaves_what_is_shown(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    page.locator(".eg-drivers tbody button").first.click()
    page.locator(".eg-shares table").wait_for()
    settle(page)
    parts = (".eg-hand-title", ".eg-question", ".eg-drivers", ".eg-element", ".eg-source-choice option:checked")
    before = [page.locator(part).text_content() for part in parts]
    code = copy_code(page)
    release = hold(page, "view")
    page.keyboard.press("/")
    page.get_by_role("searchbox").fill("conv1[1, 2, 3, 4]")
    page.get_by_role("searchbox").press("Enter")
    page.wait_for_function("() => document.querySelector('.eg-hand-title').textContent === 'conv1'")
    page.locator(".eg-centre canvas.eg-canvas").click(position={"x": 5, "y": 5})  # it still shows the other tensor
    page.get_by_role("button", name="Cancel").click()
    release()
    settle(page)
    assert [page.locator(part).text_content() for part in parts] == before
    assert copy_code(page) == code
    assert page.get_by_label("Example", exact=True).input_value() == "0"
    with new_answer(page):
        page.keyboard.press("]")
    assert page.locator(".eg-question code").text_content() == "conv1[1, 2, 3, 4]"


def test_an_error_of_the_model_takes_the_place_of_the_picture(opened):
    import torch

    net, broken = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)), []

    def breaks(x):
        if broken:
            raise RuntimeError("out of luck")
        return net(x)

    page = opened(breaks, torch.rand(1, 3), "wide")
    page.locator(".eg-drivers tbody button").first.click()
    page.locator(".eg-slider").wait_for()
    settle(page)
    broken.append(True)
    with new_answer(page):
        page.locator(".eg-slider input[type=number]").fill("0.5")
        page.locator(".eg-slider input[type=number]").press("Enter")
    assert page.locator(".eg-centre .eg-readout").text_content() == "RuntimeError: out of luck"
    assert page.locator(".eg-answer > .eg-callout").text_content() == "RuntimeError: out of luck"
    assert not page.locator("canvas.eg-canvas:visible, .eg-drivers table, .eg-derivative").count()
    broken.clear()
    with new_answer(page):
        page.locator(".eg-slider input[type=number]").fill("0.25")
        page.locator(".eg-slider input[type=number]").press("Enter")
    assert page.locator("canvas.eg-canvas:visible").count() == 2
    assert page.locator(".eg-drivers table").count() == 1
    assert page.locator(".eg-derivative strong").is_visible()


def test_of_many_tokens_there_is_one_for_each_row_of_cells(opened):
    import torch

    torch.manual_seed(0)
    net, tokens = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Tanh()), torch.randint(9, (1, 3000))
    page = opened(net, tokens, tokens=[f"t{place}" for place in range(3000)])
    go_to(page, "output[0, 2900, 3]")
    chips = page.locator(".eg-answer .eg-chips button")
    assert 256 < chips.count() <= 512
    assert page.locator(".eg-answer .eg-chips [aria-pressed=true]").count() == 0
    chips.get_by_text("t2900", exact=True).click()
    page.locator(".eg-shares table").wait_for()
    assert "0[0, 2900, 3]" in page.locator(".eg-derivative").text_content()
    assert page.locator(".eg-answer .eg-chips [aria-pressed=true]").text_content() == "t2900"
    inside = page.evaluate("""() => {
      const chip = document.querySelector('.eg-answer .eg-chips [aria-pressed=true]').getBoundingClientRect();
      const box = document.querySelector('.eg-answer .eg-chips').getBoundingClientRect();
      return chip.top >= box.top && chip.bottom <= box.bottom;
    }""")
    assert inside


def test_numbers_that_are_not_finite_can_be_seen_without_any_that_are(opened):
    import torch

    page = opened(lambda x: x / 0, torch.tensor([1.0, -2.0]))
    page.wait_for_function("() => document.querySelector('.eg-thumb[data-thumb=\"1\"]').width === 2")
    pixels = page.evaluate("""() => ['.eg-centre canvas.eg-canvas', '.eg-thumb[data-thumb="1"]'].map((selector) => {
      const canvas = document.querySelector(selector), { width, height } = canvas;
      const row = [...canvas.getContext('2d').getImageData(0, Math.floor(height / 2), width, 1).data];
      return [0.25, 0.75].map((part) => row.slice(4 * Math.floor(part * width)).slice(0, 4));
    })""")
    assert pixels[0] == pixels[1]
    assert len({*map(tuple, pixels[0])}) == 2
    assert all(pixel[3] == 255 for pixel in pixels[0])


def test_a_search_without_a_match_says_so_and_an_error_points_at_its_place(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    search = page.get_by_role("searchbox")
    search.fill("nope")
    assert page.locator(".eg-node").all_text_contents() == ["No name has this in it"]
    search.fill("conv2[0, 0")
    search.press("Enter")
    page.get_by_role("alert").wait_for()
    *_, place, mark = page.get_by_role("alert").locator("code").text_content().split("\n")
    assert (place.strip(), mark.strip()) == ("conv2[0, 0", "^")
    with new_answer(page):
        search.fill("conv2[0, 0, 1, 1]")
        search.press("Enter")
    assert not page.get_by_role("alert").is_visible()


def test_tiles_are_beside_each_other_where_there_is_room(opened):
    net, x = NETS["torch"]()
    page = opened(net, x)
    go_to(page, "conv2[0, 0, 1, 1]")
    box = page.locator(".eg-centre canvas.eg-canvas").bounding_box()
    assert box["width"] > 2 * box["height"]
