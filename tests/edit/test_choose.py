"""The learned choice of an element."""

import numpy as np
import pytest
import tensorflow as tf

import elementgrad as eg
from tests.support.frameworks import difference

X = np.array([[10.0, 20.0, 40.0], [1.0, 5.0, 3.0]])
LOGITS = np.array([[0.1, 0.2, 1.0], [0.5, 2.0, -1.0]])


def softmax(logits, axis=-1):
    exponents = np.exp(logits - logits.max(axis, keepdims=True))
    return exponents / exponents.sum(axis, keepdims=True)


def soft(x, logits, axis=-1):
    return (softmax(logits, axis) * x).sum(axis)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_the_soft_choice_is_the_weighted_mean(fw, axis):
    np.testing.assert_allclose(fw.numpy(eg.choose(fw.tensor(X), fw.tensor(LOGITS), axis)), soft(X, LOGITS, axis))


def test_the_hard_choice_is_exactly_one_element(fw):
    tiny = np.array([1e-30, 1e30, 3.0])
    assert fw.numpy(eg.choose(fw.tensor(X), fw.tensor(LOGITS), hard=True)).tolist() == [40, 5]
    assert fw.numpy(eg.choose(fw.tensor(X), fw.tensor(LOGITS), axis=0, hard=True)).tolist() == [1, 5, 40]
    for position in range(3):
        assert fw.numpy(eg.choose(fw.tensor(tiny), fw.tensor(np.eye(3)[position]), hard=True)) == tiny[position]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_beside_the_hard_choice_does_not_reach_it(fw, bad):
    x, logits = fw.tensor([bad, 2.0, 3.0]), fw.tensor([0.0, 5.0, 0.0])
    assert fw.numpy(eg.choose(x, logits, hard=True)) == 2.0
    gradient, _ = fw.grad(lambda x, logits: eg.choose(x, logits, hard=True), x, logits)
    np.testing.assert_allclose(gradient, softmax(np.array([0.0, 5.0, 0.0])), rtol=1e-12)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_both_have_the_gradients_of_the_soft_choice(fw, hard, axis):
    of_x, of_logits = fw.grad(
        lambda x, logits: fw.sum(eg.choose(x, logits, axis, hard=hard)), fw.tensor(X), fw.tensor(LOGITS)
    )
    np.testing.assert_allclose(of_x, difference(lambda x: soft(x, LOGITS, axis).sum(), X), rtol=1e-6)
    expected = difference(lambda logits: soft(X, logits, axis).sum(), LOGITS)
    np.testing.assert_allclose(of_logits, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("hard", [False, True])
def test_forward_mode_and_second_order_are_those_of_the_soft_choice(fw, hard):
    x, logits = fw.tensor(X[0]), fw.tensor(LOGITS[0])
    tangent = fw.jvp(lambda logits: eg.choose(x, logits, hard=hard), [logits], [fw.tensor([1.0, 0.0, 0.0])])
    np.testing.assert_allclose(tangent, difference(lambda logits: soft(X[0], logits), LOGITS[0])[0], rtol=1e-6)
    tangent = fw.jvp(lambda x: eg.choose(x, logits, hard=hard), [x], [fw.tensor([1.0, 2.0, 3.0])])
    np.testing.assert_allclose(tangent, softmax(LOGITS[0]) @ [1.0, 2.0, 3.0], rtol=1e-6)
    want = fw.hessians(lambda logits: eg.choose(x, logits), logits)
    for how, hessian in fw.hessians(lambda logits: eg.choose(x, logits, hard=hard), logits).items():
        np.testing.assert_allclose(hessian, want[how], atol=1e-12, err_msg=how)


def test_one_row_of_logits_serves_every_row(fw):
    for axis, logits in ((1, LOGITS[0]), (0, LOGITS[:, 0])):
        shaped = logits[None, :] if axis == 1 else logits[:, None]
        for given in (logits, shaped):
            for hard in (False, True):
                result = fw.numpy(eg.choose(fw.tensor(X), fw.tensor(given), axis, hard=hard))
                rows = np.broadcast_to(shaped, X.shape)
                expected = np.take_along_axis(X, rows.argmax(axis, keepdims=True), axis).squeeze(axis)
                np.testing.assert_allclose(result, expected if hard else soft(X, rows, axis))


def test_a_choice_that_a_mask_forbids_has_no_weight(fw):
    assert fw.numpy(eg.choose(fw.tensor([1.0, 2.0]), fw.tensor([-np.inf, 0.0]))) == 2.0
    gradient = fw.grad(lambda logits: eg.choose(fw.tensor([1.0, 2.0]), logits), fw.tensor([-np.inf, 0.0]))
    assert gradient[0].tolist() == [0, 0]
    x, logits = fw.tensor([np.nan, 2.0, 4.0]), fw.tensor([-np.inf, 0.0, 0.0])
    assert fw.numpy(eg.choose(x, logits)) == 3.0
    of_x, of_logits = fw.grad(lambda x, logits: eg.choose(x, logits), x, logits)
    assert of_x.tolist() == [0, 0.5, 0.5]
    assert of_logits.tolist() == [0, -0.5, 0.5]


def test_the_hard_choice_keeps_the_sign_of_zero(fw):
    assert np.signbit(fw.numpy(eg.choose(fw.tensor([1.0, -0.0]), fw.tensor([0.0, 1.0]), hard=True)))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(
    ("x", "logits", "axis"), [((None, None), (3,), 1), ((None, 3), (None,), 1), ((2, 3), (None,), 0)]
)
def test_tensorflow_chooses_along_axes_of_unknown_size(hard, x, logits, axis):
    signature = [tf.TensorSpec(x, tf.float64), tf.TensorSpec(logits, tf.float64)]
    function = tf.function(lambda x, logits: eg.choose(x, logits, axis, hard=hard), input_signature=signature)
    given = LOGITS[0] if axis == 1 else LOGITS[:, 0]
    wanted = eg.choose(tf.constant(X), tf.constant(given), axis, hard=hard)
    np.testing.assert_allclose(function(tf.constant(X), tf.constant(given)), wanted)


def test_a_keras_variable_chooses():
    import keras

    logits = keras.Variable(LOGITS[0].astype("float32"))
    np.testing.assert_allclose(eg.choose(tf.constant(X, tf.float32), logits, hard=True), [40, 3])


@pytest.mark.parametrize("hard", [False, True])
def test_it_compiles_and_maps_over_a_batch(fw, hard):
    x, logits = fw.tensor(X), fw.tensor(LOGITS)
    want = fw.numpy(eg.choose(x, logits, hard=hard))
    np.testing.assert_allclose(fw.numpy(fw.jit(lambda x, logits: eg.choose(x, logits, hard=hard))(x, logits)), want)
    np.testing.assert_allclose(fw.numpy(fw.vmap(lambda x, logits: eg.choose(x, logits, hard=hard))(x, logits)), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_choice_has_the_dtype_of_x(fw, dtype):
    assert eg.choose(fw.tensor(X, dtype), fw.tensor(LOGITS, dtype)).dtype == fw.tensor(X, dtype).dtype
    assert eg.choose(fw.tensor(X, dtype), fw.tensor(LOGITS, "float32"), hard=True).dtype == fw.tensor(X, dtype).dtype
