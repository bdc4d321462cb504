"""Contracts with TensorFlow and Keras: behaviour that the backend relies on, which a new version could change."""

import inspect
import random
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record
from tensorflow.python.eager.backprop import _gradient_function
from tensorflow.python.eager.context import context
from tensorflow.python.eager.imperative_grad import imperative_grad
from tensorflow.python.framework import op_callbacks
from tensorflow.python.framework.ops import _EagerTensorBase
from tensorflow.python.ops import gen_math_ops, script_ops
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from elementgrad._backends.tensorflow import _compat

pytestmark = pytest.mark.contract


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


def test_tensorflow_reraises_our_errors_with_their_type():
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


def test_autograph_skips_functions_with_its_attribute():
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
    assert callable(context().call_function)
    assert callable(tf.random.Generator._skip_single_var)
    tf.random.set_seed(1)
    assert isinstance(context()._rng, random.Random)


def test_strategies_write_to_the_copies_of_a_variable_one_by_one():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        mirrored = tf.Variable([1.0, 2.0])
    assert isinstance(mirrored, tf.distribute.DistributedValues)
    assert mirrored.distribute_strategy is strategy
    (copy,) = strategy.experimental_local_results(mirrored)
    assert isinstance(copy, tf.Variable)
    assert not isinstance(copy, tf.distribute.DistributedValues)
    written = []
    assign = copy.assign
    copy.assign = lambda *given, **options: written.append(given) or assign(*given, **options)
    mirrored.assign([3.0, 4.0])
    strategy.run(lambda: mirrored.assign([5.0, 6.0]))
    strategy.extended.update(mirrored, lambda variable: variable.assign([7.0, 8.0]))
    assert len(written) == 3
    assert mirrored._get_on_device_or_primary() is copy
    assert strategy.run(lambda: tf.constant(mirrored._get_on_device_or_primary() is copy))
    assert strategy.extended.should_checkpoint


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


def test_tensorflow_compiled_methods_wrap_their_object():
    from elementgrad._backends.tensorflow import autodiff as staging

    class Holder:
        @tf.function
        def method(self, x):
            return x if tf.reduce_sum(x) > 0 else -x

    holder = Holder()
    for _ in range(2):  # AutoGraph changes what it wraps when it first runs
        assert staging.python_function_of(holder.method).__self__ is holder
        holder.method(tf.ones(2))


def test_tensorflow_wraps_a_graph_and_prunes_it_to_some_of_its_tensors():
    held, made = tf.Variable([1.0, 2.0]), {}

    def trace():
        made["change"] = tf.compat.v1.placeholder_with_default(tf.zeros(2), [2])
        made["y"] = (held + made["change"]) ** 2
        return made["y"]

    wrapped = tf.compat.v1.wrap_function(trace, [])
    program = wrapped.prune([made["change"]], [made["y"]])
    change = tf.zeros(2)
    with tf.GradientTape() as tape:
        tape.watch(change)
        (y,) = program(change)
    assert y.numpy().tolist() == [1, 4]
    assert tape.gradient(y, change).numpy().tolist() == [2, 4]


def test_tensorflow_lets_an_operation_take_another_tensor():
    with tf.Graph().as_default() as graph:
        x, other = tf.constant(2.0), tf.constant(5.0)
        y = x * x
        assert [user.type for user in x.consumers()] == ["Mul", "Mul"]
        y.op._update_input(1, other)
        assert [argument is x for argument in y.op.inputs] == [True, False]
        with tf.compat.v1.Session(graph=graph) as session:
            assert session.run(y) == 10


def test_tensorflow_knows_the_handle_of_a_variable_in_a_graph_and_what_takes_it():
    held = tf.Variable([1.0, 2.0])

    @tf.function
    def run():
        read = held.read_value()
        tf.gather(held, [0]), tf.gather_nd(held, [[0]]), held.assign_add([1.0, 1.0])
        handle = tf.compat.v1.get_default_graph().capture(held.handle)
        kinds.extend(user.type for user in handle.consumers())
        kinds.append(read.op.type)
        return read

    kinds = []
    run.get_concrete_function()
    assert {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "AssignAddVariableOp"} <= {*kinds}
    assert kinds[-1] == "Identity"


def test_tensorflow_notes_the_gradient_of_a_concrete_function_in_its_call_and_loses_it_when_pruning():
    double, made = tf.function(lambda x: x * 2).get_concrete_function(tf.TensorSpec([2])), {}

    def trace():
        made["x"] = tf.compat.v1.placeholder_with_default(tf.zeros(2), [2])
        made["y"] = double(made["x"])
        return made["y"]

    wrapped = tf.compat.v1.wrap_function(trace, [])
    program = wrapped.prune([made["x"]], [made["y"]])
    (call,) = [operation for operation in program.graph.get_operations() if operation.type == "PartitionedCall"]
    assert call._gradient_function is None
    assert callable(wrapped.graph.get_operation_by_name(call.name)._gradient_function)


