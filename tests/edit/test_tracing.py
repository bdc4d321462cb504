"""Edits inside what traces or transforms code: compilers, vmap, dynamic shapes, indices known only at run time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.autograd.forward_ad as forward_ad

import elementgrad as eg
from tests.edit.test_edit import run
from tests.support.frameworks import JAX, TENSORFLOW, TORCH
from tests.support.made import numpy_edit

X = np.arange(1.0, 13.0).reshape(3, 4)
INDICES = [
    (1,),
    (slice(None, None, -1), 2),
    (slice(0, 3, 2), slice(1, None, 2)),
    ([0, 2],),
    (slice(None), [3, -3]),
    (0, [1, 2]),
    ([0, 1], slice(None), 0)[:2],
    (X % 2 == 0,),
    (np.array([True, False, True]), 1),
]
VERBS = ("get", "set", "add", "multiply", "apply", "only", "stop")
CASES = [(verb, index) for verb in VERBS for index in INDICES]


def needs_value(verb):
    return verb in ("set", "add", "multiply")


def edits(fw, verbs, index):
    """Several edits of one tensor, as one function: it takes as long to compile as each of them alone."""
    return lambda x, value: [run(fw, verb, x, index, value if needs_value(verb) else None) for verb in verbs]


def loss(fw, edit):
    """Each of several results counts in its own way, so that no error hides another."""
    return lambda x, value: sum((i + 1) * fw.sum(each**3) for i, each in enumerate(edit(x, value)))


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_compiled_edits_give_the_same_values_and_gradients(fw, index):
    # PyTorch traces NumPy masks too, and where it must count their elements it cannot keep to one graph.
    masked = fw is TORCH and isinstance(index[0], np.ndarray)
    counted = [verb for verb in VERBS if masked and (len(index) > 1 or verb in ("get", "apply"))]
    whole = [verb for verb in VERBS if verb not in counted]
    x, value = fw.tensor(X), fw.tensor(2.0)
    for verbs in [verbs for verbs in (counted, whole) if verbs]:
        edit = edits(fw, verbs, index)
        compiled = torch.compile(edit, backend="aot_eager") if verbs is counted else fw.jit(edit)
        for verb, found in zip(verbs, compiled(x, value), strict=True):
            np.testing.assert_allclose(fw.numpy(found), numpy_edit(verb, X, index, 2.0), err_msg=verb)
        gradients = [fw.grad(loss(fw, each), x, value) for each in (compiled, edit)]
        for got, want in zip(*gradients, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(("verb", "index"), CASES, ids=str)
def test_edits_map_over_a_batch(fw, verb, index):
    xs, values = np.stack([X, X + 1]), np.array([2.0, 3.0])

    def edit(x, value):
        return run(fw, verb, x, index, value if needs_value(verb) else None)

    expected = np.stack([numpy_edit(verb, x, index, value) for x, value in zip(xs, values, strict=True)])
    np.testing.assert_allclose(fw.numpy(fw.vmap(edit)(fw.tensor(xs), fw.tensor(values))), expected)
    if needs_value(verb):  # the tensor is shared and the value is mapped over
        shared = fw.vmap(lambda value: edit(fw.tensor(X), value))(fw.tensor(values))
        np.testing.assert_allclose(fw.numpy(shared), np.stack([numpy_edit(verb, X, index, value) for value in values]))


@pytest.mark.parametrize("verb", ["get", "set", "add", "apply", "only", "stop"])
def test_indices_known_only_at_run_time(fw, verb):
    value = np.array([5.0, 7.0])

    def edit(x, rows, column):
        return run(fw, verb, x, (rows, column), fw.tensor(value) if needs_value(verb) else None)

    rows, column = fw.tensor([2, -3], "int64"), fw.tensor(1, "int64")
    result = fw.jit(edit)(fw.tensor(X), rows, column)
    np.testing.assert_allclose(fw.numpy(result), numpy_edit(verb, X, ([2, -3], 1), value))
    (gradient,) = fw.grad(lambda x: fw.sum(fw.jit(edit)(x, rows, column) ** 2), fw.tensor(X))
    (expected,) = fw.grad(lambda x: fw.sum(edit(x, rows, column) ** 2), fw.tensor(X))
    np.testing.assert_allclose(gradient, expected)


@pytest.mark.parametrize("verb", ["get", "set", "add", "only"])
def test_a_single_index_known_only_at_run_time(fw, verb):
    value = np.array([5.0, 7.0])

    def edit(x, row):
        return run(fw, verb, x, (row, slice(None, None, -2)), fw.tensor(value) if needs_value(verb) else None)

    result = fw.jit(edit)(fw.tensor(X), fw.tensor(-1, "int64"))
    np.testing.assert_allclose(fw.numpy(result), numpy_edit(verb, X, (-1, slice(None, None, -2)), value))


@pytest.mark.parametrize("frame", [TENSORFLOW, JAX], ids=lambda frame: frame.name)
@pytest.mark.parametrize("verb", ["add", "multiply"])
def test_backward_slices_beside_indices_known_only_at_run_time(frame, verb):
    value = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    edit = frame.jit(lambda x, rows: getattr(eg.at(x)[rows, ::-1], verb)(frame.tensor(value)))
    expected = numpy_edit(verb, X, ([1, 1], slice(None, None, -1)), value)
    np.testing.assert_allclose(frame.numpy(edit(frame.tensor(X), frame.tensor([1, 1], "int64"))), expected)


def test_masks_and_indices_computed_from_x_are_read_inside_a_gradient(fw):
    x = fw.tensor([1.0, 2.0, 3.0])
    grad = {"torch": torch.func.grad, "jax": jax.grad, "tensorflow": lambda f: lambda x: fw.grad(f, x)[0]}[fw.name]
    assert np.asarray(grad(lambda x: fw.sum(eg.at(x)[x > 1.5].get() ** 2))(x)).tolist() == [0, 4, 6]
    tangent = fw.jvp(
        lambda x: fw.sum(eg.at(x)[x > 1.5].apply(lambda taken: taken**2)), [x], [fw.tensor([1.0, 1.0, 1.0])]
    )
    assert tangent == 11


def test_repeated_indices_known_only_at_run_time_accumulate_in_add(fw):
    add = fw.jit(lambda x, rows: eg.at(x)[rows].add(fw.tensor([1.0, 10.0, 100.0])))
    assert fw.numpy(add(fw.tensor([0.0, 0.0]), fw.tensor([0, 1, 0], "int64"))).tolist() == [101, 10]


@pytest.mark.parametrize("frame", [TENSORFLOW, JAX], ids=lambda frame: frame.name)
def test_repeated_indices_known_only_at_run_time_accumulate_in_multiply(frame):
    multiply = frame.jit(lambda x, rows: eg.at(x)[rows].multiply(frame.tensor([2.0, 3.0, 5.0])))
    assert frame.numpy(multiply(frame.tensor([1.0, 1.0]), frame.tensor([0, 1, 0], "int64"))).tolist() == [10, 3]


def test_pytorch_refuses_to_multiply_at_indices_known_only_at_run_time():
    with pytest.raises(Exception, match=r"PyTorch cannot multiply at traced indices, which may repeat; give concrete"):
        torch.func.vmap(lambda row: eg.at(torch.ones(3))[row].multiply(2.0))(torch.tensor([0, 1]))


def test_masks_known_only_at_run_time(fw):
    x, value = fw.tensor([np.inf, 2.0, 3.0]), fw.tensor(5.0)
    edits = {
        "set": (lambda x, mask, value: eg.at(x)[mask].set(value), [np.inf, 5, 5]),
        "add": (lambda x, mask, value: eg.at(x)[mask].add(value), [np.inf, 7, 8]),
        "multiply": (lambda x, mask, value: eg.at(x)[mask].multiply(value), [np.inf, 10, 15]),
        "only": (lambda x, mask, value: eg.at(x)[mask].only(), [np.inf, 2, 3]),
        "stop": (lambda x, mask, value: eg.at(x)[mask].stop(), [np.inf, 2, 3]),
    }
    mask = fw.tensor([False, True, True], "bool")
    for verb, (edit, expected) in edits.items():
        compiled = fw.jit(edit)
        assert fw.numpy(compiled(x, mask, value)).tolist() == expected, verb
        gradients = fw.grad(lambda x, value, f=compiled: fw.sum(eg.at(f(x, mask, value))[1:].get()), x, value)
        wanted = fw.grad(lambda x, value, f=edit: fw.sum(eg.at(f(x, mask, value))[1:].get()), x, value)
        for got, want in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(got, want, err_msg=verb)


def test_a_mask_known_only_at_run_time_takes_one_number():
    with pytest.raises(eg.BroadcastError, match="a traced mask names an unknown number of elements; give one number"):
        jax.jit(lambda x: eg.at(x)[x > 1].set(jnp.ones(2)))(jnp.arange(4.0))
    with pytest.raises(eg.TracedError, match="the mask is traced, so how many elements it names is not known"):
        jax.jit(lambda x: eg.at(x)[x > 1].get())(jnp.arange(4.0))
    with pytest.raises(eg.TracedError, match="a traced mask must cover the whole tensor, as the only index"):
        jax.jit(lambda x: eg.at(x)[x[:, 0] > 1].set(1.0))(jnp.ones((2, 2)))


def test_tensorflow_reads_a_mask_known_only_at_run_time():
    read = tf.function(lambda x, mask: eg.at(x)[mask].get())
    assert read(tf.constant([1.0, 2.0, 3.0]), tf.constant([True, False, True])).numpy().tolist() == [1, 3]


def test_static_indices_are_checked_while_compiling(fw):
    with pytest.raises(Exception, match=r"index 9 is out of range for axis 0 of size 3"):
        fw.jit(lambda x: eg.at(x)[[0, 9]].set(1.0))(fw.tensor(X))
    with pytest.raises(Exception, match=r"set names element \(0,\) more than once"):
        fw.jit(lambda x: eg.at(x)[[0, 0]].set(1.0))(fw.tensor(X))


@pytest.mark.parametrize("spec", [(None, 4), (None, None), (3, None)], ids=str)
@pytest.mark.parametrize(
    "index",
    [
        (1,),
        (-1, -1),
        (slice(None), 1),
        (slice(None, None, -1), 2),
        (slice(1, 9), slice(-3, None, 2)),
        (slice(2, 0, -1), slice(0, 0)),
        (..., [0, -1]),
        ([0, -1], slice(None), 0)[:2],
        ([0, 2], [1, -1]),
        (X % 2 == 0,),
    ],
    ids=str,
)
def test_tensorflow_axes_of_unknown_size(spec, index):
    eager = edits(TENSORFLOW, VERBS, index)
    signature = [tf.TensorSpec(spec, tf.float64), tf.TensorSpec((), tf.float64)]
    traced = tf.function(eager, input_signature=signature)
    x, value = tf.constant(X), tf.constant(2.0, tf.float64)
    for verb, found in zip(VERBS, traced(x, value), strict=True):
        np.testing.assert_allclose(found, numpy_edit(verb, X, index, 2.0), err_msg=verb)
    gradients = [TENSORFLOW.grad(loss(TENSORFLOW, each), x, value) for each in (traced, eager)]
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("index", [(3,), (-4,), ([0, 3],), ([-4],), (slice(None), [4])], ids=str)
def test_tensorflow_refuses_an_index_out_of_an_unknown_range(index):
    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.float64)])
    def read(x):
        return eg.at(x)[index].get()

    with pytest.raises(tf.errors.InvalidArgumentError, match="-1"):
        read(tf.constant(X))


def test_tensorflow_refuses_repeats_along_a_known_axis_beside_an_unknown_one():
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float64)])
    def edit(x):
        return eg.at(x)[:, [1, 1]].set([1.0, 2.0])

    with pytest.raises(eg.DuplicateError, match=r"set names element \(1,\) more than once"):
        edit(tf.constant(X))


def test_tensorflow_needs_to_know_the_number_of_axes():
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)])
    def read(x):
        return eg.at(x)[0].get()

    with pytest.raises(
        eg.TracedError, match=r"number of axes is not known while tracing; give it with tf.ensure_shape"
    ):
        read(tf.constant(X))


@pytest.mark.parametrize(("verb", "index"), CASES, ids=str)
def test_tensorflow_compiles_edits_with_xla(verb, index):
    @tf.function(jit_compile=True)
    def edit(x):
        return run(TENSORFLOW, verb, x, index, 2.0 if needs_value(verb) else None)

    np.testing.assert_allclose(edit(tf.constant(X)), numpy_edit(verb, X, index, 2.0))


def test_pytorch_breaks_the_graph_to_multiply_at_indices_that_may_repeat():
    edit = torch.compile(lambda x, rows: eg.at(x)[rows].multiply(2.0), backend="aot_eager")
    assert edit(torch.ones(3), torch.tensor([0, 0, 2])).tolist() == [4, 1, 2]


def test_pytorch_compiles_with_numbers_that_change():
    torch.compiler.reset()
    edit = torch.compile(lambda x, k: eg.at(x)[0].set(k) + eg.at(x)[[1]].multiply(k), backend="aot_eager")
    for number in (1, 2, 3, 0.5, 0.25):
        np.testing.assert_allclose(edit(torch.ones(2), number), [number + 1, number + 1])


def test_pytorch_functionalize_and_jit_trace_see_the_right_elements():
    x, rows = torch.arange(6.0).reshape(3, 2), torch.tensor([2, 1])
    assert torch.func.functionalize(lambda x, i: eg.at(x)[i].get())(x, rows).tolist() == x[rows].tolist()
    assert torch.func.functionalize(lambda x, m: eg.at(x)[m].set(0.0))(x, x > 2).sum() == 3
    with pytest.warns(torch.jit.TracerWarning, match="Converting a tensor to a Python integer"):
        traced = torch.jit.trace(lambda x: eg.at(x)[[0, -1]].get(), (x,))
    assert traced(x).tolist() == x[[0, -1]].tolist()


@pytest.mark.parametrize(
    "index", [(1,), (-1,), ([0, 2],), ([0, -1],), (slice(None), 1), (slice(None), [0, 1]), (slice(-2, None),)], ids=str
)
def test_pytorch_compiles_with_symbolic_sizes_and_without_graph_breaks(index):
    torch.compiler.reset()
    edit = torch.compile(lambda x: eg.at(x)[index].set(0.0), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 7):
        x = np.arange(rows * 4.0).reshape(rows, 4)
        np.testing.assert_allclose(edit(torch.tensor(x)), numpy_edit("set", x, index, 0.0))


def test_pytorch_compiles_with_inductor():
    def step(x, v):
        y = eg.at(x)[1, 1:].set(v)
        return eg.at(y)[[0, 2], 0].multiply(3.0).sum() + eg.at(y)[:, -1].only().sum()

    x, v = torch.tensor(X, requires_grad=True), torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(step(x, v), (x, v))
    for got, want in zip(torch.autograd.grad(torch.compile(step, fullgraph=True)(x, v), (x, v)), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_pytorch_maps_a_value_over_a_compiled_edit():
    mapped = torch.func.vmap(lambda v: eg.at(torch.zeros(3))[1].set(v))
    for function in (mapped, torch.compile(mapped, backend="aot_eager")):
        assert function(torch.tensor([1.0, 2.0])).tolist() == [[0, 1, 0], [0, 2, 0]]


def test_coordinates_name_elements_while_compiling(fw):
    edit = fw.jit(lambda x: eg.at(x).coords([[0, 1], [2, -1]]).set(0.0))
    np.testing.assert_allclose(fw.numpy(edit(fw.tensor(X))), numpy_edit("set", X, ([0, 2], [1, -1]), 0.0))
    # The compiler of PyTorch 2.8 leaves out what an error says, and names its type alone.
    with pytest.raises(Exception, match=r"coordinates in 1 columns for a tensor of 2 axes|\(SelectionError\)"):
        fw.jit(lambda x: eg.at(x).coords([[0], [1]]).get())(fw.tensor(X))


@pytest.mark.parametrize("index", [(slice(1, 3, 2),), (slice(0, 2), 1), ([0, 2],), (..., -1), (0, [1, 3])], ids=str)
def test_a_place_made_outside_works_while_compiling(index):
    torch.compiler.reset()
    place = eg.at(torch.tensor(X))[index]
    assert eg.Selection.resolve(place.index, X.shape).flat().tolist() == place.select().flat().tolist()
    got, edited = torch.compile(lambda: (place.get(), place.set(0.0)), fullgraph=True, backend="aot_eager")()
    np.testing.assert_allclose(got, numpy_edit("get", X, index, None))
    np.testing.assert_allclose(edited, numpy_edit("set", X, index, 0.0))


def test_a_place_made_while_compiling_works_outside():
    def make(x):
        return eg.at(x)[[0, 2]], x * 2

    x = torch.arange(3.0)
    place, _ = torch.compile(make, backend="aot_eager")(x)
    assert place.get().tolist() == [0, 2]
    assert place.select().flat().tolist() == [0, 2]
    assert place == eg.at(x)[[0, 2]]
    assert str(place) == "tensor[[0, 2]]"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_pytorch_edits_stay_on_their_device(device):
    x = torch.zeros(3, 4, device=device)
    for index in (0, [0, 1], slice(None, None, -1)):
        assert eg.at(x)[index].get().device == x.device
        assert eg.at(x)[index].set(1.0).device == x.device
        assert eg.at(x)[index].only().device == x.device


def test_pytorch_parameters_subclasses_and_strides():
    parameter = torch.nn.Parameter(torch.tensor(X))
    assert type(eg.at(parameter)[0].set(0.0)) is torch.Tensor
    eg.at(parameter)[0].get().sum().backward()
    assert parameter.grad.sum() == 4
    for view in (torch.tensor(X.T.copy()).T, torch.tensor(np.repeat(X, 2, 1))[:, ::2], torch.tensor(X)[0].expand(3, 4)):
        array = view.numpy().copy()
        for verb, index in CASES:
            result = run(TORCH, verb, view, index, 2.0 if needs_value(verb) else None)
            np.testing.assert_allclose(result, numpy_edit(verb, array, index, 2.0))
        assert np.array_equal(view.numpy(), array)


def test_pytorch_inference_mode_and_no_grad():
    with torch.inference_mode():
        x = torch.tensor(X)
        assert eg.at(x)[0].set(0.0)[0].sum() == 0
    assert eg.at(x)[0].set(0.0)[0].sum() == 0
    with torch.no_grad():
        assert not eg.at(torch.tensor(X, requires_grad=True))[0].only().requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pytorch_autocast_leaves_the_dtype_alone(dtype):
    x, v = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        h = x @ torch.eye(4)
        assert eg.at(h)[0].set(v).dtype == dtype
        assert eg.at(x)[[0, 1]].multiply(h[0]).dtype == torch.float32
        eg.at(h)[[0]].only().sum().backward()
    assert x.grad.tolist() == [[1] * 4, [0] * 4, [0] * 4]


def test_tensorflow_variables_read_as_tensors():
    import keras

    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    for variable in (tf.Variable(np.ones((3, 2), np.float32)), layer.kernel):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(eg.at(variable)[0].only() * 2.0) + tf.reduce_sum(eg.at(variable)[1].set(5.0))
        gradient = tape.gradient(loss, variable.value if variable is layer.kernel else variable)
        assert np.asarray(gradient).tolist() == [[3, 3], [0, 0], [1, 1]]
        assert not isinstance(eg.at(variable)[0].set(0.0), tf.Variable)


def test_a_keras_layer_edits_its_batch():
    import keras

    class Half(keras.layers.Layer):
        def call(self, x):
            return eg.at(x)[:, 1].multiply(0.5)

    inputs = keras.Input((3,))
    model = keras.Model(inputs, Half()(inputs))
    assert np.asarray(model(np.ones((2, 3), np.float32))).tolist() == [[1, 0.5, 1], [1, 0.5, 1]]
    assert model.predict(np.ones((2, 3), np.float32), verbose=0).tolist() == [[1, 0.5, 1], [1, 0.5, 1]]


def test_jax_transformations_compose():
    def loss(x, v):
        return jnp.sum(eg.at(eg.at(x)[0].set(v))[1:].only() ** 2)

    composed = jax.jit(jax.vmap(jax.grad(loss), in_axes=(0, None)))
    xs = jnp.stack([jnp.arange(3.0), jnp.arange(3.0) + 1])
    np.testing.assert_allclose(composed(xs, jnp.array(9.0)), [[0, 2, 4], [0, 4, 6]])


def test_jax_scan_linearize_and_checkpoint():
    def pick(x, i):
        return jnp.sum(eg.at(x)[i].only() ** 2)

    x = jnp.arange(3.0)
    scanned = jax.grad(lambda x: jax.lax.scan(lambda total, i: (total + pick(x, i), None), 0.0, jnp.arange(2))[0])
    assert scanned(x).tolist() == [0, 2, 0]
    assert jax.linearize(lambda x: pick(x, 2), x)[1](jnp.ones(3)) == 4
    assert jax.grad(jax.checkpoint(pick))(x, 2).tolist() == [0, 0, 4]


def test_pytorch_dual_numbers_pass_through_edits():
    x, tangent = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 100.0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        assert forward_ad.unpack_dual(eg.at(dual)[[0, 2]].only()).tangent.tolist() == [1, 0, 100]
        assert forward_ad.unpack_dual(eg.at(dual)[1].multiply(3.0)).tangent.tolist() == [1, 30, 100]


def test_jax_clamps_traced_indices_by_its_own_rule_and_refuses_concrete_ones():
    x = jnp.arange(3.0)
    assert jax.jit(lambda x, i: eg.at(x)[i].get())(x, 9) == x[9]
    with pytest.raises(eg.SelectionError, match="index 9 is out of range"):
        eg.at(x)[9].get()
