"""What the backends take for granted of their frameworks, so that an upgrade that breaks it fails here, by name."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from jax._src.core import get_opaque_trace_state, jaxprs_in_params
from jax._src.interpreters.partial_eval import dce_jaxpr
from jax._src.source_info_util import current_name_stack, user_context
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from tensorflow.python.eager.context import Context, context
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable
from torch._C._dynamo.eval_frame import get_eval_frame_callback
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


def test_pytorch_nodes_say_what_derivatives_they_take():
    node = torch.ones(3, 2, requires_grad=True).double().sum(0).grad_fn
    assert [(list(made.shape), made.dtype) for made in node._input_metadata] == [([2], torch.float64)]
    assert [following.name() for following, _ in node.next_functions] == ["ToCopyBackward0"]


def test_pytorch_maps_over_a_reverse_sweep():
    x = torch.arange(3.0, requires_grad=True)
    y = x**2
    rows = torch.func.vmap(lambda seed: torch.autograd.grad(y, x, seed, retain_graph=True)[0])(torch.eye(3))
    assert rows.diagonal().tolist() == [0, 2, 4]


def test_pytorch_draws_the_same_mask_alone_and_in_a_stack():
    state = torch.get_rng_state()
    alone = torch.dropout(torch.ones(64), 0.5, train=True)
    torch.set_rng_state(state)
    pushed = torch.func.vmap(
        lambda seed: torch.func.jvp(lambda x: torch.dropout(x, 0.5, train=True), (torch.ones(64),), (seed,))[1],
        randomness="same",
    )(torch.eye(64))
    assert pushed.diagonal().tolist() == alone.tolist()


def test_pytorch_tells_a_compiled_region_by_its_frame_callback():
    seen = []

    @torch.compiler.disable
    def look():
        seen.append(get_eval_frame_callback())

    def outer(x):
        look()
        return x + 1

    look()
    torch.compile(outer, backend="aot_eager")(torch.ones(2))
    assert seen == [None, None]
    assert get_eval_frame_callback() is None


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


def test_jax_linear_programs_are_pytrees_and_know_what_each_output_is_computed_from():
    x = jnp.ones(3)
    _, program = jax.linearize(jax.jit(lambda a, b: (a * 2, jnp.sin(b) * 3, jnp.round(a))), x, x)
    assert jax.jit(lambda program, t: program(t, t))(program, x)[0].tolist() == [2, 2, 2]
    jaxpr = jax.make_jaxpr(program)(x, x).jaxpr
    used = [dce_jaxpr(jaxpr, [o == output for o in range(3)])[1] for output in range(3)]
    assert used == [[True, False], [False, True], [False, False]]
    assert list(jaxprs_in_params(jaxpr.eqns[0].params))


def test_jax_transposes_a_custom_rule_and_refuses_to_push_through_it():
    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (x**2, x), lambda x, g: (7 * g,))
    x = jnp.ones(2)
    _, program = jax.linearize(f, x)
    assert jax.linear_transpose(program, x)(x)[0].tolist() == [7, 7]
    with pytest.raises(TypeError, match="forward-mode"):
        program(x)


def test_pytorch_finds_the_apply_of_a_function_in_its_base_class_even_if_it_was_bound_before():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    from torch.autograd.function import _SingleLevelFunction

    bound, seen = Twice.apply, []

    def apply(cls, *args):
        seen.append(cls)
        return super(_SingleLevelFunction, cls).apply(*args)

    _SingleLevelFunction.apply = classmethod(apply)
    try:
        assert bound(torch.ones(1)).item() == 2
    finally:
        del _SingleLevelFunction.apply
    assert seen == [Twice]
    assert bound(torch.ones(1)).item() == 2


def test_pytorch_lets_a_function_return_an_alias_that_may_be_written_to():
    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, x):
            return x.detach()

        @staticmethod
        def backward(ctx, upstream):
            return None, None

    x = torch.tensor([1.0, 2.0])
    alias = Alias.apply(torch.zeros((), requires_grad=True), x)
    edge = torch.autograd.graph.get_gradient_edge(alias)
    alias[0] = alias[1] * 3
    assert x.tolist() == [6, 2]
    assert alias._version == x._version == 1
    after = torch.autograd.graph.get_gradient_edge(alias)
    (gradient,) = torch.autograd.grad([after], [edge], [torch.ones(2)])
    assert gradient.tolist() == [0, 4]


def test_pytorch_counts_operations_and_nodes_keep_notes():
    x = torch.ones(2, requires_grad=True)
    start = torch.autograd._get_sequence_nr()
    y = x * 2
    assert start <= y.grad_fn._sequence_nr() < torch.autograd._get_sequence_nr()
    y.grad_fn.metadata["note"] = 1
    assert y.grad_fn.metadata["note"] == 1
    assert (y[-1].grad_fn._saved_index, y[:-1].grad_fn._saved_end) == (2**64 - 1, 2**64 - 1)


def test_tensorflow_numbers_eager_tensors_as_they_are_made():
    from tensorflow.python.framework.ops import uid

    start = uid()
    x = tf.constant(1.0) + 1
    assert start < x._id < uid()
    with tf.GradientTape(persistent=True) as tape:
        assert tape._recording
    assert not tape._recording


def test_jax_names_stay_in_programs_that_jit_has_kept_and_lower_to_nothing():
    f = jax.jit(lambda x: checkpoint_name(x * 2, "named") + 1)
    f(jnp.ones(2))
    outer = jax.make_jaxpr(lambda x: f(x))(jnp.ones(2)).jaxpr.eqns[0]
    assert outer.primitive.name in ("jit", "pjit")
    inner = outer.params["jaxpr"].jaxpr.eqns
    assert [equation.primitive.name for equation in inner] == ["mul", "name", "add"]
    assert inner[1].params == {"name": "named"}
    assert isinstance(inner[0].invars[1], Literal)
    assert "named" not in f.lower(jnp.ones(2)).compile().as_text()
    batched = jax.make_jaxpr(jax.vmap(f))(jnp.ones((3, 2))).jaxpr.eqns[0].params["jaxpr"].jaxpr.eqns[1]
    assert (batched.primitive.name, batched.invars[0].aval.shape) == ("name", (3, 2))


def test_jax_keeps_inner_programs_under_known_names():
    x = jnp.ones(2)
    (remat,) = jax.make_jaxpr(jax.checkpoint(lambda x: x * 2))(x).jaxpr.eqns
    assert remat.primitive.name in ("remat2", "checkpoint")
    assert remat.params["jaxpr"].eqns
    for name, f in {
        "scan": lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=2)[0],
        "while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x),
        "cond": lambda x: jax.lax.cond(True, lambda x: x, lambda x: -x, x),
        "custom_jvp_call": jax.nn.relu,
    }.items():
        equations = jax.make_jaxpr(f)(x).jaxpr.eqns
        assert name in [equation.primitive.name for equation in equations]
        assert any(list(jaxprs_in_params(equation.params)) for equation in equations)


def test_jax_binds_an_equation_again_where_it_came_from():
    (equation,) = jax.make_jaxpr(lambda x: jax.nn.relu(x))(jnp.ones(2)).jaxpr.eqns
    parameters = equation.primitive.get_bind_params(equation.params)
    functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)

    def again(x):
        stack = current_name_stack() + equation.source_info.name_stack
        with user_context(equation.source_info.traceback, name_stack=stack), equation.ctx.manager:
            return equation.primitive.bind(*functions, x, **parameters)[0]

    assert jax.grad(lambda x: again(x).sum())(jnp.array([0.0, 1.0])).tolist() == [0, 1]
    files = [frame.file_name for frame in jax.make_jaxpr(again)(jnp.ones(2)).jaxpr.eqns[0].source_info.traceback.frames]
    lines = [frame.line_num for frame in equation.source_info.traceback.frames]
    assert __file__ in files
    assert all(line > 0 for line in lines)


def test_jax_tells_one_level_of_tracing_from_another():
    level = get_opaque_trace_state(convention="elementgrad")
    assert level == get_opaque_trace_state(convention="elementgrad")
    for around in (jax.jit, jax.vmap, jax.grad):
        seen = []
        around(lambda x, seen=seen: seen.append(get_opaque_trace_state(convention="elementgrad") == level) or x.sum())(
            jnp.ones(2) if around is not jax.grad else jnp.array(1.0)
        )
        assert seen == [False]


def test_jax_traces_what_closes_over_values_of_an_outer_trace():
    seen = []

    def f(x):
        program = jax.make_jaxpr(lambda: x * 2)()
        seen.append(len(program.consts))
        return jax.core.eval_jaxpr(program.jaxpr, program.consts)[0]

    assert jax.linearize(f, jnp.ones(2))[1](jnp.ones(2)).tolist() == [2, 2]
    assert seen == [1]


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
