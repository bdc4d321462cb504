"""Every verb on JAX under the settings of strict code bases: what we compute with is explicit in rank and dtype."""

from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elementgrad as eg

SETTINGS = {
    "strict": {
        "numpy_rank_promotion": "raise",
        "numpy_dtype_promotion": "strict",
        "enable_checks": True,
        "check_tracer_leaks": True,
    },
    "debug_nans": {"debug_nans": True},
}
"""What only adds errors while a program is traced is on together; the other one runs programs in another way."""
NUMBERS = np.arange(1.0, 7.0).reshape(2, 3) / 3
X = jnp.asarray(NUMBERS)
SIN, COS = np.sin(NUMBERS), np.cos(NUMBERS)
PARAMS = {"w": jnp.arange(600.0).reshape(20, 30) / 1000, "b": jnp.ones(30), "table": jnp.arange(60.0).reshape(20, 3)}
KERNEL = jnp.ones((24, 20, 3, 3))


PICKED = {
    "w[3]": lambda slopes: slopes["w"][3],
    "w[[5, 7], [1, 2]]": lambda slopes: slopes["w"][np.array([5, 7]), np.array([1, 2])],
    "w[:, 2]": lambda slopes: slopes["w"][:, 2],
    "b[2]": lambda slopes: slopes["b"][2:3],
    "table[1]": lambda slopes: slopes["table"][1],
    "table[3, 1]": lambda slopes: slopes["table"][3, 1:2],
}


@pytest.fixture(params=SETTINGS, autouse=True)
def setting(request):
    with ExitStack() as stack:
        for name, value in SETTINGS[request.param].items():
            stack.enter_context(getattr(jax, name)(value))
        yield


def scaled(x):
    return jnp.sin(x) * x[:, :1]


def square(x):
    return (eg.tag(jnp.sin(x), "hidden") ** 2).sum()


def loss(params):
    hidden = jnp.ones((4, 20)) @ params["w"] + params["b"][None]
    return jnp.tanh(hidden).sum() + (params["table"][jnp.array([1, 3])] ** 2).sum()


def image(params):
    return (jax.lax.conv_general_dilated(jnp.ones((1, 20, 3, 3)), params["kernel"], (1, 1), "VALID") ** 2).sum()


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_edits():
    changed = NUMBERS.copy()
    changed[0, 1] = 2
    close(eg.at(X)[0, 1].set(2.0), changed)
    close(eg.at(X)[0].add(X[1]), NUMBERS + np.stack([NUMBERS[1], np.zeros(3)]))
    close(eg.at(X)[:, 1].multiply(3.0), NUMBERS * [1, 3, 1])
    close(eg.at(X)[::-1].set(X[0]), NUMBERS[[0, 0]])
    close(eg.at(X)[[0, 1], [2, 0]].get(), NUMBERS[[0, 1], [2, 0]])
    close(eg.at(X)[X > 1].set(0.0), np.where(NUMBERS > 1, 0, NUMBERS))
    close(jax.jit(lambda x, i: eg.at(x)[i].apply(jnp.sin))(X, 1), [NUMBERS[0], SIN[1]])
    close(jax.grad(lambda x: (eg.at(x)[0].only() ** 2).sum())(X), NUMBERS * [[2], [0]])
    close(jax.grad(lambda x: (eg.at(x)[0].stop() ** 2).sum())(X), NUMBERS * [[0], [2]])
    weights = np.exp(NUMBERS) / np.exp(NUMBERS).sum(1, keepdims=True)
    close(eg.choose(X, X), (weights * NUMBERS).sum(1))
    close(eg.choose(X, X, hard=True), NUMBERS[:, 2])


def test_reads():
    dense = np.asarray(jax.jacfwd(scaled)(X))
    jacobian = eg.jacobian(scaled, X)
    close(jacobian.dense(), dense)
    close(jacobian[(0, 1), :], dense[0, 1])
    close(jacobian[:, (0, 1)], dense[..., 0, 1])
    close(jacobian[(0, 1), (0, 0)], dense[0, 1, 0, 0])
    close(jacobian.entries(([0, 1], [1, 2]), ([0, 1], [0, 0])), dense[[0, 1], [1, 2], [0, 1], [0, 0]])
    close(jacobian.diagonal(), np.einsum("abab->ab", dense))
    close(jacobian @ X, np.einsum("abcd,cd->ab", dense, NUMBERS))
    close(X @ jacobian, np.einsum("ab,abcd->cd", NUMBERS, dense))
    close(jacobian.sparse().todense(), dense.reshape(6, 6))
    close(eg.jacobian(scaled, X, batch=True).dense(), np.einsum("abac->abc", dense))
    assert "sweep" in str(jacobian.plan((0, 1), ...))
    close(eg.grad(square, X), np.sin(2 * NUMBERS))
    close(eg.grad(square, X, wrt="hidden[0]"), 2 * SIN[0])
    close(eg.grad(lambda x, y: (x * x).sum(), X, X, wrt="y", unconnected="zero"), 0 * NUMBERS)
    close(sum(share.value for share in eg.contributions(square, X, wrt="hidden")), 2 * SIN)


