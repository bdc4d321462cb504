"""The explorer's session: all it answers is what the public verbs say, to the last digit, on every framework."""

import base64
import math
import threading
from functools import cache

import numpy as np
import pytest

import elementgrad as eg
from elementgrad._explore.session import Session
from elementgrad._explore.spelling import Spelling
from elementgrad._explore.worker import Worker
from tests.support.explored import NETS


class Explored:
    """A session, and the model that it is about."""

    def __init__(self, framework):
        self.net, self.x = NETS[framework]()
        self.session = Session(self.net, [self.x], labels=list("abcde"), spelling=Spelling("net", ["x"]))
        self.start = self.ask("start")
        self.names = [row["name"] for row in self.start["names"]]

    def ask(self, question, **fields):
        answer = self.session.answer({"ask": question, **fields})
        assert "error" not in answer, answer
        return answer

    def target(self, name, *index):
        return {"tensor": self.names.index(name), "index": list(index)}

    def numpy(self, tensor):
        return self.session.backend.to_numpy(tensor)

    @property
    def input(self):
        return self.names[0]


@cache
def explore(framework):
    return Explored(framework)


@pytest.fixture
def explored(fw):
    return explore(fw.name)


def numbers(text, narrow):
    return np.frombuffer(base64.b64decode(text), "<f4" if narrow else "<f8")


def test_the_names_are_those_of_eg_names(explored):
    rows = eg.names(explored.net, explored.x)
    listed = [(row["name"], row["kind"], tuple(row["shape"]), row["dtype"]) for row in explored.start["names"]]
    assert listed == [(row.name, row.kind, tuple(row.shape), row.dtype) for row in rows]
    assert explored.start["examples"] == 2
    assert explored.start["source"] == 0
    kinds = {row["name"]: row["layout"]["kind"] for row in explored.start["names"]}
    assert (kinds[explored.input], kinds["conv1"], kinds["output"]) == ("image", "maps", "bars")


def test_a_view_has_the_numbers_of_eg_grad_and_eg_value_to_the_bit(explored):
    view = explored.ask("view", tensor=0, of=explored.target("conv2", 1, 1, 1, 1), index=[1, 0, 0, 0])
    gradient = explored.numpy(eg.grad(explored.net, explored.x, of="conv2[1, 1, 1, 1]", wrt=explored.input))
    np.testing.assert_array_equal(numbers(view["gradient"], view["narrowGradient"]), gradient[1].reshape(-1))
    np.testing.assert_array_equal(numbers(view["values"], view["narrow"]), explored.numpy(explored.x)[1].reshape(-1))
    value = explored.numpy(eg.value(explored.net, explored.x, of="conv2[1, 1, 1, 1]"))
    assert view["of"]["value"] == float(value)
    assert view["gradientScale"]["highest"] == gradient.max()


def test_drivers_are_the_largest_gradients_of_the_whole_tensor(explored):
    answer = explored.ask("drivers", tensor=0, of=explored.target("output", 0, 3))
    gradient = explored.numpy(eg.grad(explored.net, explored.x, of="output[0, 3]", wrt=explored.input))
    largest = np.sort(np.abs(gradient).reshape(-1))[::-1][:20]
    assert [abs(row["gradient"]) for row in answer["drivers"]] == largest.tolist()
    assert all(gradient[tuple(row["index"])] == row["gradient"] for row in answer["drivers"])


def test_shares_are_those_of_eg_contributions(explored):
    index = [0, 4, 4, 0] if explored.session.backend.name == "tensorflow" else [0, 0, 4, 4]
    answer = explored.ask("shares", tensor=0, index=index, of=explored.target("output", 0, 3))
    wrt = eg.at(explored.input)[tuple(index)]
    shares = eg.contributions(explored.net, explored.x, of="output[0, 3]", wrt=wrt)
    assert [row["operation"] for row in answer["shares"]] == [share.operation for share in shares]
    assert [row["value"] for row in answer["shares"]] == [float(explored.numpy(share.value)) for share in shares]
    assert answer["total"] == float(explored.numpy(shares.total))


