"""The explorer's hosts: the command line in a process of its own, and the widget in a notebook and in Chromium."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

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


class Notebook:
    """A notebook that has run one cell, and whose kernel goes on answering its widget."""

    def __init__(self, folder, cell):
        nbformat = pytest.importorskip("nbformat", reason="a notebook is run by nbclient and ipykernel")
        nbclient = pytest.importorskip("nbclient", reason="a notebook is run by nbclient and ipykernel")
        pytest.importorskip("ipykernel", reason="a notebook is run by nbclient and ipykernel")
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        runner = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        self._stack = ExitStack()
        self._stack.enter_context(runner.setup_kernel())
        runner.execute_cell(notebook.cells[0], 0)
        shown = notebook.cells[0].outputs[-1]["data"]["application/vnd.jupyter.widget-view+json"]
        self._comm = shown["model_id"]
        self.state = runner.widget_state[self._comm]
        self._client = runner.km.blocking_client()
        self._client.start_channels()
        self._stack.callback(self._client.stop_channels)

    def send(self, content):
        """Send a message to the widget, as the front end of a notebook does; return the widget's messages."""
        data = {"comm_id": self._comm, "data": {"method": "custom", "content": content}}
        message = self._client.session.msg("comm_msg", data)
        self._client.shell_channel.send(message)
        answers = []
        while True:
            heard = self._client.get_iopub_msg(timeout=300)
            if heard["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            if heard["msg_type"] == "comm_msg" and heard["content"]["data"].get("method") == "custom":
                answers.append(heard["content"]["data"]["content"])
            if heard["msg_type"] == "status" and heard["content"]["execution_state"] == "idle":
                return answers

    def close(self):
        self._stack.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_a_widget_of_a_running_notebook_works_in_a_page(browser, tmp_path):
    """The state of the widget is what the kernel has sent, and the page gives `render` what anywidget gives it."""
    pytest.importorskip("anywidget", reason="the widget is anywidget's")
    # The page's driver has an event loop in this thread, so that the notebook has a thread of its own.
    with ThreadPoolExecutor(1) as thread:
        notebook = thread.submit(
            Notebook, tmp_path, f"{NET}\nimport elementgrad as eg\nexplorer = eg.explore(net, x)\nexplorer"
        ).result()
        page = browser.new_page()
        try:
            check_widget(page, notebook.state, lambda content: thread.submit(notebook.send, content).result())
        finally:
            page.close()
            thread.submit(notebook.close).result()


def check_widget(page, state, send):
    names = {}
    exec(NET, names)
    net, x, complaints = names["net"], names["x"], []
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.expose_function("kernel", send)
    page.set_content("<div id='cell'></div>")
    page.add_style_tag(content=state["_css"])
    script = """async ([source, start]) => {
      const module = await import(URL.createObjectURL(new Blob([source], { type: 'text/javascript' })));
      const listeners = [];
      const model = {
        get: (name) => name === 'start' ? start : undefined,
        on: (name, listener) => { if (name === 'msg:custom') listeners.push(listener); },
        send: async (content) => {
          for (const answer of await window.kernel(content)) listeners.forEach((listener) => listener(answer));
        },
      };
      await module.default.render({ model, el: document.getElementById('cell') });
    }"""
    page.evaluate(script, [state["_esm"], state["start"]])
    page.locator(".eg-drivers table").wait_for()
    target = page.locator(".eg-question code").text_content()
    gradient = eg.grad(net, x, of=target, wrt="input").numpy()
    for row in page.locator(".eg-drivers tbody tr").all():
        element, slope = row.locator("td").all_text_contents()[:2]
        assert gradient[tuple(eg.Place.parse(element).index)] == np.float32(slope)
    page.get_by_role("button", name="Theme: auto").click(click_count=2)  # light, then dark
    colour = "getComputedStyle(document.querySelector('.eg-drivers td.eg-number')).color"
    assert page.evaluate(colour) == "rgb(230, 237, 243)"  # although a page without a doctype has black tables
    page.locator(".eg-drivers tbody button").first.click()
    page.locator(".eg-shares table").wait_for()
    assert page.locator(".eg-code").text_content().startswith("eg.grad(net, x, of=")
    page.get_by_role("button", name="Walk back").click()
    page.wait_for_function("target => document.querySelector('.eg-question code').textContent !== target", arg=target)
    walked = page.locator(".eg-question code").text_content()
    slopes = eg.grad(net, x, of=target, wrt=eg.Place.parse(walked).name).numpy()
    assert abs(slopes[tuple(eg.Place.parse(walked).index)]) == abs(slopes).max()
    assert complaints == []
