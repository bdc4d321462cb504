"""The questions the library exists for, with their right answers, on every framework."""

import numpy as np
import pytest
import torch

import elementgrad as eg


def squares(fw, x):
    return fw.sum(x**2)


def test_replace_one_element_of_a_vector_and_differentiate_the_sum(fw):
    v, value = fw.tensor([1.0, 2.0, 3.0, 4.0]), fw.tensor(10.0)
    assert fw.numpy(eg.at(v)[2].set(value)).tolist() == [1, 2, 10, 4]
    of_v, of_value = fw.grad(lambda v, value: fw.sum(eg.at(v)[2].set(value)), v, value)
    assert of_v.tolist() == [1, 1, 0, 1]
    assert of_value == 1


def test_replace_element_zero_and_differentiate_the_squares(fw):
    v, value = fw.tensor([1.0, 2.0, 3.0, 4.0]), fw.tensor(7.0)
    assert fw.numpy(squares(fw, eg.at(v)[0].set(value))) == 78
    of_v, of_value = fw.grad(lambda v, value: squares(fw, eg.at(v)[0].set(value)), v, value)
    assert of_v.tolist() == [0, 4, 6, 8]
    assert of_value == 14


def test_the_gradient_of_one_element_alone(fw):
    (gradient,) = fw.grad(lambda v: squares(fw, eg.at(v)[2].only()), fw.tensor([1.0, 2.0, 3.0, 4.0]))
    assert gradient.tolist() == [0, 0, 6, 0]


def test_one_gradient_step_on_one_element(fw):
    v = fw.tensor([1.0, 2.0, 3.0, 4.0])
    (gradient,) = fw.grad(lambda v: squares(fw, eg.at(v)[1].only()), v)
    np.testing.assert_allclose(fw.numpy(v - 0.1 * fw.tensor(gradient)), [1, 1.6, 3, 4], rtol=1e-15)


def test_replacing_the_element_first_moves_every_other_element_instead(fw):
    """The published answer: it replaces element 1, so that its own gradient is 0."""
    v = fw.tensor([1.0, 2.0, 3.0, 4.0])
    (gradient,) = fw.grad(lambda v: squares(fw, eg.at(v)[1].set(2.0)), v)
    assert gradient.tolist() == [2, 0, 6, 8]


@pytest.mark.parametrize("index", [0, [0], np.array([True, False, False])], ids=["index", "gather", "mask"])
def test_element_zero_has_the_same_gradient_by_index_gather_and_mask(fw, index):
    (gradient,) = fw.grad(lambda x: fw.sum(eg.at(x)[index].get() ** 2), fw.tensor([3.0, 4.0, 5.0]))
    assert gradient.tolist() == [6, 0, 0]


def test_plain_indexing_is_differentiable(fw):
    (gradient,) = fw.grad(lambda x: x[0] ** 2, fw.tensor([3.0, 4.0, 5.0]))
    assert gradient.tolist() == [6, 0, 0]


def test_only_gives_one_element_a_gradient(fw):
    (gradient,) = fw.grad(lambda x: squares(fw, eg.at(x)[0].only()), fw.tensor([3.0, 4.0, 5.0]))
    assert gradient.tolist() == [6, 0, 0]


def test_a_mask_that_is_itself_a_parameter_learns_which_element_to_choose(fw):
    x, logits = fw.tensor([3.0, 1.0, 2.0]), fw.tensor([0.0, 0.0, 0.0])
    for _ in range(200):
        (gradient,) = fw.grad(lambda logits: (eg.choose(x, logits) - 1.0) ** 2, logits)
        logits = logits - 1.0 * fw.tensor(gradient)
    assert fw.numpy(logits).argmax() == 1
    assert fw.numpy(eg.choose(x, logits, hard=True)) == 1.0


def test_pytorch_says_element_zero_of_tensors_does_not_require_grad():
    """The error people meet is about the loss, the zeroth of the tensors to differentiate, and not about x[0]."""
    x = torch.tensor([3.0, 4.0, 5.0])
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        (eg.at(x)[0].get() ** 2).backward()
    x.requires_grad_()
    (eg.at(x)[0].get() ** 2).backward()
    assert x.grad.tolist() == [6, 0, 0]