def test_the_verdict_on_a_dead_element_is_that_of_eg_explain(explored):
    values = explored.numpy(eg.value(explored.net, explored.x, of="conv1"))
    dead = [int(position) for position in np.argwhere(values < 0)[0]]
    answer = explored.ask(
        "explain", tensor=explored.names.index("conv1"), index=dead, of=explored.target("output", dead[0], 0)
    )
    wrt = eg.at("conv1")[tuple(dead)]
    diagnosis = eg.explain(explored.net, explored.x, of=f"output[{dead[0]}, 0]", wrt=wrt)
    assert (answer["verdict"], answer["cause"]) == ("zero", "dead-relu")
    assert (answer["sentence"], answer["fix"]) == (diagnosis.sentence, diagnosis.fix)


def test_a_walk_follows_the_strongest_driver_layer_by_layer(explored):
    target, passed = explored.target("output", 1, 2), []
    for _ in range(3):
        step = explored.ask("walk", of=target)
        of = eg.at(explored.names[target["tensor"]])[tuple(target["index"])]
        gradient = explored.numpy(eg.grad(explored.net, explored.x, of=of, wrt=explored.names[step["tensor"]]))
        assert abs(step["value"]) == np.abs(gradient).max() == abs(gradient[tuple(step["index"])])
        passed.append(explored.names[step["tensor"]])
        assert step["source"] < step["tensor"]
        target = {"tensor": step["tensor"], "index": step["index"]}
    layers = ["flat", "conv2", "relu"] if "flat" in explored.names else ["tanh", "conv2", "relu"]
    assert passed == layers


def test_copied_code_runs_and_gives_the_number(explored):
    index = [1, 4, 4, 0] if explored.session.backend.name == "tensorflow" else [1, 0, 4, 4]
    edits = [{"tensor": 0, "index": index, "value": 0.25}]
    fields = {"tensor": 0, "of": explored.target("output", 1, 3), "edits": edits}
    code = explored.ask("code", index=index, **fields)["code"]
    number = eval(code, {"eg": eg, "net": explored.net, "x": explored.x})
    view = explored.ask("view", index=[1, 0, 0, 0], **fields)
    gradient = numbers(view["gradient"], view["narrowGradient"]).reshape(8, 8)
    assert float(explored.numpy(number)) == gradient[4, 4]
    assert numbers(view["values"], view["narrow"]).reshape(8, 8)[4, 4] == 0.25
    code = explored.ask("code", tensor=explored.names.index("conv1"))["code"]
    values = explored.numpy(eval(code, {"eg": eg, "net": explored.net, "x": explored.x}))
    np.testing.assert_array_equal(values, explored.numpy(eg.value(explored.net, explored.x, of="conv1")))


def test_an_edit_changes_nothing_of_the_users(explored):
    before = explored.numpy(explored.x).copy()
    edits = [{"tensor": 0, "index": [0, 1, 1, 0] if explored.start["framework"] == "tensorflow" else [0, 0, 1, 1]}]
    edits[0]["value"] = 9.0
    fields = {"tensor": explored.names.index("output"), "index": [0, 0]}
    changed, plain = explored.ask("view", edits=edits, **fields), explored.ask("view", **fields)
    assert changed["values"] != plain["values"]
    np.testing.assert_array_equal(explored.numpy(explored.x), before)


def test_the_field_frames_all_gradients_that_are_not_zero(explored):
    answer = explored.ask("field", tensor=0, of=explored.target("conv1", *[0] * 4))
    gradient = explored.numpy(eg.grad(explored.net, explored.x, of="conv1[0, 0, 0, 0]", wrt=explored.input))
    box = [[int(axis.min()), int(axis.max()) + 1] for axis in np.nonzero(gradient)]
    assert [list(ends) for ends in answer["field"]] == box
    assert answer["exact"]


def test_the_report_is_the_one_that_exists(explored):
    answer = explored.ask("report", tensor=0, of=explored.target("output", 0, 3))
    assert answer["html"].startswith("<!doctype html>")
    assert "output[0, 3]" in answer["html"]


def test_the_report_of_a_batch_has_the_tokens_of_the_targets_example(monkeypatch):
    import torch

    given, report = [], eg.report
    monkeypatch.setattr(eg, "report", lambda *args, **options: (given.append(options), report(*args, **options)))
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3))
    texts = [["a", "bee"], ["the", "cow"]]
    session = Session(net, [torch.tensor([[1, 2], [3, 4]])], tokens=texts)
    for example in (0, 1):
        of = {"tensor": [row.kind for row in session.names].index("output"), "index": [example, 1, 0]}
        answer = session.answer({"ask": "report", "tensor": session.start()["source"], "of": of})
        assert answer["html"].startswith("<!doctype html>")
        assert (given[-1]["tokens"], str(given[-1]["wrt"])) == (texts[example], f"0[{example}]")