def test_tensorflow_keeps_writes_and_reads_in_order_where_it_is_asked_to():
    from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies

    held = tf.Variable(1.0)

    def trace():
        with AutomaticControlDependencies() as order:
            before = held.read_value()
            held.assign_add(before)
            return order.mark_as_return(before), order.mark_as_return(held.read_value())

    assert [y.numpy() for y in tf.compat.v1.wrap_function(trace, [])()] == [1, 2]


def test_tensorflow_says_where_an_operation_was_made():
    with tf.Graph().as_default():
        frames = list((tf.constant(1.0) * 2).op.traceback)
    assert any(frame.filename == __file__ and frame.lineno > 0 for frame in frames)
    assert frames[-1].filename != __file__  # the innermost is the last


def test_tensorflow_binds_and_converts_the_arguments_of_a_compiled_function():
    from tensorflow.python.eager.polymorphic_function.function_type_utils import bind_function_inputs

    @tf.function(input_signature=[tf.TensorSpec([None]), [tf.TensorSpec([])]])
    def compiled(x, parts=(2.0,)):
        return x, parts

    bound = bind_function_inputs(([1.0],), {"parts": [3]}, compiled.function_type, compiled._default_values)
    x, parts = bound.args
    assert [x.numpy().tolist(), [part.numpy() for part in parts], bound.kwargs] == [[1], [3], {}]
    assert compiled._autograph is True


def test_autograph_converts_marked_functions():
    from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status

    def choosing(x):
        return x if x > 0 else -x

    converted = tf.__internal__.autograph.tf_convert(choosing, ControlStatusCtx(Status.ENABLED))
    compiled = tf.function(converted, autograph=False)
    assert [compiled(tf.constant(x)).numpy() for x in (2.0, -3.0)] == [2, 3]
    assert callable(tf.__internal__.autograph.control_status_ctx)


def test_keras_marks_symbolic_calls_of_layers():
    import keras

    scopes, seen = sys.modules["keras.src.backend.common.symbolic_scope"], []

    class Asking(keras.layers.Layer):
        def call(self, x):
            seen.append(scopes.in_symbolic_scope())
            return x

    layer = Asking()
    layer(keras.Input((2,)))
    layer(tf.ones((1, 2)))
    assert seen == [True, False]
    assert callable(sys.modules["keras.src.backend"].rnn)


def test_keras_clears_the_losses_of_layers_inside_and_changes_nothing_in_a_layer_that_has_none():
    import keras

    layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), layer])
    before = {name: id(value) for name, value in vars(layer).items()}
    with keras.StatelessScope([], collect_losses=True) as stateless:
        loss = tf.constant(1.0)
        stateless.add_loss(loss)
        layer._clear_losses()
    assert [id(each) for each in stateless.losses] == [id(loss)]
    assert {name: id(value) for name, value in vars(layer).items()} == before
    layer.add_loss(loss)
    assert len(layer._losses) == 1
    model._clear_losses()
    assert [layer._losses, layer._loss_ids] == [[], set()]


def test_keras_looks_up_the_methods_of_a_layer_in_its_class():
    import keras

    assert {"__call__", "call", "add_loss", "_clear_losses"} <= set(vars(keras.Layer))
    layer = keras.layers.Identity()
    assert not {"call", "__call__"} & set(vars(layer))


def test_tensorflow_says_which_operations_leave_a_trace():
    variable, x = tf.Variable(1.0), tf.ones(2)

    def stateful(function):
        graph = tf.function(function, autograph=False).get_concrete_function().graph
        return any(operation.op_def.is_stateful for operation in graph.get_operations())

    assert stateful(lambda: variable + 1)
    assert stateful(lambda: variable.assign(2.0))
    assert stateful(lambda: tf.random.uniform([2]))
    assert stateful(lambda: tf.py_function(lambda: x, [], tf.float32))
    assert stateful(lambda: tf.function(lambda: variable.assign(2.0))())
    assert not stateful(lambda: tf.tanh(x) * x)


def test_tensorflow_says_whether_a_tape_is_recording():
    from tensorflow.python.eager.record import could_possibly_record

    x = tf.ones(2)
    assert not could_possibly_record()
    with tf.GradientTape():
        assert could_possibly_record()
    with tf.autodiff.ForwardAccumulator(x, x):
        assert could_possibly_record()


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Lion])
def test_optimizers_write_by_the_methods_of_a_variable(kind):
    """Trained elements see every write through methods that are replaced on the variable's class."""
    variable = keras.Variable(np.ones(3))
    plain = type(variable._value)
    seen = []

    def noted(name):
        return lambda self, *args, **kwargs: seen.append(name) or getattr(plain, name)(self, *args, **kwargs)

    names = ("assign", "assign_add", "assign_sub")
    variable._value.__class__ = type(plain)("Noted", (plain,), {name: noted(name) for name in names})
    kind(0.1, weight_decay=0.1).apply([tf.ones(3)], [variable])
    assert len(seen) == 2  # the decay and the step


