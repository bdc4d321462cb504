"""Reading a Jacobian or Hessian: what each index means, products, batches, unconnected tensors, dtypes, calls made."""

import numpy as np
import pytest
from hypothesis import assume, given, settings

import elementgrad as eg
from tests.support import made
from tests.support.operations import OPS

X = np.arange(1.0, 7.0).reshape(2, 3)
FULL = (X**2).sum() * np.eye(6).reshape(2, 3, 2, 3) + 2 * np.multiply.outer(X, X)  # exact: all are whole numbers
MASK = X % 2 == 0


def stretched(fw):
    """x times its squared length, of which FULL is the Jacobian at X."""
    return lambda x: x * fw.sum(x**2)


def outer(full, shape, out, into):
    """The block of a Jacobian that NumPy's own indexing of both sides names."""
    split = full.ndim - len(shape)
    rows = np.arange(int(np.prod(full.shape[:split]))).reshape(full.shape[:split])[out]
    columns = np.arange(int(np.prod(shape))).reshape(shape)[into]
    matrix = full.reshape(-1, int(np.prod(shape)))
    return matrix[np.reshape(rows, -1)][:, np.reshape(columns, -1)].reshape(np.shape(rows) + np.shape(columns))


def assert_same(fw, read, expected):
    assert tuple(read.shape) == np.shape(expected)
    np.testing.assert_allclose(fw.numpy(read), expected, rtol=1e-12)


SIDES = [
    (0, 1),
    (np.int64(-1), np.int32(2)),
    (0, ...),
    (..., 0),
    (slice(None), 0),
    (slice(None, None, -1), slice(0, 3, 2)),
    slice(1, None),
    ([0, 1], [2, -1]),
    ([[0], [1]], [0, 0, 2]),
    [1, 0, 1],
    np.array([-1, 0]),
    MASK,
    (slice(None), np.array([True, False, True])),
    slice(None),
    ...,
    (),
    slice(0, 0),
    [],
    np.zeros((2, 3), bool),
    (0, slice(3, 3)),
]


@pytest.mark.parametrize("index", SIDES, ids=str)
def test_each_side_takes_every_index_of_numpy(fw, index):
    J = eg.jacobian(stretched(fw), fw.tensor(X))
    for out, into in [(index, (1, 2)), (index, ...), ((0, ...), index), (..., index), (index, index)]:
        assert_same(fw, J[out, into], outer(FULL, X.shape, out, into))
    H = eg.hessian(lambda x: fw.sum(x**2) ** 2 / 4, fw.tensor(X))
    assert_same(fw, H[index, (1, 2)], outer(FULL, X.shape, index, (1, 2)))


def test_made_indices_of_both_sides_name_the_outer_block(fw):
    @settings(max_examples=made.counts(25))
    @given(made.shapes_and_indices(max_axes=3, min_size=1), made.shapes_and_indices(max_axes=3, min_size=1))
    def check(out_side, in_side):
        (out, row), (into, column) = out_side, in_side
        assume(made.fits_numpy(out, row) and made.fits_numpy(into, column))
        full = np.random.default_rng(0).normal(size=(*out, *into))
        J = eg.jacobian(lambda x: made_linear(fw, full, len(out), x), fw.tensor(np.ones(into)))
        lone = [i for i, shape in ((row, out), (column, into)) if isinstance(i, int | np.integer) and len(shape) > 1]
        if any(not isinstance(i, bool | np.bool_) for i in lone):
            with pytest.raises(eg.SelectionError, match=r"write \(-?\d, \.\.\.\) for all of that row"):
                J[row, column]
        else:
            assert_same(fw, J[row, column], outer(full, into, row, column))

    check()


def made_linear(fw, full, split, x):
    matrix = fw.tensor(full.reshape(int(np.prod(full.shape[:split])), -1))
    o = OPS[fw.name]
    return o.reshape(matrix @ o.reshape(x, (-1, 1)), full.shape[:split])


def test_index_tensors_of_the_framework_itself_are_indices(fw):
    J = eg.jacobian(stretched(fw), fw.tensor(X))
    rows, mask = fw.tensor([1, 0, 1], "int64"), fw.tensor(MASK, "bool")
    assert_same(fw, J[rows, mask], outer(FULL, X.shape, [1, 0, 1], MASK))
    assert_same(fw, J[(rows, fw.tensor(0, "int32")), (0, 0)], outer(FULL, X.shape, ([1, 0, 1], 0), (0, 0)))


def test_a_place_is_an_index_if_it_is_about_this_side(fw):
    J = eg.jacobian(stretched(fw), fw.tensor(X))
    assert_same(fw, J[eg.at[0, 1], eg.at[:, 2]], FULL[0, 1, :, 2])
    assert_same(fw, J[eg.at("output")[0, 1], eg.at("x").coords([[0, 1], [1, 2]])], FULL[0, 1, [0, 1], [1, 2]])
    with pytest.raises(eg.PlaceError, match=r"x\[0, 0\] is not about output; give an index, such as eg.at\[0, 5\]"):
        J[eg.at("x")[0, 0], :]
    with pytest.raises(eg.PlaceError, match="is not about output"):
        J[eg.at(fw.tensor(X))[0], :]


