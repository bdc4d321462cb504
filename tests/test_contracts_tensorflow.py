"""What the backend takes for granted of TensorFlow and Keras: a new version that breaks one of these breaks it."""

import random

import pytest
import tensorflow as tf
from tensorflow.python.eager.context import Context, context
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable


def test_tensorflow_vectorises_a_scatter_with_int32_alone():
    def update(dtype):
        index = tf.constant([[[0], [1]]], dtype)
        values = tf.ones((3, 1, 2))
        return tf.vectorized_map(
            lambda v: tf.tensor_scatter_nd_update(tf.zeros(2), index, v), values, fallback_to_while_loop=False
        )

    assert update(tf.int32).shape == (3, 2)
    with pytest.raises(Exception, match=r"don't all match|int64"):
        update(tf.int64)


def test_tensorflow_xla_updates_unit_steps_alone():
    @tf.function(jit_compile=True)
    def update(x):
        return tf.raw_ops.TensorStridedSliceUpdate(input=x, begin=[0], end=[4], strides=[2], value=tf.ones(2))

    with pytest.raises(tf.errors.UnimplementedError, match="Strides"):
        update(tf.zeros(4))


def test_tensorflow_forward_mode_has_no_tangent_for_sparse_gradients():
    x = tf.ones(3)
    with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.gather(x, [0]) ** 2)
        gradient = tape.gradient(y, x)
    assert isinstance(gradient, tf.IndexedSlices)
    with pytest.raises(AttributeError, match="IndexedSlices"):
        accumulator.jvp(gradient)


def test_tensorflow_has_a_strided_update_with_a_gradient():
    x, v = tf.zeros(4), tf.ones(2)
    with tf.GradientTape() as tape:
        tape.watch([x, v])
        y = tf.raw_ops.TensorStridedSliceUpdate(input=x, begin=[0], end=[4], strides=[2], value=v)
    assert y.numpy().tolist() == [1, 0, 1, 0]
    of_x, of_v = tape.gradient(y, [x, v])
    assert (of_x.numpy().tolist(), of_v.numpy().tolist()) == ([0, 1, 0, 1], [1, 1])


def test_tensorflow_gives_a_dense_gradient_for_a_gather_of_a_list_of_one_list():
    x = tf.zeros((4, 2))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.gather_nd(x, [[[1], [2]]])
    assert isinstance(tape.gradient(y, x), tf.Tensor)


def test_tensorflow_raises_our_errors_again_as_what_they_are():
    class OurError(IndexError):
        __init__ = Exception.__init__

    @tf.function
    def fails():
        raise OurError("no")

    with pytest.raises(OurError, match="no"):
        fails()


def test_tensorflow_tensors_variables_and_keras_variables_share_a_type():
    import keras

    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    for tensor in (tf.zeros(1), tf.Variable(1.0), layer.kernel):
        assert isinstance(tensor, (tf.Tensor, tf.Variable, tf.__internal__.types.Tensor))


def test_autograph_leaves_alone_what_bears_its_sign():
    def converted(x):
        return x if x[0] > 0 else -x

    def signed(x):
        return x if x[0] > 0 else -x

    signed.autograph_info__ = None
    assert tf.function(lambda x: converted(x))(tf.ones(2)).numpy().tolist() == [1, 1]
    call = tf.function(lambda x: signed(x))
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        call(tf.ones(2))


def test_tensorflow_variables_are_written_by_methods_that_can_be_watched():
    for owner in (BaseResourceVariable, ResourceVariable):
        assert {"assign", "assign_add", "assign_sub"} <= set(vars(owner))
    assert callable(Context.call_function)
    assert callable(tf.random.Generator._skip_single_var)
    tf.random.set_seed(1)
    assert isinstance(context()._rng, random.Random)


def test_tensorflow_handles_say_the_dtype_of_their_variable():
    (kind,) = tf.Variable([1.0]).handle._handle_data.shape_and_type
    assert tf.as_dtype(kind.dtype) == tf.float32


def test_tensorflow_takes_a_gradient_of_a_tape_inside_a_function():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x**3
    rows = tf.function(lambda seeds: tf.vectorized_map(lambda seed: tape.gradient(y, x, output_gradients=seed), seeds))
    assert rows(tf.eye(2)).numpy().tolist() == [[3, 0], [0, 12]]


def test_tensorflow_numbers_eager_tensors_as_they_are_made():
    from tensorflow.python.framework.ops import uid

    start = uid()
    x = tf.constant(1.0) + 1
    assert start < x._id < uid()
    with tf.GradientTape(persistent=True) as tape:
        assert tape._recording
    assert not tape._recording


def test_keras_keeps_layers_variables_losses_and_masks_where_they_are_looked_for():
    import keras

    layer = keras.layers.Dense(1, name="d")
    model = keras.Sequential([keras.Input((2,), name="x"), layer], name="root")
    assert [inner.name for inner in model._layers] == ["x", "d"]
    assert isinstance(layer.kernel._value, tf.Variable)
    assert layer._trainable_variables == [layer.kernel, layer.bias]
    assert layer._non_trainable_variables == []
    assert [layer._losses, layer._loss_ids] == [[], set()]
    assert model._functional._inputs_struct is not None
    masked = keras.layers.Embedding(3, 1, mask_zero=True)(tf.constant([[0, 1]]))
    assert masked._keras_mask.numpy().tolist() == [[False, True]]


def test_keras_tries_the_first_of_the_steps_that_it_does_not_unroll():
    import keras

    for unroll, calls in ((False, 4), (True, 3)):
        cell, seen = keras.layers.SimpleRNNCell(1), []
        layer = keras.layers.RNN(cell, unroll=unroll)
        layer.build((1, 3, 2))
        original = cell.call
        cell.call = lambda *args, original=original, seen=seen, **kwargs: seen.append(1) or original(*args, **kwargs)
        layer(tf.ones((1, 3, 2)))
        assert len(seen) == calls


def test_a_compiled_method_of_tensorflow_holds_its_object_in_a_box():
    from elementgrad.backends.tensorflow import staging

    class Holder:
        @tf.function
        def method(self, x):
            return x if tf.reduce_sum(x) > 0 else -x

    holder = Holder()
    for _ in range(2):  # AutoGraph changes what it wraps when it first runs
        assert staging.written(holder.method).__self__ is holder
        holder.method(tf.ones(2))
