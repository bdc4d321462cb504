"""The questions the library exists for that are about reading gradients, with their right answers."""

import numpy as np
import torch

import elementgrad as eg
from tests.support.functions import ThriceOnePlusSum
from tests.support.operations import OPS


def test_an_element_of_a_tensor_with_respect_to_the_tensor_itself(fw):
    X = fw.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    gradient = eg.grad(lambda X: X, X, of="output[1, 2]")
    assert fw.numpy(gradient).tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]
    J = eg.jacobian(lambda X: X, X)
    assert fw.numpy(J[(1, 2), (1, 2)]) == 1
    assert fw.numpy(J[(1, 2), (2, 1)]) == 0


def test_one_element_of_a_matrix_product(fw):
    X, Y = fw.tensor([[1.0, 2.0], [3.0, 4.0]]), fw.tensor([[5.0, 6.0], [7.0, 8.0]])
    f = lambda X, Y: X @ Y  # noqa: E731
    assert fw.numpy(eg.grad(f, X, Y, of="output[0, 0]", wrt="X")).tolist() == [[5, 7], [0, 0]]
    assert fw.numpy(eg.jacobian(f, X, Y, wrt=X)[(0, 0), :]).tolist() == [[5, 7], [0, 0]]
    assert fw.numpy(eg.grad(f, X, Y, of="output[0, 0]", wrt="Y")).tolist() == [[1, 0], [2, 0]]


def test_the_sum_of_all_elements(fw):
    X = fw.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert fw.numpy(eg.grad(lambda X: fw.sum(X), X)).tolist() == [[1, 1, 1], [1, 1, 1]]


def network(o, pixels):
    """Two layers of 3 x 3 convolutions, the second with a stride of 2."""
    return o.conv(o.softplus(o.conv(pixels, o.numbers(2, 1, 3, 3))), o.numbers(3, 2, 3, 3), 2)


def test_one_feature_map_element_and_one_pixel(fw):
    o = OPS[fw.name]
    image = np.random.default_rng(0).normal(size=(1, 1, 10, 10))
    step = np.zeros_like(image)
    step[0, 0, 3, 4] = 1e-6
    up, down = (fw.numpy(network(o, fw.tensor(image + sign * step)))[0, 2, 1, 1] for sign in (1, -1))
    number = eg.grad(lambda x: network(o, x), fw.tensor(image), of="output[0, 2, 1, 1]", wrt="x[0, 0, 3, 4]")
    assert tuple(number.shape) == ()
    np.testing.assert_allclose(fw.numpy(number), (up - down) / 2e-6, rtol=1e-6)


def test_the_receptive_field_of_one_feature_map_element(fw):
    o = OPS[fw.name]
    image = fw.tensor(np.random.default_rng(0).normal(size=(1, 1, 10, 10)))
    J = eg.jacobian(lambda x: network(o, x), image)
    assert J.shape == (1, 3, 3, 3, 1, 1, 10, 10)
    for row, column in [(0, 0), (1, 2), (2, 1)]:
        field = np.zeros((10, 10), bool)
        field[2 * row : 2 * row + 5, 2 * column : 2 * column + 5] = True
        picture = fw.numpy(J[(0, 1, row, column), :])[0, 0]
        np.testing.assert_array_equal(picture != 0, field)
        np.testing.assert_allclose(fw.numpy(J[(0, 1, row, column), (0, 0, 4, 4)]), picture[4, 4], rtol=1e-12)


def test_a_plain_tensor_needs_no_watching(fw):
    """With a tape of one's own, an unwatched tensor or a slice taken outside gives None."""
    x = fw.tensor([1.0, 2.0, 3.0])
    part = x[1:]
    assert fw.numpy(eg.grad(lambda part: fw.sum(part**2), part)).tolist() == [4, 6]
    assert fw.numpy(eg.grad(lambda x: fw.sum(x[1:] ** 2), x)).tolist() == [0, 4, 6]


def test_an_element_that_is_used_twice(fw):
    f = lambda x: 2 * x[2] + fw.sum(x)  # noqa: E731
    x = fw.tensor([1.0, 2.0, 3.0, 4.0])
    assert fw.numpy(eg.grad(f, x, wrt="x[2]")) == 3
    assert fw.numpy(eg.grad(f, x)).tolist() == [1, 1, 3, 1]


def test_an_autograd_function_that_takes_an_integer_index():
    """An index goes on the context; the published Function hands it to `save_for_backward`, which takes tensors."""

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert eg.grad(lambda x: ThriceOnePlusSum.apply(x, 2), x, wrt="x[2]").item() == 4
    assert eg.grad(ThriceOnePlusSum.apply, x, 2).tolist() == [1, 1, 4, 1]


def test_repeated_reads_of_one_element_agree(fw):
    x, w = fw.tensor([1.0, 2.0, 3.0, 4.0]), fw.tensor([0.5, 0.25, 0.125, 8.0])
    f = lambda x, w: fw.sum(x * w)  # noqa: E731
    assert [float(fw.numpy(eg.grad(f, x, w, wrt="x[2]"))) for _ in range(2)] == [0.125, 0.125]
    J = eg.jacobian(f, x, w, wrt="x")
    assert [float(fw.numpy(J[..., 2])) for _ in range(2)] == [0.125, 0.125]