def test_a_side_without_axes_is_all_of_itself(fw):
    J = eg.jacobian(lambda x: fw.sum(x**2), fw.tensor(X))
    for out in (slice(None), ..., (), eg.at[...]):
        assert_same(fw, J[out, (1, 2)], 12.0)
        assert_same(fw, J[out, :], 2 * X)
    with pytest.raises(eg.SelectionError, match="1 indices for a tensor of 0 axes"):
        J[0, :]
    assert_same(fw, eg.jacobian(lambda x: x**3, fw.tensor(2.0))[:, :], 12.0)
    assert_same(fw, eg.hessian(lambda x: x**3, fw.tensor(2.0)).diagonal(), 12.0)


def test_entries_pair_up_and_broadcast(fw):
    J = eg.jacobian(stretched(fw), fw.tensor(X))
    assert_same(fw, J.entries((0, 1), (1, 2)), FULL[0, 1, 1, 2])
    assert_same(fw, J.entries(([1, 0], [0, 0]), (..., 2)), FULL[[1, 0], [0, 0], [0, 1], [2, 2]])
    assert_same(fw, J.entries((0, 0), MASK), FULL[0, 0][MASK])
    assert_same(fw, J.entries(([[0], [1]], 0), ([0, 1, 1], 2)), FULL[[[0], [1]], 0, [0, 1, 1], 2])
    assert_same(fw, J.entries(([], []), ([], [])), np.zeros(0))
    assert_same(fw, J.entries(..., ...), np.einsum("ijij->ij", FULL))
    with pytest.raises(eg.BroadcastError, match=r"outs of shape \(3,\) and ins of shape \(2,\) do not pair up"):
        J.entries((0, ...), (..., 0))
    with pytest.raises(eg.SelectionError, match=r"have no diagonal; they must be of one shape"):
        eg.jacobian(lambda x: x[0], fw.tensor(X)).diagonal()


def test_restricted_sides_are_sides_for_every_read(fw):
    J = eg.jacobian(stretched(fw), fw.tensor(X), of="output[:, 1:]", wrt="x[0, ::2]")
    full = FULL[:, 1:, 0, ::2]
    assert J.shape == (2, 2, 2)
    assert_same(fw, J.value, (X * 91)[:, 1:])
    assert_same(fw, J.dense(), full)
    assert_same(fw, J[(1, 0), :], full[1, 0])
    assert_same(fw, J[(0, ...), -1], full[0, :, -1])
    assert_same(fw, J[:, [1, 1]], full[..., [1, 1]])
    assert_same(fw, J.entries(([0, 1], 0), [1, 0]), full[[0, 1], 0, [1, 0]])
    assert_same(fw, J @ fw.tensor([2.0, 3.0]), full @ [2, 3])
    u = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert_same(fw, fw.tensor(u) @ J, np.tensordot(u, full, 2))
    assert J.plan((0, 0), ...).task.columns == 2
    with pytest.raises(IndexError, match=r"x: .*index 2 is out of range for axis 0 of size 2"):
        J[(0, 0), 2]
    twice = eg.jacobian(stretched(fw), fw.tensor(X), of=eg.at[[1, 1], [2, 0]], wrt=eg.at("x").coords([[1, 2], [1, 2]]))
    assert_same(fw, twice.diagonal(), FULL[[1, 1], [2, 0], 1, 2])
    assert_same(fw, twice @ fw.tensor([1.0, 10.0]), 11 * FULL[[1, 1], [2, 0], 1, 2])
    H = eg.hessian(lambda x: fw.sum(x**2) ** 2 / 4, fw.tensor(X), wrt="x[1, :2]")
    assert_same(fw, H.dense(), FULL[1, :2, 1, :2])
    nothing = eg.jacobian(stretched(fw), fw.tensor(X), wrt=eg.at[:0])
    assert_same(fw, nothing.dense(), np.zeros((2, 3, 0, 3)))
    assert_same(fw, eg.grad(stretched(fw), fw.tensor(X), of="output[0, 0]", wrt="x[2:]"), np.zeros((0, 3)))


def test_several_inputs_share_one_function(fw):
    def f(x, y):
        return x * y[0], fw.sum(y**2)

    x, y = fw.tensor([2.0, 3.0]), fw.tensor([5.0, 7.0])
    (a, b), (c, d) = eg.jacobian(f, x, y, of=["output.0", "output.1"], wrt=["x", "y"], unconnected="zero")
    assert_same(fw, a.dense(), 5 * np.eye(2))
    assert_same(fw, b.dense(), [[2, 0], [3, 0]])
    assert_same(fw, c.dense(), [0, 0])
    assert_same(fw, d.dense(), [10, 14])
    assert_same(fw, eg.grad(f, x, y, of="output.0[1]", wrt=["y", "x[1]"])[1], 5)


