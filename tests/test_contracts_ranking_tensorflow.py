"""What ranking and training elements take for granted of TensorFlow and Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.record import should_record_backprop
from tensorflow.python.framework import op_callbacks


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


def test_autograph_converts_what_it_is_told_to():
    from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status

    def choosing(x):
        return x if x > 0 else -x

    converted = tf.__internal__.autograph.tf_convert(choosing, ControlStatusCtx(Status.ENABLED))
    compiled = tf.function(converted, autograph=False)
    assert [compiled(tf.constant(x)).numpy() for x in (2.0, -3.0)] == [2, 3]
    assert callable(tf.__internal__.autograph.control_status_ctx)


def test_keras_says_whether_it_runs_a_layer_just_for_a_shape():
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


def test_tensorflow_knows_whether_anybody_records():
    from tensorflow.python.eager.record import could_possibly_record

    x = tf.ones(2)
    assert not could_possibly_record()
    with tf.GradientTape():
        assert could_possibly_record()
    with tf.autodiff.ForwardAccumulator(x, x):
        assert could_possibly_record()


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Lion])
def test_optimizers_write_by_the_methods_of_a_variable(kind):
    """Elements in training hear of every write by methods that are replaced on the variable's class."""
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


def test_setting_an_attribute_to_what_it_is_does_nothing():
    """So a layer that is trainable, with variables that are not, needs another way to be told."""
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    layer.bias.trainable = False
    layer.trainable = True
    assert not layer.bias.trainable


def test_tensorflow_numbers_eager_tensors_as_they_are_made_and_tells_of_operations_after_the_tape():
    x, met = tf.ones(2), []

    def callback(kind, inputs, attributes, outputs, *_, **__):
        met.append([(y._id, should_record_backprop([y])) for y in (*inputs, *outputs)])

    with tf.GradientTape() as tape:
        tape.watch(x)
        op_callbacks.add_op_callback(callback)
        y = tf.sin(x)
        op_callbacks.remove_op_callback(callback)
    assert met == [[(x._id, True), (y._id, True)]]
    assert x._id < y._id < tf.ones(2)._id


def test_tensorflow_hands_gradients_to_rules_one_at_a_time_and_takes_none_for_an_answer():
    taken = []
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.custom_gradient(lambda x: (tf.identity(x), taken.append))(tf.convert_to_tensor(x))
        z = tf.reduce_sum(y * y) + tf.reduce_sum(tf.gather(y, [0]))
    assert tape.gradient(z, x) is None
    assert len(taken) == 1  # of both uses together
    assert tf.convert_to_tensor(taken[0]).numpy().tolist() == [3.0, 4.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_tensorflow_leaves_negative_segments_out_of_sums(compiled):
    total = tf.function(lambda x: tf.math.unsorted_segment_sum(x, [0, -1, 0], 2), jit_compile=compiled)
    assert total(tf.constant([1.0, np.nan, 2.0])).numpy().tolist() == [3.0, 0.0]


def test_keras_lends_tensors_to_variables_and_keeps_what_is_written_apart():
    variable = keras.Variable([1.0])
    with keras.StatelessScope([(variable, tf.constant([2.0]))]) as scope:
        assert variable.numpy().tolist() == [2.0]
        variable.assign([3.0])
        assert scope.get_current_value(variable).numpy().tolist() == [3.0]
    assert variable.numpy().tolist() == [1.0]