def test_thumbnails_have_numbers_in_steps(explored):
    tensors = list(range(len(explored.names)))
    pictures = explored.ask("thumbnails", tensors=tensors, index=[1])["thumbnails"]
    assert set(pictures) == set(tensors)
    for picture in pictures.values():
        assert len(base64.b64decode(picture["steps"])) == picture["rows"] * picture["columns"] <= 400


def test_one_number_has_no_field():
    import torch

    session = Session(lambda x: x * x, [torch.tensor(3.0)])
    of = {"tensor": 1, "index": []}
    assert session.answer({"ask": "field", "tensor": 0, "of": of})["field"] is None
    assert session.answer({"ask": "drivers", "tensor": 0, "of": of})["drivers"][0]["gradient"] == 6


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"ask": "view", "tensor": 99}, "there is no tensor 99"),
        ({"ask": "view", "tensor": 0, "of": {"tensor": 1, "index": [0, 99, 0, 0]}}, "no element of a tensor of shape"),
        ({"ask": "shares", "tensor": 0, "index": [0], "of": {"tensor": 1, "index": [0, 0, 0, 0]}}, "no element of a"),
        (
            {"ask": "view", "tensor": 0, "edits": [{"tensor": 1, "index": [0], "value": 1}]},
            "no input that can be edited",
        ),
        ({"ask": "find", "text": "__import__('os').system('true')"}, "expected one of input"),
        ({"ask": "find", "text": "conv1[0, 0, 0"}, "expected"),
        ({"ask": "find", "text": "conv9"}, "no tensor is named 'conv9'"),
        ({"ask": "find", "text": "conv1[0]"}, "names 108 elements"),
        ({"ask": "walk", "of": {"tensor": 0, "index": [0, 0, 0, 0]}}, "nothing comes before it"),
    ],
)
def test_what_does_not_fit_is_an_answer_of_one_sentence(message, why):
    assert why in explore("torch").session.answer(message)["error"]


def test_a_place_in_words_is_found():
    explored = explore("torch")
    answer = explored.ask("find", text="conv1[0, 2, -1, 3]")
    assert (explored.names[answer["tensor"]], answer["index"]) == ("conv1", [0, 2, 5, 3])


def test_what_is_cut_off_is_said_with_the_line():
    import torch

    def cut(x):
        return (x.detach() * 2).sum() + 0 * x[1]

    session = Session(cut, [torch.tensor([1.0, 2.0])])
    of = {"tensor": 1, "index": []}
    assert session.answer({"ask": "view", "tensor": 0, "of": of})["gradientScale"]["notes"] == ["all zero"]
    session = Session(lambda x: x.detach().sum(), [torch.tensor([1.0, 2.0])])
    view = session.answer({"ask": "view", "tensor": 0, "of": of})
    assert "does not depend on x" in view["missing"]
    assert view["gradient"] is None
    verdict = session.answer({"ask": "explain", "tensor": 0, "index": [1], "of": of})
    assert verdict["verdict"] == "unconnected"
    assert verdict["where"].startswith("test_session.py:")


def test_large_tensors_are_reduced_and_every_number_is_that_of_one_element():
    import torch

    logits = torch.linspace(-1, 1, 50257)[None]
    session = Session(lambda x: torch.nn.functional.pad(x, (0, 0)) * 1.0, [logits])
    view = session.answer({"ask": "view", "tensor": 1, "index": [0, 0]})
    assert view["cells"][2] <= 1024
    assert "largest in size of 50" in view["notes"][0]
    positions = np.frombuffer(base64.b64decode(view["positions"]), "<i4")
    cells = numbers(view["values"], view["narrow"])
    elements = np.arange(len(cells)) * view["block"][1] + positions
    np.testing.assert_array_equal(cells, logits[0, elements].numpy())
    part = session.answer({"ask": "view", "tensor": 1, "index": [0, 0], "columns": [50000, 50100]})
    np.testing.assert_array_equal(numbers(part["values"], True), logits[0, 50000:50100].numpy())
    assert part["notes"] == ["columns 50000 to 50099 of 50257"]
    maps = Session(lambda x: x * 1.0, [torch.rand(1, 2048, 7, 7)])
    view = maps.answer({"ask": "view", "tensor": 1, "tiles": [2000, 2048]})
    assert (view["cells"], view["notes"]) == ((48, 7, 7), ["channels 2000 to 2047 of 2048"])


