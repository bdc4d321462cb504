"""What the backends take for granted of their frameworks, so that an upgrade that breaks it fails here, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch._dynamo.eval_frame import cached_backends


def test_pytorch_runs_an_allowed_function_in_the_graph_with_plain_python_inside():
    seen = []

    @torch.compiler.allow_in_graph
    def step(x, index):
        seen.append((torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling(), index))
        return x[np.asarray([1]).tolist()]

    def outer(x):
        assert torch.compiler.is_dynamo_compiling()
        return step(x, (slice(0, 2), ...)) * 2

    assert torch.compile(outer, fullgraph=True, backend="aot_eager")(torch.ones(3)).tolist() == [2]
    assert all(entry == (True, False, (slice(0, 2), ...)) for entry in seen)
    assert seen


def test_pytorch_knows_whether_anything_was_compiled():
    torch.compiler.reset()
    assert not any(cached_backends.values())
    torch.compile(lambda x: x + 1, backend="aot_eager")
    assert any(cached_backends.values())


def test_pytorch_vmap_refuses_to_write_a_mapped_value_into_a_shared_tensor():
    def write(v):
        y = torch.zeros(3)
        y[0] = v
        return y

    with pytest.raises(RuntimeError, match="vmap: inplace"):
        torch.func.vmap(write)(torch.ones(2))
    assert torch.func.vmap(lambda v: torch.zeros(3).index_put((torch.tensor(0),), v))(torch.ones(2)).shape == (2, 3)


def test_pytorch_cannot_read_a_mapped_tensor():
    with pytest.raises((RuntimeError, TypeError)):
        torch.func.vmap(lambda i: torch.tensor(i.numpy(force=True)))(torch.tensor([0, 1]))


def test_pytorch_indexes_with_a_traced_scalar_only_through_aten():
    x, i = torch.arange(3.0), torch.tensor(1)
    read = torch.compile(lambda x, i: torch.ops.aten.index.Tensor(x, (i,)), fullgraph=True, backend="aot_eager")
    assert read(x, i) == 1


def test_pytorch_symbolic_sizes_become_ints_when_asked():
    seen = []

    @torch.compiler.allow_in_graph
    def look(x):
        seen.append((type(x.shape[0]), int(x.shape[0])))
        return x * 2

    torch.compile(lambda x: look(x), fullgraph=True, dynamic=True, backend="aot_eager")(torch.ones(3))
    assert (torch.SymInt, 3) in seen


def test_pytorch_functional_tensors_are_known_as_such():
    seen = []
    torch.func.functionalize(lambda x: seen.append(torch._is_functional_tensor(x)) or x * 1)(torch.ones(2))
    assert seen == [True]


def test_pytorch_reads_what_a_gradient_wraps_as_a_list_only():
    def look(x):
        mask = x > 1
        with pytest.raises((RuntimeError, TypeError)):
            mask.numpy(force=True)
        assert mask.tolist() == [False, True]
        return x.sum()

    torch.func.grad(look)(torch.tensor([1.0, 2.0]))


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


def test_jax_keeps_numpy_index_arrays_concrete_under_jit():
    mask = np.array([True, False])
    assert jax.jit(lambda x: x.at[mask].get())(jnp.arange(2.0)).tolist() == [0]


def test_jax_tracers_are_known_by_their_class():
    seen = []
    jax.jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or x)(1.0)
    assert seen == [True]
