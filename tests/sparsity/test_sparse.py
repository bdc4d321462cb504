"""Sparse Jacobians and Hessians: the numbers of dense ones, no entry missed, and few sweeps."""

import numpy as np
import pytest

import elementgrad as eg
from tests.support import functions
from tests.support.frameworks import FRAMEWORKS, JAX, TENSORFLOW, TORCH
from tests.support.functions import CASES, OPS
from tests.support.sparse_problems import PROBLEMS

BRANCHING = {case.name for case in CASES if case.eager} - {"native condition"}
"""What looks at values in Python, on every framework."""
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def over(table, among=FRAMEWORKS):
    return [pytest.param(fw, case, id=f"{fw.name}-{case}") for case in table for fw in among]


def made(fw, problem, array, **options):
    make = eg.hessian if problem.second else eg.jacobian
    return make(lambda x: problem.f(OPS[fw.name], x), fw.tensor(array), **options)


def dense(J, fw):
    rows = int(np.prod(fw.numpy(J.value).shape))
    return fw.numpy(J.dense()).reshape(rows, -1)


def to_array(matrix):
    return matrix.toarray()


@pytest.mark.parametrize(("fw", "problem"), over(PROBLEMS))
def test_a_sparse_problem_has_the_numbers_of_the_dense_one_in_few_sweeps(fw, problem):
    own = dense(made(fw, problem, problem.point), fw)
    J = made(fw, problem, problem.point)
    P = J.pattern()
    again = dense(made(fw, problem, problem.point[..., ::-1] * 1.1), fw)
    seen = (own != 0) | (again != 0)
    assert not (seen & ~P.dense()).any(), "an entry is missed"
    assert not problem.exact or P.size == seen.sum()
    S = J.prepare("scipy")
    assert S.plan.sweeps == problem.sweeps
    np.testing.assert_allclose(to_array(S.sparse()), own, **EXACT)
    np.testing.assert_allclose(to_array(S(fw.tensor(problem.point[..., ::-1] * 1.1))), again, **EXACT)
    np.testing.assert_allclose(dense(J, fw), own, **EXACT)
    assert J.verify() is True


@pytest.mark.parametrize(("fw", "case"), over(CASES))
def test_no_entry_is_missed_at_any_point(fw, case):
    """A pattern found at one point holds at others; that of this point holds here."""

    def f(x):
        return case.f(OPS[fw.name], x)

    f = fw.jit(f) if fw is JAX and not case.eager else f  # it compiles each operation otherwise
    # Away from kinks the numbers of all are the same, and those of PyTorch there at once.
    own_at = functions.derivative(fw.name if case.kink else "torch", case)
    own = own_at(case.point).reshape(-1, case.point.size)
    noise = 1e-13 * np.abs(own).max()
    J = eg.jacobian(f, fw.tensor(case.point))
    local = J.pattern(local=True)
    assert not ((np.abs(own) > noise) & ~local.dense()).any()
    if fw is not JAX:  # where a program is compiled for each
        np.testing.assert_allclose(to_array(J.sparse("scipy")), own, **EXACT)
    J = eg.jacobian(f, fw.tensor(case.point))
    if case.name in BRANCHING or (case.eager and fw is TORCH):
        with pytest.raises(eg.PatternError, match=r"no pattern that holds for every x .* use J\.pattern\(local=True\)"):
            J.pattern()
        return
    P = J.pattern()
    if fw is not JAX:
        np.testing.assert_allclose(to_array(J.sparse("scipy")), own, **EXACT)
    for scale in (1.0, 0.7, 1.3):
        point = np.roll(case.point.reshape(-1), 1).reshape(case.point.shape) * scale
        there = own_at(point).reshape(own.shape)
        assert not ((np.abs(there) > noise) & ~P.dense()).any()


@pytest.mark.parametrize(("fw", "case"), over([case for case in CASES if case.second and not case.eager], [TORCH]))
def test_sparse_hessians_are_the_frameworks_own(fw, case):
    own = functions.hessian(fw.name, case).reshape(case.point.size, -1)
    H = eg.hessian(functions.scalar(OPS[fw.name], case), fw.tensor(case.point), unconnected="zero")
    assert not ((own != 0) & ~H.pattern().dense()).any()
    np.testing.assert_allclose(to_array(H.sparse("scipy")), own, rtol=1e-8, atol=1e-10)


