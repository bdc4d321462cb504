"""Contracts with JAX: behaviour that the backend relies on, which a new version could change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core
from jax._src.core import get_opaque_trace_state, jaxprs_in_params
from jax._src.interpreters.partial_eval import dce_jaxpr
from jax._src.source_info_util import current_name_stack, user_context
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from elementgrad._backends.jax._compat import scan_sizes

pytestmark = pytest.mark.contract


def test_jax_keeps_numpy_index_arrays_concrete_under_jit():
    mask = np.array([True, False])
    assert jax.jit(lambda x: x.at[mask].get())(jnp.arange(2.0)).tolist() == [0]


def test_jax_tracers_are_known_by_their_class():
    seen = []
    jax.jit(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or x)(1.0)
    assert seen == [True]


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


def test_programs_of_losses_have_the_parts_that_training_reads():
    def program(w, x):
        y, _ = jax.lax.scan(lambda c, t: (c @ w + t, None), x[0], x)
        y = jax.checkpoint(lambda y: y @ w)(y)
        return jax.lax.cond(y.sum() > 0, lambda w: w[0, 0], lambda w: w[0, 1], w) + w[jnp.array([1])].sum(), x

    jaxpr = jax.make_jaxpr(program)(jnp.ones((3, 3)), jnp.ones((2, 3))).jaxpr
    params = {equation.primitive.name: equation.params for equation in jaxpr.eqns}
    assert {"jaxpr", "length", "reverse", "unroll"} <= params["scan"].keys()
    assert scan_sizes(params["scan"]) == (1, 1)
    assert {"jaxpr", "prevent_cse", "policy"} <= next(
        params[name] for name in ("remat2", "checkpoint") if name in params
    ).keys()
    assert len(params["cond"]["branches"]) == 2
    gather = params["gather"]["dimension_numbers"]
    assert (gather.start_index_map, gather.collapsed_slice_dims, gather.offset_dims) == ((0,), (0,), (1,))
    assert dce_jaxpr(jaxpr, [False, True])[1] == [False, True]


def test_jax_hands_every_operation_to_the_current_trace_and_runs_it_elsewhere_meanwhile():
    class Trace(core.Trace):
        def process_primitive(self, primitive, tracers, params):
            seen.append(primitive.name)
            with core.eval_context():
                return primitive.bind(*tracers, **params)

        def process_custom_jvp_call(self, primitive, fun, jvp, tracers, **params):
            seen.append("custom")
            return fun.call_wrapped(*tracers)

    seen = []
    with core.set_current_trace(Trace()):
        y = jax.lax.sin(jax.nn.relu(jnp.ones(2)))
    assert seen[-2:] == ["custom", "sin"]
    assert y.tolist() == pytest.approx([0.84147098, 0.84147098])
    with core.take_current_trace() as before:
        assert type(before).__name__ == "EvalTrace"
    assert hasattr(core.Tracer, "to_concrete_value")


def test_jax_tells_where_the_shards_of_an_array_are_and_that_axes_have_names():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.arange(4.0), sharding)
    assert list(sharding.devices_indices_map(x.shape)) == list(mesh.devices)
    assert [shard.index[0].indices(4) for shard in x.addressable_shards] == [(0, 4, 1)]
    seen = []

    def named(x):
        seen.append(bool(core.get_axis_env().axis_sizes))
        return x

    jax.vmap(named, axis_name="data")(x)
    named(x)
    assert seen == [True, False]
