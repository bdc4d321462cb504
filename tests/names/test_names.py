"""Names of inputs and outputs, results for several of them, and refusals before any work."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest

import elementgrad as eg

Pair = namedtuple("Pair", "first second")
A, B = np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0])


class Counted:
    """A function that knows how often it was called."""

    def __init__(self, f):
        self.f, self.calls = f, 0

    def __call__(self, x):
        self.calls += 1
        return self.f(x)


def product(fw):
    """A function whose parameter `p` holds two tensors in some structure, and how to take them out of it."""
    return lambda take: lambda p: fw.sum(take(p)[0] * take(p)[1])


@pytest.mark.parametrize(
    ("make", "take", "name"),
    [
        (lambda a, b: {"w": [a, b]}, lambda p: p["w"], "p.w.0"),
        (lambda a, b: [a, b], lambda p: p, "p.0"),
        (lambda a, b: (a, (b,)), lambda p: (p[0], p[1][0]), "p.0"),
        (
            lambda a, b: ("text", None, 3, {"deep": [a, {"er": b}]}),
            lambda p: (p[3]["deep"][0], p[3]["deep"][1]["er"]),
            "p.3.deep.0",
        ),
        (lambda a, b: Pair(a, b), lambda p: (p.first, p.second), "p.first"),
        (lambda a, b: Pair(first=b, second=[a]), lambda p: (p.first, p.second[0]), "p.second.0"),
        (lambda a, b: {0: a, 1: b}, lambda p: (p[0], p[1]), "p.0"),
        (lambda a, b: OrderedDict(x=a, y=b), lambda p: (p["x"], p["y"]), "p.x"),
    ],
    ids=["dict of list", "list", "tuple", "beside other things", "namedtuple", "inside it", "int keys", "ordered dict"],
)
def test_inputs_inside_structures_have_names(fw, make, take, name):
    p = make(fw.tensor(A), fw.tensor(B))
    f = product(fw)(take)
    assert fw.numpy(eg.grad(f, p, wrt=name)).tolist() == B.tolist()
    assert fw.numpy(eg.grad(f, p, wrt=f"{name}[1]")) == 20
    assert fw.numpy(eg.jacobian(f, p, wrt=eg.at(name))[..., 2]) == 30


def test_structures_keep_their_type_inside_the_function(fw):
    seen = []

    def f(p):
        seen.append(type(p))
        return fw.sum(p["x"] * p["y"])

    eg.grad(f, OrderedDict(x=fw.tensor(A), y=fw.tensor(B)), wrt="p.x")
    assert seen == [OrderedDict]


@pytest.mark.parametrize("name", ["y", "scale", "more.0", "options.shift"])
def test_keyword_and_variadic_arguments_have_names(fw, name):
    def f(x, y, *more, scale, **options):
        return fw.sum(x * y * more[0] * scale + options["shift"])

    ones = fw.tensor([1.0, 1.0])
    kwargs = {"scale": fw.tensor([3.0, 3.0]), "shift": ones}
    gradient = eg.grad(f, ones, fw.tensor([2.0, 2.0]), ones, kwargs=kwargs, wrt=name)
    assert (
        fw.numpy(gradient).tolist() == {"y": [3, 3], "scale": [2, 2], "more.0": [6, 6], "options.shift": [1, 1]}[name]
    )


OUTPUTS = {
    "output.loss": 3 * A**2,
    "output.parts.0": 2 * A,
    "output:parts:0": 2 * A,
    "output.parts.1.deep": 5 * np.ones(3),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_inside_structures_have_names(fw, name):
    def f(x):
        return {"loss": fw.sum(x**3), "parts": (fw.sum(x**2), {"deep": fw.sum(5 * x), "note": "text"})}

    assert fw.numpy(eg.grad(f, fw.tensor(A), of=name)).tolist() == OUTPUTS[name].tolist()


def test_several_outputs_go_by_number_with_a_colon_or_a_dot(fw):
    def f(x):
        return x * 2, x * 3

    for name in ("output:1", "output.1", eg.at("output:1"), eg.at("output.1")):
        assert fw.numpy(eg.jacobian(f, fw.tensor(A), of=name)[0, 0]) == 3
    assert fw.numpy(eg.grad(f, fw.tensor(A), of="output:1[2]", wrt="x[2]")) == 3


def test_an_input_may_be_given_as_the_tensor_itself(fw):
    x, y = fw.tensor(A), fw.tensor(B)

    def f(x, y):
        return fw.sum(x * y)

    assert fw.numpy(eg.grad(f, x, y, wrt=x)).tolist() == B.tolist()
    assert fw.numpy(eg.grad(f, x, y, wrt=eg.at(y)[0])) == 1
    assert fw.numpy(eg.grad(f, x, y, wrt=eg.at(y).coords([[2], [0]]))).tolist() == [3, 1]
    why = ", and what a function closes over is constant on JAX" if fw.name == "jax" else ""
    with pytest.raises(eg.PlaceError, match=rf"the tensor is none of the inputs x, y{why}; pass it to the function"):
        eg.grad(f, x, y, wrt=fw.tensor(A))


def test_a_tensor_given_twice_is_two_inputs(fw):
    x = fw.tensor(A)

    def f(x, y):
        return fw.sum(x**2 * y)

    assert fw.numpy(eg.grad(f, x, x, wrt="x")).tolist() == (2 * A * A).tolist()
    assert fw.numpy(eg.grad(f, x, x, wrt="y")).tolist() == (A**2).tolist()
    assert [fw.numpy(g).tolist() for g in eg.grad(f, x, x, wrt=["x", "y"])] == [(2 * A * A).tolist(), (A**2).tolist()]
    with pytest.raises(eg.PlaceError, match="the tensor was given as x, y; say which by its name"):
        eg.grad(f, x, x, wrt=x)


@pytest.mark.parametrize(
    ("place", "index"),
    [
        (eg.at[1], 1),
        (eg.at[-1:], slice(-1, None)),
        (eg.at[[1, 1]], [1, 1]),
        (eg.at[...], ...),
        ("x[1]", 1),
        ("x[::-1]", slice(None, None, -1)),
        (eg.at("x")[1], 1),
        (eg.at("x").coords([[1], [0]]), [1, 0]),
    ],
    ids=str,
)
def test_elements_go_by_a_place_its_text_or_without_a_name(fw, place, index):
    J = eg.jacobian(lambda x: x * fw.sum(x), fw.tensor([2.0, 5.0]), wrt=place)
    np.testing.assert_array_equal(fw.numpy(J.dense()), np.array([[9.0, 2.0], [5.0, 12.0]])[:, index])


@pytest.mark.parametrize(
    "structure", [list, tuple, lambda names: dict(zip("ab", names, strict=True))], ids=["list", "tuple", "dict"]
)
def test_a_structure_of_names_gives_the_same_structure(fw, structure):
    def f(x, y):
        return fw.sum(x**2 * y), fw.sum(x * y)

    x, y = fw.tensor(A), fw.tensor(B)
    wrt, of = structure(["x", "y[0]"]), structure(["output.1", "output.0"])
    expected = structure([B.tolist(), A[0]])
    got = eg.grad(f, x, y, of="output.1", wrt=wrt)
    assert type(got) is type(wrt)
    assert list(got) == list(wrt) if isinstance(wrt, dict) else len(got) == 2
    second = "b" if isinstance(wrt, dict) else 1
    first = "a" if isinstance(wrt, dict) else 0
    assert fw.numpy(got[first]).tolist() == expected[first]
    assert fw.numpy(got[second]) == expected[second]
    both = eg.jacobian(f, x, y, of=of, wrt=wrt)
    assert type(both) is type(both[first]) is type(wrt)
    assert fw.numpy(both[second][first][..., 1]) == 2 * A[1] * B[1]
    H = eg.hessian(f, x, y, of="output.0", wrt=wrt)
    assert fw.numpy(H[first][second][1, ...]) == 0
    assert fw.numpy(H[first][second][0, ...]) == fw.numpy(H[second][first][..., 0]) == 2 * A[0]


def test_structures_of_structures_and_namedtuples_come_back_too(fw):
    f = lambda x, y: fw.sum(x * y)  # noqa: E731
    got = eg.grad(f, fw.tensor(A), fw.tensor(B), wrt={"deep": ["x", ("y",)], "pair": Pair("x[0]", "y[0]")})
    assert fw.numpy(got["deep"][1][0]).tolist() == A.tolist()
    assert isinstance(got["pair"], Pair)
    assert fw.numpy(got["pair"].first) == 10


def test_without_wrt_there_must_be_one_floating_input(fw):
    whole = fw.tensor([0, 2], "int32")
    assert fw.numpy(eg.grad(lambda x, i: fw.sum(x) * 2, fw.tensor(A), whole)).tolist() == [2, 2, 2]
    with pytest.raises(eg.PlaceError, match=r"there are 2 inputs, x, p.y; name one, as in wrt='x'"):
        eg.grad(lambda x, p: fw.sum(x), fw.tensor(A), {"y": fw.tensor(B)})
    with pytest.raises(eg.DtypeError, match=r"no input is floating point \(i: .*int32.*\), and no other dtype has"):
        eg.grad(lambda i: fw.sum(i), whole)
    with pytest.raises(eg.PlaceError, match=r"there are 2 outputs, output.0, output.1; name one, as in of='output.0'"):
        eg.jacobian(lambda x: (x, x), fw.tensor(A))
    with pytest.raises(eg.PlaceError, match="of or wrt names nothing; name a tensor"):
        eg.grad(lambda x: fw.sum(x), fw.tensor(A), wrt=[])


def test_a_gradient_without_of_needs_a_single_number(fw):
    x = fw.tensor(A)
    assert fw.numpy(eg.grad(lambda x: fw.sum(x * x), x)).tolist() == [2, 4, 6]
    assert fw.numpy(eg.grad(lambda x: x[:1] ** 2, x)).tolist() == [2, 0, 0]
    with pytest.raises(eg.SelectionError, match=r'output of shape \(3,\) is not a single .* as in of="output\[0\]"'):
        eg.grad(lambda x: x * x, x)
    with pytest.raises(eg.SelectionError, match=r'\(3, 1\) has a Hessian for each .* of="output\[0, 0\]"'):
        eg.hessian(lambda x: x[:, None] ** 2, x)


def test_two_inputs_of_one_name_are_distinguished_or_refused(fw):
    p = {"a.b": fw.tensor(A), "a": {"b": fw.tensor(B)}}
    with pytest.raises(eg.PlaceError, match=r"2 inputs are named 'p.a.b'; rename the keys of the dicts"):
        eg.grad(lambda p: fw.sum(p["a.b"] * p["a"]["b"]), p, wrt="p.a.b")
    assert fw.numpy(eg.grad(lambda p: fw.sum(p["a.b"] * p["a"]["b"]), p, wrt=p["a.b"])).tolist() == B.tolist()


def test_errors_of_the_function_come_through_unchanged(fw):
    class MineError(Exception):
        pass

    raised = MineError("mine", 7)

    def f(x):
        raise raised

    for verb in (eg.grad, eg.jacobian, eg.hessian):
        with pytest.raises(MineError) as caught:
            verb(f, fw.tensor(A))
        assert caught.value is raised