def test_a_given_pattern_serves_every_read(fw):
    def f(x):
        return x[1:] ** 2 * x[:-1]

    x = fw.tensor(np.linspace(0.5, 2.0, 12))
    own = fw.numpy(eg.jacobian(f, x).dense())
    J = eg.jacobian(f, x, pattern=eg.Pattern.from_dense(own))
    assert J.plan().sweeps == 2
    assert J.plan(3, slice(None)).colouring is None
    np.testing.assert_allclose(fw.numpy(J.dense()), own, **EXACT)
    np.testing.assert_allclose(fw.numpy(J[2:9, 1:7]), own[2:9, 1:7], **EXACT)
    np.testing.assert_allclose(fw.numpy(J[[3, 3, 0, 5], :]), own[[3, 3, 0, 5]], **EXACT)
    outs, ins = [0, 4, 4, 8, 10], [1, 4, 7, 9, 11]
    np.testing.assert_allclose(fw.numpy(J.entries(outs, ins)), own[outs, ins], **EXACT)
    np.testing.assert_allclose(fw.numpy(J[3, :]), own[3], **EXACT)
    assert "2 colours against 11 rows and 12 columns" in str(J.prepare().plan)
    assert J.verify() is True
    matrix = eg.jacobian(f, x, pattern=eg.Pattern.from_dense(own).to_scipy()).sparse("scipy")
    np.testing.assert_allclose(matrix.toarray(), own, **EXACT)
    native = J.sparse()
    assert tuple(native.shape) == own.shape


def test_some_elements_of_both_sides_have_a_sparse_jacobian_of_their_own(fw):
    def f(x):
        return x[:, 1:] * x[:, :-1]

    x = fw.tensor(np.linspace(0.5, 2.0, 12).reshape(2, 6))
    whole = fw.numpy(eg.jacobian(f, x).dense()).reshape(2, 5, 2, 6)
    own = whole[1, [0, 3, 3]][:, :, 1::2].reshape(3, -1)
    names = {"of": "output[1, [0, 3, 3]]", "wrt": "x[:, 1::2]"}
    J = eg.jacobian(f, x, **names, pattern=eg.Pattern.from_dense(own))
    np.testing.assert_allclose(J.sparse("scipy").toarray(), own, **EXACT)
    other = fw.tensor(np.linspace(2.0, 3.0, 12).reshape(2, 6))
    there = fw.numpy(eg.jacobian(f, other, **names).dense()).reshape(3, -1)
    np.testing.assert_allclose(J.prepare("scipy")(other).toarray(), there, **EXACT)


def test_an_unconnected_jacobian_has_no_pattern_or_an_empty_one(fw):
    x, pattern = fw.tensor(np.ones(3)), eg.Pattern.from_dense(np.eye(3))
    stop = OPS[fw.name].stop
    with pytest.raises(eg.UnconnectedError, match="output does not depend on x"):
        eg.jacobian(lambda x: stop(x), x, pattern=pattern).sparse()
    zeros = eg.jacobian(lambda x: stop(x), x, pattern=pattern, unconnected="zero").sparse("scipy")
    np.testing.assert_array_equal(zeros.toarray(), np.zeros((3, 3)))
    with pytest.raises(eg.UnconnectedError, match="output does not depend on x"):
        eg.jacobian(lambda x: stop(x), x).pattern()
    assert eg.jacobian(lambda x: stop(x), x, unconnected="zero").pattern().size == 0


def without_entries(fw):
    """Jacobians and Hessians in which nothing can be nonzero, with their shapes and where they can be read again."""
    o, x, nothing = OPS[fw.name], fw.tensor(np.ones(3)), fw.tensor(np.ones((0, 2)))
    empty = eg.Pattern.from_entries([], [], (3, 3))
    yield eg.hessian(lambda x: o.sum(o.relu(x)), x, unconnected="zero"), (3, 3), x
    yield eg.jacobian(lambda x: o.stop(x), x, unconnected="zero"), (3, 3), x
    yield eg.jacobian(lambda x: x * 0, x, pattern=empty), (3, 3), x
    yield eg.jacobian(lambda x: x * x, x, of="output[3:]"), (0, 3), x
    yield eg.jacobian(lambda x: x * x, x, wrt="x[3:]"), (3, 0), x
    yield eg.jacobian(lambda x: x * x, nothing), (0, 0), nothing
    yield eg.jacobian(lambda x: o.sum(x), nothing), (1, 0), nothing
    yield eg.hessian(lambda x: o.sum(x * x), nothing), (0, 0), nothing


