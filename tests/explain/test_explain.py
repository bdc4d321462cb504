"""What explain says and how: texts, options, refusals, and that nothing of the user's is disturbed."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import elementgrad as eg
from elementgrad._explain.blame import Evidence, why_nonfinite, why_unconnected, why_zero
from elementgrad._explain.causes import CAUSE_BY_OPERATION, CAUSES, UNDECIDED
from elementgrad._explain.path import DataPath
from elementgrad._explain.trace import CotangentSizes, Op, OpGraph, Tangents, TangentSizes

X = torch.tensor([1.0, -2.0, 3.0])
FRAMEWORKS = ("torch", "tensorflow", "jax")
SLUGS = """
    not-tracked integer non-leaf unused resliced detached left-framework no-grad outside-tape discrete step-function
    assigned-state no-rule custom-rule hook freed-graph dead-relu saturated clamped masked dropped row-not-used
    overwritten modified-in-place modified-through-data cancelled underflow masked-branch singular accumulated tie
""".split()  # noqa: SIM905


def line_of(mark):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


def test_every_cause_has_its_words_in_every_framework():
    assert set(SLUGS) <= set(CAUSES)
    for cause in (*CAUSES.values(), UNDECIDED):
        for framework in FRAMEWORKS:
            words = {"operation": "f", "of": "y", "wrt": "x"}
            said, fix = cause.clause.format(**words), cause.fix_in(framework).format(**words)
            assert said.strip(".") == said != "", said
            assert fix.strip(".") == fix != "", fix
            assert not {"AccumulateGrad", "aten", "jaxpr", "autodiff", "vjp", "jvp"} & set(said.split())
    assert set(CAUSE_BY_OPERATION.values()) <= set(CAUSES)


def test_the_text_is_one_verdict_one_line_and_one_fix():
    def f(x):
        return (x * 2).detach().sum()  # cut

    found = eg.explain(f, X, wrt="x[1]")
    where = f"test_explain.py:{line_of('cut')}"
    assert str(found) == (
        "output has no gradient with respect to x[1]: detach cuts the gradient.\n"
        f"where: {where}, at detach\n"
        "fix: leave detach out, or apply it only where no gradient is wanted"
    )
    assert found.path == ("mul", "detach (broken here)", "sum")
    assert not found
    html = found._repr_html_()
    assert "detach cuts the gradient" in html
    assert where in html
    assert "#cf222e" in html


TEXTS = {
    "the gradient of output with respect to x[1] is zero: the input of relu is not above zero, where its gradient is "
    "zero.": (lambda x: torch.relu(x).sum()),
    "the gradient of output with respect to x[1] is zero: the input of clamp is beyond its bounds, where its "
    "gradient is zero.": (lambda x: x.clamp(0, 1).sum()),
    "the gradient of output with respect to x[1] is zero: max selects other elements than x[1].": lambda x: x.max(),
    "the gradient of output with respect to x[1] is zero: it is not computed from x[1].": lambda x: x[0] * 2,
    "the gradient of output with respect to x[1] is not finite: sqrt has no finite gradient at this input.": (
        lambda x: (x + 2).sqrt().sum()
    ),
    "output has no gradient with respect to x[1]: its values leave the framework in item.": (
        lambda x: torch.ones(()) * x.sum().item()
    ),
    "output has no gradient with respect to x[1]: argmax returns integers, booleans or random draws, which have no "
    "gradient.": (lambda x: x.argmax()),
    "output has a gradient with respect to x[1].": lambda x: x.sum(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_verdict_is_one_sentence(text):
    assert eg.explain(TEXTS[text], X, wrt="x[1]").sentence == text


def test_the_diagnosis_is_about_the_element_asked_for():
    f = lambda x: torch.relu(x).sum()  # noqa: E731
    assert eg.explain(f, X, wrt="x[1]").cause == "dead-relu"
    assert eg.explain(f, X, wrt="x[0]").verdict == "flows"
    whole = eg.explain(f, X)
    assert whole.verdict == "flows"
    assert whole.evidence == ("1 of 3 elements have a gradient of zero",)
    assert torch.equal(whole.value, torch.tensor([1.0, 0.0, 1.0]))
    assert eg.explain(lambda x: x**2, X, of="output[1]", wrt="x[0]").cause == "unused"


def test_a_live_tensor_by_its_elements():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = torch.relu(x)
    assert eg.explain(of=y.sum(), wrt=eg.at(x)[1]).cause == "dead-relu"
    assert eg.explain(of=y.sum(), wrt=eg.at(x)[0]).verdict == "flows"
    assert eg.explain(of=eg.at(y)[0], wrt=eg.at(x)[0]).value == 1
    assert x.grad is None


def test_a_recording_tells_the_line_of_a_live_tensor():
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    with eg.record(x):
        y = torch.relu(x).sum()  # recorded
    found = eg.explain(of=y, wrt=x)
    assert (found.cause, found.where) == ("dead-relu", f"test_explain.py:{line_of('recorded')}")


def test_what_does_not_decide_is_said_to():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    found = eg.explain(of=(y * 2).sum(), wrt=x)
    assert (found.verdict, found.cause) == ("unconnected", None)
    assert "evidence: it is tracked, and the graph of the result does not lead to it" in str(found)
    found = eg.explain(lambda x: torch.ones(()) * x.sum().item(), X, probe=False)
    assert found.cause is None
    assert "it was not tried whether they are used again" in found.evidence[0]


def test_the_error_of_grad_names_the_line_and_the_fix():
    def f(x):
        h = torch.tanh(x)
        return h.detach().sum()  # the error's line

    where = f"test_explain.py:{line_of('the error' + chr(39) + 's line')}"
    with pytest.raises(eg.UnconnectedError) as caught:
        eg.grad(f, X)
    assert str(caught.value) == (
        f"output does not depend on x in torch's graph: detach cuts the gradient ({where}), so there is no "
        "gradient, not even a zero one; leave detach out, or apply it only where no gradient is wanted, or pass "
        'unconnected="zero" to get zeros instead'
    )


def clamps_at_the_bound() -> bool:
    """PyTorch takes the derivative of clamp at its bound for 1, and since 2.15 for 0."""
    x = torch.ones(1, requires_grad=True)
    return not torch.autograd.grad(x.clamp(-1, 1), x)[0]


KINKS = {
    "abs at 0": (torch.abs, 0.0, "zero", "kink", 0.0),
    "clip at the bound": (
        lambda x: x.clamp(-1, 1),
        1.0,
        *(("zero", "clamped", 0.0) if clamps_at_the_bound() else ("flows", None, 1.0)),
    ),
    "max(x, 0) at 0": (lambda x: torch.maximum(x, torch.zeros(1)), 0.0, "flows", None, 0.5),
    "relu at 0": (torch.relu, 0.0, "zero", "dead-relu", 0.0),
    "round": (torch.round, 0.3, "zero", "step-function", 0.0),
    "where and sqrt at 0": (
        lambda x: torch.where(x > 0, x.sqrt(), torch.zeros(1)),
        0.0,
        "nonfinite",
        "masked-branch",
        np.nan,
    ),
    "norm at 0": (lambda x: x.norm()[None], 0.0, "zero", "kink", 0.0),
}


@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_reported_as_pytorch_takes_them(name):
    f, x, verdict, cause, value = KINKS[name]
    found = eg.explain(f, torch.tensor([x]), of="output[0]", wrt=eg.at[0])
    assert (found.verdict, found.cause) == (verdict, cause), found
    np.testing.assert_equal(float(found.value), value)


def test_following_needs_no_framework():
    ops = [
        Op("mul", "a.py:1", inputs=(0,), outputs=(1,)),
        Op("stop_gradient", "a.py:2", inputs=(1,), outputs=(2,), cut_cause="detached"),
        Op("relu", "a.py:3", inputs=(1,), outputs=(3,)),
        Op("add", "a.py:4", inputs=(2, 3), outputs=(4,)),
    ]
    cut = DataPath(OpGraph([*ops[:2], Op("sum", inputs=(2,), outputs=(4,))], 0, 4, {0, 1}))
    assert why_unconnected(cut, None).op is ops[1]
    assert cut.operations(ops[1]) == ["mul", "stop_gradient (broken here)", "sum"]
    path = DataPath(OpGraph(ops, 0, 4, {0, 1, 3, 4}))
    tangents = [TangentSizes(1, 2), TangentSizes(2, 0), TangentSizes(2, 0), TangentSizes(0, 0)]
    tangents = Tangents(dict(zip(ops, tangents, strict=True)), 0.0, False)
    dead = why_zero(path, Evidence(tangents=lambda: tangents, precise=lambda: 0.0, epsilon=1e-7))
    assert (dead.cause, dead.op, dead.others) == ("dead-relu", ops[2], [ops[1]])
    sizes = CotangentSizes(np.nan, np.nan, 0), CotangentSizes(1, np.inf, 1), CotangentSizes(1, 1, 1)
    cotangents = dict(zip((ops[0], *ops[2:]), sizes, strict=True))
    assert why_nonfinite(path, Evidence(cotangents=lambda: cotangents)).op is ops[2]


def test_gpt2_names_the_module_and_the_line():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=8, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    ids = torch.tensor([[3, 7, 1]])

    def explained(fault=None, of="output.logits[0, -1, 2]", wrt="transformer.wpe.weight[0, 0]"):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
        if fault is not None:
            fault(model.transformer.h)
        return eg.explain(model, ids, of=of, wrt=wrt)

    def cut(blocks):
        blocks[7].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))  # block 7

    def written(blocks):
        blocks[2].ln_2.register_forward_hook(lambda _, __, out: out.data.mul_(3.0) * 0 + out)  # block 2

    def overflown(blocks):
        blocks[3].mlp.register_forward_hook(lambda _, __, out: (out.half() * 1e9).float())  # block 3

    def frozen(blocks):
        blocks[5].requires_grad_(False)

    assert explained().verdict == "flows"
    found = explained(cut)
    assert (found.cause, found.module) == ("detached", "transformer.h.7")
    assert found.where == f"test_explain.py:{line_of('block 7')}"
    found = explained(written)
    assert (found.verdict, found.cause, found.module) == ("mismatch", "modified-through-data", "transformer.h.2")
    assert found.where == f"test_explain.py:{line_of('block 2')}"
    found = explained(overflown)
    assert (found.verdict, found.cause, found.where) == (
        "nonfinite",
        "overflow",
        f"test_explain.py:{line_of('block 3')}",
    )
    found = explained(frozen, wrt="transformer.h.5.attn.c_attn.weight[0, 0]")
    assert (found.cause, found.module) == ("not-tracked", "transformer.h.5.attn.c_attn")
    found = explained(wrt="transformer.wpe.weight[9, 0]")
    assert (found.cause, found.module) == ("row-not-used", "transformer.wpe")


def test_an_element_of_a_step_has_a_gradient_though_others_have_none():
    weight = torch.tensor([1.0, -2.0], requires_grad=True)

    def step():
        torch.relu(weight).sum().backward()

    found = eg.explain(step, wrt=eg.at(weight)[0])
    assert (found.verdict, found.value.tolist()) == ("flows", [1.0])
    assert eg.explain(lambda: torch.autograd.grad((weight**2).sum(), weight), wrt=weight).verdict == "flows"


def test_a_grad_of_nan_from_before_is_no_gradient_of_the_step():
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    weight.grad = torch.tensor([0.0, float("nan")])
    assert eg.explain(lambda: (weight.detach() * other).sum().backward(), wrt=weight).cause == "detached"


def test_a_step_that_fails_otherwise_raises_what_it_raised():
    def step():
        F.cross_entropy(torch.ones(2, 3), torch.tensor([0, 7]))

    with pytest.raises(IndexError):
        eg.explain(step)


def test_the_page_lists_every_cause():
    page = (Path(__file__).parents[2] / "docs" / "explaining.md").read_text()
    assert [cause for cause in CAUSES if f"`{cause}`" not in page] == []


def test_a_gradient_of_nan_from_before_is_not_one_of_this_step():
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    x.grad = torch.tensor([0.0, float("nan")])

    def step():
        weight = torch.nn.Parameter(x.clone())
        (weight**2).sum().backward()

    found = eg.explain(step, wrt=x)
    assert (found.verdict, found.cause) == ("unconnected", "detached")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


double = Doubled.apply  # bound before any recording


def test_a_function_with_its_own_derivative_is_one_operation_between_its_neighbours():
    diagnosis = eg.explain(lambda x: double(x.sin()).square().sum(), torch.ones(3), wrt="x[0]")
    assert diagnosis.verdict == "flows"
    diagnosis = eg.explain(lambda x: torch.relu(double(x.sin()) - 9).sum(), torch.ones(3), wrt="x[0]")
    assert (diagnosis.cause, diagnosis.operation) == ("dead-relu", "relu")


HIDDEN_WRITES = {
    "data": lambda h: h.data.mul_(3.0),
    "numpy": lambda h: np.multiply(h.detach().numpy(), 3.0, out=h.detach().numpy()),
}


def step_with(weight, before=lambda h: None, between=lambda h: None, after=lambda h: None):
    def step():
        before(weight)
        h = weight * 2
        loss = (h * h).sum()
        between(h)
        loss.backward()
        after(weight)

    return step


@pytest.mark.parametrize("write", HIDDEN_WRITES)
def test_a_step_says_that_a_write_was_hidden_from_its_gradient(write):
    weight = torch.ones(2, requires_grad=True)
    found = eg.explain(step_with(weight, between=HIDDEN_WRITES[write]), wrt=weight)
    assert found.verdict == "flows"
    assert "the gradient may be that of other numbers" in found.evidence[0]
    assert "test_explain.py" in found.evidence[0]


def test_a_step_whose_hidden_write_makes_the_gradient_zero_says_so():
    weight = torch.ones(2, requires_grad=True)
    found = eg.explain(step_with(weight, between=lambda h: h.data.zero_()), wrt=weight)
    assert (found.verdict, found.cause) == ("zero", "modified-through-data")


@pytest.mark.parametrize("write", HIDDEN_WRITES)
def test_writes_before_the_forward_and_after_the_backward_are_none_of_its_business(write):
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2
    change = HIDDEN_WRITES[write]
    steps = step_with(weight, before=change), step_with(weight, after=change)
    for step in (*steps, step_with(weight, between=lambda h: change(other))):
        weight.grad = None
        found = eg.explain(step, wrt=weight)
        assert (found.verdict, found.evidence) == ("flows", ())