def test_products_take_more_axes_behind_or_before(fw):
    J = eg.jacobian(stretched(fw), fw.tensor(X))
    rng = np.random.default_rng(0)
    for more in [(), (4,), (2, 3), (1,)]:
        v, u = rng.normal(size=(2, 3, *more)), rng.normal(size=(*more, 2, 3))
        assert_same(fw, J @ fw.tensor(v), np.tensordot(FULL, v, 2))
        assert_same(fw, fw.tensor(u) @ J, np.tensordot(u, FULL, 2))
    assert_same(fw, np.ones((2, 3)) @ J, FULL.sum((0, 1)))
    assert_same(fw, J @ np.ones((2, 3)), FULL.sum((2, 3)))
    total = eg.jacobian(lambda x: fw.sum(x), fw.tensor(X))
    assert_same(fw, total @ fw.tensor(X), X.sum())
    assert_same(fw, fw.tensor([2.0, 3.0]) @ total, np.stack([2 * np.ones((2, 3)), 3 * np.ones((2, 3))]))


def test_no_products_at_all_are_an_empty_answer(fw):
    J = eg.jacobian(stretched(fw), fw.tensor(X))
    assert_same(fw, J @ fw.tensor(np.ones((2, 3, 0))), np.ones((2, 3, 0)))
    assert_same(fw, fw.tensor(np.ones((0, 2, 3))) @ J, np.ones((0, 2, 3)))


def test_products_over_nothing_are_zeros(fw):
    dtype = "complex128"  # where one of the directions is that of the other
    x, nothing = fw.tensor(np.ones(3), dtype), fw.tensor(np.ones((0, 2)), dtype)
    for J in (eg.jacobian(lambda y: y * y, nothing), eg.jacobian(lambda x: x * x, x, of="output[3:]", wrt="x[:2]")):
        out, into = tuple(J.value.shape), J.shape[len(J.value.shape) :]
        for more in ((), (2,)):
            v, u = (fw.tensor(np.ones(shape), dtype) for shape in ((*into, *more), (*more, *out)))
            np.testing.assert_array_equal(fw.numpy(J @ v), np.zeros((*out, *more)))
            np.testing.assert_array_equal(fw.numpy(u @ J), np.zeros((*more, *into)))


def test_columns_and_products_of_a_complex_hessian_are_those_of_its_rows(fw):
    o, z = OPS[fw.name], fw.tensor([1 + 2j, 3 - 1j, 0.5j], "complex128")
    weights = fw.tensor([1.0, 2j, -1.5], "complex128")

    def f(z):
        return o.sum(o.real(z * o.conj(z) * z * weights)) ** 2

    H = eg.hessian(f, z)
    rows = np.stack([fw.numpy(H[row, :]) for row in range(3)])
    columns = np.stack([fw.numpy(H[:, column]) for column in range(3)], 1)
    v = np.array([1.0, -1.0, 2.0])
    np.testing.assert_allclose(columns, rows, rtol=1e-12)
    np.testing.assert_allclose(fw.numpy(H @ fw.tensor(v, "complex128")), rows @ v, rtol=1e-12)
    np.testing.assert_allclose(fw.numpy(H[:, 1:]), rows[:, 1:], rtol=1e-12)


def test_a_jacobian_shows_itself_and_is_no_sequence(fw):
    J = eg.jacobian(stretched(fw), fw.tensor(X))
    assert repr(J) == (
        f"<Jacobian of output (2, 3) with respect to x (2, 3): {fw.name} float64, shape (2, 3, 2, 3), 288 B if dense>"
    )
    assert J.shape == (2, 3, 2, 3)
    assert_same(fw, J.value, 91 * X)
    with pytest.raises(TypeError, match="not iterable"):
        iter(J)
    assert "for each of 2 examples" in repr(eg.jacobian(lambda x: x, fw.tensor(X), batch=True))
    assert "the gradient of output" in repr(eg.hessian(lambda x: fw.sum(x), fw.tensor(X)))


def test_the_function_runs_once_and_reverse_reads_never_run_it_again(fw):
    calls = []

    def f(x):
        calls.append(1)
        return x * fw.sum(x**2)

    J = eg.jacobian(f, fw.tensor(X))
    assert len(calls) == 1
    J[(0, 0), :], J[(0, 0), (1, 1)], J[([0, 1], 0), :], J.value, J.entries((0, 0), ...), np.ones((2, 3)) @ J
    J[(0, ...), :], repr(J), J.plan()
    assert len(calls) == 1
    eg.grad(f, fw.tensor(X), of="output[0, 1]")
    assert len(calls) == 2
    H = eg.hessian(lambda x: fw.sum(f(x)), fw.tensor(X))
    before = len(calls)
    H[(0, 0), :]
    assert len(calls) == before