def test_tokens_and_labels_are_given_to_what_they_fit():
    import torch

    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    tokens = torch.tensor([[1, 2, 3]])
    session = Session(Reader(), [tokens], tokens=["a", "<b>", "c"])
    layouts = {row["name"]: row["layout"]["kind"] for row in session.start()["names"]}
    assert layouts["tokens"] == layouts["embedding"] == "tokens"
    assert session.start()["names"][session.start()["source"]]["name"] == "embedding"
    with pytest.raises(eg.OptionError, match="labels= has 3 texts"):
        Session(Reader(), [tokens], labels=["a", "b", "c"])
    with pytest.raises(eg.OptionError, match="list of texts"):
        Session(Reader(), [tokens], labels="abc")
    with pytest.raises(eg.OptionError, match="different lengths"):
        Session(Reader(), [tokens], tokens=[["a"], ["b", "c"]])


def test_labels_are_given_to_the_classes_of_every_position():
    import torch

    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3))
    session = Session(net, [torch.tensor([[1, 2]])], tokens=["a", "b"], labels=["x", "y", "z"])
    labelled = [row["name"] for row in session.start()["names"] if row["labels"]]
    assert labelled == ["1", "output"]


def test_a_dict_of_inputs_is_data_where_the_model_has_parameters_of_its_own():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, batch):
            return {"logits": self.layer(batch["x"]), "count": batch["ids"].sum()}

    session = Session(Net(), [{"x": torch.rand(2, 3), "ids": torch.arange(2)}])
    start = session.start()
    assert start["names"][start["source"]]["name"] == "batch.x"
    assert start["names"][start["output"]]["name"] == "output.logits"
    assert start["names"][start["source"]]["layout"]["kind"] == "bars"
    assert start["examples"] == 2


def test_numbers_that_are_not_finite_are_shown():
    import torch

    session = Session(lambda x: x.sqrt(), [torch.tensor([0.0, 4.0, -1.0])])
    view = session.answer({"ask": "view", "tensor": 0, "of": {"tensor": 1, "index": [0]}})
    assert math.isinf(numbers(view["gradient"], True)[0])
    drivers = session.answer({"ask": "drivers", "tensor": 0, "of": {"tensor": 1, "index": [0]}})["drivers"]
    assert drivers[0]["gradient"] == "inf"


def test_an_error_of_the_model_is_an_answer():
    import torch

    calls = []

    def breaks(x):
        calls.append(x)
        if len(calls) > 2:
            raise RuntimeError("out of luck")
        return x * 2

    session = Session(breaks, [torch.ones(2)])
    for _ in range(3):
        session.answer({"ask": "view", "tensor": 0, "of": {"tensor": 1, "index": [0]}})
    session.close()
    assert "out of luck" in session.answer({"ask": "view", "tensor": 1})["error"]


def test_code_is_spelled_as_the_caller_has_it():
    import torch

    model, image = torch.nn.Linear(2, 1), torch.ones(1, 2)
    with eg.explore(model, image) as explorer:
        code = explorer._session.answer({"ask": "code", "tensor": 0, "of": {"tensor": 1, "index": [0, 0]}})["code"]
    assert code == "eg.grad(model, image, of='output[0, 0]', wrt='input')"
    assert eval(code).shape == (1, 2)


def test_a_name_may_be_anything():
    import torch

    net, x = torch.nn.Sequential(), torch.ones(1, 3)
    net.add_module("a[0](b) <script>", torch.nn.Linear(3, 2))
    net.add_module("tanh", torch.nn.Tanh())
    session = Session(net, [x], spelling=Spelling("net", ["x"]))
    of = {"tensor": 1, "index": [0, 1]}
    view = session.answer({"ask": "view", "tensor": 0, "of": of})
    code = session.answer({"ask": "code", "tensor": 0, "of": of})["code"]
    assert numbers(view["gradient"], True).tolist() == eval(code).flatten().tolist() == net[0].weight[1].tolist()
    assert session.answer({"ask": "shares", "tensor": 0, "index": [0, 2], "of": of})["total"] == net[0].weight[1, 2]


