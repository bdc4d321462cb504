"""Results as tensors of one's own: they hold their numbers, can be written to, and share memory with nothing."""

import io

import numpy as np
import pytest
import torch

import elementgrad as eg

ONES, WEIGHTS = torch.ones(3), torch.arange(1.0, 4.0)
COMPLEX = torch.tensor([1 + 2j, 3 - 1j, 0.5j])


class GivesWhatItSaved(torch.autograd.Function):
    """The gradient is computed forward and handed out as it is, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(weights)
        return (x * weights).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


def weighted(x, weights):
    return GivesWhatItSaved.apply(x, weights)


def double(x):
    return 2 * x


READS = {
    "zeros": lambda: eg.hessian(lambda x: x.abs().sum(), ONES)[0, 1],
    "zeros of a row": lambda: eg.hessian(lambda x: x.abs().sum(), ONES)[0, :],
    "zeros of all": lambda: eg.hessian(lambda x: x.abs().sum(), ONES).dense(),
    "zeros of a product": lambda: eg.hessian(lambda x: x.abs().sum(), ONES) @ ONES,
    "zeros of a diagonal": lambda: eg.hessian(lambda x: x.abs().sum(), ONES).diagonal(),
    "a gradient": lambda: eg.grad(lambda x: x.sum(), ONES),
    "a row": lambda: eg.jacobian(lambda x: x.sum() + x, ONES)[1, :],
    "a column": lambda: eg.jacobian(lambda x: x.sum().expand(4), ONES)[:, 1],
    "a block": lambda: eg.jacobian(lambda x: x.sum().expand(4), ONES).dense(),
    "some of a large gradient": lambda: eg.grad(lambda x: (x**2).sum(), torch.ones(10_000), wrt="x[5:7]"),
    "one of a large gradient": lambda: eg.grad(lambda x: (x**2).sum(), torch.ones(10_000), wrt="x[5]"),
    "a conjugate": lambda: eg.grad(lambda z: (z.conj() * z).real.sum(), COMPLEX),
    "a conjugate entry": lambda: eg.jacobian(lambda z: z.conj(), COMPLEX)[1, 1],
    "an imaginary part": lambda: eg.grad(lambda x: torch.complex(x, x).conj().imag.sum(), ONES),
    "a product": lambda: ONES @ eg.jacobian(lambda x: x, ONES),
    "several products": lambda: eg.jacobian(double, ONES) @ torch.ones(3, 2),
    "a value": lambda: eg.jacobian(lambda x: x, ONES).value,
    "an expanded value": lambda: eg.jacobian(lambda x: x.sum().expand(3), ONES).value,
    "what was saved": lambda: eg.grad(weighted, ONES, WEIGHTS, wrt="x"),
    "with its graph": lambda: eg.grad(lambda x: x.sum(), ONES, create_graph=True).detach(),
    "a contribution": lambda: eg.contributions(lambda x: x.sum(), ONES)[0].value,
}


@pytest.mark.parametrize("read", READS)
def test_a_result_can_be_written_to_converted_and_saved_at_its_own_size(read):
    result, given = READS[read](), [x.clone() for x in (ONES, WEIGHTS, COMPLEX)]
    before = result.clone()
    np.testing.assert_array_equal(result.numpy(), before.numpy())
    result += 1
    np.testing.assert_array_equal(result.numpy(), before.numpy() + 1)
    file = io.BytesIO()
    torch.save(result, file)
    assert len(file.getvalue()) < 3_000
    for x, was in zip((ONES, WEIGHTS, COMPLEX), given, strict=True):
        assert torch.equal(x, was)


def test_writing_to_a_result_changes_no_other_and_no_later_read():
    x, y = torch.ones(3), torch.ones(3)
    of_x, of_y = eg.grad(lambda x, y: (x + y).sum(), x, y, wrt=["x", "y"])
    of_x += 1
    assert of_y.tolist() == [1, 1, 1]
    J = eg.jacobian(weighted, x, torch.arange(1.0, 4.0), wrt="x")
    for read in (lambda: J[..., :], lambda: J.dense(), lambda: torch.ones(()) @ J):
        read().zero_()
        assert read().tolist() == [1, 2, 3]
    K = eg.jacobian(double, x)
    K.value.zero_()
    assert K.value.tolist() == [2, 2, 2]
    u = torch.ones(3)
    (u @ eg.jacobian(lambda x: x, x)).zero_()
    assert u.tolist() == [1, 1, 1]
    with eg.record(x) as recording:
        z = x.sum()
    recording.grad(z, x).zero_()
    share = recording.contributions(z, x)[0].value
    share += 1
    assert recording.grad(z, x).tolist() == [1, 1, 1]


def test_numbers_of_blocks_and_matrices_of_scipy_can_be_written_to(fw):
    J = eg.jacobian(lambda x: x * x, fw.tensor([1.0, 2.0, 3.0]))
    for block in J.blocks():
        block.values[...] = 0
    pattern = J.pattern()
    for matrix in (J.sparse("scipy"), pattern.to_scipy()):
        matrix.data[0] = 0
        matrix.eliminate_zeros()
        assert matrix.nnz == 2
    assert pattern.columns.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(J.sparse("scipy").toarray(), np.diag([2.0, 4.0, 6.0]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_that_numpy_or_scipy_lack_are_not_cut_off(fw, dtype):
    x = fw.tensor([[1.0, 2.0, 3.0]] * 2, dtype)
    matrix = eg.jacobian(lambda x: x[0] * x[0] / 4, x).sparse("scipy")
    np.testing.assert_array_equal(matrix.toarray()[:, :3], np.diag([0.5, 1.0, 1.5]))
    assert matrix.dtype == np.float32
    mixed = eg.jacobian(lambda x: x + (x[:1] - x[1:]) / 4, x, batch=True)
    with pytest.raises(eg.BatchError, match="the examples mix"):
        mixed.dense()