def test_hessians():
    dense = np.asarray(jax.hessian(lambda x: scaled(x).sum())(X))
    hessian = eg.hessian(lambda x: scaled(x).sum(), X)
    close(hessian.dense(), dense)
    close(hessian[(0, 0), (0, 1)], dense[0, 0, 0, 1])
    close(hessian[(0, 0), :], dense[0, 0])
    close(hessian @ X, np.einsum("abcd,cd->ab", dense, NUMBERS))
    close(hessian.sparse().todense(), dense.reshape(6, 6))


@pytest.mark.parametrize("places", [["w[3]", "w[[5, 7], [1, 2]]", "b[2]", "table[1]"], ["w[:, 2]", "table[3, 1]"]])
def test_training(places):
    elements = eg.trainable(PARAMS, places)
    values = {place: value + 1 for place, value in elements.values.items()}
    params = elements.merge(values)
    expected, slopes = jax.value_and_grad(loss)(params)
    step = jax.jit(lambda values, params: elements.value_and_grad(loss, values, params=params))
    for given in (PARAMS, params):
        found, gradient = step(values, given)
        close(found, expected)
        for place, slope in gradient.items():
            close(slope, PICKED[place](slopes))
    close(elements.grad({places[0]: loss}, values)[places[0]], gradient[places[0]])
    assert elements.plan(loss).uses


def test_training_of_kernels_and_of_half_precision():
    for place in ("kernel[1]", "kernel[:, 1]"):
        gradient = eg.trainable({"kernel": KERNEL}, place).grad(image)[place]
        close(gradient, np.full(len(gradient), 2 * 180.0))
    for dtype in (jnp.bfloat16, jnp.float16):
        params = {"w": jnp.ones((20, 30), dtype), "table": jnp.ones((20, 3), dtype)}
        elements = eg.trainable(params, ["w[3, 4]", "table[1, 1]"])

        def half(params):
            return (jnp.ones((4, 20), params["w"].dtype) @ params["w"]).sum() + params["table"][jnp.array([1])].sum()

        assert [slope.tolist() for slope in elements.grad(half).values()] == [[4], [1]]


def test_ranking_explaining_and_checking():
    slopes = np.asarray(jax.grad(loss)(PARAMS)["b"])
    assert [str(place) for place in eg.top(PARAMS, loss, 1, among="b")] == [f"b[[{np.abs(slopes).argmax()}]]"]
    assert eg.top(PARAMS, loss, 2, by="fisher", among="b")
    assert eg.explain(lambda x: jax.nn.relu(-x).sum(), X, wrt="x[0, 0]").cause == "dead-relu"
    assert eg.explain(square, X).verdict == "flows"
    assert eg.explain(lambda x: jnp.round(x).sum(), X).cause == "step-function"
    assert eg.check(scaled, X, of="output[0, 1]").verdict == "agrees"


def sheltered(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0).sum()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: eg.grad(sheltered, x),
        lambda x: eg.grad(sheltered, x, wrt="x[0]"),
        lambda x: eg.jacobian(lambda x: 0 * jnp.sqrt(x), x).dense(),
        lambda x: eg.jacobian(lambda x: 0 * jnp.sqrt(x), x)[:, 0],
        lambda x: eg.check(sheltered, x),
    ],
    ids=["gradient", "element", "whole", "column", "check"],
)
def test_a_read_raises_at_a_nan_where_the_user_wants_that(read):
    if jax.config.jax_debug_nans:  # and does not answer by the other direction, in which there is none
        with pytest.raises(FloatingPointError, match="nan"):
            read(jnp.array([0.0, 1.0]))


def test_an_explanation_follows_a_nan_in_any_case():
    diagnosis = eg.explain(sheltered, jnp.array([0.0, 1.0]), wrt="x[0]")
    assert (diagnosis.verdict, diagnosis.cause) == ("nonfinite", "masked-branch")
    findings = eg.audit({"w": jnp.array([0.0, 1.0])}, lambda params: sheltered(params["w"])).findings
    assert [finding.cause for finding in findings] == ["masked-branch"]
