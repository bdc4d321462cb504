"""Reports: the question, the exact numbers, the plan, the diagnosis; and how the file is written."""

import base64
import csv
import io
import re
import sys

import numpy as np
import pytest
import torch

import elementgrad as eg
from elementgrad._show.page import Code, NumbersTable, Page, Prose, Section, StepList, Table
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry


def numbers(html):
    """The .npy files in a page."""
    found = re.findall(r'download="[^"]*\.npy" href="data:application/octet-stream;base64,([^"]*)"', html)
    return [np.load(io.BytesIO(base64.b64decode(file))) for file in found]


def cells(html):
    """The rows of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def headings(html):
    return re.findall(r"<h2[^>]*>(.*?)</h2>", html)


def test_a_gradient_is_reported_as_it_is(fw, tmp_path):
    def f(x, y):
        return (x**2) * y[0]

    x = np.array([[1.0, -2.0], [0.1, 4.0]])
    path = tmp_path / "report.html"
    arguments = fw.tensor(x), fw.tensor(np.array([3.0]))
    assert eg.report(path, f, *arguments, of="output[1, 0]", wrt="x", title="one") == path
    html = path.read_text()
    assert headings(html) == ["The question", "The answer", "The numbers", "The plan", "The path"]
    (found,) = numbers(html)
    assert found.tolist() == [[0.0, 0.0], [6.0 * 0.1, 0.0]]
    assert ["[1, 0]", "0.6", "0.1"] in cells(html)
    assert "1 reverse sweep" in html
    assert "output[1, 0], value 0.03" in html
    assert "output[1, 0] has a gradient with respect to x." in html
    assert fw.name in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "https://" not in html
    assert path.stat().st_size < 300_000


def test_several_places_are_reported_one_after_another(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    x = torch.tensor([1.0, 2.0, 3.0])
    html = eg.report(tmp_path / "r.html", model, x, wrt=["input[::-1]", "0", "0.weight"]).read_text()
    found = numbers(html)
    assert [array.tolist() for array in found] == [[0.5] * 3, [0.5] * 2, [[0.5, 1.0, 1.5]] * 2]
    assert "output by 0.weight: The plan" in headings(html)
    assert ["[2]", "0.5", "3"] in cells(html)  # the element that is meant, as it is indexed in the input
    assert ["[0]", "0.5"] in cells(html)  # an activation is there only in a run
    html = eg.report(tmp_path / "r.html", model, x, wrt=["*.weight[0]", "input"]).read_text()
    assert [array.tolist() for array in numbers(html)] == [[0.5, 1.0, 1.5], [3.5, 3.5], [0.5] * 3]
    assert "output by 2.weight[0]: The plan" in headings(html)


def pictures(html):
    return re.findall(r'<img class="on-light" src="[^"]*" alt="([^"]*)"', html)


def test_gradients_of_one_shape_share_a_picture(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    path, x = tmp_path / "r.html", torch.ones(2, 3)
    (alt,) = pictures(eg.report(path, net, x, of=["output[0, 0]", "output[1, 1]"], wrt="input").read_text())
    assert alt.startswith("By input. Heat maps of 2 gradients, output[0, 0], output[1, 1]: 12 numbers from ")
    found = pictures(eg.report(path, net, x, of="output[0, 0]", wrt=["input", "0.weight", "2.weight"]).read_text())
    assert [text.partition(". ")[0] for text in found] == [
        f"output[0, 0] by {name}" for name in ("input", "0.weight", "2.weight")
    ]
    found = pictures(eg.report(path, net, x, of=["output[0, 0]", "output[1, 1]"], wrt=["0.bias", "1"]).read_text())
    assert [text.partition(". ")[0] for text in found] == ["By 0.bias", "By 1"]
    (alt,) = pictures(eg.report(path, net, x, of="output[0, 0]", wrt=["input[0]", "input[1]"]).read_text())
    names = "output[0, 0] by input[0], output[0, 0] by input[1]"
    assert alt.startswith(f"Side by side. Heat maps of 2 gradients, {names}: 6 numbers from ")


def test_no_gradient_is_reported_with_the_line_that_cut_it(fw, tmp_path):
    stops = {"torch": "x.detach()", "tensorflow": "tf.stop_gradient(x)", "jax": "jax.lax.stop_gradient(x)"}
    import jax
    import tensorflow as tf

    names = {"tf": tf, "jax": jax}
    f = eval(f"lambda x: ({stops[fw.name]} * 2)[0]", names)
    html = eg.report(tmp_path / "r.html", f, fw.tensor(np.ones(2))).read_text()
    assert "output has no gradient with respect to x" in html
    assert 'class="finding bad"' in html
    assert "fix:" in html
    assert 'class="broken"' in html
    assert numbers(html) == []


def test_trained_elements_are_reported_before_and_after(tmp_path):
    model = torch.nn.Linear(3, 2)
    elements = eg.trainable(model, ["weight[0, 1]", "bias"])
    before = elements["weight[0, 1]"].item()
    with torch.no_grad():
        elements["weight[0, 1]"].fill_(2.5)
    html = eg.report(tmp_path / "r.html", elements).read_text()
    row = next(row for row in cells(html) if row[0] == "weight[0, 1]" and row[2] == "2.5")
    assert float(row[1]) == pytest.approx(before)
    assert "1 of 3" in html
    elements.save(tmp_path / "patch.safetensors")
    again = eg.report(tmp_path / "p.html", eg.inspect(tmp_path / "patch.safetensors")).read_text()
    assert row in cells(again)


def test_everything_is_escaped(tmp_path):
    evil = "</script><script>alert(1)</script>"
    sections = [
        Section(evil, [Prose(evil), Code(evil), Table([evil], [[evil]], evil), StepList([(1, evil, True, evil)])])
    ]
    html = Page(evil, sections, evil).html()
    assert "<script>alert" not in html
    assert html.count("<script>") == html.count("</script>") == 1
    html = eg.report(tmp_path / "r.html", lambda x: x.sum(), torch.ones(2), title="<img src=x> & 'y'").read_text()
    assert "<title>&lt;img src=x&gt; &amp; &#39;y&#39;</title>" in html


def test_no_cell_of_a_downloaded_table_begins_a_formula(tmp_path):
    names = ["=1+1", "+a", "-b", "@c", "d"]
    old, new = BitArray.of(np.float32([0.5])), BitArray.of(np.float32([-1.5]))
    entries = [Entry(f"{name}[0]", name, (1,), "float32", np.array([0]), new, old, "sample:") for name in names]
    eg.report(tmp_path / "r.html", eg.Patch(tuple(entries)))
    (content,) = re.findall(r"data:text/csv;[^,]*base64,([^\"]*)", (tmp_path / "r.html").read_text())
    rows = list(csv.reader(io.StringIO(base64.b64decode(content).decode(), newline="")))
    assert rows[1:] == [[name, "0.5", "-1.5", "-2"] for name in ("'=1+1[0]", "'+a[0]", "'-b[0]", "'@c[0]", "d[0]")]


def test_cells_that_begin_with_signs_and_breaks_stay_one_cell_each():
    cells = ["\t=1", "\r=1", "\n=1", "a\r=1", "-inf", "nan", "1e-5", "\uff1d1", '=";"', ""]
    table = Table.of(["="], [[cell] for cell in cells], 20, "t")
    text = base64.b64decode(table.csv).decode()
    rows = [row for (row,) in csv.reader(io.StringIO(text, newline=""))]
    assert rows == ["'=", *[cell if cell in ("a\r=1", "-inf", "nan", "1e-5", "") else f"'{cell}" for cell in cells]]


def test_large_reports_stay_small_and_say_what_they_leave_out(tmp_path):
    net = torch.nn.Conv2d(3, 2, 7, stride=4)
    image = torch.rand(1, 3, 224, 224)
    path = eg.report(tmp_path / "r.html", net, image, of="output[0, 0, 20, 20]", wrt="input")
    assert path.stat().st_size < 2_000_000
    (found,) = numbers(path.read_text())
    assert found.dtype == np.float32
    assert np.array_equal(found, eg.grad(net, image, of="output[0, 0, 20, 20]", wrt="input").numpy())
    left = NumbersTable.of(np.ones(500_000), "many")
    assert left.npy == ""
    assert "All 500000 numbers would take 2.0 MB and are left out" in left.left_out
    with pytest.raises(eg.SizeError, match="too many for a report"):
        eg.report(tmp_path / "s.html", lambda x: x * x[0], torch.ones(3000))
    assert not (tmp_path / "s.html").exists()


def test_numbers_keep_their_bits():
    exact = np.array([0.1, -0.0, np.inf, np.nan, 1e-310])
    found = np.load(io.BytesIO(base64.b64decode(NumbersTable.of(exact, "n").npy)))
    assert found.dtype == np.float64
    assert found.tobytes() == exact.tobytes()


@pytest.mark.parametrize("path", ["missing/r.html", "."], ids=str)
def test_a_path_that_cannot_be_written_is_refused_before_the_function_runs(tmp_path, path):
    runs = []
    with pytest.raises(eg.OptionError, match="directory"):
        eg.report(tmp_path / path, lambda x: runs.append(x), torch.ones(2))
    assert runs == []


def test_an_old_report_stays_when_the_new_one_fails(tmp_path):
    path = tmp_path / "r.html"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError):
        eg.report(path, lambda x: x / (1 // 0), torch.ones(2))
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.parametrize(("package", "call"), [("matplotlib", "plot"), ("matplotlib", "report"), ("jinja2", "report")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = {"plot": [np.ones(2)], "report": [tmp_path / "r.html", torch.sin, torch.ones(1)]}[call]
    with pytest.raises(ImportError) as raised:
        getattr(eg, call)(*arguments)
    assert str(raised.value) == f"eg.{call} needs {package}; pip install 'elementgrad[show]'"


def test_the_contents_have_one_entry_for_each_question(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    path = eg.report(
        tmp_path / "r.html",
        net,
        torch.ones(1, 3),
        of=["output[0, -1]", "output[0, 0]"],
        wrt=["input", "0.weight[2:, 1]"],
    )
    text = path.read_text()
    entries = re.findall(r'<li><a href="#s\d+">(.*?)</a>', text)
    assert entries == [
        f"{of} by {wrt}" for of in ("output[0, -1]", "output[0, 0]") for wrt in ("input", "0.weight[2:, 1]")
    ]
    assert "[3, 1]" in text  # the element as it is named in the weight, and not in the part that was asked for
    assert re.search(r"<code>tanh</code> in 1, test_report\.py:\d+", text)


@pytest.mark.parametrize("sides", [{"of": 4}, {"wrt": 4}, {"of": 2, "wrt": 2}], ids=str)
def test_several_places_take_as_many_runs_as_one(sides, tmp_path):
    calls = []

    def f(x):
        calls.append(1)
        return torch.tanh(x) * x.sum()

    def ask(**sides):
        calls.clear()
        places = {side: [f"{'output' if side == 'of' else 'x'}[{i}]" for i in range(n)] for side, n in sides.items()}
        eg.report(tmp_path / "report.html", f, torch.ones(5), **({"of": "output[1]", "wrt": "x"} | places))
        return len(calls)

    assert ask(**sides) == ask(of=1)


def test_a_place_without_a_path_beside_others_is_reported(tmp_path):
    path = tmp_path / "report.html"
    eg.report(path, lambda x, y: x * 2, torch.ones(2), torch.ones(2), of="output[0]", wrt=["x[0]", "y[0]", "x[1]"])
    html = path.read_text()
    assert [heading for heading in headings(html) if "numbers" in heading] == [
        "output[0] by x[0]: The numbers",
        "output[0] by x[1]: The numbers",
    ]
    assert "output[0] has no gradient with respect to y[0]" in html