@pytest.mark.parametrize("name", ["Dense", "Conv1D", "Conv2D"])
def test_layers_apply_their_activation_last_to_what_is_linear_in_the_kernel(name):
    layer = getattr(keras.layers, name)(2, **({} if name == "Dense" else {"kernel_size": 2}), activation="tanh")
    x = tf.random.stateless_normal((2, *[4] * (1 if name == "Dense" else int(name[4]) + 1)), (0, 1))
    after = layer(x)
    layer.activation = None
    before = layer(x)
    assert np.allclose(tf.tanh(before), after, atol=1e-6)
    layer._kernel.assign(2 * layer._kernel)
    assert np.allclose(layer(x), 2 * before, atol=1e-5)


def test_embeddings_are_rows_of_a_variable_and_count_from_the_end_too():
    layer = keras.layers.Embedding(4, 3)
    rows = layer(tf.constant([0, -1]))
    assert np.array_equal(rows, tf.gather(layer._embeddings._value, [0, 3]))


def test_setting_an_attribute_to_its_own_value_does_nothing():
    """A trainable layer whose variables are not trainable needs another mark."""
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    layer.bias.trainable = False
    layer.trainable = True
    assert not layer.bias.trainable


def test_tensorflow_tells_of_every_eager_operation_and_reads_variables_by_a_name_that_can_be_replaced():
    seen = []
    variable, x = tf.Variable([1.0, 2.0]), tf.constant([3.0, 4.0])

    def callback(kind, inputs, attributes, outputs, op_name=None, graph=None):
        seen.append((kind, len(inputs), dict(zip(attributes[::2], attributes[1::2], strict=True)), graph))

    op_callbacks.add_op_callback(callback)
    try:
        _ = x * variable
    finally:
        op_callbacks.remove_op_callback(callback)
    assert [(kind, count, graph) for kind, count, _, graph in seen] == [("Mul", 2, None)]  # the read is not told of
    assert gen_math_ops.pywrap_tfe is pywrap_tfe
    assert "pywrap_tfe.TFE_Py_FastPathExecute" in inspect.getsource(gen_math_ops.mul)


def test_tensorflow_looks_up_gradient_rules_in_one_function():
    x = tf.constant([1.0, 4.0])
    (pulled,) = [_gradient_function("Sqrt", ("T", 1), 1, [x], [tf.sqrt(x)], [tf.ones(2)], (), "")]
    np.testing.assert_allclose(pulled, [0.5, 0.25])
    assert _gradient_function("StopGradient", ("T", 1), 1, [x], [x], [x], (), "") == [None]
    with pytest.raises(LookupError, match="gradient registry has no entry for: Unique"):
        _gradient_function("Unique", (), 1, [x], [x], [x], (), "")


def test_tensorflow_calls_compiled_functions_by_a_method_of_its_context(monkeypatch):
    names, original = [], context().call_function
    monkeypatch.setattr(context(), "call_function", lambda name, *args: names.append(name) or original(name, *args))
    variable = tf.Variable(1.0)
    tf.function(lambda: variable.assign_add(1.0))()
    assert len(names) == 1
    assert float(variable) == 2.0


def test_tapes_give_gradients_without_flattening():
    x, variable, other = tf.constant([1.0, 2.0]), tf.Variable([3.0, 4.0]), tf.constant(1.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, other])
        y = x * x * variable
    by_x, by_variable, none = imperative_grad(tape._tape, [y], [x, variable.handle, other])
    np.testing.assert_array_equal(by_x, tape.gradient(y, x))
    np.testing.assert_array_equal(by_variable, tape.gradient(y, variable))
    assert none is None
    (seeded,) = imperative_grad(tape._tape, [y], [x], output_gradients=[tf.constant([0.0, 1.0])])
    np.testing.assert_array_equal(seeded, [0.0, 16.0])


def test_tensorflow_reads_numbers_out_of_a_tensor_by_one_method():
    source = {name: inspect.getsource(getattr(_EagerTensorBase, name)) for name in ("numpy", "__float__", "__bool__")}
    assert all("self._numpy()" in text for text in source.values())
    for name in ("py_func_common", "_internal_py_func"):
        assert hasattr(script_ops, name)
    assert list(inspect.signature(record.record_operation).parameters)[:4] == [
        "op_type",
        "output_tensors",
        "input_tensors",
        "backward_function",
    ]


def test_keras_makes_the_variables_of_a_model_from_the_shapes_of_a_batch():
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.compile("sgd", "mse")
    _compat.build_symbolically(model, (tf.ones((4, 3)), tf.ones((4, 2))))
    assert [tuple(v.shape) for v in model.trainable_variables] == [(3, 2), (2,)]
