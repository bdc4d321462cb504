"""The elements with the largest scores are those of a dense computation, on every framework."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import elementgrad as eg
from elementgrad._backends import registry as backends
from elementgrad._train import top as ranking
from tests.support.made import counts
from tests.support.ranked import HOW, assert_best, best, named
from tests.support.ranked_keras import RankedKeras
from tests.support.ranked_torch import RankedTorch

FRAMEWORKS = {"torch": RankedTorch(), "tensorflow": RankedKeras()}
CASES = [(name, which) for name, framework in FRAMEWORKS.items() for which in framework.models]
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=list(FRAMEWORKS))


@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize(("name", "which"), CASES)
def test_the_largest_gradients_are_those_of_a_dense_computation(name, which, by):
    framework = FRAMEWORKS[name]
    model, loss_fn = framework.models[which]()
    size = sum(values.size for values in framework.dense(model, loss_fn, by).values())
    for k in (1, size // 2, size) if by == "gradient" else (size // 2,):
        assert_best(framework, model, loss_fn, k, by)


@pytest.mark.parametrize("by", HOW)
@pytest.mark.parametrize(
    ("name", "which"), [*[("torch", which) for which in ("mlp", "conv", "gru")], ("tensorflow", "mlp")]
)
def test_losses_may_come_as_a_number_a_vector_a_list_or_one_by_one(name, which, by):
    framework = FRAMEWORKS[name]
    model, vector = framework.models[which]()
    for loss_fn in (
        lambda model: framework.sums(vector(model)),
        lambda model: [vector(model)[i] for i in range(3)],
        lambda model: (vector(model)[i] for i in range(3)),
        lambda model: (vector(model)[i : i + 2] for i in (0, 2)),
        lambda model: (vector(model)[:2], vector(model)[2]),
    ):
        assert_best(framework, model, loss_fn, 11, by)


@every_framework
@settings(max_examples=counts(25))
@given(st.data())
def test_made_models(framework, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    widths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    kernels = [rng.normal(size=shape).round() for shape in pairwise(widths)]  # ties, and more of dead units
    biases = [rng.normal(size=width).round() if data.draw(st.booleans()) else None for width in widths[1:]]
    tied = data.draw(st.booleans()) and kernels[0].shape == kernels[-1].shape[::-1] == kernels[-1].shape
    model = framework.chain(kernels, biases, frozen=data.draw(st.booleans()), tied=tied)
    x = framework.tensor(rng.integers(-2, 3, (data.draw(st.integers(1, 3)), widths[0])).astype(float))
    by = data.draw(st.sampled_from(HOW))
    lazy = data.draw(st.booleans())

    def loss_fn(model):
        return (framework.sums(model(row[None]))[0] for row in x) if lazy else framework.sums(model(x))

    k = data.draw(st.integers(1, sum(x.size for x in framework.parameters(model).values())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framework.pieces, "PIECE", data.draw(st.integers(1, 5)))
        patch.setattr(ranking, "ROOM", data.draw(st.integers(0, 3)))
        assert_best(framework, model, loss_fn, k, by)


@every_framework
@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(1, 50), st.integers(1, 9), st.integers(0, 3))
def test_the_largest_of_a_tensor_and_the_first_of_equal_ones(framework, values, count, piece, floor):
    x = framework.tensor(np.float32(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framework.pieces, "PIECE", piece)
        sizes, positions = backends.require_backend(x).load("top").topk_abs(x, count, floor, None)
    order = sorted((i for i in range(len(x)) if abs(values[i]) >= floor), key=lambda i: (-abs(values[i]), i))[:count]
    assert positions.tolist() == sorted(order)
    assert sizes.tolist() == [abs(values[i]) for i in sorted(order)]


@every_framework
def test_magnitude_and_how_far_elements_have_moved(framework):
    model, _ = framework.models["mlp"]()
    then = framework.parameters(framework.copied(model))
    assert named(eg.top(model, None, 9, "magnitude"), framework, model) == best(
        {name: np.abs(x) for name, x in then.items()}, 9
    )
    before = framework.copied(model)
    state = {name: framework.tensor(x) for name, x in then.items()}
    rng = np.random.default_rng(1)
    framework.assign(model, {name: x + rng.normal(size=x.shape) for name, x in then.items()})
    now = framework.parameters(model)
    expected = best({name: np.abs(now[name] - x) for name, x in then.items()}, 9)
    for since in (before, state, framework.tensors(before), {**state, "head.weight": framework.tensor([1.0]), 3: None}):
        assert named(eg.top(model, None, 9, by="magnitude", since=since), framework, model) == expected


@pytest.mark.parametrize("by", HOW)
@every_framework
def test_among_some_parameters_or_some_of_their_elements(framework, by):
    model, loss_fn = framework.models["mlp"]()
    scores = framework.dense(model, loss_fn, by)
    tensors = framework.tensors(model)
    kernel, bias, second, second_bias, _, last = tensors  # of three layers
    wide = tensors[kernel].shape[1]
    points = [[1, 1], [0, 4], [2, 3]]
    cases = [
        (kernel, lambda name, at: name == kernel),
        ([last, eg.at(kernel)[1]], lambda name, at: name == last or (name == kernel and at // wide == 1)),
        (tensors[second], lambda name, at: name == second),
        ({f"{bias}[2:]", f"{bias}[[3, 3, 0]]"}, lambda name, at: name == bias and at != 1),
        (
            [eg.at(tensors[kernel]).coords(points)],
            lambda name, at: name == kernel and [at // wide, at % wide] in points,
        ),
        ((f"{name} (parameter)" for name in (kernel, bias)), lambda name, at: name in (kernel, bias)),
        ([f"{second_bias}[0]", second_bias], lambda name, at: name == second_bias),
        (f"{kernel}[:, ::-2]", lambda name, at: name == kernel and at % wide % 2 == 0),
    ]
    for among, allowed in cases:
        found = eg.top(model, loss_fn, 3, by, among=among)
        assert named(found, framework, model) == best(scores, 3, allowed)


@every_framework
def test_parameters_without_axes_are_named_whole_and_unreached_ones_never(framework):
    model, loss_fn = framework.models["sparse"]()
    first, second = eg.top(model, loss_fn, 28)
    assert first == eg.at("scale")
    assert second.name.startswith("table")
    assert eg.top(model, lambda model: model.scale, 1) == [eg.at("scale")]  # a loss that is a parameter itself


@every_framework
def test_k_may_be_an_int_of_numpy(framework):
    model, loss_fn = framework.models["mlp"]()
    assert eg.top(model, loss_fn, np.int64(3)) == eg.top(model, loss_fn, 3)