def test_a_walk_names_the_layers_that_it_steps_over():
    import torch

    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    session = Session(torch.nn.Sequential(inner, torch.nn.Linear(4, 2)), [torch.rand(1, 3)])
    names = [row.name for row in session.names]
    target, walked = {"tensor": names.index("output"), "index": [0, 1]}, []
    for _ in range(2):
        step = session.answer({"ask": "walk", "of": target})
        assert all(passed["index"] == tuple(target["index"]) for passed in step["passed"])
        walked.append((names[step["tensor"]], [names[passed["tensor"]] for passed in step["passed"]]))
        target = {"tensor": step["tensor"], "index": list(step["index"])}
    assert walked == [("0", ["1"]), ("0.0", ["0.1"])]


def test_a_walk_lands_where_the_number_changes():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.flat = torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Flatten(0)
            self.shift, self.scale = torch.nn.Module(), torch.nn.Linear(4, 2)
            self.shift.forward = lambda x: x + 1  # its gradient is 1, and it is a step nevertheless

        def forward(self, x):
            return self.scale(self.shift(self.flat(self.drop(self.first(x)))))

    torch.manual_seed(0)
    session = Session(Net().eval(), [torch.rand(1, 3)])
    names = [row.name for row in session.names]
    target, walked = {"tensor": names.index("output"), "index": [1]}, []
    for _ in range(3):
        step = session.answer({"ask": "walk", "of": target})
        target = {"tensor": step["tensor"], "index": list(step["index"])}
        walked.append((names[step["tensor"]], [names[passed["tensor"]] for passed in step["passed"]]))
    assert walked == [("shift", ["scale"]), ("flat", []), ("x", ["drop", "first"])]
    assert "nothing comes before it" in session.answer({"ask": "walk", "of": target})["error"]


def test_a_walk_goes_to_whichever_input_the_element_has():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 4), torch.nn.Linear(3, 4)

        def forward(self, left, right):
            return self.first(left) + self.second(right)

    session = Session(Net(), [torch.rand(1, 2), torch.rand(1, 3)])
    names = [row.name for row in session.names]
    step = session.answer({"ask": "walk", "of": {"tensor": names.index("second"), "index": [0, 1]}})
    assert names[step["tensor"]] == "right"


def test_of_equal_drivers_a_walk_takes_the_largest_value():
    import torch

    net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.AvgPool1d(4))
    session = Session(net, [torch.tensor([[-1.0, 2.0, 3.0, -4.0]])])
    step = session.answer({"ask": "walk", "of": {"tensor": 2, "index": [0, 0]}})
    assert (session.names[step["tensor"]].name, step["index"]) == ("0", (0, 2))


def test_a_walk_of_tokens_ends_at_the_row_that_was_looked_up():
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))
    session = Session(net, [torch.tensor([[5, 2]])])
    names = [row.name for row in session.names]
    target = {"tensor": names.index("output"), "index": [0, 1, 0]}
    for name in ("0", "0.weight"):
        step = session.answer({"ask": "walk", "of": target})
        assert names[step["tensor"]] == name
        assert names[step["source"]] == "0.weight"
        target = {"tensor": step["tensor"], "index": list(step["index"])}
    assert target["index"][0] == 2


def test_slow_questions_wait_until_no_other_does():
    begun, gate, order = threading.Event(), threading.Event(), []
    worker = Worker()
    worker.submit(lambda: (begun.set(), gate.wait(10)))
    begun.wait(10)
    last = [worker.submit(order.append, name, slow=name == "slow") for name in ("slow", "first", "second")]
    gate.set()
    for future in last:
        future.result(10)
    worker.close()
    assert order == ["first", "second", "slow"]


def test_the_small_picture_tells_nan_and_both_infinities_apart():
    import torch

    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 2.0, -2.0, 0.0])
    session = Session(lambda x: x * 1, [x])
    picture = session.answer({"ask": "thumbnails", "tensors": [0]})["thumbnails"][0]
    steps = np.frombuffer(base64.b64decode(picture["steps"]), np.int8)
    assert steps.tolist() == [-128, 127, -127, 126, -126, 0]


@pytest.mark.parametrize(
    ("number", "is_exact"), [(2**53 - 1, True), (-(2**53) + 1, True), (2**60, False), (-(2**60), False)]
)
def test_it_is_said_when_integers_are_rounded(number, is_exact):
    import torch

    session = Session(lambda x: x.float(), [torch.tensor([1, number])])
    notes = session.answer({"ask": "view", "tensor": 0})["scale"]["notes"]
    assert any("2 to the 53" in note for note in notes) != is_exact