@pytest.mark.filterwarnings("error")
def test_a_matrix_without_entries_is_empty(fw):
    for J, shape, x in without_entries(fw):
        S = J.prepare("scipy")
        for matrix in (J.sparse("scipy"), S.sparse(), S(x)):
            assert (matrix.shape, matrix.nnz, matrix.dtype) == (shape, 0, np.float64)
        own = J.sparse()
        assert tuple(own.shape) == shape
        assert own.dtype == x.dtype
        assert (J.pattern().shape, J.pattern(local=True).size, S.plan.sweeps) == (shape, 0, 0)
        assert J.verify() is True
        np.testing.assert_array_equal(fw.numpy(J.dense()).reshape(shape), np.zeros(shape))
        assert sum(block.values.size for block in J.blocks()) == shape[0] * shape[1]
        if shape == (3, 3):
            np.testing.assert_array_equal(fw.numpy(J.diagonal()), np.zeros(3))


def test_a_matrix_has_the_requested_layout(fw):
    own = np.diag([2.0, 4.0, 6.0])
    J = eg.jacobian(lambda x: x * x, fw.tensor([1.0, 2.0, 3.0]), pattern=eg.Pattern.from_dense(np.eye(3)))
    to_dense = {"torch": lambda m: m.to_dense().numpy(), "jax": lambda m: np.asarray(m.todense())}
    for layout in (None, "coo", "csr"):
        if fw is TENSORFLOW and layout == "csr":
            with pytest.raises(eg.FrameworkError, match='use "coo" or "scipy"'):
                J.sparse(layout)
            continue
        matrix = J.sparse(layout)
        values = scattered(matrix) if fw is TENSORFLOW else to_dense[fw.name](matrix)
        np.testing.assert_array_equal(values, own)


def scattered(matrix):
    array = np.zeros(tuple(matrix.dense_shape))
    array[tuple(np.asarray(matrix.indices).T)] = np.asarray(matrix.values)
    return array


def test_a_rule_whose_derivative_is_not_symmetric_is_not_read_by_symmetry(fw):
    """At zero it looks symmetric; everywhere else it is not."""
    o = OPS[fw.name]
    g = o.custom(lambda x: o.sum(x), lambda x, gradient: gradient * o.roll(x, 1, 0) ** 2)
    pattern = eg.Pattern.from_dense(np.roll(np.eye(5), 1, 0))
    S = eg.hessian(g, fw.tensor(np.zeros(5)), pattern=pattern).prepare("scipy")
    at = np.arange(1.0, 6.0)
    own = fw.numpy(eg.hessian(g, fw.tensor(at)).dense())
    assert (own != own.T).any()
    np.testing.assert_allclose(S(fw.tensor(at)).toarray(), own, **EXACT)


def test_a_product_over_an_axis_has_all_entries_on_jax():
    """Its derivative reshapes and transposes in one operation."""
    jnp = pytest.importorskip("jax.numpy")
    J = eg.jacobian(lambda x: jnp.prod(x.reshape(2, 4), 1), jnp.arange(1.0, 9.0))
    assert (J.pattern().dense() == np.kron(np.eye(2), np.ones(4)).astype(bool)).all()
    np.testing.assert_allclose(J.sparse("scipy").toarray(), J.dense())


def test_value_and_jacobian_come_from_one_evaluation(fw):
    def f(x):
        return x[1:] ** 2 * x[:-1]

    x, y = fw.tensor([1.0, 2.0, 3.0]), fw.tensor([0.5, -1.0, 4.0])
    S = eg.jacobian(f, x).prepare("scipy")
    value, matrix = S.value_and_jacobian(y)
    np.testing.assert_allclose(fw.numpy(value), fw.numpy(f(y)), **EXACT)
    np.testing.assert_allclose(matrix.toarray(), dense(eg.jacobian(f, y), fw), **EXACT)
    S = eg.jacobian(f, x, of="output[1:]").prepare("scipy")
    value, matrix = S.value_and_jacobian(y)
    np.testing.assert_allclose(fw.numpy(value), fw.numpy(f(y))[1:], **EXACT)
    assert matrix.shape == (1, 3)

    def loss(x):
        return fw.sum(f(x))

    H = eg.hessian(loss, x).prepare("scipy")
    gradient, matrix = H.value_and_jacobian(y)
    np.testing.assert_allclose(fw.numpy(gradient), fw.numpy(eg.grad(loss, y)), **EXACT)
    np.testing.assert_allclose(matrix.toarray(), dense(eg.hessian(loss, y), fw), **EXACT)
    with pytest.raises(eg.BroadcastError):
        S.value_and_jacobian(fw.tensor([1.0]))
