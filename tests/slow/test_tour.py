"""The tour: a real process for each framework answers every question, and leaves a page."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elementgrad._cli import main
from elementgrad._cli.output import silence_stdout, tolerant_streams
from elementgrad._tour.data import WORDS, load_digits
from elementgrad._tour.render import Terminal, explore_command
from elementgrad._tour.runner import QUESTIONS, Answer, CellResult, Question, check_same, read_cells
from tests.slow.test_report_browser import CHROMIUM, WIDTHS
from tests.support.tour_answers import FOUNDING, MISLED, RAISED

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "jax"


class Printed:
    """One answer as it was printed: its code, and what came of it."""

    def __init__(self, text: str):
        before, *outcomes = re.split(r"^ {4}→ ", text, flags=re.MULTILINE)
        self.code = before.split("\n    ", 1)[1]
        rows = [re.split(r" {2,}", row, maxsplit=1) for row in outcomes]
        self.error = " ".join(outcomes[0].split()) if len(rows) == 1 and re.match(r"\w+Error: ", outcomes[0]) else None
        self.values = {} if self.error else {row[0]: " ".join(row[1].split()) for row in rows}

    def __getitem__(self, name: str) -> float:
        return float(self.values[name].strip("[]"))


def split_answers(printed: str) -> dict[str, tuple[Printed | None, Printed]]:
    """For each question the usual answer and ours."""
    answered = re.sub(r"^─+ .*$", "", printed.partition("At a glance")[0], flags=re.MULTILINE)
    sections = re.split(r"^\d+\. .*$", answered, flags=re.MULTILINE)[1:]
    assert len(sections) == len(QUESTIONS)
    answers = {}
    for question, section in zip(QUESTIONS, sections, strict=True):
        usual, ours = section.split("  elementgrad: ")
        answers[question.key] = Printed(usual) if "the usual answer:" in usual else None, Printed(ours)
    return answers


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_the_tour_answers_every_question_and_leaves_a_page(framework, tmp_path):
    command = [sys.executable, "-m", "elementgrad", "tour", "--framework", framework]
    paged = framework != "jax"  # whose arrays have the shapes of PyTorch's, so that its page is the same
    command += [] if paged else ["--no-report"]
    cached = {"JAX_COMPILATION_CACHE_DIR": str(CACHE), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | cached | {"COLUMNS": "200"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    *_, pictures, explorer = done.stdout.splitlines()
    assert (pictures == "The same with pictures: tour.html") == paged
    assert explorer == f"Click through the digits net: {explore_command(framework)}"
    answers = split_answers(done.stdout)
    ours = {key: list(answer.values.values()) for key, (_, answer) in answers.items()}
    assert {key: ours[key] for key in FOUNDING} == FOUNDING
    usual = {key: answer for key, (answer, _) in answers.items() if answer is not None}
    raised = {key: answer.error for key, answer in usual.items() if answer.error}
    assert list(raised) == list(RAISED[framework])
    assert [error for key, error in raised.items() if RAISED[framework][key] not in error] == []
    misled = MISLED["everywhere"] | MISLED[framework]
    assert {key: list(usual[key].values.values()) for key in misled} == misled
    assert_models(done.stdout)
    assert_reads(framework, answers)
    assert_causes(framework, answers)
    assert_training(framework, answers)
    assert [file.name for file in tmp_path.iterdir()] == ["tour.html"] * paged
    if paged:
        assert_page((tmp_path / "tour.html").read_text("utf-8"))
    if framework == "torch":
        assert_in_browser(tmp_path / "tour.html")


def assert_models(printed):
    right, likely = (
        float(number) for number in re.findall(r"^ {4}→ (?:right|likely) +([\d.]+)", printed, re.MULTILINE)
    )
    assert right > 0.85
    assert likely > 0.8


def assert_reads(framework, answers):
    usual, ours = answers["pixel"]
    rows = ours.values["field"].split()
    seen = np.array([[shade != "·" for shade in row[::2]] for row in rows])
    assert seen.shape == (8, 8)
    assert seen[1:6, 2:7].all()
    assert seen.sum() == 25
    if framework != "tensorflow":  # where the usual answer sums over the feature map
        assert next(iter(usual.values.values())) == ours.values["number"]
    assert ours.values.get("untouched", "True") == "True"
    usual, ours = answers["photo"]
    _, *expected = usual.values.values()  # the times differ
    _, *given, field = ours.values.values()
    assert len(expected) == 2
    for left, right in zip(expected, given, strict=True):
        np.testing.assert_allclose(*(np.array(text.strip("[]").split(","), float) for text in (right, left)), rtol=2e-3)
    assert "194:207, 294:307" in field
    sizes = [float(size) for size in answers["words"][1].values["sizes"].strip("[]").split(", ")]
    assert len(sizes) == 5
    assert min(sizes) > 0
    plan, few = list(answers["large"][1].values.values())[1:]
    assert "40 GB" in plan
    assert "1 forward sweep" in plan
    assert few == "[0, 0.42, 0.7616, 0]"
    weights, chosen = answers["choice"][1].values.values()
    assert float(weights.split(", ")[1]) > 0.9
    assert chosen == "1"


def assert_causes(framework, answers):
    answer = answers["message"][1]
    sentence, where, fix = answer.values.values()
    cut = "detach" if framework == "torch" else "stop_gradient"
    assert f"{cut} cuts the gradient" in sentence
    assert f"leave {'tf.' if framework == 'tensorflow' else ''}{cut} out" in fix
    file, line = where.split(":")
    assert file == "message.py"
    assert cut in answer.code.splitlines()[int(line) - 1]
    gradient, sentence, _ = answers["unseen"][1].values.values()
    assert gradient == "0"
    assert "the input does not contain that index" in sentence


def assert_training(framework, answers):
    place = {"torch": "0.weight", "tensorflow": "table/embeddings", "jax": "table"}[framework]
    assert list(answers["entry"][1].values.values()) == [f"{place}[0, 5]"] * 4
    token = answers["token"][1]
    assert token["chances[-1]"] > token["chances[0]"]
    usual, ours = answers["routed"]
    assert usual["the"] != ours["the"] != 0
    assert usual["a"] != ours["a"] != 0
    truth, read_as, now_read_as, right_now, size, undone = answers["shipped"][1].values.values()
    assert read_as != truth == now_read_as
    assert float(right_now) > 0.8
    assert (size, undone) == ("256", "True")


def assert_page(page):
    for question in QUESTIONS:
        assert re.sub(r"[\"']", "", question.text) in re.sub(r"&#3[49];|[\"']", "", page)
    pictures = sum(question.picture is not None for question in QUESTIONS)
    assert page.count('<img class="on-light"') == pictures + 1  # one is also at the head
    assert len(page) < 2_000_000


def assert_in_browser(page):
    """In a real browser it fits a desk and a phone, asks for nothing, and complains of nothing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="to look at the page: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("to look at the page: apt-get install chromium")
    complaints = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in WIDTHS.values():
            opened = browser.new_page(viewport={"width": width, "height": 900}, offline=True)
            opened.on("console", lambda message: complaints.append(message.text))
            opened.on("pageerror", lambda error: complaints.append(str(error)))
            opened.on("request", lambda request: complaints.append(request.url) if "http" in request.url[:5] else None)
            opened.goto(page.as_uri())
            assert opened.evaluate("document.documentElement.scrollWidth") == width
            assert opened.locator("header img:visible").count() == 1  # the picture at the head
            assert opened.locator("h3").count() == len(QUESTIONS)
        browser.close()
    assert complaints == []


