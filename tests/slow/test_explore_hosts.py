"""The explorer's hosts: the command line in a process of its own, and the widget in a notebook and in Chromium."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial

import numpy as np
import pytest
import torch

import elementgrad as eg
from tests.slow.test_report_browser import CHROMIUM
from tests.slow.test_report_browser import browser as browser

NET = """
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
x = torch.ones(1, 3)
"""
QUESTIONS = """
import base64, numpy

# What the page sends comes in by the widget's own handler of messages.
sent = []
explorer.send = lambda content, buffers=None: sent.append(content)
question = {"ask": "view", "tensor": 0, "of": {"tensor": 4, "index": [0, 1]}}
explorer._handle_custom_msg({"id": 7, "message": question}, [])
explorer._handle_custom_msg({"id": 8, "message": {"ask": "shell"}}, [])
explorer._handle_custom_msg("nonsense", [])
numbers = numpy.frombuffer(base64.b64decode(sent[0]["answer"]["gradient"]), "float32")
expected = eg.grad(net, x, of="output[0, 1]", wrt="input")
print(sent[0]["id"], (numbers == expected.numpy()[0]).all(), sent[1]["answer"]["error"][:22], len(sent))
explorer.close()
"""


def ask(url, **message):
    request = urllib.request.Request(url, json.dumps(message).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read().splitlines()[-1])


def test_the_command_prints_an_address_that_answers_until_ctrl_c(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    command = [sys.executable, "-m", "elementgrad", "explore", "net.py:net", "--input", "net.py:x", "--no-browser"]
    # A shell without job control has its background jobs ignore Ctrl-C, and so would what they start.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=tmp_path, preexec_fn=heed, **pipes)
    try:
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32,}", url), process.stderr.read()
        with urllib.request.urlopen(url) as response:
            assert b'"0.weight"' in response.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url[:-1])
        code = ask(url, ask="code", tensor=0, of={"tensor": 4, "index": [0, 1]})["code"]
        assert code == "eg.grad(net, x, of='output[0, 1]', wrt='input')"
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 0


def test_a_script_serves_until_it_closes(tmp_path):
    script = f"{NET}\nimport elementgrad as eg\nexplorer = eg.explore(net, x)\nprint(explorer.url, flush=True)\n"
    script += "input()\nexplorer.close()\nprint(explorer, [p.grad for p in net.parameters()][0])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    url = process.stdout.readline().strip()
    answer = ask(url, ask="view", tensor=0, of={"tensor": 4, "index": [0, 1]})
    assert answer["gradient"]
    out, err = process.communicate("\n", timeout=60)
    assert out == "Explorer(closed) None\n", err
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


def test_a_notebook_shows_the_widget_and_its_kernel_answers(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="a notebook is run by nbclient and ipykernel")
    client = pytest.importorskip("nbclient", reason="a notebook is run by nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="a notebook is run by nbclient and ipykernel")
    pytest.importorskip("anywidget", reason="the widget is anywidget's")
    cells = [f"{NET}\nimport elementgrad as eg\nexplorer = eg.explore(net, x)\nexplorer", QUESTIONS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = notebook.cells[0].outputs[-1]["data"]
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert notebook.cells[1].outputs[0]["text"] == "7 True 'shell' is no question 2\n"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_the_widgets_front_end_runs_in_a_page_as_anywidget_drives_it(browser):
    """anywidget gives `render` a model with get, on and send; a page does so here, with the real widget behind it."""
    pytest.importorskip("anywidget", reason="the widget is anywidget's")
    from elementgrad._explore.session import Session
    from elementgrad._explore.widget import make_widget

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    x = torch.rand(1, 3)
    widget = make_widget(Session(net, [x]))
    answers, complaints = [], []
    widget.send = lambda content, buffers=None: answers.append(content)

    def handle(content):
        widget._handle_custom_msg(content, [])
        return answers.pop()

    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.expose_function("kernel", handle)
    page.set_content("<div id='cell'></div>")
    page.add_style_tag(content=widget._css)
    script = """async ([source, start]) => {
      const module = await import(URL.createObjectURL(new Blob([source], { type: 'text/javascript' })));
      const listeners = [];
      const model = {
        get: (name) => name === 'start' ? start : undefined,
        on: (name, listener) => { if (name === 'msg:custom') listeners.push(listener); },
        send: async (content) => {
          const answer = await window.kernel(content);
          listeners.forEach((listener) => listener(answer));
        },
      };
      await module.default.render({ model, el: document.getElementById('cell') });
    }"""
    page.evaluate(script, [widget._esm, json.loads(json.dumps(widget.start))])
    page.locator(".eg-drivers table").wait_for()
    target = page.locator(".eg-question code").text_content()
    gradient = eg.grad(net, x, of=target, wrt="input").numpy()
    for row in page.locator(".eg-drivers tbody tr").all():
        element, slope = row.locator("td").all_text_contents()[:2]
        assert gradient[tuple(eg.Place.parse(element).index)] == np.float32(slope)
    page.locator(".eg-drivers tbody button").first.click()
    page.locator(".eg-shares table").wait_for()
    page.close()
    widget.close()
    assert complaints == []
