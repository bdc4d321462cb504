"""Every way to read a Jacobian or Hessian, over one table, against the framework itself and finite differences."""

import numpy as np
import pytest

import elementgrad as eg
from tests.support import functions
from tests.support.frameworks import FRAMEWORKS, JAX, TENSORFLOW, TORCH
from tests.support.functions import CASES, OPS
from tests.support.made import LONG

EXACT = {"rtol": 1e-9, "atol": 1e-11}
NEAR = {"rtol": 1e-5, "atol": 1e-7}
TABLE = [
    pytest.param(fw, case, id=f"{fw.name}-{case.name}")
    for case in CASES
    for fw in FRAMEWORKS
    if fw.name in case.frameworks
]


def function(fw, case):
    return lambda x: case.f(OPS[fw.name], x)


def repeated(fw, case, f):
    """The function, to be called often: JAX compiles each operation of it otherwise, in each shape."""
    return fw.jit(f) if fw is JAX and not case.eager else f


def differences(fw, f, x, step=1e-6):
    """Central finite differences, the axes of the input last."""
    columns = []
    for position in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[position] += step
        down[position] -= step
        columns.append((fw.numpy(f(fw.tensor(up))) - fw.numpy(f(fw.tensor(down)))) / (2 * step))
    return np.stack(columns, -1).reshape(columns[0].shape + x.shape)


def flat_index(shape, positions):
    """Positions in a flattened tensor as an index into the tensor."""
    return tuple(np.unravel_index(positions, shape)) if shape else ()


@pytest.mark.parametrize(("fw", "case"), TABLE)
def test_every_read_of_a_jacobian_is_the_frameworks_own_derivative(fw, case):
    f, x = function(fw, case), fw.tensor(case.point)
    J = eg.jacobian(f, x)
    own = functions.jacobian(fw.name, case)
    out, into = own.shape[: own.ndim - case.point.ndim], case.point.shape
    assert J.shape == own.shape
    np.testing.assert_allclose(fw.numpy(J.value), fw.numpy(f(x)), rtol=1e-14)

    matrix = own.reshape(int(np.prod(out)), -1)
    rng = np.random.default_rng(0)
    row, column = (int(rng.integers(size)) for size in matrix.shape)
    some_rows, some_columns = rng.integers(matrix.shape[0], size=3), rng.integers(matrix.shape[1], size=2)
    at_row, at_column = flat_index(out, row), flat_index(into, column)

    def same(read, expected):
        assert tuple(read.shape) == expected.shape
        np.testing.assert_allclose(fw.numpy(read), expected, **EXACT)

    same(J[at_row, at_column], matrix[row, column])
    same(J[at_row, :], matrix[row].reshape(into))
    same(J[..., at_column], matrix[:, column].reshape(out))
    block = J[flat_index(out, some_rows), flat_index(into, some_columns)]
    counts = ((3,) if out else (), (2,) if into else ())
    same(
        block, matrix[some_rows][:, some_columns][: None if out else 1, : None if into else 1].reshape(sum(counts, ()))
    )
    mask = rng.random(into) < 0.5
    same(J[at_row, mask], matrix[row].reshape(into)[mask])
    same(J.dense(), own)
    if out == into:
        same(J.diagonal(), np.diagonal(matrix).reshape(into))
    if out and into:
        same(
            J.entries(flat_index(out, some_rows[:2]), flat_index(into, some_columns)),
            matrix[some_rows[:2], some_columns],
        )
    u, v = rng.normal(size=out), rng.normal(size=into)
    same(J @ fw.tensor(v), (matrix @ v.reshape(-1)).reshape(out))
    same(fw.tensor(u) @ J, (u.reshape(-1) @ matrix).reshape(into))
    if not case.kink:
        np.testing.assert_allclose(own, differences(fw, f, case.point), **NEAR)
    if not case.kink and fw is not TORCH:
        np.testing.assert_allclose(own, functions.jacobian("torch", case), rtol=1e-8, atol=1e-10)


def curved():
    """All cases with second derivatives on PyTorch, and half of them on each of the others, unless there is time."""
    cases = [case for case in CASES if case.second]
    turns = {case.name: [TORCH, (JAX, TENSORFLOW)[number % 2]] for number, case in enumerate(cases)}
    given = [(row, *row.values) for row in TABLE if row.values[1].second]
    return [row for row, fw, case in given if LONG or fw in turns[case.name]]


@pytest.mark.parametrize(("fw", "case"), curved())
def test_entries_columns_and_diagonals_of_hessians_are_the_frameworks_own_derivative(fw, case):
    f, x = functions.scalar(OPS[fw.name], case), fw.tensor(case.point)
    own = functions.hessian(fw.name, case)
    matrix = own.reshape(case.point.size, -1)
    H = eg.hessian(f, x)
    rng = np.random.default_rng(1)
    row, column = (int(rng.integers(case.point.size)) for _ in range(2))
    at_row, at_column = flat_index(case.point.shape, row), flat_index(case.point.shape, column)

    def same(read, expected):
        assert tuple(read.shape) == expected.shape
        np.testing.assert_allclose(fw.numpy(read), expected, rtol=1e-8, atol=1e-9)

    same(H[at_row, at_column], matrix[row, column])
    same(H[..., at_column], matrix[:, column].reshape(case.point.shape))
    same(H.diagonal(), np.diagonal(matrix).reshape(case.point.shape))
    gradient = repeated(fw, case, OPS[fw.name].grad(f))
    same(eg.grad(f, x), fw.numpy(gradient(x)))
    if not case.kink:
        np.testing.assert_allclose(own, differences(fw, gradient, case.point), rtol=1e-4, atol=1e-5)


def test_the_table_is_long_enough():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.kink for case in CASES) >= 6
    assert all(len(case.frameworks) == 3 for case in CASES if not case.kink)