def test_the_digits_and_words_match_their_description():
    images, labels = load_digits()
    sklearn = pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    original = sklearn.load_digits()
    np.testing.assert_array_equal(images * 16, original.images)
    np.testing.assert_array_equal(labels, original.target)
    assert [WORDS[token] for token in (1, 43, 2, 18, 0)] == ["a", "brave", "cat", "sees", "the"]
    assert (WORDS[5], len(set(WORDS))) == ("fish", 50)


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_every_cell_of_a_script_belongs_to_a_question(framework):
    keys = [question.key for question in QUESTIONS]
    usual = [f"{key}: usual" for key in keys]
    cells = read_cells(framework)
    assert {"setup", "net", "reader", *keys} <= set(cells)
    assert set(cells) <= {"setup", "net", "reader", *keys, *usual}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([1.0, 2.001], "wrong by 0.001"),
        ([1.0, np.nan], "wrong by nan"),
        ([[1.0, 2.0]], r"has shape \(1, 2\)"),
    ],
)
def test_the_tour_fails_where_both_answers_should_be_the_same_and_differ(given, problem):
    question = Question("photo", "How?", same="gradient")
    usual = CellResult("", "", names={"gradient": np.array([1.0, 2.0])})
    check_same(Answer(1, question, CellResult("", "", names={"gradient": np.array([1.000001, 2.0])}), usual))
    ours = CellResult("", "", names={"gradient": np.array(given)})
    with pytest.raises(AssertionError, match=problem):
        check_same(Answer(1, question, ours, usual))
    with pytest.raises(AssertionError, match="no usual answer"):
        check_same(Answer(1, question, ours, CellResult("", "", error="ValueError: no")))


@pytest.mark.parametrize("package", ["rich", "matplotlib", "jinja2", "safetensors"])
def test_the_tour_says_what_to_install_for_all_of_it(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["tour", "--framework", "jax"]) == 2
    install = "pip install 'elementgrad[show,train,jax]'"
    assert capsys.readouterr().err == f"elementgrad: the tour needs {package}; {install}\n"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_the_terminal_may_know_few_characters(encoding, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    with tolerant_streams():
        terminal = Terminal()
        terminal.chapter("The first")
        terminal.cell("elementgrad", CellResult("Do so.", "f(x)", {"J": np.eye(8) / 4 + np.eye(8, k=1)}), "green")
        terminal.cell("the usual answer", CellResult("Do so.", "f(x)", error="ValueError: no"), "red")
    assert out.errors == "strict"
    printed = out.buffer.getvalue().decode(encoding)
    assert "-> ValueError: no" in printed
    assert "::##" in printed


def test_a_reader_of_the_tour_may_leave(monkeypatch):
    left, right = os.pipe()
    os.close(left)
    monkeypatch.setattr(sys, "stdout", os.fdopen(right, "w"))
    with pytest.raises(BrokenPipeError):
        Terminal().foot("The end")
    silence_stdout()
    sys.stdout.close()


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys):
    assert main(["tour", "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert main(["tour", "--out", str(tmp_path / "none" / "tour.html")]) == 2
    assert "is no directory" in capsys.readouterr().err
